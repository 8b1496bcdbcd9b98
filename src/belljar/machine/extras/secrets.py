"""Secrets that a machine's requests are sent with: the values stay with its supervisor, whose certificate the guest trusts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from belljar.guest import Guest
from belljar.host.threads import in_thread
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.model import Payload, PlainFile, Secret
from belljar.records import replace

BUNDLE = b"/run/belljar/authorities.pem"
VARIABLES = dict.fromkeys(
    (b"SSL_CERT_FILE", b"REQUESTS_CA_BUNDLE", b"CURL_CA_BUNDLE", b"GIT_SSL_CAINFO", b"NODE_EXTRA_CA_CERTS"), BUNDLE
)


class Secrets(Extra):
    """Made with the values."""

    def __init__(self, values: Sequence[tuple[Secret, bytes]]) -> None:
        self._values = values

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        from belljar.host.guard.vault import Vault

        self._vault = await in_thread(lambda: Vault(self._values))
        return replace(there, vault=self._vault)

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        await guest.place((PlainFile(BUNDLE, self._vault.bundle, is_users=False),), payload.account)
