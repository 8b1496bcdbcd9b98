"""No proof, no payload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belljar.errors import IdentityRefused
from belljar.guest import IdentityProof
from belljar.machine.life.identity import check, new_identity
from belljar.model import NetworkMode
from belljar.network import mac_address, plan

WANTED = new_identity("0123456789ab", plan(NetworkMode.USER, "0123456789ab"))
PROOF = IdentityProof(WANTED.hostname, WANTED.machine_id, WANTED.nonce, WANTED.mac, "ab" * 32, 0.01)


def test_a_guest_that_is_who_it_was_told_to_be_passes() -> None:
    check(WANTED, PROOF)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hostname": "template"}, "hostname"),
        ({"machine_id": "0" * 32}, "machine_id"),
        ({"nonce": ""}, "nonce"),
        ({"mac": "52:54:00:12:34:56"}, "mac"),
        ({"sample": ""}, "random"),
        ({"sample": "../" * 21 + "x"}, "random"),
        ({"clock_skew": 0.2}, "clock"),
        ({"clock_skew": -3600.0}, "clock"),
    ],
)
def test_a_guest_that_is_somebody_else_is_refused_and_told_why(changes: dict[str, object], says: str) -> None:
    with pytest.raises(IdentityRefused, match=says):
        check(WANTED, replace(PROOF, **changes))  # type: ignore[arg-type]


def test_no_two_machines_get_the_same_names_or_entropy() -> None:
    link = plan(NetworkMode.NONE, "a")
    identities = [new_identity(f"{n:012x}", link) for n in range(100)]
    for name in ("hostname", "machine_id", "nonce", "entropy"):
        assert len({getattr(identity, name) for identity in identities}) == 100


def test_a_mac_is_local_unicast_and_its_machines_own() -> None:
    macs = {mac_address(f"{n:012x}") for n in range(1000)}
    assert len(macs) == 1000
    assert all(int(mac[:2], 16) & 0b11 == 0b10 for mac in macs)
    assert mac_address("a") == mac_address("a")
