"""Where a guarded machine may go, judged without a packet."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.host.guard.egress import Egress, Only, Transport, Verdict, decide, obstacle, rule
from belljar.host.guard.names import Name

METADATA = ("169.254.169.254", 80)
addresses = st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number)))
ports, transports = st.integers(0, 65535), st.sampled_from(Transport)


def verdict(egress: Egress, address: str, port: int = 80, transport: Transport = Transport.TCP) -> Verdict:
    return decide(egress, address, port, transport)[0]


@given(addresses, ports, transports)
def test_whatever_is_not_global_is_refused(address: str, port: int, transport: Transport) -> None:
    there = ipaddress.ip_address(address)
    if there.is_private and not there.is_global and verdict(Egress(), address, port, transport) is Verdict.ALLOWED:
        # documentation ranges and a few like them are nobody's; nothing inside can have them
        assert any(
            there in ipaddress.ip_network(net)
            for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "192.88.99.0/24")
        )
    if there.is_loopback or there.is_link_local or there.is_multicast or there.is_unspecified or there.is_reserved:
        assert verdict(Egress(), address, port, transport) is Verdict.REFUSED


@pytest.mark.parametrize(
    "address",
    ["10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.1", "100.64.0.1", "100.127.255.255",
     "127.0.0.1", "0.0.0.0", "168.63.129.16", "169.254.169.254", "224.0.0.1", "255.255.255.255"],
)  # fmt: skip
def test_the_edges_of_what_is_blocked(address: str) -> None:
    assert verdict(Egress(), address) is Verdict.REFUSED


@pytest.mark.parametrize(
    "address",
    [
        "9.255.255.255",
        "11.0.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "8.8.8.8",
        "223.255.255.255",
    ],
)
def test_the_edges_of_what_is_not(address: str) -> None:
    assert verdict(Egress(), address) is Verdict.ALLOWED


def test_a_resolver_is_reached_for_names_and_for_nothing_else() -> None:
    egress = Egress(resolvers=("10.0.0.53",))
    assert verdict(egress, "10.0.0.53", 53, Transport.UDP) is Verdict.ALLOWED
    assert verdict(egress, "10.0.0.53", 53, Transport.TCP) is Verdict.ALLOWED
    assert verdict(egress, "10.0.0.53", 22) is Verdict.REFUSED
    assert verdict(egress, "10.0.0.53", 53, Transport.ICMP) is Verdict.REFUSED
    assert verdict(Egress(resolvers=("10.0.0.53",), deny=(rule("10.0.0.53"),)), "10.0.0.53", 53) is Verdict.REFUSED


def test_a_resolver_on_this_host_is_reached_too_where_its_network_is_allowed() -> None:
    egress = Egress(resolvers=("10.0.0.53",), allow=(rule("10.0.0.0/8"),))
    assert decide(egress, "10.0.0.53", 53, Transport.UDP) == (Verdict.ALLOWED, "resolver")
    assert decide(egress, "10.0.0.53", 80, Transport.TCP) == (Verdict.ALLOWED, "")  # unless it is this host


def test_deny_is_stronger_than_allow_and_an_answered_place_than_both() -> None:
    egress = Egress(
        allow=(rule("10.0.0.0/8"),), deny=(rule("10.1.0.0/16"), rule("169.254.0.0/16")), answers=(METADATA,)
    )
    assert verdict(egress, "10.2.0.1") is Verdict.ALLOWED
    assert verdict(egress, "10.1.0.1") is Verdict.REFUSED
    assert verdict(egress, *METADATA) is Verdict.ANSWERED
    assert verdict(egress, METADATA[0], 443) is Verdict.REFUSED
    assert verdict(egress, *METADATA, Transport.UDP) is Verdict.REFUSED


@pytest.mark.parametrize(
    ("text", "address", "port", "transport", "fits"),
    [
        ("10.0.0.1", "10.0.0.1", 1, Transport.UDP, True),
        ("10.0.0.1", "10.0.0.2", 1, Transport.UDP, False),
        ("10.0.0.0/8:3128", "10.9.9.9", 3128, Transport.TCP, True),
        ("10.0.0.0/8:3128", "10.9.9.9", 3129, Transport.TCP, False),
        ("10.0.0.0/8:3128", "10.9.9.9", 3128, Transport.ICMP, False),
        ("10.0.0.0/8:3128/tcp", "10.9.9.9", 3128, Transport.UDP, False),
        ("0.0.0.0/0", "127.0.0.1", 1, Transport.TCP, True),
    ],
)
def test_a_rule_fits_what_it_names(text: str, address: str, port: int, transport: Transport, fits: bool) -> None:
    expected = Verdict.ALLOWED if fits else Verdict.REFUSED
    assert decide(Egress(allow=(rule(text),)), address, port, transport)[0] is expected


@pytest.mark.parametrize(
    "text",
    ["", "example.org", "10.0.0", "10.0.0.0.0", "10.0.0.1/33", "10.0.0.1/8", "10.0.0.0/-1", "10.0.0.0/8:", "10.0.0.0/8:0",
     "10.0.0.0/8:65536", "10.0.0.0/8:80/sctp", "10.0.0.0/8:80/", "::1", "10.0.0.1 80", "0x7f.1", "10.0.0.0/٨"],
)  # fmt: skip
def test_a_rule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        rule(text)


# -- lists of what may be reached ----------------------------------------------------------------------------------------


@given(addresses, ports, transports)
def test_a_list_opens_nothing_that_was_closed(address: str, port: int, transport: Transport) -> None:
    everything = Only((rule("0.0.0.0/0"),), (Name("data.example.org"),))
    for egress in (
        Egress(only=(everything,)),
        Egress(only=(Only(names=everything.names),)),
        Egress(only=(everything, Only())),
    ):
        if verdict(Egress(), address, port, transport) is Verdict.REFUSED:
            assert verdict(egress, address, port, transport) is Verdict.REFUSED
            assert obstacle(egress, address, port) or transport is not Transport.TCP


def test_of_two_lists_each_has_to_have_it() -> None:
    site = Only((rule("203.0.113.0/24"),), (Name("*.example.org"),))
    own = Only((rule("203.0.113.7"), rule("198.51.100.1")), (Name("data.example.org", 8443), Name("example.net")))
    egress = Egress(only=(site, own))
    assert verdict(egress, "203.0.113.7", 22) is Verdict.ALLOWED
    assert verdict(egress, "203.0.113.8", 22) is verdict(egress, "198.51.100.1", 22) is Verdict.REFUSED
    assert [verdict(egress, "8.8.8.8", port) for port in (80, 443, 8443)] == [Verdict.ANSWERED] * 3
    assert not egress.reaches("data.example.org", 8443) and not egress.reaches("example.net", 443)
    assert Egress(only=(own,)).reaches("data.example.org", 8443) and egress.reaches("data.example.org")


def test_a_rule_for_the_network_of_a_resolver_does_not_open_it() -> None:
    egress = Egress(allow=(rule("10.0.0.0/8"),), resolvers=("10.0.0.53",), only=(Only((rule("10.0.0.0/8"),)),))
    assert verdict(egress, "10.0.0.53", 53, Transport.UDP) is Verdict.QUERY
    assert verdict(egress, "10.0.0.53", 53) is Verdict.REFUSED
    assert verdict(egress, "10.0.0.54", 53) is verdict(egress, "10.0.0.53", 80) is Verdict.ALLOWED


def test_nothing_is_reached_by_an_empty_list() -> None:
    egress = Egress(resolvers=("10.0.0.53",), answers=(METADATA,), only=(Only(),))
    assert verdict(egress, "8.8.8.8") is verdict(egress, "10.0.0.53", 53) is Verdict.REFUSED
    assert verdict(egress, "8.8.8.8", 53, Transport.ICMP) is Verdict.REFUSED
    assert verdict(egress, *METADATA) is Verdict.ANSWERED
    assert verdict(egress, "10.0.0.53", 53, Transport.UDP) is Verdict.QUERY and not egress.reaches("localhost")


def test_a_host_of_a_secret_is_reached_by_its_name_and_the_rest_as_ever() -> None:
    egress = Egress(secret=Only(names=(Name("api.example.org", 443),)))
    assert verdict(egress, "8.8.8.8", 443) is Verdict.ANSWERED and verdict(egress, "10.0.0.1", 443) is Verdict.REFUSED
    assert verdict(egress, "8.8.8.8", 80) is verdict(egress, "8.8.8.8", 443, Transport.UDP) is Verdict.ALLOWED
