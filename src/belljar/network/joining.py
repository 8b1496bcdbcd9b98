"""What the settings of `[network]` mean: whom a guarded machine may reach, which bridge is meant, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import BadSetting, NoSuchNetwork
from belljar.host.guard import egress as rules
from belljar.host.guard.egress import Egress, Place
from belljar.network import EgressMode, Settings

RESOLVERS = Path("/etc/resolv.conf")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")


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


def bridge_of(settings: Settings, name: str) -> str:
    """The bridge that is meant. Raises NoSuchNetwork for one the site did not name."""
    if not settings.bridges:
        hint = "The site names its bridges in `network.bridges`."
        raise NoSuchNetwork("this site lets no machine onto a bridge", hint=hint)
    chosen = name or settings.bridges[0]
    if chosen not in settings.bridges:
        raise NoSuchNetwork(f"bridge {chosen!r}: the site lets machines onto {', '.join(settings.bridges)} only")
    if not INTERFACE.fullmatch(chosen):
        raise BadSetting(f"network.bridges: {chosen!r} cannot be the name of a bridge")
    return chosen


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each."""
    from belljar.network.bridge import addresses, check_address, macs
    from belljar.network.isolated import subnet

    def check_range(text: str) -> None:
        name, colon, _ = text.rpartition(":")
        if colon and name not in settings.bridges:
            raise BadSetting(f"network.bridge_addresses: {text!r}: {name} is not in `network.bridges`")
        list(addresses((text,)))

    checks: list[tuple[str, Iterable[str], Callable[[str], object]]] = [
        ("allow", settings.allow, lambda text: rules_of("allow", (text,))),
        ("deny", settings.deny, lambda text: rules_of("deny", (text,))),
        ("bridges", settings.bridges, lambda name: bridge_of(Settings(bridges=(name,)), name)),
        ("bridge_addresses", settings.bridge_addresses, check_range),
        ("bridge_gateway", settings.bridge_gateway.split(), lambda text: check_address("bridge_gateway", text)),
        ("bridge_dns", (settings.bridge_dns,), lambda text: check_address("bridge_dns", text)),
        ("mac_pool", settings.mac_pool, lambda text: list(macs((text,)))),
        ("isolated_net", (settings.isolated_net,), subnet),
    ]
    for key, texts, check in checks:
        for text in texts:
            try:
                check(text)
            except BadSetting as exc:
                yield key, exc
