"""Sign and verify bytes: Ed25519 keys, and the keys of X.509 certificates. `trust` decides who may sign what.

In this room the only user of the library `cryptography`. A signature covers a line that names the kind of data, and the bytes: one for an index
is not valid for an image. The library builds and checks chains of certificates; this module says what is checked:
authorities are authorities, keys are for signing, and no list of revocations beside the certificates (`*.r0`, `*.crl`) names
one of the chain. Folders are laid out as /etc/grid-security/certificates: PEM files `*.pem`, `*.crt`, `*.0`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import (
    BadSetting,
    HostError,
    InputMissing,
    NotPermitted,
    OutputUnwritable,
    SignatureRefused,
    UnsafeFolder,
)
from belljar.host.files import read_capped, write_all
from belljar.image.site import Signature
from belljar.records import dataclass

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_BYTES = 32
LARGEST_KEY = 64 << 10
# What a signature is over, before the bytes.
INDEX, STATEMENT = b"belljar image index 1\n", b"belljar image statement 1\n"


@dataclass(frozen=True)
class Signer:
    """A private key, with its certificates where it has some."""

    key: Any
    certificates: tuple[str, ...] = ()

    def sign(self, kind: bytes, data: bytes) -> Signature:
        """A signature over *data* as a *kind*."""
        value = base64.b64encode(_signed(self.key, kind + data)).decode()
        if self.certificates:
            return Signature(certificates=self.certificates, value=value)
        return Signature(key=public_word(self.key.public_key()), value=value)


def needed() -> None:
    """Raise HostError when the library for signatures is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as exc:
        raise HostError(
            "signatures take the Python library `cryptography`, which is not installed",
            hint="Install belljar anew with what it needs: `make install`, or `pip install cryptography` beside it.",
        ) from exc


def make_key(path: Path) -> str:
    """Make an Ed25519 key in a new file (PEM, 0600). Returns its public word. Raises OutputUnwritable."""
    needed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key: Ed25519PrivateKey = Ed25519PrivateKey.generate()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise OutputUnwritable(f"{path}: {exc.strerror}", hint="Name a new file.") from exc
    try:
        write_all(descriptor, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    finally:
        os.close(descriptor)
    return public_word(key.public_key())


def load_signer(key_file: Path, certificate_file: Path | None = None) -> Signer:
    """The signer of a key file (PEM, without a passphrase, for its owner alone), with the chain of a certificate file.
    Raises InputMissing, NotPermitted."""
    needed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_private(key_file)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as exc:
        raise InputMissing(
            f"{key_file}: not a private key: {exc}", hint="Give a PEM file without a passphrase."
        ) from exc
    if certificate_file is not None:
        return Signer(key, _chain_of(key, certificate_file))
    if not isinstance(key, Ed25519PrivateKey):
        raise InputMissing(f"{key_file}: not an Ed25519 key", hint="Give its certificate too, with --certificate.")
    return Signer(key)


def _read_private(path: Path) -> bytes:
    try:
        facts = os.stat(path)
        data = read_capped(path, LARGEST_KEY)
    except OSError as exc:
        raise InputMissing(f"{path}: {exc.strerror}", hint="Make a key with `belljar image key FILE`.") from exc
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise NotPermitted(f"{path}: others may read this private key", hint="chmod 600 it; if they did, make another.")
    return data


def _chain_of(key: Any, path: Path) -> tuple[str, ...]:
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509 import load_pem_x509_certificates

    try:
        chain = load_pem_x509_certificates(read_capped(path, LARGEST_KEY))
    except (OSError, ValueError) as exc:
        raise InputMissing(f"{path}: no certificates: {exc}", hint="Give a PEM file, the signer's first.") from exc
    if chain[0].public_key() != key.public_key():
        raise InputMissing(f"{path}: its first certificate is of another key", hint="Put the signer's first.")
    return tuple(one.public_bytes(Encoding.PEM).decode() for one in chain)


def public_word(key: Any) -> str:
    """An Ed25519 public key as base64."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def check_public_key(text: str) -> str:
    """The key itself. Raises BadSetting for what is none."""
    try:
        if len(base64.b64decode(text, validate=True)) == KEY_BYTES:
            return text
    except (binascii.Error, ValueError):
        pass
    raise BadSetting(
        f"image.trust: {text!r} is not an Ed25519 public key", hint="`belljar image key FILE` prints the key of a file."
    )


def verify_ed25519(key: str, value: str, data: bytes) -> None:
    """Raise SignatureRefused unless this key signed *data*."""
    needed()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(base64.b64decode(key)).verify(_bytes_of(value), data)
    except (InvalidSignature, ValueError) as exc:
        raise SignatureRefused(f"its signature by ed25519:{key} is wrong: this is not what was signed") from exc


def verify_key(key: Any, value: str, data: bytes, *, digested: bool = False) -> None:
    """Raise SignatureRefused unless a certificate's key (RSA with PKCS#1 v1.5, ECDSA, both with SHA-256, or Ed25519) signed
    *data*; *digested*: it is the SHA-256 of what was signed. The signature is base64."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    digest: Any = utils.Prehashed(SHA256()) if digested else SHA256()
    signature = _bytes_of(value)
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, padding.PKCS1v15(), digest)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(digest))
        elif isinstance(key, ed25519.Ed25519PublicKey) and not digested:
            key.verify(signature, data)
        else:
            raise SignatureRefused(f"a signature by a key of a kind belljar does not know ({type(key).__name__})")
    except InvalidSignature as exc:
        raise SignatureRefused("its signature by a certificate's key is wrong: this is not what was signed") from exc


