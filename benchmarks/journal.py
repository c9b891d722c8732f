"""What the journal costs a step on the host: the time of ``CheckpointManager.save`` at steps without a save.

Run: ``python benchmarks/journal.py``. Prints medians over steps, with and without ``journal=True``, for models with
their AdamW of 100, 1,000 and 10,000 tensors: of the thread of the loop, and of all threads; the best of three rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

from dcp_datastates import CheckpointManager, RngState

STEPS = 400
ROUNDS = 3


def state_of(tensors: int) -> dict[str, object]:
    """A state of that many tensors: a quarter are parameters, of 16 KiB each."""
    model = torch.nn.ParameterList(torch.randn(4096) for _ in range(tensors // 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for each in model:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": RngState()}


def microseconds(tensors: int, journal: bool) -> tuple[float, float]:
    """Of a call of ``save()`` that does not save: the median of its thread, and the mean of all threads."""
    state, taken = state_of(tensors), []
    with (
        tempfile.TemporaryDirectory() as root,
        CheckpointManager(root, every=10**9, journal=journal, save_last=False) as manager,
    ):
        manager.save(1, state, {"loss": 1.0})
        began_all = time.process_time()
        for step in range(2, STEPS):
            began = time.thread_time()
            manager.save(step, state, {"loss": 1.0})
            taken.append(time.thread_time() - began)
            time.sleep(0.0005)  # so that the thread of the journal works between two steps
        whole = time.process_time() - began_all
    return statistics.median(taken) * 1e6, whole / (STEPS - 2) * 1e6


def main() -> None:
    """Print the table."""
    for tensors in (100, 1_000, 10_000):
        (loop, whole), (loop_with, whole_with) = (
            tuple(map(min, zip(*(microseconds(tensors, each) for _ in range(ROUNDS)), strict=True)))
            for each in (False, True)
        )
        print(
            f"{tensors:6,} tensors: {loop_with - loop:4.0f} us of the loop, {whole_with - whole:4.0f} us of all "
            f"threads (aim: {100 + 0.02 * tensors:.0f} us)"
        )


if __name__ == "__main__":
    main()
