"""How the ranks of one load agree on what they read for each other: an offer of each rank, and the first rank's answer.

Both travel as bytes with what the ranks tell each other anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.ragged import Ints
from dcp_datastates.io.requests import Request
from dcp_datastates.planning.packing import Message
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.sharing.assignment import Offer, Share, assign
from dcp_datastates.sharing.shared_reads import OwnOffer, SharedReads, offer
from dcp_datastates.sharing.where_it_pays import pays
from dcp_datastates.storage.object_path import Location
from dcp_datastates.wire.secret import Address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offered(Message):
    address: tuple[Any, ...]
    runs: Ints


@dataclass(frozen=True)
class _Shared(Message):
    rank: int
    spans: Ints
    readers: list[Any]
    addresses: list[Any]


class JointReads:
    """This rank's side. One thread uses it. :meth:`close` ends what was offered and not taken.

    Args:
        wanted: whether to share; None: where it pays.
        rank_set: the ranks that load.
        place: where they read from.
    """

    def __init__(self, wanted: bool | None, rank_set: RankSet, place: Location) -> None:
        self._wanted = rank_set.world > 1 and (pays(place) if wanted is None else wanted)
        self._rank_set = rank_set
        self._place = place
        self._own: OwnOffer | None = None

    def offer(self, requests: Iterable[Request], table: MetadataTable) -> bytes:
        """What this rank tells the first one, before it reads; empty if it shares nothing."""
        self.close()
        if not self._wanted:
            return b""
        self._own = offer(requests, table.note, self._rank_set.host)
        if self._own is None:
            return b""
        offered = self._own.offer
        return _Offered(tuple(offered.address), offered.runs.ravel()).encode()

    def take(self, share: bytes, table: MetadataTable) -> SharedReads | None:
        """This rank's shared reads, by the first rank's answer; None if it shares nothing."""
        own, self._own = self._own, None
        if own is None:
            return None
        if share:
            told = _Shared.decode(share)
            readers = [tuple(each) for each in told.readers]
            addresses = {rank: Address(*address) for rank, *address in told.addresses}
            mine = Share(told.rank, told.spans.reshape(-1, 4), readers, addresses)
            try:
                return SharedReads(mine, own, table.note, self._place)
            except RuntimeError as error:
                logger.warning("this rank shares no reads: the system gives no thread: %s", error)
        own.close()  # the others are refused immediately
        return None

    def close(self) -> None:
        """Idempotent."""
        if self._own is not None:
            self._own.close()
            self._own = None


def assigned(offers: Sequence[bytes]) -> list[bytes]:
    """The first rank's answers to the offers of all ranks."""
    if not any(offers):
        return [b""] * len(offers)
    found = {rank: _Offered.decode(each) for rank, each in enumerate(offers) if each}
    shares = assign(
        {rank: Offer(Address(*o.address), o.runs.reshape(-1, 2)) for rank, o in found.items()}
    )
    answers = [b""] * len(offers)
    for rank, share in shares.items():
        addresses = [[other, *address] for other, address in share.addresses.items()]
        readers = list(map(list, share.readers))
        answers[rank] = _Shared(share.rank, share.spans.ravel(), readers, addresses).encode()
    return answers
