"""The factory with machines that are only said to be: what it starts, finds again, ends, and remembers."""

import asyncio
import os
from typing import Any

import pytest
from tests.unit.vacuum.factory.site import NOW, SPACE, Site, until

from belljar.model import Context, OwnWork, Request, RunPayload
from belljar.records import replace
from belljar.service.kept import read
from belljar.vacuum import TypeStatus
from belljar.vacuum.decisions.decide import Reason
from belljar.vacuum.factory.factory import SHOWS_WITHIN, finish
from belljar.vacuum.factory.keeper import Living, labels_of, request_for
from belljar.vacuum.factory.state import STATUS, Finished, Status
from belljar.vacuum.protocol.query import Snapshot


async def test_an_empty_host_is_filled_in_one_cycle_by_shares(site: Site) -> None:
    factory = site.factory()
    await factory.cycle()
    assert sorted(one.machinetype for one in site.machines.values()) == ["atlas", "atlas", "lhcb", "lhcb"]
    assert sorted(one.slot for one in site.machines.values()) == [0, 1, 2, 3]
    await factory.cycle()
    assert len(site.asked) == 4  # it is full
    status = read(site.folder / STATUS, Status)
    assert (status.machines, status.processors, status.most_processors, status.hs06) == (4, 4, 4, 40.0)


async def test_what_is_asked_of_the_keeper(site: Site) -> None:
    await site.factory(replace(SPACE, processors=1, site="EXAMPLE", types=SPACE.types[:1])).cycle()
    (request,) = site.asked
    assert isinstance(request.work, RunPayload) and request.work.payload.script == b"#!/bin/sh\n"
    assert (request.work.payload.account.uid, request.work.user_data) == (0, b"#!/bin/sh\n")
    assert (request.machine.image, request.machine.cpus, request.machine.memory) == ("a", 1, 1 << 20)
    assert (request.name, request.requester, request.timeout) == ("atlas", f"vacuum:{request.id}", 86400.0)
    assert dict(request.labels) == {
        "space": "vac.example.org", "factory": "vf1.example.org", "machinetype": "atlas", "slot": "0", "ends": "1800086400",
        "fizzle": "600", "wall_limit": "86400", "site": "EXAMPLE", "hs06": "10",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "context"),
    [
        (b"#cloud-config\n", Context.AUTO),
        (b"#!/bin/sh\n", Context.NONE),
        (b"#!/bin/sh\n", Context.CLOUD_INIT),
        (b"", Context.AUTO),
    ],
)
def test_user_data_that_are_no_script_are_the_images_own_affair(data: bytes, context: Context) -> None:
    kind = replace(SPACE.types[0], context=context)
    request = request_for(SPACE, kind, Living("atlas", 1, NOW + 10, id="0123456789ab"), data, NOW)
    assert isinstance(request.work, OwnWork) and request.work.user_data == (data or None)


async def test_a_factory_that_is_killed_finds_its_machines_again(site: Site) -> None:
    await site.factory().cycle()
    again = site.factory()
    await again.cycle()
    assert len(site.asked) == 4 and len(again.living) == 4


async def test_a_machine_that_was_being_claimed_when_the_factory_was_killed_is_counted(site: Site) -> None:
    site.shows = False
    await site.factory().cycle()
    again = site.factory()
    await again.cycle()
    assert len(site.asked) == 4 and len(again.all_living()) == 4 and again.living == []
    for request in site.asked[:3]:
        site.show(request)
    site.now += 10
    await again.cycle()
    assert len(site.asked) == 4 and len(again.all_living()) == 4
    site.now += SHOWS_WITHIN  # the fourth was never claimed
    await again.cycle()
    assert len(site.asked) == 5
    assert sorted(dict(one.labels)["slot"] for one in [*site.asked[:3], site.asked[4]]) == ["0", "1", "2", "3"]


