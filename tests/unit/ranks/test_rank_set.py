"""At which address other machines reach this one, and that gloo listens there."""

import itertools
import socket

import pytest
from support.jobs.threads import MemoryStore, rank_set, together

from dcp_datastates.ranks import gloo_group
from dcp_datastates.ranks import rank_set as module
from dcp_datastates.ranks.gloo_tree import GlooTree


@pytest.fixture
def network(monkeypatch):
    """Names and routes: the own address by what is connected to; None: there is no route."""
    names, routes = {}, {}

    class Probe:
        def __init__(self, family, kind):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, address):
            self._own = routes.get(address[0])
            if self._own is None:
                raise OSError(101, "Network is unreachable")

        def getsockname(self):
            return self._own, 1

    def found(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (names.get(host, host), port))]

    monkeypatch.setattr(module.socket, "getaddrinfo", found)
    monkeypatch.setattr(module.socket, "socket", Probe)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "me")
    return names, routes


@pytest.mark.parametrize(
    ("store", "online"),
    list(itertools.product(["first", "me", "", "localhost", "127.0.0.1"], [0, 1])),
)
def test_the_address_is_that_of_the_route_to_the_store(store, online, network):
    names, routes = network
    names |= {"first": "10.0.0.1", "me": "127.0.1.1", "localhost": "127.0.0.1"}
    routes |= {"10.0.0.1": "10.0.0.2", "127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    if online:
        routes["192.0.2.1"] = "10.0.0.2"
    is_here = store in ("localhost", "127.0.0.1")
    expected = "127.0.0.1" if is_here or (not online and store != "first") else "10.0.0.2"
    assert module.own_address(store) == expected


@pytest.mark.parametrize("user", ["", "lo"])
def test_gloo_listens_at_that_address_unless_the_user_names_an_interface(user, monkeypatch):
    monkeypatch.setattr(module, "own_address", lambda host: "127.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", user)
    published = []
    publish = gloo_group.Rendezvous.set

    def watched(meeting, key, value):
        published.append(value)
        publish(meeting, key, value)

    monkeypatch.setattr(gloo_group.Rendezvous, "set", watched)
    trees = [GlooTree(each, "t") for each in rank_set(2, MemoryStore())]
    try:
        assert together(trees, lambda tree, _: tree.join(lambda: None)) == [True, True]
        assert together(trees, lambda tree, _: tree.gather(b"x", lambda: None))[0] == [b"x"] * 2
    finally:
        together(trees, lambda tree, _: tree.close())
    assert published
    wanted = socket.inet_aton("127.0.0.1" if user else "127.0.0.2")
    assert all(wanted in value for value in published)


def test_a_release_of_torch_without_devices_chooses_the_address_itself(monkeypatch):
    def lacking(**_):
        raise TypeError("create_device(): incompatible function arguments")

    monkeypatch.setattr(gloo_group.dist.ProcessGroupGloo, "create_device", staticmethod(lacking))
    trees = [GlooTree(each, "t") for each in rank_set(2, MemoryStore())]
    assert together(trees, lambda tree, _: tree.join(lambda: None)) == [True, True]
    together(trees, lambda tree, _: tree.close())
