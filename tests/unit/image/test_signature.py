"""Images that carry their signature in themselves, as CernVM's do: made here, signed here, and tampered with."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from tests.unit.image.authority import DAY, NOW, Holder, authority, holder
from tests.unit.image.image_parts import ext4

from belljar.errors import BadOption, ImageMismatch
from belljar.image.intake import signature, sources
from belljar.image.intake.signature import BLOCK
from belljar.image.intake.sources import Order
from belljar.image.store.store import Store
from belljar.model import MIB

DN = "/DC=ch/DC=cern/CN=cvm-sign01.cern.ch"
PAYLOAD = b"an image of sorts" * 5000
METADATA = b'{\n"ucernvm-version": "1.0",\n"kernel": "HEAD",\n}'.ljust(BLOCK, b"\0")
KEY = rsa.generate_private_key(65537, 2048)


@pytest.fixture
def signer(tmp_path: Path) -> Holder:
    return authority(tmp_path / "ca").issue(DN, key=KEY)


def image(path: Path, signer: Holder, payload: bytes = PAYLOAD, *, as_real: bool = False) -> Path:
    """An image with a signature block; *as_real*: with the commas that real ones lack and have too many."""
    body = payload + METADATA
    signature = base64.b64encode(signer.key.sign(body, padding.PKCS1v15(), SHA256())).decode()
    certificate = base64.b64encode(signer.pem.encode()).decode()
    if as_real:
        block = f'{{"howto-verify": {{\n"signature": "<signature>"\n"host": "cvm-sign01.cern.ch"\n"more": "x",\n}},\n"signature": "{signature}",\n"certificate": "{certificate}"\n}}'
    else:
        block = json.dumps({"signature": signature, "certificate": certificate})
    path.write_bytes(body + block.encode().ljust(BLOCK, b"\0"))
    return path


def rule(tmp_path: Path, dn: str = DN) -> str:
    return f"x509:{tmp_path}/ca:{dn}"


@pytest.mark.parametrize("as_real", [False, True])
def test_a_signed_image_is_its_signers(tmp_path: Path, signer: Holder, as_real: bool) -> None:
    path = image(tmp_path / "image", signer, as_real=as_real)
    assert signature.verify(path, rule(tmp_path), NOW) == DN
    assert signature.verify(path, rule(tmp_path, "/DC=ch/DC=cern/CN=cvm-sign[0-9]+.cern.ch"), NOW) == DN


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


CHANGES: dict[str, Callable[[bytearray], None]] = {
    "its first byte": flip(0),
    "its metadata": flip(len(PAYLOAD) + 5),
    "the padding of the metadata": flip(len(PAYLOAD) + BLOCK - 1),
    "a byte put before it": lambda data: data.insert(0, 0),
    "a byte put after it": lambda data: data.append(0),
    "its end cut off": lambda data: data.__delitem__(slice(-BLOCK, None)),
    "no signature": lambda data: data.__setitem__(slice(-BLOCK, None), b"{}".ljust(BLOCK, b"\0")),
    "a list": lambda data: data.__setitem__(slice(-BLOCK, None), b"[]".ljust(BLOCK, b"\0")),
    "nesting": lambda data: data.__setitem__(slice(-BLOCK, None), b"[" * BLOCK),
    "all of it": lambda data: data.__delitem__(slice(0, None)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_image_that_was_changed_is_refused(tmp_path: Path, signer: Holder, what: str) -> None:
    path = image(tmp_path / "image", signer)
    data = bytearray(path.read_bytes())
    CHANGES[what](data)
    path.write_bytes(data)
    with pytest.raises(ImageMismatch):
        signature.verify(path, rule(tmp_path), NOW)


def test_an_image_by_another_is_refused(tmp_path: Path, signer: Holder) -> None:
    ca = authority(tmp_path / "ca")
    strangers = holder("/CN=Stranger", is_authority=True)
    for who in (ca.issue("/DC=ch/DC=cern/CN=other", key=KEY), strangers.issue(DN, key=KEY), holder(DN, key=KEY)):
        with pytest.raises(ImageMismatch):
            signature.verify(image(tmp_path / "image", who), rule(tmp_path), NOW)
    with pytest.raises(ImageMismatch, match="vouches"):
        signature.verify(image(tmp_path / "image", ca.issue(DN, key=KEY, until=NOW - DAY)), rule(tmp_path), NOW)


def test_an_import_takes_only_what_was_signed(
    tmp_path: Path, signer: Holder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.time, "time", lambda: NOW.replace(tzinfo=UTC).timestamp())
    disk = ext4(tmp_path / "disk", size=2 * MIB).read_bytes()
    path = image(tmp_path / "signed", signer, disk)
    asked = f"x509:{tmp_path}/ca:{DN}"
    taken = sources.bring(store, Order(str(path), "mine", signer=asked))
    assert taken.facts["signer"] == DN
    (tmp_path / "plain").write_bytes(disk)
    with pytest.raises(ImageMismatch):
        sources.bring(store, Order(str(tmp_path / "plain"), "other", signer=asked))
    assert [one.names for one in store.images()] == [("mine",)]
    for words in ("ed25519:x", "x509:relative:x", f"x509:{tmp_path}:", f"x509:{tmp_path}:("):
        with pytest.raises(BadOption):
            sources.check(Order(str(path), "mine", signer=words))
