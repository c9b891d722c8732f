"""What users of Lightning do, beside Lightning's own strategies: ``lightning_rows.py`` has the rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch.core.saving as saving
import pytest
import torch

import dcp_datastates as ds
from lightning_launch import from_step, job
from lightning_rows import (
    FAILED,
    ROWS,
    Compiled,
    Longer,
    Net,
    Scheduled,
    TwoGroups,
    Use,
    WithLBFGS,
    all_rows,
    batches,
    resumed,
)

RENAMED = {"state_dict.net.": "state_dict.body."}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return all_rows(str(tmp_path_factory.mktemp("rows")), "single")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("rows")
    return on_two_ranks("all_rows", folder, folder=str(folder), device="ddp")


def on_two_ranks(function: str, scratch: Path, **arguments: Any) -> Any:
    ranks = job(function, 2, scratch, module="lightning_rows", seconds=300.0, **arguments)
    first, *_ = [one.result() for one in ranks]
    return first


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("device", ["single", "ddp"])
def test_a_row_ends_as_with_lightnings_own(
    device: str, name: str, request: pytest.FixtureRequest
) -> None:
    own, ours = request.getfixturevalue(device)[name]
    assert not str(own).startswith(FAILED), own
    assert ours == own


@pytest.mark.parametrize(("saved", "loaded"), [(Compiled, Net), (Net, Compiled)])
def test_a_job_may_begin_or_cease_to_compile(
    tmp_path: Path, saved: type[Net], loaded: type[Net]
) -> None:
    """Lightning's own cannot."""
    use = Use("single", tmp_path)
    path = use.save(saved())
    assert use.resume(loaded(), path) == use.resume(saved(), path)


# ---- the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Net, Compiled, Scheduled, TwoGroups, WithLBFGS])
def test_lightnings_own_strategy_goes_on_from_a_checkpoint_and_from_a_file_made_of_it(
    tmp_path: Path, model: type[Net]
) -> None:
    live, own = Use("own single", tmp_path / "live"), Use("own single", tmp_path / "own")
    losses = from_step(live.resume(model(), None), 10)
    path = Use("single", tmp_path).save(model())
    assert own.resume(model(), path) == losses
    torch.save(saving.pl_load(path), tmp_path / "file.ckpt")
    assert own.resume(model(), str(tmp_path / "file.ckpt")) == losses
    assert_same(torch.load(tmp_path / "file.ckpt"), torch.load(live.save(model())))


def test_what_two_ranks_have_saved_becomes_a_file_of_lightnings(tmp_path: Path) -> None:
    """Each rank has written a part: groups and parameters are in their order all the same."""
    files = []
    for kind in ("ddp", "own ddp"):
        folder = tmp_path / kind
        path = on_two_ranks("saved", tmp_path, folder=str(folder), kind=kind, model="TwoGroups")
        files.append(path)
    torch.save(saving.pl_load(files[0]), tmp_path / "file.ckpt")
    assert_same(torch.load(tmp_path / "file.ckpt"), torch.load(files[1]))


def assert_same(ours: Any, own: Any) -> None:
    """The same keys in the same types, and the same values; but for the callbacks, which have paths."""
    callbacks = ours.pop("callbacks"), own.pop("callbacks")
    assert callbacks[0].keys() == callbacks[1].keys()
    assert plain(ours) == plain(own)


