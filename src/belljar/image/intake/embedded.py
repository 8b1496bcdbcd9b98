"""The signature within a CernVM image.

The last 64 KiB of such a file are two blocks of 32 KiB, each a JSON object filled up with NULs: what the image is, and its
signature. That is over the SHA-256 of all bytes but the last block: RSA, PKCS#1 v1.5, by the key of a certificate that
lies in the block too. JSON in real images has commas too many and too few, as in Vac's reader of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, SignatureRefused
from belljar.image.intake import chain
from belljar.records import dataclass

BLOCK = 32 << 10
CHUNK = 1 << 20
PEM = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


@dataclass(frozen=True)
class Signer:
    """Who must have signed: somebody for whom an authority in *folder* vouches, and whose whole name fits the pattern *dn*."""

    folder: Path
    dn: str


def signer_of(text: str) -> Signer:
    """The signer in the words of `--signer`. Raises BadOption."""
    kind, _, rest = text.partition(":")
    folder, _, dn = rest.partition(":")
    try:
        re.compile(dn)
    except re.error as exc:
        raise BadOption(f"--signer: {dn!r} is not a pattern: {exc}") from exc
    if kind != "x509" or not folder.startswith("/") or not dn:
        raise BadOption(f"--signer {text}: not of the form x509:FOLDER:DN, with an absolute FOLDER")
    return Signer(Path(folder), dn)


def verify(path: Path, signer: Signer, now: datetime) -> str:
    """The distinguished name of the one who signed the image in *path*. Only the last 32 KiB of the file are interpreted; *now*: in
    UTC, without a time zone. Raises SignatureRefused."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import padding, rsa, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    signature, certificates = read_block(path)
    key, dn = chain.check_chain(certificates, signer.folder, now)
    if not re.fullmatch(signer.dn, dn):
        raise SignatureRefused(f"{path.name}: signed by {dn}, which is not the signer that was asked for")
    if not isinstance(key, rsa.RSAPublicKey):
        raise SignatureRefused(f"{path.name}: signed with a key of an unknown kind ({type(key).__name__})")
    try:
        key.verify(signature, _digest(path), padding.PKCS1v15(), utils.Prehashed(SHA256()))
    except InvalidSignature as exc:
        raise SignatureRefused(f"{path.name}: its signature is wrong: this is not what was signed") from exc
    return dn


def read_block(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """What the signature block says: the signature and the chain of certificates (PEM, the signer's first). Raises
    SignatureRefused when there is none."""
    size = path.stat().st_size
    if size <= 2 * BLOCK:
        raise SignatureRefused(f"{path.name}: too small to carry a signature ({size} bytes)")
    with open(path, "rb") as file:
        file.seek(size - BLOCK)
        value = _object(file.read(BLOCK), path)
    try:
        signature = base64.b64decode(_text(value, "signature"), validate=True)
        pem = base64.b64decode(_text(value, "certificate")).decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError) as exc:
        raise SignatureRefused(f"{path.name}: its signature block cannot be read: {exc}") from exc
    if not (certificates := tuple(PEM.findall(pem))):
        raise SignatureRefused(f"{path.name}: its signature block has no certificate")
    return signature, certificates


def _object(block: bytes, path: Path) -> dict[str, Any]:
    try:
        text = block.rstrip(b"\0").decode()
        value = json.loads(_mended(text))
    except (ValueError, RecursionError) as exc:
        raise SignatureRefused(f"{path.name}: carries no signature") from exc
    if not isinstance(value, dict):
        raise SignatureRefused(f"{path.name}: carries no signature")
    return value


def _mended(text: str) -> str:
    """JSON, with a comma between lines that each end and begin with a string, and none before an end."""
    text = re.sub(r'"([ \t]*\r?\n\s*)(?=")', r'",\1', text)
    return re.sub(r",(\s*[}\]])", r"\1", text)


def _text(value: dict[str, Any], key: str) -> str:
    if not isinstance(text := value.get(key), str):
        raise ValueError(f"no {key}")
    return text


def _digest(path: Path) -> bytes:
    from hashlib import sha256

    digest = sha256()
    left = path.stat().st_size - BLOCK
    with open(path, "rb") as file:
        while left > 0 and (data := file.read(min(CHUNK, left))):
            digest.update(data)
            left -= len(data)
    return digest.digest()
