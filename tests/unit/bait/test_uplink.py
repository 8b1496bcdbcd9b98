"""Free bandwidth, from counters as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

from belljar.bait.networks.uplink import SPAN, Uplinks


def card(nets: Path, name: str, speed: str, received: int = 0, sent: int = 0) -> None:
    (nets / name / "statistics").mkdir(parents=True, exist_ok=True)
    (nets / name / "speed").write_text(f"{speed}\n")
    for kind, count in (("rx", received), ("tx", sent)):
        (nets / name / f"statistics/{kind}_bytes").write_text(f"{count}\n")


def test_what_is_free_is_the_cards_speed_without_what_went_through_it(tmp_path: Path) -> None:
    (tmp_path / "br0/brif").mkdir(parents=True)
    for port in ("eth0", "bj-tap0"):
        (tmp_path / f"br0/brif/{port}").touch()
        card(tmp_path, port, "1000")
    (tmp_path / "bj-tap0/tun_flags").touch()  # a machine's
    now = [100.0]
    uplinks = Uplinks(("br0",), tmp_path, lambda: now[0])
    assert uplinks.free() == 125_000_000
    card(tmp_path, "eth0", "1000", received=50_000_000, sent=500_000_000)
    now[0] += SPAN - 1
    assert uplinks.free() == 125_000_000  # too short a time to tell
    now[0] += 1
    assert uplinks.free() == 25_000_000
    card(tmp_path, "eth0", "1000", received=5_000_000_000, sent=500_000_000)
    now[0] += SPAN
    assert uplinks.free() == 0
    now[0] += SPAN
    assert uplinks.free() == 125_000_000


def test_a_bridge_whose_cards_tell_no_speed_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "br0/brif").mkdir(parents=True)
    (tmp_path / "br0/brif/eth0").touch()
    for speed in ("-1", "", "Invalid argument"):
        card(tmp_path, "eth0", speed)
        assert Uplinks(("br0", "br1"), tmp_path).free() is None
