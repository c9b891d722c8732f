"""Files as ``DCP_DATASTATES_SECRET_FILE`` names them: a certificate and its private key."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Certificate:
    """A certificate of ``days``, signed by itself or by ``issuer``. ``password``: of its key in the file."""

    def __init__(
        self, path: Path, *, days: int = 10, issuer: Certificate | None = None, password: str = ""
    ) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, path.name)])
        signer = issuer or self
        now = datetime.datetime.now(datetime.timezone.utc)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=20))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(
                x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True
            )
            .sign(signer.key, hashes.SHA256())
        )
        lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            lock = serialization.BestAvailableEncryption(password.encode())
        private = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock
        )
        public = self.certificate.public_bytes(serialization.Encoding.PEM)
        rest = (
            b"" if issuer is None else issuer.certificate.public_bytes(serialization.Encoding.PEM)
        )
        path.write_bytes(private + public + rest)
        path.chmod(0o600)
        self.path = path
