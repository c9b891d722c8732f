"""The secret of a job: what its processes know, and others on the network do not.

Each server has a random token, which the job's processes learn with its address. The key that a connection has to prove
is made of the token and of the secret. Without a secret, whoever learns the token can connect.

The file of the secret may be a certificate with its private key (PEM). Then connections are encrypted, and each end
proves by TLS, too, that it has this file: no certificate but this one counts, whoever has signed it.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from typing import Final, NamedTuple

from dcp_datastates.errors import ConfigurationError, DataStatesError

_VARIABLE: Final = "DCP_DATASTATES_SECRET"
_FILE_VARIABLE: Final = "DCP_DATASTATES_SECRET_FILE"
_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 16384
"""A key and certificates of RSA, in PEM, have some 5,000."""
_SIGNATURE_BYTES: Final = 32
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"

SAME_FOR_ALL: Final = f"{_VARIABLE}, or {_FILE_VARIABLE}, must be the same on all ranks"


class Address(NamedTuple):
    """Of a server: host, port, and its token."""

    host: str
    port: int
    token: bytes

    def key(self) -> bytes:
        """What both ends of a connection prove that they know. Raises :class:`ConfigurationError`."""
        return hmac.digest(_secret(), self.token, "sha256")


def encryption(*, of_server: bool) -> ssl.SSLContext | None:
    """How a connection is encrypted, by its server or its client; None: the job has no certificate. Raises
    :class:`ConfigurationError`.
    """
    secret = _secret().decode(errors="replace")
    if _BEGIN not in secret:
        return None
    if not (path := os.environ.get(_FILE_VARIABLE, "")):
        raise ConfigurationError(
            f"{_VARIABLE} is a certificate: write it to a file that its owner alone may read, with its private key, "
            f"and name that in {_FILE_VARIABLE}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if of_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a host is known by the file, which all of them have
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it
    if of_server:
        context.num_tickets = 0  # each connection proves all anew
    certificate = secret[secret.index(_BEGIN) :].partition(_END)[0] + _END
    try:
        context.load_cert_chain(path, password="")  # or it would be asked for at the terminal
        context.load_verify_locations(cadata=certificate)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{_FILE_VARIABLE}={path!r} must have one certificate and its private key without a password, as PEM: "
            f"{getattr(error, 'reason', None) or error}"
        ) from error
    return context


def signed(data: bytes) -> bytes:
    """``data`` with a signature by the job's secret. Raises :class:`ConfigurationError`."""
    return hmac.digest(_secret(), data, "sha256") + data


def verified(message: bytes) -> bytes:
    """The data of a message from :func:`signed`. Raises :class:`DataStatesError` if it was signed otherwise."""
    data = message[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signed(data), message):
        raise DataStatesError(
            f"a message of another rank is not signed by the job's secret: {SAME_FOR_ALL}; if it is, a stranger "
            f"writes to the job's store"
        )
    return data


def _secret() -> bytes:
    """The job's secret, from the environment or a file; empty if there is none. Raises :class:`ConfigurationError` if
    it is too short, or if others may read the file.
    """
    path = os.environ.get(_FILE_VARIABLE, "")
    name = f"{_FILE_VARIABLE}={path!r}" if path else _VARIABLE
    secret = _read(path) if path else os.environb.get(_VARIABLE.encode(), b"")
    if (path or secret) and not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigurationError(
            f"{name}: the secret has {len(secret)} bytes, and needs {_LEAST_BYTES} to {_MOST_BYTES}: make one by "
            f"`openssl rand -hex 32`, the same for all ranks"
        )
    return secret


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise ConfigurationError(
                    f"{_FILE_VARIABLE}={path!r} must be a file that its owner alone may read: chmod 600 {path}"
                )
            return file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigurationError(
            f"{_FILE_VARIABLE}={path!r} cannot be read: {error.strerror}; every rank needs the file"
        ) from error
