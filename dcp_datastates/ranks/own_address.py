"""The address at which the other ranks reach this machine: that of the route to the store that all of them reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Final

_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are no machine's (RFC 5737, RFC 3849)."""


def addresses(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of ``host``, best first. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    return [(family, address) for family, _, _, _, address in found]


def own_address(store_host: str) -> str:
    """This machine's address on the route to the store's host; of no known host (empty): to this machine's name.

    On the machine itself its name often stands for the loopback (127.0.1.1 on Debian), where no other machine reaches
    it. Then this is the address of the route to other networks, if there is one, unless the store's host is given as
    the loopback: then all ranks are on this machine. Sends nothing. Raises OSError if the name has no address.
    """
    host = store_host or socket.gethostname()
    family, address = addresses(host)[0]
    own = _source(family, address)
    if _is_loopback(own) and host != "localhost" and not _is_loopback(host):
        with contextlib.suppress(OSError):  # no network
            own = _source(family, (_ELSEWHERE[family], 1))
    return own


def _source(family: socket.AddressFamily, address: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False
