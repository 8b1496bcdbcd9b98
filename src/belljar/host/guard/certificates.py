"""X.509 certificates that programs of ours make: keys on the curve P-256, text as PEM has it. Imported where one is made."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

Signer = tuple[str, ec.EllipticCurvePrivateKey]  # its title and its key


def certificate(title: str, hosts: Iterable[str], days: int, by: Signer | None = None) -> tuple[Signer, bytes, bytes]:
    """A new key, its text, and its certificate for these names and addresses; signed by this authority, or by itself: then it is
    one."""
    key, now, is_root = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), by is None
    above, own = by or (title, key)
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])]) for text in (title, above))
    usage = x509.KeyUsage(True, False, False, False, False, is_root, is_root, False, False)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key()), critical=False)
    )
    if names := [_name(host) for host in hosts]:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (title, key), text, builder.sign(own, SHA256()).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text))
    return x509.DNSName(text)
