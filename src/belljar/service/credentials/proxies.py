"""Limited X.509 proxies, and tokens: what a machine may do in its experiment's name, until its end and no longer.

RFC 3820 (Internet X.509 Proxy Certificate Profile), with the policy "limited" of the Globus Toolkit. The subject's new part is the
serial number, as the RFC suggests, since no two proxies may have the same.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import HostError, NoCredentials, in_words
from belljar.host.files import read_capped
from belljar.records import dataclass

if TYPE_CHECKING:
    from cryptography import x509

LARGEST = 256 << 10
LARGEST_TOKEN = 64 << 10
RSA_BITS = 2048
SLACK = 300.0  # seconds that a machine's clock may be behind
LEAST = 600.0  # seconds a proxy is good for, or it is not worth making
PRIVATE = re.compile(rb"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)
PROXY_CERT_INFO = "1.3.6.1.5.5.7.1.14"
# ProxyCertInfo ::= SEQUENCE { proxyPolicy SEQUENCE { policyLanguage 1.3.6.1.4.1.3536.1.1.1.9 } }, in DER
LIMITED = bytes.fromhex("300f300d060b2b060104019b5001010109")


class ProxyKey(str, Enum):
    """The kind of a proxy's own key."""

    RSA = "rsa"
    EC = "ec"


@dataclass(frozen=True)
class Source:
    """A certificate with its key, and those between it and an authority."""

    name: str  # for messages: where it is
    chain: tuple[Any, ...]
    key: Any


def load_token(path: Path) -> bytes:
    """The token of a file, without blanks around it. Raises NoCredentials."""
    data = _read(path, "token", LARGEST_TOKEN).strip()
    if not data or not data.isascii() or len(data.split()) != 1:
        raise NoCredentials(f"token: {path}: not one word of ASCII")
    return data


def load_source(paths: Sequence[Path]) -> Source:
    """The certificate and key in these files, or in one. Raises NoCredentials."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    certificate, key_file = paths[0], paths[-1]
    try:
        chain = load_pem_x509_certificates(_read(certificate))
        key = load_pem_private_key(_private_part(key_file), password=None)
    except (ValueError, TypeError) as exc:
        raise NoCredentials(f"proxy: {certificate}, {key_file}: no certificate with a key in PEM: {exc}") from exc
    if chain[0].public_key() != key.public_key():
        raise NoCredentials(f"proxy: {key_file} is not the key of the first certificate in {certificate}")
    return Source(str(certificate), tuple(chain), key)


def _private_part(path: Path) -> bytes:
    """The key's lines. Raises NoCredentials where others may read it, ValueError where there is none."""
    if (key := PRIVATE.search(_read(path))) is None:
        raise ValueError("no private key")
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise NoCredentials(f"proxy: {path}: others may read this private key", hint="chmod 600 it.")
    return key[0] + b"\n"


def _read(path: Path, what: str = "proxy", most: int = LARGEST) -> bytes:
    try:
        return read_capped(path, most)
    except (OSError, HostError) as exc:
        raise NoCredentials(f"{what}: {in_words(exc) if isinstance(exc, OSError) else exc.message}") from exc


def limited_proxy(source: Source, *, now: float, until: float, key: ProxyKey = ProxyKey.RSA) -> bytes:
    """A proxy with a key of its own, good until then, or until its source ends where that is sooner. It is PEM as the tools of grids
    take it: certificate, key, chain. Raises NoCredentials."""
    issuer = source.chain[0]
    ends = min(until, issuer.not_valid_after_utc.timestamp())
    if ends < now + LEAST:
        over = "is over" if ends <= now else "is nearly over"
        raise NoCredentials(f"proxy: {source.name} {over}: {issuer.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    begins, own = max(now - SLACK, issuer.not_valid_before_utc.timestamp()), _new_key(key)
    if begins > now:
        raise NoCredentials(f"proxy: {source.name} has not begun: {issuer.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
    try:
        _check(source)
        certificate = _signed(source, own.public_key(), _moment(begins), _moment(ends), is_rsa=key is ProxyKey.RSA)
    except (ValueError, TypeError) as exc:  # malformed extensions, and keys that cannot sign
        raise NoCredentials(f"proxy: {source.name} can sign none: {exc}") from exc
    return _pem(certificate, own, source.chain)


def _check(source: Source) -> None:
    """Raises NoCredentials for a source that can have no such proxy."""
    from cryptography import x509

    extensions = {extension.oid.dotted_string: extension.value for extension in source.chain[0].extensions}
    basic, usage = extensions.get("2.5.29.19"), extensions.get("2.5.29.15")
    if isinstance(basic, x509.BasicConstraints) and basic.ca:
        raise NoCredentials(f"proxy: {source.name} is an authority's certificate")
    if isinstance(usage, x509.KeyUsage) and not usage.digital_signature:
        raise NoCredentials(f"proxy: {source.name} is not for signing")


def _new_key(kind: ProxyKey) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    if kind is ProxyKey.EC:
        return ec.generate_private_key(ec.SECP256R1())
    return rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)


def _signed(source: Source, public: Any, begins: datetime, ends: datetime, *, is_rsa: bool) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ed448, ed25519
    from cryptography.hazmat.primitives.hashes import SHA256

    issuer = source.chain[0]
    serial = x509.random_serial_number()
    part = x509.RelativeDistinguishedName([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(serial))])
    usage = x509.KeyUsage(
        digital_signature=True, key_encipherment=is_rsa, key_agreement=not is_rsa, content_commitment=False,
        data_encipherment=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder(issuer.subject, x509.Name([*issuer.subject.rdns, part]), public)
        .serial_number(serial)
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(usage, critical=True)
        .add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(PROXY_CERT_INFO), LIMITED), critical=True)
    )
    is_edwards = isinstance(source.key, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey))
    return builder.sign(source.key, None if is_edwards else SHA256())


def _pem(certificate: Any, key: Any, chain: Sequence[Any]) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    rest = b"".join(issuer.public_bytes(Encoding.PEM) for issuer in chain)
    return bytes(certificate.public_bytes(Encoding.PEM) + private + rest)


def _moment(timestamp: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(seconds=int(timestamp))
