"""The signature within a CernVM image.

The last 64 KiB of such a file are two blocks of 32 KiB, each a JSON object filled up with NULs: what the image is, and its
signature. That is over the SHA-256 of all bytes but the last block: RSA, PKCS#1 v1.5, by the key of a certificate that
lies in the block too. JSON in real images has commas too many and too few, as in Vac's reader of them.

The library `cryptography` checks the chain of certificates. This module says what is checked: authorities are authorities, keys are
for signing, and no list of revocations beside the certificates (`*.r0`, `*.crl`) names a certificate of the chain. Folders of
authorities are laid out as /etc/grid-security/certificates: PEM files `*.pem`, `*.crt`, `*.0`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import verification as rules

from belljar.errors import BadOption, ImageMismatch, UnsafeFolder
from belljar.host.files import read_capped

BLOCK = 32 << 10
PEM = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
LARGEST_FILE, LONGEST_CHAIN = 64 << 20, 8
CERTIFICATES, REVOCATIONS = (".pem", ".crt", ".0"), (".r0", ".crl")
EMAIL = "1.2.840.113549.1.9.1"
# A value that looks like further parts of the name would make the one-line form ambiguous.
LOOKS_LIKE_A_PART = re.compile(r"/[A-Za-z]+=")


def signer_of(text: str) -> tuple[Path, str]:
    """Who must have signed, in the words of `--signer`: somebody for whom an authority in a folder vouches, and whose whole name fits
    a pattern. Raises BadOption."""
    try:
        match = re.fullmatch("x509:(/[^:]*):(.+)", text)
        if match and re.compile(match[2]):
            return Path(match[1]), match[2]
    except re.error as exc:
        raise BadOption(f"--signer {text}: its DN is not a pattern: {exc}") from exc
    raise BadOption(f"--signer {text}: not of the form x509:FOLDER:DN, with an absolute FOLDER")


def verify(path: Path, signer: str, now: datetime) -> str:
    """The distinguished name of the one who signed the image in *path*. Only the last 32 KiB of the file are interpreted. *signer*: as
    for `signer_of`; *now*: in UTC, without a time zone. Raises ImageMismatch, BadOption."""
    folder, pattern = signer_of(signer)
    signature, certificates = read_block(path)
    key, dn = check_chain(certificates, folder, now)
    if not re.fullmatch(pattern, dn):
        raise ImageMismatch(f"{path.name}: signed by {dn}, which is not the signer that was asked for")
    try:
        key.verify(signature, _digest(path), padding.PKCS1v15(), utils.Prehashed(SHA256()))
    except (InvalidSignature, TypeError) as exc:  # TypeError: a key of another kind
        raise ImageMismatch(f"{path.name}: its signature is wrong: this is not what was signed") from exc
    return dn


def read_block(path: Path) -> tuple[bytes, list[str]]:
    """What the signature block says: the signature and the chain of certificates (PEM, the signer's first). Raises
    ImageMismatch when there is none."""
    if (size := path.stat().st_size) <= 2 * BLOCK:
        raise ImageMismatch(f"{path.name}: too small to carry a signature ({size} bytes)")
    with open(path, "rb") as file:
        file.seek(size - BLOCK)
        text = file.read(BLOCK).rstrip(b"\0")
    try:
        value = json.loads(_mended(text.decode()))
        signature = base64.b64decode(value["signature"], validate=True)
        certificates = PEM.findall(base64.b64decode(value["certificate"]).decode("ascii"))
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ImageMismatch(f"{path.name}: carries no signature that can be read: {exc}") from exc
    return signature, certificates


def _mended(text: str) -> str:
    """JSON, with a comma between lines that each end and begin with a string, and none before an end."""
    text = re.sub(r'"([ \t]*\r?\n\s*)(?=")', r'",\1', text)
    return re.sub(r",(\s*[}\]])", r"\1", text)


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file, mmap(file.fileno(), path.stat().st_size - BLOCK, access=ACCESS_READ) as signed:
        return sha256(signed).digest()


def check_chain(chain: Sequence[str], folder: Path, now: datetime) -> tuple[Any, str]:
    """The public key and the name of the signer of a chain of PEM certificates, the signer's first, for whom an authority in
    *folder* vouches. *now*: in UTC. Raises ImageMismatch."""
    try:
        signer, *between = [x509.load_pem_x509_certificate(pem.encode()) for pem in chain]
    except ValueError as exc:
        raise ImageMismatch(f"its certificate cannot be read: {exc}") from exc
    dn = one_line(signer.subject)
    authorities: list[x509.Certificate] = []
    for data in _read(folder, CERTIFICATES):
        with suppress(ValueError):  # one broken file of a hundred does not matter
            authorities += x509.load_pem_x509_certificates(data)
    either = rules.Criticality.AGNOSTIC
    anything = rules.ExtensionPolicy.permit_all()
    is_authority = _must(lambda constraints: constraints.ca, "its issuer is not an authority")
    signs_keys = _must(lambda usage: usage.key_cert_sign, "its issuer's key may not sign certificates")
    signs = _must(lambda usage: usage.digital_signature or usage.content_commitment, "its key is not for signatures")
    of_authorities = anything.require_present(x509.BasicConstraints, either, is_authority)
    of_authorities = of_authorities.may_be_present(x509.KeyUsage, either, signs_keys)
    of_signers = anything.may_be_present(x509.KeyUsage, either, signs)
    try:
        builder = rules.PolicyBuilder().store(rules.Store(authorities)).time(now).max_chain_depth(LONGEST_CHAIN)
        verifier = builder.extension_policies(ca_policy=of_authorities, ee_policy=of_signers).build_client_verifier()
        verified = verifier.verify(signer, between)
    except (rules.VerificationError, ValueError) as exc:
        raise ImageMismatch(f"no authority in {folder} vouches for {dn}: {exc}") from exc
    _refuse_revoked(verified.chain, folder)
    return signer.public_key(), dn


def one_line(name: x509.Name) -> str:
    """A distinguished name as grids write it: /DC=ch/DC=cern/CN=signer."""
    parts = []
    for attribute in name:
        text = str(attribute.value)
        if LOOKS_LIKE_A_PART.search(text) or not text.isprintable():
            raise ImageMismatch(f"the name {text!r} in a certificate could be mistaken for another name")
        is_email = attribute.oid.dotted_string == EMAIL
        parts.append(f"/{'emailAddress' if is_email else attribute.rfc4514_attribute_name}={text}")
    return "".join(parts)


def _must(is_right: Callable[[Any], bool], problem: str) -> Callable[[Any, Any, Any], None]:
    """Judges an extension of a certificate, where it has that."""

    def judge(policy: Any, certificate: Any, extension: Any) -> None:
        if extension is not None and not is_right(extension):
            raise ValueError(problem)

    return judge


def _refuse_revoked(chain: list[x509.Certificate], folder: Path) -> None:
    """Every list counts that its authority has signed, old ones too: what was revoked stays revoked."""
    for data in _read(folder, REVOCATIONS):
        with suppress(ValueError):
            revoked = x509.load_pem_x509_crl(data)
            for certificate, issuer in pairwise(chain):
                if revoked.issuer != certificate.issuer or not revoked.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                    continue
                if revoked.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
                    raise ImageMismatch(f"the certificate of {one_line(certificate.subject)} was revoked")


def _read(folder: Path, endings: tuple[str, ...]) -> Iterator[bytes]:
    for path in sorted(folder.glob("*")):
        with suppress(OSError, UnsafeFolder):
            if path.suffix in endings:
                yield read_capped(path, LARGEST_FILE)
