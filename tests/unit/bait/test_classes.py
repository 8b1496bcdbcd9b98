"""Network classes kept apart: what the settings become for nft."""

from __future__ import annotations

import pytest

from belljar.bait import Settings
from belljar.bait.networks.classes import matches, rules
from belljar.errors import BadSetting
from belljar.host.guard.egress import rule
from belljar.network import AntiSpoofing
from belljar.network import Settings as Network
from belljar.records import replace

SETTINGS = Settings(
    networks=(("open", "br0"), ("closed", "br1")), closed=("closed",), services=("192.0.2.1:6817/tcp", "192.0.2.8")
)  # fmt: skip
NETWORK = Network(bridges=("br0", "br1"), bridge_addresses=("10.99.0.10-10.99.0.40/24", "br1:10.98.0.10-10.98.0.40/24"))


def test_a_closed_class_has_its_services_and_an_open_one_all_but_the_others() -> None:
    text = rules(SETTINGS, NETWORK)
    lines = [line.strip() for line in text.splitlines()]
    service = "ip daddr 192.0.2.1/32 tcp dport 6817 accept"
    assert lines.index(f'iifname "br1" {service}') < lines.index('iifname "br1" drop')
    assert {f"ip saddr {{ 10.98.0.0/24 }} {service}", "ip saddr { 10.98.0.0/24 } drop", service} <= set(lines)
    assert 'iifname "br0" ip daddr { 10.98.0.0/24 } drop' in lines and 'iifname "br0" drop' not in lines
    assert text.startswith("add table inet belljar_bait\ndelete table inet belljar_bait\n")


def test_a_service_is_as_exact_as_it_was_written() -> None:
    assert [list(matches(rule(text))) for text in ("192.0.2.8", "192.0.2.0/24:53", "192.0.2.1:53/udp")] == [
        ["ip daddr 192.0.2.8/32"],
        ["ip daddr 192.0.2.0/24 tcp dport 53", "ip daddr 192.0.2.0/24 udp dport 53"],
        ["ip daddr 192.0.2.1/32 udp dport 53"],
    ]


@pytest.mark.parametrize(
    ("network", "what"),
    [
        (Network(bridges=("br0", "br1")), "br0 has none"),
        (replace(NETWORK, bridge_addresses=("10.99.0.10-10.99.0.40/24",)), "10.99.0.0/24 is on two bridges"),
        (replace(NETWORK, bridge_addresses=("br1:10.98.0.10/24",)), "br0 has none"),
        (replace(NETWORK, anti_spoofing=AntiSpoofing.OFF), "a node could use the address of another class"),
    ],
)
def test_classes_that_cannot_be_told_apart_are_refused(network: Network, what: str) -> None:
    with pytest.raises(BadSetting, match=what):
        rules(SETTINGS, network)


def test_one_open_class_needs_no_addresses_of_ours() -> None:
    text = rules(Settings(networks=(("open", "br0"),)), Network(bridges=("br0",)))
    assert 'iifname != { "br0" } accept' in text and "saddr" not in text
