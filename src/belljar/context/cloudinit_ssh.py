"""What cloud-init is told so that belljar gets in by ssh: its key, and the key by which the guest is known.

https://docs.cloud-init.io/en/latest/reference/modules.html#ssh
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from belljar.context import seed_disc
from belljar.context.cloudinit import NOBODY, VENDOR

HEAD = "#cloud-config\n"  # JSON is YAML, and has one way to quote


@dataclass(frozen=True)
class SshSeed:
    """Implements `Seed`."""

    user: str
    public: str
    host_private: str
    host_public: str
    grows: bool

    @cached_property
    def digest(self) -> str:
        return sha256(f"{HEAD}{self._config('', '', '')}{VENDOR}{self.grows}".encode()).hexdigest()

    def write(self, path: Path) -> None:
        vendor = VENDOR.format(growpart="auto" if self.grows else "off", resize=str(self.grows).lower())
        config = self._config(self.public, self.host_private, self.host_public)
        seed_disc(
            path, instance_id=f"belljar-{self.digest[:16]}", hostname=NOBODY, meta={},
            user_data=f"{HEAD}{config}\n".encode(), vendor_data=vendor.encode(),
        )  # fmt: skip

    def _config(self, public: str, host_private: str, host_public: str) -> str:
        return json.dumps(
            {
                "disable_root": False,
                "users": ["default", {"name": self.user, "ssh_authorized_keys": [public]}],
                "ssh_deletekeys": True,
                "ssh_keys": {"ed25519_private": host_private, "ed25519_public": host_public},
                "ssh_quiet_keygen": True,
            },
            indent=1,
        )
