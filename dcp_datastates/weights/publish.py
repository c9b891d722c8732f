"""Publishes the weights of a loop's checkpoints: each rank writes its share of a folder, in the background.

The ranks read what they have just committed, not the device and not each other: each takes whole tensors, whatever the
sharding of the job, verifies the stored bytes, converts them, and writes its files. There is no gather, and training's
threads do nothing. The first rank then publishes the version (:mod:`dcp_datastates.weights.version`). A save that fails
publishes nothing; if a rank fails here, or if a newer checkpoint waits already, this version is left out, and the loop
goes on.

Threads: ``dcp_datastates-weights`` does all of it, one version after another. It starts with the first, and ends with
:meth:`Publisher.close`, or the process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Final, Literal

import torch

from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.commit.group import commit_group
from dcp_datastates.commit.joint_work import JointWork
from dcp_datastates.config import check_count
from dcp_datastates.conversion.dcp_checkpoints import DataStatesSource
from dcp_datastates.conversion.hugging_face import companions_of
from dcp_datastates.conversion.source import Source, parse_dtype, select
from dcp_datastates.errors import (
    CheckpointReplacedError,
    CommitOutcomeUnknown,
    ConfigurationError,
    IncompatibleStateError,
    SaveAbandonedError,
)
from dcp_datastates.format.stored_names import Rename, check_rename
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.futures import Worker, when_done
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, check_opens, locate, stored
from dcp_datastates.text import size, step_of
from dcp_datastates.weights import version
from dcp_datastates.weights.share import DELTA, Share, Written, zstd

logger = logging.getLogger(__name__)

_FILE_BYTES: Final = 5_000_000_000
"""Of the tensors in one file, about. Each rank writes one, if there are enough tensors."""
_PAYS: Final = 0.5
"""A delta of more of a full version's bytes than this saves little."""
_LONGEST_WAIT: Final = 3600.0
"""How long a rank waits for the slowest other one to write its files, in seconds."""
_CLOSE_SECONDS: Final = 10.0
"""How long the end waits for the tensor that is being written, once it has given up."""


@dataclass(frozen=True)
class Weights:
    """Where and how :class:`~dcp_datastates.CheckpointManager` publishes a model's weights (``publish=``).

    Each version is a Hugging Face folder, ``root/weight_v000001`` and so on, which ``from_pretrained`` loads and
    :func:`~dcp_datastates.follow` follows. It appears when it is complete, never before.

    Attributes:
        root: A directory that all ranks share, or its URL.
        every: Publish every n-th checkpoint that is saved, the first among them. Of those that come while a version is
            being written, only the newest is published.
        part: The name in the state under which the model lies, which is removed from the tensors' names. None: all
            tensors of the state, under their own names.
        dtype: The dtype of all floating-point tensors, such as "bfloat16"; None: as they are saved.
        names: The names in the version: a dict from prefixes, or a function from a name to a name, as ``rename`` of
            :func:`~dcp_datastates.convert`. It sees names without ``part``.
        keep: How many of the newest versions stay. A reader of an older one may find it gone. None: all.
        config_from: A Hugging Face folder whose configuration and tokenizer files go into each version.
        delta: "xor": a version has only what has changed since the one before, compressed, if the same ranks have
            written that. Of bfloat16 under AdamW, 4 % of the bytes were left at a learning rate of 1e-6, 16 % at 1e-5.
            Each rank keeps the bytes of its share of the model in memory. Needs ``dcp_datastates[weights]``.
        full_every: With ``delta``, each n-th version is full, so that readers can begin. Older versions stay as long as
            one that is kept needs them.
        storage_options: fsspec's, if ``root`` is a URL.

    Each rank needs memory for its largest tensor, as it is saved and as it is published.

    Raises:
        ConfigurationError: an option cannot work.
    """

    root: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 1
    part: str | None = "model"
    dtype: str | torch.dtype | None = None
    names: Rename | None = None
    keep: int | None = 3
    config_from: str | os.PathLike[str] | None = None
    delta: Literal["xor"] | None = None
    full_every: int = 20
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_count("full_every", self.full_every)
        if self.delta is not None:
            if self.delta != "xor":
                raise ConfigurationError(f'delta={self.delta!r} must be "xor" or None')
            zstd()
        if self.keep is not None:
            check_count("keep", self.keep)
        check_rename(self.names)
        parse_dtype(self.dtype)
        if self.config_from is not None and not is_directory(locate(self.config_from)):
            raise ConfigurationError(f"config_from={str(self.config_from)!r} is no directory")

    def publisher(self, rank_set: RankSet, then: Callable[[], object]) -> Publisher:
        """What publishes the saves of these ranks, all of which call this. ``then`` is called for each that is held no
        more.
        """
        return Publisher(self, rank_set, then)


