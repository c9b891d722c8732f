"""The secret of a job: where it is found, and what is refused."""

import os

import pytest

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.wire.secret import Address

ADDRESS = Address("host", 1, b"t" * 16)
SECRET = "s" * 32


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("DCP_DATASTATES_SECRET_FILE", str(path))
    return path


def test_the_key_needs_the_secret_and_the_token(monkeypatch):
    without = ADDRESS.key()
    assert without == ADDRESS.key()
    assert without != ADDRESS._replace(token=b"u" * 16).key()
    monkeypatch.setenv("DCP_DATASTATES_SECRET", SECRET)
    assert without != ADDRESS.key()
    assert ADDRESS.key() == ADDRESS._replace(host="other", port=2).key()


def test_a_file_says_the_same_as_the_variable(file, monkeypatch):
    from_file = ADDRESS.key()
    monkeypatch.delenv("DCP_DATASTATES_SECRET_FILE")
    monkeypatch.setenv("DCP_DATASTATES_SECRET", SECRET)
    assert ADDRESS.key() == from_file


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_may_read_or_change_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        ADDRESS.key()


def test_a_pipe_is_refused_and_not_waited_for(file):
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(ConfigurationError, match="its owner alone"):
        ADDRESS.key()


def test_a_file_that_is_missing_is_named(file):
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"secret' cannot be read: No such file"):
        ADDRESS.key()


@pytest.mark.parametrize("secret", ["", "short", "x" * 20_000])
def test_a_secret_that_is_too_short_or_long_is_refused(file, monkeypatch, secret):
    file.write_text(secret)
    with pytest.raises(ConfigurationError, match=r"SECRET_FILE=.*16 to 16384: make one by"):
        ADDRESS.key()
    monkeypatch.delenv("DCP_DATASTATES_SECRET_FILE")
    monkeypatch.setenv("DCP_DATASTATES_SECRET", secret)
    if secret:
        with pytest.raises(ConfigurationError, match=r"SECRET: the secret has .* bytes"):
            ADDRESS.key()
