"""What is wrong with the values of `[network]` beyond their types: each is read here as it is when it is used. Nothing of
this host is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from belljar.errors import BadSetting
from belljar.network import Settings
from belljar.network.bridge import check_address
from belljar.network.claims import addresses, macs
from belljar.network.isolated import subnet
from belljar.network.joining import bridge_of, check_prefix, plan_egress


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each."""
    looks: list[tuple[str, Callable[[], object]]] = [
        *(("allow", lambda text=text: plan_egress(Settings(allow=(text,)), ())) for text in settings.allow),
        *(("deny", lambda text=text: plan_egress(Settings(deny=(text,)), ())) for text in settings.deny),
        *(("bridges", lambda name=name: bridge_of(Settings(bridges=(name,)), name)) for name in settings.bridges),
        *(("bridge_addresses", lambda text=text: list(addresses((text,)))) for text in settings.bridge_addresses),
        ("bridge_gateway", lambda: check_address("bridge_gateway", settings.bridge_gateway)),
        ("bridge_dns", lambda: check_address("bridge_dns", settings.bridge_dns)),
        *(("mac_pool", lambda text=text: list(macs((text,)))) for text in settings.mac_pool),
        ("mac_prefix", lambda: check_prefix(settings.mac_prefix)),
        ("isolated_net", lambda: subnet(settings.isolated_net)),
    ]
    for key, look in looks:
        try:
            look()
        except BadSetting as exc:
            yield key, exc