class Publisher:
    """Publishes the saves of one loop. Any thread may call the methods; every rank makes the same calls."""

    def __init__(self, rules: Weights, rank_set: RankSet, then: Callable[[], object]) -> None:
        self._rules, self._then = rules, then
        self._root = locate(rules.root, options=rules.storage_options)
        check_opens(self._root)
        self._work = JointWork(commit_group(rank_set), "weights", _LONGEST_WAIT)
        self._share = Share(rules.delta is not None, self._work.wait)
        self._full = 0
        """The newest full version, of this job."""
        self._hopeless: BaseException | None = None
        """Why no version can be published."""
        self._worker = Worker("dcp_datastates-weights")
        self._first: int | None = None  # the number of the first save, the same on all ranks
        self._lock = threading.RLock()  # guards what follows
        self._turns: list[Location] = []
        """The checkpoints that are to be published, or are being published."""
        _publishers.add(self)

    def follow(self, save: SaveOperation) -> None:
        """A save has begun: publish it once it is committed, if it is its turn."""
        if self._first is None:
            self._first = save.number
        if (save.number - self._first) % self._rules.every == 0:
            when_done(save.committed, lambda _: self._add(save))

    def check(self) -> None:
        """Before a save: raises what would be wrong with each version, such as a ``part`` that the state lacks."""
        if (failure := self._hopeless) is not None:
            self._hopeless = None
            raise failure

    def holds(self, name: str) -> bool:
        """Whether the checkpoint of this name is still to be read, so that it must not be deleted. (Those between the
        first and the newest will be left out.)
        """
        with self._lock:
            return any(path.name == name for path in (*self._turns[:1], *self._turns[-1:]))

    def wait(self, seconds: float | None = None) -> bool:
        """Return True when all that was committed is published or left out; False after ``seconds``."""
        return self._worker.wait(seconds)

    def close(self) -> None:
        """Give up what is not published. Idempotent."""
        self._work.closing.set()
        self._worker.close(_CLOSE_SECONDS)

    def _add(self, save: SaveOperation) -> None:
        error, path, attempt = save.committed.peek(), save.path, save.attempt
        # A commit whose outcome is not known here may be known to the other ranks: they wait for this one's files.
        if path is None or attempt is None or not isinstance(error, CommitOutcomeUnknown | None):
            return
        with self._lock:
            self._turns.append(path)
        if not self._worker.post(lambda: self._turn(path, attempt)):
            self._end(path)

    def _end(self, path: Location) -> None:
        with self._lock:
            self._turns.remove(path)
        self._then()

    # ---- the thread -----------------------------------------------------------------------------------

    def _turn(self, path: Location, attempt: Attempt) -> None:
        try:
            self._publish(path, attempt)
        except BaseException as error:
            level = logging.INFO if isinstance(error, SaveAbandonedError) else logging.ERROR
            logger.log(level, "the weights of %s are not published: %s", path, error)
            if isinstance(error, ConfigurationError | IncompatibleStateError):
                self._hopeless = error
        finally:
            self._end(path)

    def _publish(self, path: Location, attempt: Attempt) -> None:
        began, share = time.monotonic(), self._share
        begin = ((attempt.incarnation << 64) + attempt.sequence) * 2
        doing, held = "publishing the weights of", str(share.held).encode()
        met = self._work.do(begin, lambda: held, self._begin, doing, path)
        number, base = map(int, met.split())
        if not number:
            logger.info("the weights of %s are left out: a newer checkpoint waits", path)
            return
        source: Source

        def write() -> bytes:
            nonlocal source
            source = self._opened(path, attempt)
            files = _files(source, self._work.world)
            mine = dict(list(files.items())[self._work.rank :: self._work.world])
            place = stored(version.version_path(self._root, number))
            return json.dumps(asdict(share.write(source, mine, place, base))).encode()

        def publish(messages: Sequence[bytes]) -> bytes:
            parts = [Written(**json.loads(message)) for message in messages]
            folder = self._rules.config_from
            small = {} if base or folder is None else companions_of(source, locate(folder))
            version.publish(self._root, number, _index(source, parts, number, base, path), small)
            nbytes, kind = sum(part.nbytes for part in parts), "all"
            if base:
                kind = f"a delta of version {base}, with {nbytes / (source.nbytes or 1):.0%} of its bytes"
                if nbytes > _PAYS * source.nbytes:
                    kind += ": without delta= readers have less to do"
            logger.info(
                "published the weights of %s as version %d (%s): %s in %.1f s",
                *(path, number, kind, size(nbytes), time.monotonic() - began),
            )
            self._remove_old(number)
            return b""

        self._work.do(begin + 1, write, publish, doing, path)
        share.held = number if self._rules.delta else 0

    def _begin(self, messages: Sequence[bytes]) -> bytes:
        """On the first rank: the number of the version, 0 to leave it out; and the version of which it is a delta, 0
        for a full one. ``messages``: the version that each rank holds.
        """
        with self._lock:
            is_newest = len(self._turns) == 1
        if not is_newest:
            return b"0 0"
        number = version.claim(self._root)
        # Readers take deltas in the order of the numbers, without a gap.
        is_delta = set(map(int, messages)) == {number - 1} and number - 1 > 0
        if is_delta and number - self._full < self._rules.full_every:
            return f"{number} {number - 1}".encode()
        self._full = number
        return f"{number} 0".encode()

    def _opened(self, path: Location, attempt: Attempt) -> Source:
        source, rules = DataStatesSource(path), self._rules
        if source.attempt != attempt:
            raise CheckpointReplacedError(
                f"{path}: attempt {attempt.name} was replaced by {source.attempt.name} before it was published"
            )
        return select(source, part=rules.part, rename=rules.names, dtype=rules.dtype)

    def _remove_old(self, number: int) -> None:
        """Remove what is older than ``keep`` published versions and the full one that these begin with; and what was
        never published.
        """
        try:
            older = [each for each in version.numbers_below(self._root) if each < number]
            published = [each for each in older if version.is_published(self._root, each)]
            keep = self._rules.keep
            first = 0 if keep is None else max(0, len(published) + 1 - keep)
            while first > 0 and version.is_delta(self._root, [*published, number][first]):
                first -= 1
            version.remove(self._root, (each for each in older if each not in published[first:]))
        except OSError as error:
            logger.warning("old versions stay in %s: %s", self._root, error)


