"""`belljar vacuum explain` and `check`: what a factory wrote down, told to people and to programs."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.unit.vacuum.factory.conftest import api_requests
from tests.unit.vacuum.factory.site import Site

from belljar.cli import main
from belljar.cli.render import moment
from belljar.errors import ImageUnknown
from belljar.records import replace
from belljar.service.kept import keep, read
from belljar.vacuum.factory.daemon import Order, order
from belljar.vacuum.factory.keeper import Living
from belljar.vacuum.factory.state import STATUS, Status

HOUR, DAY = 3600.0, 86400.0
__all__ = ["api_requests"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A factory that had room an hour ago, then an image that is gone, then was full, and is full since."""
    asyncio.run(work(Site(tmp_path)))
    return tmp_path


async def work(site: Site) -> None:
    site.now = time.time() - HOUR
    factory = site.factory()
    factory.space = replace(factory.space, processors=2)
    await factory.cycle()
    ended = next(id for id, one in site.machines.items() if one.machinetype == "atlas")
    site.now += 900
    site.errors["atlas"] = ImageUnknown("a: no such image")
    factory._note(site.end(ended, "200 Done"))
    await factory.cycle()
    await factory.cycle()
    site.now += 900
    site.errors.clear()
    await factory.cycle()
    await factory.cycle()
    site.now = time.time()
    await factory.cycle()


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["vacuum", "explain", *args]) == 0
    return capsys.readouterr().out


def test_why_there_was_no_machine_at_a_time_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ago = ["--state", str(folder), "--ago"]
    first, second, third = (told(capsys, *ago, when).splitlines() for when in ("59m", "44m", "1s"))
    rows = [{line.split()[0]: line for line in lines[2:]} for lines in (first, second, third)]
    assert first[0].startswith("Decided 20") and first[1].split()[:2] == ["TYPE", "SHARE"]
    assert "1 started" in rows[0]["atlas"] and "1 started" in rows[0]["lhcb"]
    assert "it failed on this host: ImageUnknown: a: no such image" in rows[1]["atlas"]
    assert "no processors are free" in rows[2]["atlas"]
    (one,) = json.loads(told(capsys, *ago, "44m", "--format", "json", "atlas"))["verdicts"]
    assert (one["machinetype"], one["reason"], one["share"]) == ("atlas", "failed", 1.0)


def test_of_times_without_a_decision_that_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["vacuum", "explain", "--state", str(folder)]
    assert main([*at, "--ago", "2h"]) == 125
    assert "no decision is known of that time" in capsys.readouterr().err
    assert main([*at, "--ago", "30m", "nosuch"]) == 125
    assert "nosuch: no such machinetype" in capsys.readouterr().err


def test_a_check_exits_as_nagios_wants_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = read(folder / STATUS, Status)
    lines = []
    for cycles, code in ((1, 0), (4, 1), (11, 2)):
        keep(folder / STATUS, replace(status, cycled=time.time() - cycles * status.cycle, error="", troubles={}))
        assert main(["vacuum", "check", "--state", str(folder)]) == code
        lines.append(capsys.readouterr().out)
    assert [line.partition(":")[0] for line in lines] == ["OK", "WARNING", "CRITICAL"]
    assert all("| processors=2;;;0;2 machines=2;;;0 age=" in line for line in lines)
    assert main(["vacuum", "check", "--state", str(folder / "none")]) == 2


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> list[Living]:
    """The machines of this host's factory."""
    living = [Living("atlas", 1, time.time() + 6 * DAY, id="0123456789ab")]
    monkeypatch.setattr("belljar.vacuum.factory.keeper.Machines.living", lambda machines: living)
    return living


def test_a_drain_says_which_machines_go_on_and_until_when(
    folder: Path, living: list[Living], capsys: pytest.CaptureFixture[str]
) -> None:
    drain = ["vacuum", "drain", "--state", str(folder)]
    assert main(drain) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "No more machines are started on this host."
    assert second == f"  0123456789ab atlas: until {moment(living[0].ends)} (in 5 d 23 h) at most"
    assert main([*drain, "--by", "+2h"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    by = order(folder).shutdown_time
    assert f"; all are gone by {moment(by)} (" in first and f"atlas: until {moment(by)} (" in second
    assert main([*drain, "--off"]) == 0
    assert capsys.readouterr().out == "Machines are started again.\n"
    assert order(folder) == Order()


def test_a_drain_tells_that_a_time_is_tomorrow_and_refuses_one_that_has_passed(
    folder: Path, living: list[Living], capsys: pytest.CaptureFixture[str]
) -> None:
    drain = ["vacuum", "drain", "--state", str(folder), "--by"]
    assert main([*drain, time.strftime("%H:%M")]) == 0  # that minute has begun
    assert "(tomorrow, in 23 h 5" in capsys.readouterr().out
    before = order(folder)
    assert main([*drain, "2026-01-01T18:00"]) == 125
    assert "--by: 2026-01-01 18:00:00 has passed" in capsys.readouterr().err
    assert order(folder) == before