def plain(value: Any) -> Any:
    """Without tensors, and without the order of keys."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


# ---- options of a load ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp2"])
def test_the_options_of_a_load_are_those_of_the_strategy(tmp_path: Path, kind: str) -> None:
    """A model that is renamed takes its optimizer with it."""
    options = {"rename": RENAMED, "missing": "ignore"}
    if kind == "single":
        use = Use(kind, tmp_path)
        whole = use.resume(Longer(), None)
        found = use.resume(Longer(), use.save(Net()), strategy=options)
    else:
        common = {"folder": str(tmp_path), "kind": kind}
        longer = {**common, "model": "Longer", "options": options}
        whole = on_two_ranks("resumed", tmp_path, **longer)
        path = on_two_ranks("saved", tmp_path, **common, model="Net")
        found = on_two_ranks("resumed", tmp_path, **longer, path=path)
    first = min(found)
    assert 0 < first < max(found)
    assert found == from_step(whole, first)


def test_every_option_is_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use = Use("single", tmp_path)
    path = use.save(Net())

    def resume(model: Net, **options: Any) -> None:
        use.resume(model, path, strategy=options)

    with caplog.at_level(logging.WARNING, "dcp_datastates"):
        resume(Longer(), rename=RENAMED, missing="warn")
    assert "more.weight" in caplog.text
    with pytest.raises(ds.errors.IncompatibleStateError, match="Unexpected key"):
        resume(Longer(), missing="ignore")
    anew: dict[str, Any] = {"missing": "ignore", "unexpected": "warn"}
    with pytest.raises(ds.errors.IncompatibleStateError, match=r"optimizer_0\.state\.net"):
        resume(Longer(), **anew)  # moments that have no owner
    resume(Longer(), **anew, exclude="optimizer_0")
    with pytest.raises(ds.errors.IncompatibleStateError, match="cast=False"):
        resume(Net().double(), cast=False)
    with pytest.raises(ds.errors.ConfigurationError, match="missing='perhaps'"):
        resume(Net(), missing="perhaps")
    with pytest.raises(ds.errors.ConfigurationError, match="did you mean 'exclude'"):
        resume(Net(), excludes="net")


def test_an_error_names_the_options_of_the_strategy(tmp_path: Path) -> None:
    use = Use("single", tmp_path)
    path = use.save(Net())
    with pytest.raises(
        ds.errors.IncompatibleStateError, match=r"DataStatesSingleDeviceStrategy\(…\)"
    ):
        use.resume(Longer(), path)


@pytest.mark.parametrize(
    ("model", "said"),
    [("OtherOnTheLast", "is that of AdamW"), ("OneMore", "the checkpoint has no 'optimizer_1'")],
)
def test_an_optimizer_that_does_not_fit_leaves_the_shards_of_all_ranks_as_they_are(
    tmp_path: Path, model: str, said: str
) -> None:
    arguments = {"folder": str(tmp_path), "kind": "fsdp2"}
    path = on_two_ranks("saved", tmp_path, model="Net", **arguments)
    arguments |= {"model": model, "path": path, "module": "lightning_rows"}
    for one in job("refused", 2, tmp_path, **arguments):
        error, unchanged = one.result()
        assert said in error
        assert unchanged


# ---- a damaged checkpoint ------------------------------------------------------------------------


def damaged(path: Path) -> Path:
    """With one bit changed, in a file of data."""
    data = max(path.glob("*/*"), key=lambda each: each.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    return path


def three(folder: Path) -> list[Path]:
    """Three checkpoints, the oldest first."""
    Use("single", folder).save(Net(), epochs=3, save_top_k=-1, save_last=False, filename="{epoch}")
    return [folder / f"epoch={number}.ckpt" for number in range(3)]


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_training_goes_on_before_a_damaged_newest(tmp_path: Path, kind: str) -> None:
    first, second, newest = three(tmp_path / "run")
    damaged(second)
    path = str(damaged(newest))
    arguments = {"kind": kind, "model": "Net", "options": {}}
    if kind == "single":
        losses = resumed(str(tmp_path), path=path, **arguments)
        assert losses == resumed(str(tmp_path), path=str(first), **arguments)
        assert min(losses) == 10
    else:
        losses = on_two_ranks("resumed", tmp_path, folder=str(tmp_path), path=path, **arguments)
        assert min(losses) == 10


def test_another_one_that_is_named_must_be_whole(tmp_path: Path) -> None:
    _, second, newest = three(tmp_path)
    use = Use("single", tmp_path)
    with pytest.raises(ds.errors.CheckpointCorruptError):
        use.resume(Net(), str(damaged(second)), epochs=4)
    with pytest.raises(ds.errors.CheckpointCorruptError):
        use.trainer(1).validate(Net(), batches(4), ckpt_path=str(damaged(newest)), verbose=False)
