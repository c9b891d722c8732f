"""Reads pickles in Python, and refuses tuples that nest deeply: C code hashes a key of a dict by recursion, and a
megabyte of pickle would end the process.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from functools import partial
from typing import IO, Any, ClassVar, Final

_LEGACY_PICKLES: Final = 4
"""Of a file of torch before 1.6: a number, the protocol, sizes of types, and the value. (Names of storages follow.)"""


class BoundedUnpickler(pickle._Unpickler):  # the one in C cannot check what it builds
    """Raises ValueError for tuples that nest deeper than ``deepest``: stock DCP's metadata have two levels."""

    deepest: ClassVar[int] = 8
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _load_tuple(self, load: Any) -> None:
        load(self)
        made = self.stack[-1]  # type: ignore[attr-defined]
        depths = vars(self).setdefault("depths", {})  # with the tuple, so that its id stays its own
        depth = 1 + max((depths.get(id(each), (0,))[0] for each in made), default=0)
        if depth > self.deepest:
            raise ValueError(f"it nests tuples too deeply; {self.deepest} levels are allowed")
        depths[id(made)] = depth, made

    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = partial(lambda load, self: self._load_tuple(load), dispatch[_code[0]])


class _Anything:
    """Stands for an instance of a class that is not called."""

    def __new__(cls, *_args: object, **_kwargs: object) -> _Anything:
        return super().__new__(cls)

    def _ignore(self, *_args: object) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = add = _ignore


class _Dry(BoundedUnpickler):
    """Builds what is plain, and calls nothing."""

    deepest = 500  # flattening a deeper state would exceed Python's own limit

    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()


def check_nesting(stream: IO[bytes]) -> None:
    """Raise an exception if the pickles that ``torch.save`` has written to ``stream`` cannot be read, or nest tuples
    too deeply. Leaves the stream where it was.
    """
    begin = stream.tell()
    is_archive = stream.read(4) == b"PK\x03\x04"
    stream.seek(begin)
    if is_archive:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("/data.pkl"):
                    _Dry(io.BytesIO(archive.read(entry))).load()
    else:
        for _ in range(_LEGACY_PICKLES):
            _Dry(stream).load()
    stream.seek(begin)
