"""Connections by TLS: who is refused, what crosses the network, and what is not waited for."""

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.stores.asking import asked
from support.stores.certificates import Certificate
from support.stores.nodes import Cluster

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.wire import server as servers
from dcp_datastates.wire.line import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    connect,
    new_challenge,
    proof,
)
from dcp_datastates.wire.secret import Address

from .conftest import MOST, serving

VARIABLE = "DCP_DATASTATES_SECRET_FILE"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The job's certificate."""
    made = Certificate(tmp_path / "job.pem")
    monkeypatch.setenv(VARIABLE, str(made.path))
    return made


@pytest.fixture
def server(own, server):
    return server


@contextlib.contextmanager
def relay(server, there=lambda data: data, back=lambda data: data):
    """The address of a relay to the server, which passes on what ``there`` and ``back`` make of the bytes."""
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on(source, target, change):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(change(data))
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def run():
            client, _ = between.accept()
            with client, socket.create_connection(server.address[:2]) as other:
                up = threading.Thread(target=pass_on, args=(client, other, there))
                up.start()
                pass_on(other, client, back)
                up.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield server.address._replace(port=between.getsockname()[1])
        thread.join()


def test_what_is_sent_is_received_and_crosses_the_network_encrypted(server):
    seen = bytearray()

    def see(data):
        seen.extend(data)
        return data

    with relay(server, see, see) as address, contextlib.closing(connect(address)) as line:
        for nbytes in (0, 1, 20_000, 9_000_001):
            data = os.urandom(64) * (nbytes // 64 + 1)
            line.send({"words": nbytes}, data[:nbytes])
            words, came = line.result(MOST)
            assert words == {"words": nbytes}
            assert came == data[:nbytes]
            assert nbytes < 64 or data[:64] not in seen
    assert len(seen) > 18_000_000
    assert b"words" not in seen


def test_a_store_of_nodes_works_by_tls(own, tmp_path):
    cluster = Cluster(tmp_path / "nodes", 3)
    data = os.urandom(20 << 20)
    key = "step-1/x/r00000-0.safetensors"
    cluster.store("a").put_stream(key, iter([data] * 2), part_bytes=1, parts_in_flight=1)
    assert cluster.has(key) == ["a", "b"]
    assert cluster.store("c").get(key) == data * 2
    cluster.close()


# ---- who is refused ----------------------------------------------------------------------------------


def knocks(server, context):
    """What the server answers to one who knows its key, and shakes hands as ``context`` says."""
    key = server.address.key()
    with socket.create_connection(server.address[:2], 5) as connection:
        theirs = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        try:
            with context.wrap_socket(connection) as encrypted:
                mine = os.urandom(CHALLENGE_BYTES)
                encrypted.sendall(mine + proof(key, b"client", theirs + mine))
                return encrypted.recv(PROOF_BYTES)
        except OSError:
            return b""


def a_client():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_one_without_the_certificate_is_refused_even_if_it_knows_the_key(server, own, tmp_path):
    without, another, the_jobs = a_client(), a_client(), a_client()
    another.load_cert_chain(Certificate(tmp_path / "another.pem").path)
    the_jobs.load_cert_chain(own.path)
    assert knocks(server, without) == b""
    assert knocks(server, another) == b""
    assert len(knocks(server, the_jobs)) == PROOF_BYTES


def test_of_certificates_that_one_authority_has_signed_only_the_jobs_counts(tmp_path, monkeypatch):
    authority = Certificate(tmp_path / "authority.pem")
    job = Certificate(tmp_path / "job.pem", issuer=authority)
    stranger = a_client()
    stranger.load_cert_chain(Certificate(tmp_path / "stranger.pem", issuer=authority).path)
    monkeypatch.setenv(VARIABLE, str(job.path))
    with contextlib.closing(serving()) as server:
        assert knocks(server, stranger) == b""
        with contextlib.closing(connect(server.address)) as line:
            assert asked(line, "own") == ("own", b"")


@pytest.mark.parametrize("by", ["itself", "the same authority"])
def test_a_man_in_the_middle_who_decrypts_is_refused(tmp_path, monkeypatch, by):
    """He has a certificate, and passes on the server's challenge. The client tells him no proof."""
    authority = Certificate(tmp_path / "authority.pem") if by != "itself" else None
    monkeypatch.setenv(VARIABLE, str(Certificate(tmp_path / "job.pem", issuer=authority).path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Certificate(tmp_path / "man.pem", issuer=authority).path)
    heard = []

    def decrypt(between, server):
        client, _ = between.accept()
        with client, socket.create_connection(server.address[:2]) as other:
            client.sendall(other.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            with contextlib.suppress(OSError), context.wrap_socket(client, True) as encrypted:
                heard.append(encrypted.recv(1000))

    with (
        contextlib.closing(serving()) as server,
        socket.create_server(("127.0.0.1", 0)) as between,
    ):
        thread = threading.Thread(target=decrypt, args=(between, server))
        thread.start()
        with pytest.raises(PermissionError, match=r"TLS refuses it \(.*certificate"):
            connect(server.address._replace(port=between.getsockname()[1]))
        thread.join()
    assert b"".join(heard) == b""


@pytest.mark.parametrize("is_plain", ["client", "server", "a relay says so"])
def test_one_end_without_tls_is_refused_immediately_and_told_why(own, monkeypatch, is_plain):
    if is_plain == "server":
        monkeypatch.delenv(VARIABLE)
    with contextlib.closing(serving()) as server:
        began = time.monotonic()
        if is_plain == "client":
            monkeypatch.delenv(VARIABLE)
            with pytest.raises(PermissionError, match=f"it uses TLS, and this .*{VARIABLE}"):
                connect(server.address)
        elif is_plain == "server":
            monkeypatch.setenv(VARIABLE, str(own.path))
            with pytest.raises(PermissionError, match=f"this process uses TLS.*{VARIABLE}"):
                connect(server.address)
        else:
            strip = lambda data: b"\0" + data[1:]  # noqa: E731
            with (
                relay(server, back=strip) as address,
                pytest.raises(PermissionError, match="this process uses TLS"),
            ):
                connect(address)
        assert time.monotonic() - began < 3
        assert not server._lines


def test_what_is_changed_on_the_way_ends_the_connection(server):
    harm = threading.Event()

    def change(data):
        return bytes([*data[:-1], data[-1] ^ 1]) if harm.is_set() else data

    with relay(server, there=change) as address, contextlib.closing(connect(address)) as line:
        assert asked(line, "before") == ("before", b"")
        harm.set()
        with pytest.raises(OSError, match=r"TLS|has ended|reset"):
            asked(line, "harmed")


def test_another_file_is_refused_and_named(server, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(Certificate(tmp_path / "another.pem").path))
    with pytest.raises(PermissionError, match=f"TLS refuses it .*{VARIABLE}, must be the same"):
        connect(server.address)


def test_a_certificate_that_has_expired_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(Certificate(tmp_path / "old.pem", days=-1).path))
    with (
        contextlib.closing(serving()) as server,
        pytest.raises(PermissionError, match="certificate has expired"),
    ):
        connect(server.address)


# ---- what is not waited for --------------------------------------------------------------------------


def client_hello():
    """How a handshake begins."""
    out = ssl.MemoryBIO()
    begun = a_client().wrap_bio(ssl.MemoryBIO(), out)
    with contextlib.suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    return out.read()


HELLO = client_hello()


@pytest.mark.parametrize("says", [b"", HELLO[:40], HELLO], ids=["nothing", "half", "hello"])
def test_one_who_stops_within_the_handshake_disturbs_nobody_and_is_dropped(
    server, monkeypatch, says
):
    monkeypatch.setattr(servers, "STRANGER_SECONDS", 0.5)
    with socket.create_connection(server.address[:2], 10) as stranger:
        stranger.sendall(says)
        began = time.monotonic()
        with contextlib.closing(connect(server.address)) as line:
            assert asked(line, "amid") == ("amid", b"")
        while stranger.recv(10_000):
            pass
        assert time.monotonic() - began < 5


def test_resets_within_the_handshake_do_not_hold_the_server_up(server):
    for number in range(200):
        with socket.create_connection(server.address[:2], 10) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stranger.sendall(HELLO[: number * 2])
    began = time.monotonic()
    with contextlib.closing(connect(server.address)) as line:
        assert asked(line, "after") == ("after", b"")
    assert time.monotonic() - began < 5


def test_a_server_that_is_silent_within_the_handshake_is_waited_for_no_longer_than_said(own):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], bytes(16))
        accepted = []

        def begin():
            accepted.append(silent.accept()[0])
            accepted[0].sendall(new_challenge(has_tls=True))

        thread = threading.Thread(target=begin)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="does not answer"):
            connect(address, 0.4)
        assert time.monotonic() - began < 5
        thread.join()
        accepted[0].close()


