"""A server in a process that trains: strangers at its port, the job's own processes, and forked children."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from support.jobs.scripts import run_script
from support.stores.asking import asked
from support.stores.certificates import Certificate
from support.waiting import await_that

from dcp_datastates.wire import server as servers
from dcp_datastates.wire.line import CHALLENGE_BYTES, PROOF_BYTES, connect, proof
from dcp_datastates.wire.server import listen

from .conftest import serving, threads

SERVED = """
import socket
from dcp_datastates.wire.line import connect
from dcp_datastates.wire.server import Server, listen
from support.stores.asking import asked
server = Server(*listen("127.0.0.1"), "wire", lambda line: [line.answer(w) for w, _ in line.requests()])
"""
"""The first lines of a program with a server."""


@pytest.fixture(params=["plain", "TLS"])
def either(request, monkeypatch, tmp_path):
    """Without and with TLS, and a server of that kind."""
    if request.param == "TLS":
        certificate = Certificate(tmp_path / "job.pem")
        monkeypatch.setenv("DCP_DATASTATES_SECRET_FILE", str(certificate.path))
    return request.getfixturevalue("server")


def stranger(server):
    return socket.create_connection(server.address[:2], 5)


def has_ended(connection):
    """Whether the server has ended the connection; waits for that."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_silent_strangers_take_no_thread_and_few_descriptors_and_disturb_nobody(server):
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "before") == ("before", b"")
        before, crowd = descriptors(), []
        with contextlib.ExitStack() as stack:
            for number in range(5 * servers.MOST_STRANGERS):
                crowd.append(stack.enter_context(stranger(server)))
                if not number % 50:
                    with contextlib.closing(connect(server.address)) as new:
                        assert asked(new, number) == (number, b"")
            assert all(map(has_ended, crowd[: 4 * servers.MOST_STRANGERS - 20]))
            await_that(lambda: descriptors() - len(crowd) - before <= servers.MOST_STRANGERS + 2)
            assert len(threads()) <= 3
            assert asked(own, "amid") == ("amid", b"")


@pytest.mark.parametrize("says", [b"", b"x", bytes(CHALLENGE_BYTES)])
def test_a_stranger_is_dropped_after_a_few_seconds(server, monkeypatch, says):
    monkeypatch.setattr(servers, "STRANGER_SECONDS", 0.3)
    with stranger(server) as connection:
        began = time.monotonic()
        connection.send(says)
        assert has_ended(connection)
        assert time.monotonic() - began > 0.2


def test_a_stranger_that_says_a_byte_now_and_then_is_dropped_as_soon(server, monkeypatch):
    monkeypatch.setattr(servers, "STRANGER_SECONDS", 1.0)
    with stranger(server) as connection:
        connection.recv(CHALLENGE_BYTES)
        connection.settimeout(0.05)
        said = 0
        while said < CHALLENGE_BYTES + PROOF_BYTES - 1:
            with contextlib.suppress(TimeoutError, ConnectionError):
                if not connection.recv(1):
                    break
            with contextlib.suppress(ConnectionError):
                said += connection.send(b"x")
    assert 3 < said < 30


@pytest.mark.parametrize("says", [os.urandom(4096), b"\xff" * 64, b"GET / HTTP/1.1\r\n" * 4])
def test_garbage_is_answered_with_nothing_but_the_end(either, says):
    with stranger(either) as connection:
        connection.sendall(says)
        assert has_ended(connection)
    with contextlib.closing(connect(either.address)) as own:
        assert asked(own, "after") == ("after", b"")


def test_resets_do_not_hold_the_server_up(server):
    for _ in range(200):
        with stranger(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    began = time.monotonic()
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "after") == ("after", b"")
    assert time.monotonic() - began < 5


def test_a_process_with_few_descriptors_can_open_files_while_strangers_come(tmp_path):
    ended = run_script(
        """
        import resource, subprocess, threading
        limit = len(os.listdir("/proc/self/fd")) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        code = f'''
        import resource, socket
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        kept = [socket.create_connection(("127.0.0.1", {server.address.port})) for _ in range(1000)]
        print("there", flush=True)
        input()
        '''
        import textwrap
        crowd = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert crowd.stdout.readline() == b"there\\n"
        for _ in range(20):
            open("/dev/null").close()
            assert asked(connect(server.address), "own")[0] == "own"
        assert threading.active_count() < 30, threading.active_count()
        crowd.communicate(b"\\n")
        """,
        tmp_path,
        preface=SERVED,
    )
    ended.assert_clean()