def _files(source: Source, world: int) -> dict[str, list[str]]:
    """The names of the tensors in each file: about as many files as ranks, or more, of about the same size."""
    nbytes = source.nbytes or 1
    count = max(world, -(-nbytes // _FILE_BYTES))
    groups: dict[int, list[str]] = {}
    at = 0
    for name, tensor in source.tensors.items():
        middle = at + tensor.nbytes // 2
        groups.setdefault(middle * count // nbytes, []).append(name)
        at += tensor.nbytes
    return {
        f"model-{n:05d}-of-{len(groups):05d}.safetensors": names
        for n, names in enumerate(groups.values(), 1)
    }


def _index(
    source: Source, parts: Sequence[Written], number: int, base: int, path: Location
) -> dict[str, Any]:
    """The index of a version. Raises :class:`ConfigurationError` if the ranks have not written all tensors."""
    checksums = {name: each for part in parts for name, each in part.sums.items()}
    if checksums.keys() != source.tensors.keys():
        raise ConfigurationError(
            "the ranks have chosen different tensors: Weights(…) must be the same on all of them"
        )
    metadata: dict[str, Any] = {
        "version": f"{number:06d}",
        "step": str(step_of(str(path))),
        "published_at": str(time.time()),
    }
    if base:
        metadata |= {"base_version": f"{base:06d}", **DELTA}
    else:
        parameters = sum(each.numel() for each in source.tensors.values())
        metadata |= {"total_size": source.nbytes, "total_parameters": parameters}
    files = {name: file for part in parts for file, names in part.files.items() for name in names}
    return {
        "metadata": metadata,
        "weight_map": dict(sorted(files.items())),
        "checksums": dict(sorted(checksums.items())),
    }


_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_publishers):
        each.close()


at_end(_close_all, Phase.GIVE_UP)
