"""What the settings of `[network]` mean for the guard of a user network: whom its machine may reach."""

from __future__ import annotations

import re
from pathlib import Path

from belljar.errors import BadOption, BadSetting, BelljarError
from belljar.host.guard import egress as rules
from belljar.host.guard.egress import Egress, Only, Place
from belljar.host.guard.names import name
from belljar.network import EgressMode, Settings
from belljar.records import replace

RESOLVERS = Path("/etc/resolv.conf")
PROXY = ("127.0.0.1", 3128)  # 10.0.2.2:3128 for the guest: for programs that are told about a proxy
NOTHING = "none"
NAME_SERVER = re.compile(r"^\s*nameserver\s+([0-9.]+)(?:\s|$)", re.MULTILINE)


def egress_of(
    settings: Settings, answers: tuple[Place, ...], allow: tuple[str, ...] = (), secret: tuple[str, ...] = ()
) -> Egress | None:
    """The rules for the guard of a user network; None where there is no guard. *allow*: what this machine asks for, *secret*:
    hosts that are sent its secrets. Raises BadSetting, BadOption."""
    if settings.egress is EgressMode.OPEN and not (allow or secret):
        return Egress(allow=(rules.Rule(0, 0),), answers=answers) if answers else None
    resolvers = resolvers_of(RESOLVERS.read_text(errors="replace") if RESOLVERS.exists() else "")
    sites = list_of("network.allow", settings.allow, BadSetting)
    hosts = list_of("--secret", secret)
    only = (sites,) if sites.names or NOTHING in settings.allow else ()
    if allow:
        own = list_of("--allow", allow)
        only = (*only, replace(own, names=own.names + hosts.names))
    egress = Egress(sites.rules, rules_of("deny", settings.deny), resolvers, answers, only, hosts)
    return replace(egress, answers=(*answers, PROXY)) if egress.ports else egress


def list_of(what: str, texts: tuple[str, ...], error: type[BelljarError] = BadOption) -> Only:
    """What these rules and names are; *what* they are in errors. Raises BadOption, or the other one."""
    places, names = [], []
    for text in texts:
        try:
            if (host := name(text)) is None:
                places.append(rules.rule(text))
            elif text != NOTHING:
                names.append(host)
        except ValueError as exc:
            hint = "Give such an address or network, NAME[:PORT], *.NAME[:PORT] or none."
            raise error(f"{what}: {exc}", hint=hint) from None
    return Only(tuple(places), tuple(names))


def rules_of(key: str, texts: tuple[str, ...]) -> tuple[rules.Rule, ...]:
    """Raises BadSetting for a rule that cannot be read."""
    try:
        return tuple(rules.rule(text) for text in texts)
    except ValueError as exc:
        raise BadSetting(f"network.{key}: {exc}") from exc


def resolvers_of(text: str) -> tuple[str, ...]:
    """The IPv4 name servers of a resolv.conf. QEMU forwards a guest's queries to the first."""
    return tuple(NAME_SERVER.findall(text)[:3])
