"""Signs of life that need no Python: ``native/src/ranks/pulse.h`` for a set of ranks.

While a call holds the GIL, a rank sends no beats, but a native thread keeps sending its pulse, so the rank does not
count as lost. The coordinator listens, and publishes the address in its beat; the other ranks send datagrams to it, and
it answers. If the network carries no datagrams between the ranks, a rank that holds the GIL for a minute counts as
lost.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dcp_datastates._native import PulseClient, PulseServer
from dcp_datastates.ranks.own_address import addresses, own_address
from dcp_datastates.ranks.rank_set import RankSet

__all__ = ["Pulse"]

logger = logging.getLogger(__name__)


class Pulse:
    """This rank's pulse, and the pulses that it receives. For one thread, except :meth:`close`.

    Args:
        interval: time between two datagrams, in seconds.
    """

    def __init__(self, rank_set: RankSet, interval: float) -> None:
        self._rank_set = rank_set
        self._interval = interval
        self._server: PulseServer | None = None
        self._client: PulseClient | None = None
        self.place: Final[Sequence[Any]] = self._serve() if rank_set.rank == 0 else ()
        """The coordinator's address, for its beats: host, port, token. Empty on other ranks, and if it cannot listen.
        """
        self._followed: Sequence[Any] = ()
        atexit.register(self.close)  # a process that hangs at exit must count as lost

    def _serve(self) -> Sequence[Any]:
        token = secrets.randbits(63)
        try:
            host = own_address(self._rank_set.host)
            self._server = PulseServer(token, self._rank_set.world)
            return host, self._server.port, token
        except (OSError, RuntimeError) as error:
            logger.info("ranks that hold the GIL for long will count as lost: %s", error)
            return ()

    def follow(self, place: Sequence[Any]) -> None:
        """Send to ``place``, the address in the coordinator's latest beat."""
        if place == self._followed:
            return
        self._followed = place
        if self._client is not None:
            self._client.close()
            self._client = None
        if not place:
            return
        host, port, token = place
        hosts = [host]
        try:
            if self._rank_set.host:  # this rank may not know the coordinator's name for itself
                hosts.append(addresses(self._rank_set.host)[0][1][0])
            self._client = PulseClient(
                token, self._rank_set.rank, self._interval, list(dict.fromkeys(hosts)), port
            )
        except (OSError, RuntimeError, ValueError) as error:
            logger.info("if this rank holds the GIL for long, it will count as lost: %s", error)

    def counts(self) -> Mapping[int, int]:
        """For each watched rank, a number that changes while its process runs; 0 if no pulse has arrived."""
        server, client = self._server, self._client
        with contextlib.suppress(RuntimeError):  # closed meanwhile, at the end of the process
            if server is not None:
                return dict(enumerate(server.counts()))
            if client is not None:
                return {0: client.count}
        return {}

    def set_sending(self, for_this_rank: bool) -> None:
        """Start or stop sending pulses for this rank: it stops while the store does not answer it."""
        server, client = self._server, self._client
        with contextlib.suppress(RuntimeError):  # as above
            if server is not None:
                server.answer(for_this_rank)
            if client is not None:
                client.send(for_this_rank)

    def close(self) -> None:
        """Stop sending and listening. Idempotent. Any thread."""
        atexit.unregister(self.close)
        server, self._server = self._server, None
        client, self._client = self._client, None
        for side in (server, client):
            if side is not None:
                side.close()
