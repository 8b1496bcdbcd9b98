"""What goes wrong around a factory: starts that fail or hang, disks that are full, clocks that jump, keepers that die."""

import asyncio
from typing import Any

import pytest
from tests.unit.vacuum.factory.site import NOW, SPACE, Site, until

from belljar.errors import HostError, ImageUnknown, MachineBusy
from belljar.model import Request
from belljar.records import replace
from belljar.service.kept import keep
from belljar.vacuum.decisions.decide import Reason
from belljar.vacuum.factory.factory import SHOWS_WITHIN
from belljar.vacuum.factory.state import MEMORY


async def test_a_type_whose_start_fails_backs_off_here_and_longer_each_time(site: Site) -> None:
    site.errors["atlas"] = ImageUnknown("a: no such image")
    factory = site.factory(replace(SPACE, types=SPACE.types[:1]))
    await factory.cycle()
    assert len(site.asked) == 4  # those that were begun together have failed once
    until = NOW + 600
    for failures, delay in ((2, 1200), (3, 2400), (4, 4800), (5, 4800)):
        site.now = until - 1
        await factory.cycle()
        assert factory.decision is not None
        (verdict,) = factory.decision.verdicts
        assert (verdict.reason, verdict.until) == (Reason.FAILED, until) and "no such image" in verdict.why
        site.now = until
        await factory.cycle()
        assert len(site.asked) == 4 * failures
        until += delay
    (own,) = factory.snapshot().types
    assert (own.message, own.last_abort) == (None, None)  # other factories may start it
    del site.errors["atlas"]
    site.now = until
    await factory.cycle()
    assert len(site.machines) == 4 and factory.status.error == ""


async def test_an_image_that_takes_long_keeps_no_other_type_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.vacuum.factory.factory.CLAIMED_WITHIN", 0.01)
    fetched, start = asyncio.Event(), site.start

    async def slow(request: Request) -> None:
        if dict(request.labels)["machinetype"] == "atlas":
            await fetched.wait()
        await start(request)

    monkeypatch.setattr(site, "start", slow)
    factory = site.factory()
    await factory.cycle()
    assert {one.machinetype for one in site.machines.values()} == {"lhcb"}
    site.now += SHOWS_WITHIN + 1
    await factory.cycle()
    assert len(factory.all_living()) == 4 and len(site.machines) == 2  # its places are kept, however long it takes
    fetched.set()
    await until(lambda: len(site.machines) == 4)


async def test_what_a_dead_keeper_left_is_finished_and_its_place_is_free(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[str]()

    async def ended(id: str) -> None:
        waited.append(id)
        raise HostError(f"{id}: cannot be finished")

    monkeypatch.setattr(site, "ended", ended)
    factory = site.factory()
    for _ in range(3):
        await factory.cycle()
        await asyncio.sleep(0)
    assert set(waited) == set(site.machines)
    about = sorted(f"machine {id}" for id in site.machines)
    assert sorted(facts["about"] for _, facts in site.told if "about" in facts) == about  # once each
    id = next(iter(site.machines))
    factory._note(site.end(id))
    assert f"machine {id}" not in factory.troubles.now


async def test_a_clock_that_jumps_ends_no_machine_and_frees_no_place(site: Site) -> None:
    kind = replace(SPACE.types[0], heartbeat_file="beat", heartbeat=900.0)
    factory = site.factory(replace(SPACE, processors=2, types=(kind,)))
    await factory.cycle()
    await factory.cycle()
    for jump in (86400.0, -2 * 86400.0):
        site.now += jump
        site.jumped += jump
        await factory.cycle()
        assert site.stopped == [] and len(site.machines) == 2
    site.now += 901
    await factory.cycle()
    assert sorted(site.stopped) == sorted(site.machines)


async def test_a_machine_that_hangs_keeps_the_others_deadlines_from_nothing(site: Site) -> None:
    refused = list[str]()

    def move(id: str, moment: float) -> None:
        if id == hanging and not refused:
            refused.append(id)
            raise MachineBusy("did not answer")
        site.moved[id] = moment

    factory = site.factory()
    await factory.cycle()
    hanging = next(iter(site.machines))
    site.move = move  # type: ignore[method-assign]
    await factory.cycle()
    assert site.moved.keys() == site.machines.keys() - {hanging}
    await factory.cycle()
    assert site.moved.keys() == site.machines.keys()  # it was asked again


async def test_a_full_disk_keeps_no_machine_from_being_looked_after(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = site.factory()
    await factory.cycle()
    id = next(iter(site.machines))
    monkeypatch.setattr("belljar.service.kept.keep", full)
    factory._note(site.end(id, "200 Done"))
    with pytest.raises(OSError):
        await factory.cycle()  # nothing is started that could not be found again
    assert len(site.asked) == 4


async def test_a_full_disk_is_told_once_and_when_it_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, tries = site.factory(), 0

    def write(*words: Any, **options: Any) -> None:
        nonlocal tries
        tries += 1
        factory.wake()
        if tries < 100:
            full()
        keep(*words, **options)

    monkeypatch.setattr("belljar.service.kept.keep", write)
    monkeypatch.setattr("belljar.vacuum.factory.factory.LOOK_AT_ONCE", 0.0)
    running = asyncio.ensure_future(factory.run())
    await until(lambda: len(site.machines) == 4 and not factory.troubles.now)
    running.cancel()
    await asyncio.wait([running])
    lines = [(event, facts["about"]) for event, facts in site.told if "about" in facts]
    assert sorted(lines) == [(event, about) for event in ("failed", "works again") for about in ("cycle", MEMORY)]
    assert len(site.asked) == 4


def full(*words: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_start_that_fails_is_said_once_and_stops_no_other(site: Site) -> None:
    site.errors["atlas"] = ImageUnknown("a: no such image")
    factory = site.factory()
    for _ in range(3):
        await factory.cycle()
        site.now += 60
    assert {one.machinetype for one in site.machines.values()} == {"lhcb"}
    assert [facts["about"] for event, facts in site.told if event == "failed"] == ["atlas"]
    assert "no such image" in factory.status.error
    assert not factory.memory.pending
