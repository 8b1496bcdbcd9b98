"""A place on a bridge that is given up while it is being made."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BadOption, NetworkFailed
from belljar.host.threads import in_thread
from belljar.model import NetworkMode
from belljar.network import Link, Settings, bridge, mistakes
from belljar.records import replace

LONGEST = 20.0


async def test_rules_that_were_being_made_are_taken_away_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    making, may_end = threading.Event(), threading.Event()

    def make_table(*about: Any) -> None:
        making.set()
        assert may_end.wait(LONGEST)
        order.append("made")

    monkeypatch.setattr(bridge.os, "access", lambda path, mode: True)
    monkeypatch.setattr(bridge.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bridge, "guards_addresses", lambda *about, **more: True)

    def make_tap(name: str, bridge: str, *, is_guarded: bool) -> int:
        order.append("guarded" if is_guarded else "open")
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(bridge, "make_tap", make_tap)
    monkeypatch.setattr(bridge, "make_table", make_table)
    monkeypatch.setattr(bridge, "remove_table", lambda id: order.append("removed"))
    intended: list[tuple[str, Path]] = []
    link = Link(NetworkMode.BRIDGE, "52:54:00:00:00:01")
    task = asyncio.ensure_future(
        bridge.join_bridge(Settings(), link, "br0", "0123456789ab", lambda *one: intended.append(one))
    )
    await in_thread(lambda: making.wait(LONGEST))
    assert [what for what, _ in intended] == ["nft-table"]  # in the journal before it is made
    task.cancel()
    await asyncio.sleep(0)
    assert order == ["guarded"]
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["guarded", "made", "removed"]


async def test_a_tap_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_end, given = threading.Event(), threading.Event(), list[int]()

    def ask_helper(name: str) -> int:
        asked.set()
        assert may_end.wait(LONGEST)
        given.append(os.open("/dev/null", os.O_RDONLY))
        return given[0]

    monkeypatch.setattr(bridge.os, "access", lambda path, mode: True)
    monkeypatch.setattr(bridge.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(bridge, "ask_helper", ask_helper)
    closed = threading.Event()
    close = os.close
    monkeypatch.setattr(bridge.os, "close", lambda fd: (close(fd), closed.set() if fd in given else None))
    link = Link(NetworkMode.BRIDGE, "52:54:00:00:00:01")
    task = asyncio.ensure_future(bridge.join_bridge(Settings(), link, "br0", "0123456789ab", lambda *one: None))
    await in_thread(lambda: asked.wait(LONGEST))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert await in_thread(lambda: closed.wait(LONGEST))


def test_a_machine_may_ask_for_one_of_this_hosts_addresses() -> None:
    settings = Settings(bridge_addresses=("10.9.9.2-10.9.9.9/24",))
    first, second = (bridge.OnBridge(Link(NetworkMode.BRIDGE), "0" * 12, has_rules=False) for _ in range(2))
    first.claim(settings, "10.9.9.3")
    assert first.link.address == "10.9.9.3/24"
    with pytest.raises(NetworkFailed, match="in use"):
        second.claim(settings, "10.9.9.3")
    for wanted, known in (("10.9.9.1", settings), ("10.9.9.3/24", settings), ("10.9.9.3", Settings())):
        with pytest.raises(BadOption, match="not an address that this host gives"):
            second.claim(known, wanted)
    first.close()
    second.claim(settings, "10.9.9.3")
    second.close()


def test_a_machine_does_not_get_the_address_of_one_that_has_just_ended() -> None:
    """Others believe for a while that the other is there: a batch system would end the new one's job for the old one's."""
    settings, found = Settings(bridge_addresses=("10.9.6.2-10.9.6.9/24",)), []
    for id in ("0000000000a0", "0000000000a1", "ffffffffffff"):
        one = bridge.OnBridge(Link(NetworkMode.BRIDGE), id, has_rules=False)
        one.claim(settings)
        found.append(one.link.address)
        one.close()
    assert found == ["10.9.6.2/24", "10.9.6.3/24", "10.9.6.9/24"]
    held = [bridge.OnBridge(Link(NetworkMode.BRIDGE), "ffffffffffff", has_rules=False) for _ in range(9)]
    for one in held[:8]:
        one.claim(settings)
    assert {one.link.address for one in held[:8]} == {f"10.9.6.{number}/24" for number in range(2, 10)}
    with pytest.raises(NetworkFailed, match="all 8 addresses"):
        held[8].claim(settings)
    for one in held:
        one.close()


def test_each_bridge_may_have_addresses_and_a_gateway_of_its_own() -> None:
    settings = Settings(
        bridges=("br0", "br1", "br2"),
        bridge_addresses=("10.9.8.2-10.9.8.9/24", "br1:10.9.7.2-10.9.7.9/24"),
        bridge_gateway="10.9.7.1 10.9.8.1",
    )
    found = []
    for name in ("br0", "br1", "br2", "br1"):
        one = bridge.OnBridge(Link(NetworkMode.BRIDGE), "0" * 12, has_rules=False)
        one.claim(settings, bridge=name)
        found.append((one.link.address, one.link.gateway))
        one.close()
    assert found == [("10.9.8.2/24", "10.9.8.1"), ("10.9.7.2/24", "10.9.7.1")] * 2
    assert bridge.gateway_for("10.9.9.2/24", "10.9.7.1 10.9.8.1") == bridge.gateway_for("10.9.9.2/24", "") == ""
    assert bridge.gateway_for("10.9.9.2/24", "10.9.7.1") == "10.9.7.1"  # one alone is that of all
    assert list(mistakes(settings)) == []
    (wrong,) = mistakes(replace(settings, bridge_addresses=("br9:10.9.8.2/24",)))
    assert wrong[0] == "bridge_addresses" and "br9 is not in `network.bridges`" in wrong[1].message
