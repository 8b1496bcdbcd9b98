"""A service's own certificate: made once, and known to its clients by its fingerprint or as their only authority."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from belljar.errors import HostError
from belljar.host.files import read_capped, write_whole

DAYS = 3650
LARGEST = 1 << 16


def own_certificate(path: Path, names: tuple[str, ...]) -> str:
    """A file (0600) with key and certificate, made where it is missing, for these names and addresses. Returns the SHA-256 of the
    certificate, hexadecimal. Raises HostError where the file is another thing."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    from belljar.host.guard.certificates import certificate

    if not path.exists():
        _, key, own = certificate(names[0], names, DAYS)
        write_whole(path, key + own, durable=True)
    try:
        known = x509.load_pem_x509_certificate(read_capped(path, LARGEST))
    except ValueError as exc:
        raise HostError(f"{path}: not a certificate: {exc}", hint="Remove it: it and its pin are made anew.") from exc
    return sha256(known.public_bytes(Encoding.DER)).hexdigest()
