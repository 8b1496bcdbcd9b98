"""The factory with machines that are only said to be: what it starts, finds again, ends, and remembers."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BelljarError, HostError, ImageUnknown, MachineBusy
from belljar.host.service.kept import read
from belljar.model import Context, OwnWork, Request, RunPayload
from belljar.records import replace
from belljar.vacuum import MachineType, Space, TypeStatus
from belljar.vacuum.decisions.decide import Reason
from belljar.vacuum.factory.factory import SHOWS_WITHIN, Factory, finish
from belljar.vacuum.factory.keeper import Living, labels_of, request_for
from belljar.vacuum.factory.state import STATUS, Finished, Status
from belljar.vacuum.protocol.query import Snapshot

SPACE = Space(
    "vac.example.org", "vf1.example.org", ("vf1.example.org",), processors=4, memory=1 << 20, hs06=10.0,
    types=(MachineType("atlas", share=1.0, image="a", fizzle=600, backoff=600), MachineType("lhcb", share=1.0, image="l")),
)  # fmt: skip
NOW = 1_800_000_000.0


class Site:
    """A keeper with a clock of its own. What it was asked for lives in `machines`, and outlives a factory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.jumped = folder, NOW, 0.0
        self.machines: dict[str, Living] = {}
        self.asked: list[Request] = []
        self.stopped: list[str] = []
        self.moved: dict[str, float] = {}
        self.errors: dict[str, BelljarError] = {}
        self.rows: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.shows = True

    @property
    def steady(self) -> float:
        """A clock that nobody sets."""
        return self.now - self.jumped

    def living(self) -> list[Living]:
        return list(self.machines.values())

    async def ended(self, id: str) -> None:
        await asyncio.Event().wait()

    def free_memory(self) -> int:
        return 1 << 40

    async def start(self, request: Request) -> None:
        self.asked.append(request)
        labels = dict(request.labels)
        if error := self.errors.get(labels["machinetype"]):
            raise error
        if self.shows:
            self.show(request)

    def show(self, request: Request) -> None:
        labels = dict(request.labels)
        self.machines[request.id] = Living(
            labels["machinetype"], request.machine.cpus, float(labels["ends"]), request.machine.memory, 0, request.id,
            int(labels["slot"]), self.now, self.now, float(labels["fizzle"]), 10.0 * request.machine.cpus,
            folder=str(self.folder / request.id),
        )  # fmt: skip

    def stop(self, id: str) -> None:
        self.stopped.append(id)

    def move(self, id: str, moment: float) -> None:
        self.moved[id] = moment

    def end(self, id: str, message: str = "") -> dict[str, Any]:
        """The event of a machine's end."""
        one = self.machines.pop(id)
        code, _, text = message.partition(" ")
        labels = {
            "space": SPACE.name,
            "factory": SPACE.factory,
            "machinetype": one.machinetype,
            "slot": str(one.slot),
            "fizzle": "600",
        }
        row = {
            "event": "ended", "machine": id, "time": self.now, "started": one.created, "position": f"2027-01:{len(self.rows) + 1}",
            "labels": [list(pair) for pair in labels.items()], "cause": "finished",
        }  # fmt: skip
        self.rows.append(row | ({"shutdown_code": int(code), "shutdown_message": text} if code else {}))
        return self.rows[-1]

    async def events(self, since: str) -> AsyncIterator[dict[str, Any]]:
        at = int(since.rpartition(":")[2] or 0)
        while True:
            for row in self.rows[at:]:
                yield row
            at = len(self.rows)
            await self.news.wait()
            self.news.clear()

    def tell(self, event: str, **facts: Any) -> None:
        self.told.append((event, facts))

    def factory(
        self, space: Space = SPACE, others: tuple[TypeStatus, ...] = (), data: bytes = b"#!/bin/sh\n"
    ) -> Factory:
        draws = iter(range(10**6))

        async def ask() -> tuple[tuple[TypeStatus, ...], tuple[str, ...]]:
            return others, ()

        return Factory(
            space, self.folder, self, ask, lambda kind, order, now: data, self.tell, clock=lambda: self.now,
            luck=lambda: (next(draws) * 0.37) % 1, load=lambda: (0.0, 0.0, 0.0), steady=lambda: self.steady,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def api_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests by the settings as they come, not by this host's."""
    from belljar import api
    from belljar.config import Paths, Settings
    from belljar.jobs.starting import make_request

    settings = Settings(Paths(*(Path("/nowhere"),) * 3, scratch=Path("/nowhere"), logs=Path("/nowhere")))
    monkeypatch.setattr(api, "request_of", lambda work, **asked: make_request(settings, work, **asked))
    yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


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
    assert sorted(facts["about"] for _, facts in site.told if "about" in facts) == sorted(site.machines)  # once each


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
    def move(id: str, moment: float) -> None:
        if id == hanging:
            raise MachineBusy("did not answer")
        site.moved[id] = moment

    factory = site.factory()
    await factory.cycle()
    hanging = next(iter(site.machines))
    site.move = move  # type: ignore[method-assign]
    await factory.cycle()
    assert site.moved.keys() == site.machines.keys() - {hanging}


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


async def until(is_so: Any) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


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
        ("refused", "image a: no room", "500 image a: no room"),
        ("boot-failed", "", "500 boot-failed"),
        ("walltime", "", ""),
        ("guest-lost", "the guest went", ""),
    ],
)
def test_a_machine_that_could_not_live_here_counts_against_its_type(cause: str, reason: str, said: str) -> None:
    event = {"time": NOW + 5000, "started": NOW, "cause": cause, "reason": reason}
    found = finish(None, event, {"fizzle": "600"}, "", SPACE)
    assert found.message == said and found.aborted == (int(NOW + 5000) if said else 0)


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


async def test_a_full_disk_keeps_no_machine_from_being_looked_after(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = site.factory()
    await factory.cycle()
    id = next(iter(site.machines))
    monkeypatch.setattr("belljar.host.service.kept.keep", full)
    factory._note(site.end(id, "200 Done"))
    with pytest.raises(OSError):
        await factory.cycle()  # nothing is started that could not be found again
    assert len(site.asked) == 4


def full(*words: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def test_labels_that_are_empty_are_left_out() -> None:
    assert "site" not in labels_of(SPACE, SPACE.types[0], Living("atlas", 1, NOW))
