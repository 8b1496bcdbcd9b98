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

from belljar.errors import SignatureRefused
from belljar.image.site import signing
from belljar.image.site.trust import Rule

BLOCK = 32 << 10
CHUNK = 1 << 20
PEM = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def verify(path: Path, rule: Rule, now: datetime) -> str:
    """The distinguished name of the signer of the image in *path*, whom *rule* (an x509 line) allows. Only the last 32 KiB of
    the file are interpreted. Raises SignatureRefused."""
    signature, chain = read_block(path)
    key, dn = signing.check_chain(chain, rule.folder, now)
    if not re.fullmatch(rule.dn, dn):
        raise SignatureRefused(f"{path.name}: signed by {dn}, who is not the one asked for", hint="Correct --signer.")
    signing.verify_key(key, signature, _digest(path), digested=True)
    return dn


def read_block(path: Path) -> tuple[str, tuple[str, ...]]:
    """What the signature block says: the signature (base64) and the chain of certificates (PEM, the signer's first). Raises
    SignatureRefused when there is none."""
    size = path.stat().st_size
    if size <= 2 * BLOCK:
        raise SignatureRefused(f"{path.name}: too small to carry a signature ({size} bytes)")
    with open(path, "rb") as file:
        file.seek(size - BLOCK)
        value = _object(file.read(BLOCK), path)
    try:
        signature = _text(value, "signature")
        pem = base64.b64decode(_text(value, "certificate")).decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError) as exc:
        raise SignatureRefused(f"{path.name}: its signature block cannot be read: {exc}") from exc
    if not (chain := tuple(PEM.findall(pem))):
        raise SignatureRefused(f"{path.name}: its signature block has no certificate")
    return signature, chain


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
    if not isinstance(found := value.get(key), str):
        raise ValueError(f"no {key}")
    return found


def _digest(path: Path) -> bytes:
    from hashlib import sha256

    digest = sha256()
    left = path.stat().st_size - BLOCK
    with open(path, "rb") as file:
        while left > 0 and (data := file.read(min(CHUNK, left))):
            digest.update(data)
            left -= len(data)
    return digest.digest()
