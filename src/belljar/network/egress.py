"""What the settings of `[network]` mean for the guard of a user network: whom its machine may reach."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from belljar.errors import BadSetting
from belljar.host.guard import egress as rules
from belljar.host.guard.egress import Egress, Place
from belljar.network import EgressMode, Settings

RESOLVERS = Path("/etc/resolv.conf")


def egress_of(settings: Settings, answers: tuple[Place, ...]) -> Egress | None:
    """The rules for the guard of a user network; None where there is no guard. Raises BadSetting."""
    if settings.egress is EgressMode.GUARDED:
        resolvers = resolvers_of(RESOLVERS.read_text(errors="replace") if RESOLVERS.exists() else "")
        allow, deny = rules_of("allow", settings.allow), rules_of("deny", settings.deny)
        return Egress(allow=allow, deny=deny, resolvers=resolvers, answers=answers)
    return Egress(allow=(rules.Rule(0, 0),), answers=answers) if answers else None


def rules_of(key: str, texts: tuple[str, ...]) -> tuple[rules.Rule, ...]:
    """Raises BadSetting for a rule that cannot be read."""
    try:
        return tuple(rules.rule(text) for text in texts)
    except ValueError as exc:
        raise BadSetting(f"network.{key}: {exc}") from exc


def resolvers_of(text: str) -> tuple[str, ...]:
    """The IPv4 name servers of a resolv.conf. QEMU forwards a guest's queries to the first."""
    servers = []
    for words in map(str.split, text.splitlines()):
        with suppress(ValueError, IndexError):  # IPv6; no address
            if words[0] == "nameserver" and rules.as_number(words[1]) >= 0:
                servers.append(words[1])
    return tuple(servers[:3])
