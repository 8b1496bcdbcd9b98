"""Keys for an ssh guest: belljar's, and the one its server is to have. A pure function of a secret."""

from __future__ import annotations

from hashlib import sha256
from hmac import digest
from typing import Any

from belljar.guest import SshDelivery, SshKeys
from belljar.guest.ssh_link import library

ED25519 = bytes.fromhex("302e020100300506032b657004220420")  # what stands before the 32 bytes of such a key in PKCS #8


def keys_from(secret: bytes, purpose: str, user: str) -> SshDelivery:
    """See `belljar.guest.ssh_delivery`."""
    ours, hosts = (_key(secret, f"{purpose} {whose}") for whose in ("client", "host"))
    public, host_public = (key.export_public_key().decode().strip() for key in (ours, hosts))
    keys = SshKeys(ours.export_private_key().decode(), user, (host_public,))
    return SshDelivery(keys, public, hosts.export_private_key().decode(), host_public, _of_dropbear(hosts))


def _key(secret: bytes, purpose: str) -> Any:
    return library().import_private_key(ED25519 + digest(secret, purpose.encode(), sha256))


def _of_dropbear(key: Any) -> bytes:
    """The key's kind, then its private and its public half (dropbear's ed25519.c, buf_put_ed25519_priv_key)."""
    private = key.export_private_key("pkcs8-der")[-32:]
    public = key.public_data[-32:]
    return b"".join(len(part).to_bytes(4, "big") + part for part in (b"ssh-ed25519", private + public))