# ---- who is served -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_server", "of_client"), [("", "s" * 32), ("s" * 32, "")])
def test_another_token_or_secret_is_refused_at_both_ends(of_server, of_client, monkeypatch):
    """Who has read all of the job's store knows the token, and not the secret."""
    monkeypatch.setenv("DCP_DATASTATES_SECRET", of_server)
    with contextlib.closing(serving()) as server:
        with contextlib.closing(connect(server.address)) as own:
            assert asked(own, "own") == ("own", b"")
        assert server.await_unused(10)
        with pytest.raises(PermissionError, match="DCP_DATASTATES_SECRET"):
            connect(server.address._replace(token=bytes(16)))
        monkeypatch.setenv("DCP_DATASTATES_SECRET", of_client)
        with pytest.raises(PermissionError, match="DCP_DATASTATES_SECRET"):
            connect(server.address)
        assert not server._lines


def test_a_server_that_does_not_know_the_key_is_told_nothing():
    listening, address = listen("127.0.0.1")
    listening.setblocking(True)
    said = []

    def impostor():
        connection, _ = listening.accept()
        connection.sendall(bytes(CHALLENGE_BYTES))
        connection.recv(1000)
        connection.sendall(proof(bytes(32), b"server", bytes(64)))
        said.append(connection.recv(1000))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PermissionError):
        connect(address)
    thread.join()
    listening.close()
    assert said == [b""]


def overheard(server):
    """What one of the job's own and the server say to each other."""
    up, down = bytearray(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def listen_in():
            client, _ = between.accept()
            with client, stranger(server) as other:
                down.extend(other.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
                client.sendall(down)
                up.extend(client.recv(CHALLENGE_BYTES + PROOF_BYTES, socket.MSG_WAITALL))
                other.sendall(up)
                down.extend(other.recv(PROOF_BYTES, socket.MSG_WAITALL))
                client.sendall(down[-PROOF_BYTES:])

        thread = threading.Thread(target=listen_in)
        thread.start()
        connect(server.address._replace(port=between.getsockname()[1])).close()
        thread.join()
    return bytes(up), bytes(down)


def test_what_crosses_the_wire_is_neither_the_token_nor_good_for_another_connection(server):
    up, down = overheard(server)
    assert server.address.token not in up + down
    assert server.address.key() not in up + down
    for replayed in (up, up[:CHALLENGE_BYTES] + down[-PROOF_BYTES:]):
        with stranger(server) as connection:
            connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            connection.sendall(replayed)
            assert connection.recv(1000) == bytes(PROOF_BYTES)
            assert has_ended(connection)


def test_beyond_the_limit_a_connection_is_refused(server, monkeypatch):
    monkeypatch.setattr(servers, "MOST_LINES", 1)
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "first") == ("first", b"")
        with contextlib.closing(connect(server.address)) as more, pytest.raises(ConnectionError):
            asked(more, "second")
    await_that(lambda: not server._lines)
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "third") == ("third", b"")


def test_without_a_thread_for_it_a_connection_is_refused(server, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        with contextlib.closing(connect(server.address)) as own, pytest.raises(ConnectionError):
            asked(own, "refused")
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "served") == ("served", b"")


# ---- the end -----------------------------------------------------------------------------------------


def test_the_end_closes_all(either):
    server = either
    own, silent = connect(server.address), stranger(server)
    assert asked(own, "there") == ("there", b"")
    assert not server.await_unused(0.1)
    server.close()
    with pytest.raises(ConnectionError):
        asked(own, "gone")
    assert has_ended(silent)
    silent.close()
    with pytest.raises(ConnectionRefusedError):
        connect(server.address)
    assert server.await_unused(5)
    await_that(lambda: not threads())


def test_a_line_that_has_answered_is_in_use(server):
    class SlowSet(set):
        def add(self, line):
            time.sleep(0.3)
            super().add(line)

    server._lines = SlowSet()
    with contextlib.closing(connect(server.address)) as own:
        assert asked(own, "there") == ("there", b"")
        assert not server.await_unused(0.01)


def test_a_forked_child_holds_no_socket(either, tmp_path):
    ended = run_script(
        """
        own = connect(server.address)
        silent = socket.create_connection(server.address[:2])
        assert asked(own, "there")[0] == "there"
        def sockets():
            held = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
            return sorted(os.readlink(each) for each in held if os.path.islink(each) and "socket:" in os.readlink(each))
        for _ in range(1000):  # until the server has taken the silent connection
            if len(before := sockets()) == 5:
                break
            time.sleep(0.01)
        assert len(before) == 5, before
        mine = os.readlink(f"/proc/self/fd/{silent.fileno()}")
        child = os.fork()
        if child == 0:
            os._exit(0 if sockets() == [mine] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sockets() == before
        assert asked(own, "still there")[0] == "still there"
        """,
        tmp_path / "scratch",
        preface=SERVED,
    )
    ended.assert_clean()
