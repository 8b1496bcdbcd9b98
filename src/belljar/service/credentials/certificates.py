"""A service's own certificate: made once, and known to its clients by its fingerprint or as their only authority."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from belljar.errors import HostError
from belljar.host.files import read_capped, write_whole

YEARS = 10
LARGEST = 1 << 16


def own_certificate(path: Path, names: tuple[str, ...]) -> str:
    """A file (0600) with key and certificate, made where it is missing, for these names and addresses. Returns the SHA-256 of the
    certificate, hexadecimal. Raises HostError where the file is another thing."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    if not path.exists():
        write_whole(path, _made(names), durable=True)
    try:
        certificate = x509.load_pem_x509_certificate(read_capped(path, LARGEST))
    except ValueError as exc:
        raise HostError(f"{path}: not a certificate: {exc}", hint="Remove it: it and its pin are made anew.") from exc
    return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def _made(names: tuple[str, ...]) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


def _name(text: str) -> Any:
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text))
    return x509.DNSName(text)
