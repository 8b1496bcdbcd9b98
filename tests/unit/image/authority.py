"""Certificates as authorities issue them, in folders as grids lay them out."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NOW = datetime.datetime(2026, 6, 1)
DAY = datetime.timedelta(days=1)
KINDS = {"DC": NameOID.DOMAIN_COMPONENT, "O": NameOID.ORGANIZATION_NAME, "CN": NameOID.COMMON_NAME}


def named(dn: str) -> x509.Name:
    """The name in the form /DC=ch/CN=somebody."""
    parts = [part.split("=", 1) for part in dn.strip("/").split("/")]
    return x509.Name([x509.NameAttribute(KINDS[kind], value) for kind, value in parts])


@dataclass
class Holder:
    """A key and its certificate; issues certificates whether it may or not."""

    key: Any
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def key_pem(self) -> bytes:
        pem: bytes = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return pem

    def issue(self, dn: str, **facts: Any) -> Holder:
        return holder(dn, self, **facts)

    def revoke(self, *others: Holder) -> bytes:
        """A list of revocations, PEM."""
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(NOW - DAY).next_update(NOW + DAY)
        for one in others:
            entry = x509.RevokedCertificateBuilder().serial_number(one.certificate.serial_number)
            builder = builder.add_revoked_certificate(entry.revocation_date(NOW - DAY).build())
        return builder.sign(self.key, SHA256()).public_bytes(Encoding.PEM)


def holder(
    dn: str, issuer: Holder | None = None, *, is_authority: bool | None = None, until: datetime.datetime = NOW + 30 * DAY,
    key: Any = None, signs: bool | None = None,
) -> Holder:  # fmt: skip
    """Somebody with a certificate by *issuer*, or by himself. *is_authority*, *signs*: what its basic constraints and key usage say;
    None: it has none."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = named(dn)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 60 * DAY)
        .not_valid_after(until)
    )
    if is_authority is not None:
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    if signs is not None:
        usage = x509.KeyUsage(signs, False, not signs, False, False, bool(is_authority), False, False, False)
        builder = builder.add_extension(usage, critical=True)
    return Holder(key, builder.sign(issuer.key if issuer else key, SHA256()))


def authority(folder: Path, dn: str = "/DC=org/DC=grid/CN=Authority") -> Holder:
    """An authority whose certificate lies in the folder."""
    made = holder(dn, is_authority=True)
    folder.mkdir(exist_ok=True)
    (folder / f"{made.certificate.serial_number:x}.0").write_text(made.pem)
    return made
