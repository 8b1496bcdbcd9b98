"""What stands after `--network`."""

from __future__ import annotations

from belljar.errors import NoSuchNetwork
from belljar.model import NetworkMode

NAMED = (NetworkMode.BRIDGE, NetworkMode.ISOLATED)


def network_of(text: str) -> tuple[NetworkMode, str]:
    """none, user, bridge, bridge:NAME or isolated:GROUP. Raises NoSuchNetwork; whether there is such a one is seen later."""
    kind, colon, name = text.partition(":")
    try:
        mode = NetworkMode(kind)
    except ValueError:
        raise NoSuchNetwork(f"--network {text[:80]!r}: no such kind of network") from None
    if colon and (mode not in NAMED or not name):
        raise NoSuchNetwork(f"--network {text[:80]!r}: {'no name may follow' if name else 'the name is missing'}")
    if mode is NetworkMode.ISOLATED and not name:
        raise NoSuchNetwork("--network isolated: the name of the group is missing")
    return mode, name