def _signed(key: Any, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, padding.PKCS1v15(), SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(SHA256()))
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    raise InputMissing("a private key of a kind belljar does not sign with", hint="Use Ed25519, RSA or ECDSA.")


def _bytes_of(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise SignatureRefused("its signature is not base64") from exc


def as_json(signatures: Sequence[Signature]) -> list[dict[str, Any]]:
    """Signatures as they are written beside what they are over."""
    signers = [{"certificates": list(one.certificates)} if one.certificates else {"key": one.key} for one in signatures]
    return [{**signer, "value": one.value} for signer, one in zip(signers, signatures, strict=True)]


LARGEST_CERTIFICATE, LARGEST_LIST = 1 << 20, 64 << 20
LONGEST_CHAIN = 8
CERTIFICATES, REVOCATIONS = (".pem", ".crt", ".0"), (".r0", ".crl")
# A value that looks like further parts of the name would make the one-line form ambiguous.
LOOKS_LIKE_A_PART = re.compile(r"/[A-Za-z]+=")


def check_chain(chain: Sequence[str], folder: Path, now: datetime) -> tuple[Any, str]:
    """The public key and the name of the signer of a chain of PEM certificates, the signer's first, for whom an authority in
    *folder* vouches. *now*: in UTC. Raises SignatureRefused."""
    needed()
    from cryptography import x509
    from cryptography.x509.verification import VerificationError

    if not 1 <= len(chain) <= LONGEST_CHAIN:
        raise SignatureRefused(f"a chain of {len(chain)} certificates")
    try:
        signer, *between = [x509.load_pem_x509_certificate(one.encode()) for one in chain]
    except ValueError as exc:
        raise SignatureRefused(f"its certificate cannot be read: {exc}") from exc
    dn = one_line(signer.subject)
    authorities = list(_authorities(folder))
    if not authorities:
        raise SignatureRefused(f"{folder}: no certificate of an authority is there")
    try:
        verified = _verifier(authorities, now).verify(signer, between)
    except (VerificationError, ValueError) as exc:
        raise SignatureRefused(f"no authority in {folder} vouches for {dn}: {exc}") from exc
    _refuse_revoked(verified.chain, folder)
    return signer.public_key(), dn


def one_line(name: x509.Name) -> str:
    """A distinguished name as grids write it: /DC=ch/DC=cern/CN=signer."""
    parts = []
    for attribute in name:
        text = str(attribute.value)
        if LOOKS_LIKE_A_PART.search(text) or not text.isprintable():
            raise SignatureRefused(f"the name {text!r} in a certificate could be mistaken for another name")
        word = "emailAddress" if attribute.oid.dotted_string == "1.2.840.113549.1.9.1" else None
        parts.append(f"/{word or attribute.rfc4514_attribute_name}={text}")
    return "".join(parts)


def _verifier(authorities: list[x509.Certificate], now: datetime) -> Any:
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store

    either = Criticality.AGNOSTIC
    of_authorities = (
        ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, either, _is_authority)
        .may_be_present(x509.KeyUsage, either, _signs_certificates)
    )
    of_signers = ExtensionPolicy.permit_all().may_be_present(x509.KeyUsage, either, _signs)
    builder = PolicyBuilder().store(Store(authorities)).time(now).max_chain_depth(LONGEST_CHAIN)
    return builder.extension_policies(ca_policy=of_authorities, ee_policy=of_signers).build_client_verifier()


def _is_authority(policy: Any, certificate: Any, constraints: Any) -> None:
    if not constraints.ca:
        raise ValueError("its issuer is not an authority")


def _signs_certificates(policy: Any, certificate: Any, usage: Any) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("its issuer's key may not sign certificates")


def _signs(policy: Any, certificate: Any, usage: Any) -> None:
    if usage is not None and not (usage.digital_signature or usage.content_commitment):
        raise ValueError("its key is not for signatures")


def _authorities(folder: Path) -> Iterator[x509.Certificate]:
    from cryptography import x509

    for path in _files(folder, CERTIFICATES):
        with suppress(OSError, ValueError, UnsafeFolder):  # one broken file of a hundred does not matter
            yield from x509.load_pem_x509_certificates(read_capped(path, LARGEST_CERTIFICATE))


def _refuse_revoked(chain: list[x509.Certificate], folder: Path) -> None:
    """Every list counts that its authority has signed, old ones too: what was revoked stays revoked."""
    from cryptography import x509

    for path in _files(folder, REVOCATIONS):
        with suppress(OSError, ValueError, UnsafeFolder):
            revoked = x509.load_pem_x509_crl(read_capped(path, LARGEST_LIST))
            for one, issuer in pairwise(chain):
                if revoked.issuer != one.issuer or not revoked.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                    continue
                if revoked.get_revoked_certificate_by_serial_number(one.serial_number) is not None:
                    raise SignatureRefused(f"the certificate of {one_line(one.subject)} was revoked ({path.name})")


def _files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.suffix in endings)
    return []