# ---- the file ----------------------------------------------------------------------------------------


def pem(text, what):
    """The parts of a file that are ``what``."""
    return "\n".join(re.findall(f"-----BEGIN {what}.*?-----END {what}-----", text, re.S)) + "\n"


@pytest.mark.parametrize("has", ["no key", "the key of another", "a key with a password", "damage"])
def test_a_file_that_cannot_be_used_is_refused_and_named(own, tmp_path, has):
    another = Certificate(tmp_path / "another", password="x" if "password" in has else "")
    mine, theirs = own.path.read_text(), another.path.read_text()
    own.path.write_text(
        {
            "no key": pem(mine, "CERTIFICATE"),
            "the key of another": pem(theirs, "PRIVATE KEY") + pem(mine, "CERTIFICATE"),
            "a key with a password": theirs,
            "damage": mine.replace("M", "N"),
        }[has]
    )
    with pytest.raises(ConfigurationError, match=rf"{VARIABLE}=.*private key without a password"):
        serving()


def test_a_certificate_in_the_variable_is_refused(own, monkeypatch):
    monkeypatch.setenv("DCP_DATASTATES_SECRET", own.path.read_text())
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigurationError, match=f"write it to a file.*{VARIABLE}"):
        connect(Address("127.0.0.1", 1, bytes(16)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_the_command_of_the_documents_makes_such_a_file(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs/stores.md"
    (command,) = re.findall(r"^openssl req .*$", page.read_text(), re.M)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(VARIABLE, str(file))
    with (
        contextlib.closing(serving()) as server,
        contextlib.closing(connect(server.address)) as line,
    ):
        assert asked(line, "own") == ("own", b"")