async def test_what_is_about_to_be_started_is_on_disk_before_it_is(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def start(request: Request) -> None:
        seen.append(request.id in (site.folder / "memory.json").read_text())

    monkeypatch.setattr(site, "start", start)
    await site.factory().cycle()
    assert seen == [True] * 4


async def test_no_more_machines_start_at_a_time_than_the_settings_say(site: Site) -> None:
    site.shows = False
    factory = site.factory(replace(SPACE, starting=3))
    await factory.cycle()
    await factory.cycle()
    assert len(site.asked) == 3 and factory.decision is not None
    assert {one.reason for one in factory.decision.verdicts} == {Reason.STARTING}
    assert [one.room for one in factory.snapshot().types] == [1.0, 1.0]  # it has one place more to give away
    site.show(site.asked[0])
    await factory.cycle()
    assert len(site.asked) == 4
    for request in site.asked[1:]:
        site.show(request)
    await factory.cycle()
    assert [one.room for one in factory.snapshot().types] == [None, None]
    factory._note(site.end(site.asked[0].id, "200 Done"))
    assert [one.room for one in factory.snapshot().types] == [1.0, 1.0]


async def test_an_end_makes_room_and_is_remembered(site: Site) -> None:
    factory = site.factory()
    running = asyncio.ensure_future(factory.run())
    await until(lambda: len(site.machines) == 4)
    id = next(id for id, one in site.machines.items() if one.machinetype == "lhcb")
    site.now += 1000
    site.end(id, "200 Done")
    site.news.set()
    await until(lambda: len(site.machines) == 4)
    running.cancel()
    await asyncio.wait([running])
    last = factory.memory.finished["lhcb"]
    assert (last.message, last.at, last.proved, last.aborted) == ("200 Done", int(NOW + 1000), int(NOW), 0)
    assert factory.memory.position == "2027-01:1" and factory.ended["lhcb", "200"] == 1
    again = site.factory()
    assert again.memory.position == "2027-01:1" and again.memory.finished["lhcb"] == last


@pytest.mark.parametrize(
    ("message", "lived", "reason", "said", "aborted", "proved"),
    [
        ("200 Done", 100, "", "200 Done", False, True),
        ("300 Nothing", 5000, "", "300 Nothing", True, False),
        ("", 599, "", "300 Fizzled after 599 seconds", True, False),
        ("", 600, "", "", False, True),
        ("", 5000, "700 Heartbeat file not updated", "700 Heartbeat file not updated", True, False),
        ("100 Stopped", 10, "700 Heartbeat file not created", "100 Stopped", False, False),
    ],
)
def test_what_an_end_means(message: str, lived: float, reason: str, said: str, aborted: bool, proved: bool) -> None:
    code, _, text = message.partition(" ")
    event: dict[str, Any] = {"time": NOW + lived, "started": NOW, "cause": "finished"}
    event |= {"shutdown_code": int(code), "shutdown_message": text} if code else {}
    found = finish(Finished(aborted=7, proved=8), event, {"slot": "3", "fizzle": "600"}, reason, SPACE)
    assert (found.message, found.machine) == (said, "vf1-03.example.org")
    assert found.aborted == (int(NOW + lived) if aborted else 7) and found.proved == (int(NOW) if proved else 8)


@pytest.mark.parametrize(
    ("cause", "reason", "said"),
    [
        ("boot-failed", "", "500 boot-failed"),
        ("walltime", "", ""),
        ("guest-lost", "the guest went", ""),
        ("host-oom", "QEMU was killed from outside", "100 QEMU was killed from outside"),
        ("node-fault", "belljar was killed", "100 belljar was killed"),
        ("image-fault", "a: damaged", "100 a: damaged"),
        ("refused", "no bridge br7", "100 no bridge br7"),
    ],
)
@pytest.mark.parametrize("lived", [5, 5000])
def test_only_what_a_payload_or_its_image_did_counts_against_its_type(
    cause: str, reason: str, said: str, lived: float
) -> None:
    event = {"time": NOW + lived, "started": NOW, "cause": cause, "reason": reason}
    found = finish(None, event, {"fizzle": "600"}, "", SPACE)
    if cause == "guest-lost" and lived < 600:
        said = "300 Fizzled after 5 seconds"
    assert found.message == said and bool(found.aborted) == (said[:1] in ("3", "5"))


async def test_a_machine_that_is_killed_on_this_host_stops_its_type_on_this_host_alone(site: Site) -> None:
    factory = site.factory(replace(SPACE, processors=2, types=SPACE.types[:1]))
    await factory.cycle()
    first, second = site.machines
    site.now += 1000
    why = "QEMU was killed from outside (by the host's OOM killer, a limit, or an administrator)"
    for id in (first, second):
        factory._note(site.end(id) | {"cause": "host-oom", "reason": why})
    await factory.cycle()
    assert not site.machines and factory.decision is not None
    (verdict,) = factory.decision.verdicts
    assert (verdict.reason, verdict.until) == (Reason.FAILED, site.now + 600) and why in verdict.why
    (own,) = factory.snapshot().types
    assert (own.message, own.last_abort) == (f"100 {why}", None)  # other factories go on
    assert why in factory.status.error
    site.now += 600
    await factory.cycle()
    assert len(site.machines) == 2 and factory.status.error == ""


async def test_what_ended_with_its_host_long_ago_is_no_reason_to_wait(site: Site) -> None:
    factory = site.factory(replace(SPACE, processors=1, types=SPACE.types[:1]))
    await factory.cycle()
    event = site.end(next(iter(site.machines))) | {"cause": "node-fault", "reason": "the host was restarted"}
    site.now += 3600
    factory._note(event)
    await factory.cycle()
    assert len(site.machines) == 1


@pytest.mark.parametrize("cause", ["cancelled", "walltime"])
def test_a_young_machine_that_was_asked_to_end_is_no_abort(cause: str) -> None:
    found = finish(None, {"time": NOW + 8, "started": NOW, "cause": cause}, {"fizzle": "600"}, "", SPACE)
    assert (found.message, found.aborted, found.proved) == ("", 0, 0)


async def test_nothing_is_started_of_a_type_that_backs_off(site: Site) -> None:
    factory = site.factory(replace(SPACE, processors=2))
    await factory.cycle()
    (id,) = [id for id, one in site.machines.items() if one.machinetype == "atlas"]
    site.now += 60
    factory._note(site.end(id, "300 No work"))
    await factory.cycle()
    assert sorted(one.machinetype for one in site.machines.values()) == ["lhcb", "lhcb"]
    verdicts = {one.machinetype: one.reason.value for one in factory.decision.verdicts} if factory.decision else {}
    assert verdicts["atlas"] == "full" or verdicts["atlas"] == "backing-off"
    own = {one.machinetype: one for one in factory.snapshot().types}
    assert (own["atlas"].message, own["atlas"].last_abort) == ("300 No work", int(site.now))


async def test_a_deadline_is_set_when_the_work_begins_and_moves_with_the_factorys_end(site: Site) -> None:
    factory = site.factory()
    await factory.cycle()
    await factory.cycle()
    assert set(site.moved.values()) == {NOW + 86400}
    factory.use(replace(SPACE, shutdown_time=NOW + 3600))
    await factory.cycle()
    assert set(site.moved.values()) == {NOW + 3600} and len(site.moved) == 4


async def test_a_machine_without_a_heartbeat_is_ended_once(site: Site) -> None:
    kind = replace(SPACE.types[0], heartbeat_file="beat", heartbeat=900.0)
    space = replace(SPACE, processors=2, types=(kind,))
    factory = site.factory(space)
    await factory.cycle()
    first, second = site.machines
    await factory.cycle()
    site.now += 601
    for id in (first, second):
        (site.folder / id / "joboutputs").mkdir(parents=True)
    beat = site.folder / first / "joboutputs/beat"
    beat.touch()
    os.utime(beat, (site.now, site.now))
    await factory.cycle()
    site.now += 300
    await factory.cycle()
    await factory.cycle()
    assert site.stopped == [second]
    factory._note(site.end(second))
    assert factory.memory.finished["atlas"].message == "700 Heartbeat file not created"
    site.now += 601
    await factory.cycle()
    assert site.stopped == [second, first]


async def test_what_others_run_counts(site: Site) -> None:
    others = (TypeStatus("vf2.example.org", "atlas", running_hs06=400.0, running_machines=40),)
    await site.factory(replace(SPACE, factories=("vf1.example.org", "vf2.example.org")), others).cycle()
    assert {one.machinetype for one in site.machines.values()} == {"lhcb"}


async def test_others_are_told_all_slots(site: Site) -> None:
    factory = site.factory(replace(SPACE, processors=5))
    await factory.cycle()
    id = next(iter(site.machines))
    slot = site.machines[id].slot
    factory._note(site.end(id, "200 Done"))
    factory.living = site.living()
    told: Snapshot = factory.snapshot()
    states = {one.machine: (one.state, one.message) for one in told.machines}
    assert len(states) == 5 and states[f"vf1-{slot:02}.example.org"] == ("Shut down", "200 Done")
    assert sum(state == "Running" for state, _ in states.values()) == 4
    assert told.own is not None and told.own.running_machines == 4 and told.own.max_processors == 5


def test_labels_that_are_empty_are_left_out() -> None:
    assert "site" not in labels_of(SPACE, SPACE.types[0], Living("atlas", 1, NOW))
