"""Fresh keys for a guest that is entered by ssh: belljar's, and the one its server is to have."""

from __future__ import annotations

from typing import Any

from belljar.guest import SshDelivery, SshKeys
from belljar.guest.ssh_link import library


def fresh_keys(user: str) -> SshDelivery:
    """See `belljar.guest.ssh_delivery`."""
    ours, hosts = (library().generate_private_key("ssh-ed25519") for _ in range(2))
    public, host_public = (key.export_public_key().decode().strip() for key in (ours, hosts))
    keys = SshKeys(ours.export_private_key().decode(), user, (host_public,))
    return SshDelivery(keys, public, hosts.export_private_key().decode(), host_public, _of_dropbear(hosts))


def _of_dropbear(key: Any) -> bytes:
    """The key's kind, then its private and its public half (dropbear's ed25519.c, buf_put_ed25519_priv_key)."""
    private = key.export_private_key("pkcs8-der")[-32:]
    public = key.public_data[-32:]
    return b"".join(len(part).to_bytes(4, "big") + part for part in (b"ssh-ed25519", private + public))
