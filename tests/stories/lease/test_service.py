"""The lease service with its own records and real connections, a batch system that a test plays, and machines that need no guest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from tests.stories.lease.house import SITE_KEY, Running

from belljar.errors import CommandFailed, MachineBusy, NoSpace
from belljar.lease import Instance, Lease, LeaseState, Settings, Size, Wanted, jobfile
from belljar.lease.decisions.policy import Policy
from belljar.lease.desk import Desk, Owner
from belljar.lease.ec2 import keyring
from belljar.lease.service import jobs as service_jobs
from belljar.lease.service.daemon import Daemon
from belljar.lease.service.door import Door
from belljar.lease.service.jobs import Jobs
from belljar.lease.store import Book, Store, open_store
from belljar.model import GIB, MIB
from belljar.pool import pilots_of
from belljar.records import replace
from belljar.service.credentials.certificates import own_certificate

OWNER = Owner("alice")
T = TypeVar("T")


class PlayedSlurm:
    """Answers squeue, sbatch and scancel, and starts a pilot for each node of a job when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, dict[str, list[str]]()  # id -> name, state, script, nodes
        self.loses_answers = 0
        self.refuses = self.is_silent = ""
        self.pilots: dict[str, list[Running]] = {}
        self.asked: list[str] = []
        self.limits: list[tuple[str, ...]] = []

    async def command(self, argv: tuple[str, ...]) -> bytes:
        self.asked.append(argv[0])
        if self.is_silent:
            raise CommandFailed(self.is_silent)
        if argv[0] == "squeue":
            return "".join(f"{id}|{job[1]}|N/A|None|{job[0]}\n" for id, job in self.jobs.items()).encode()
        if argv[:2] == ("scontrol", "show"):
            return (
                b"PartitionName=batch Default=YES MaxTime=UNLIMITED\nPartitionName=short Default=NO MaxTime=01:00:00\n"
            )
        if argv[0] == "scontrol":
            self.limits.append(argv)
            return b""
        if argv[0] == "scancel":
            self.end(argv[1], "CANCELLED")
            return b""
        assert argv[0] == "sbatch", argv
        if self.refuses:
            raise CommandFailed(f"sbatch: exit 1: {self.refuses}")
        facts = dict(one[2:].split("=", 1) for one in argv if one.startswith("--") and "=" in one)
        id = str(len(self.jobs) + 1)
        self.jobs[id] = [facts["job-name"], "PENDING", argv[-1], facts["nodes"]]
        if self.loses_answers:
            self.loses_answers -= 1
            raise CommandFailed("sbatch: not finished after 30 s, killed")
        return f"{id}\n".encode()

    def start(self, id: str, ranks: int | None = None, make: Any = None) -> list[Running]:
        """Its pilots, on so many nodes."""
        name, _, script, nodes = self.jobs[id]
        self.jobs[id][1] = "RUNNING"
        (file,) = re.findall(r" pilot (\S+)$", Path(script).read_text(), re.MULTILINE)
        job = jobfile.read(Path(file))
        found = [Running(job, self.folder / name, rank, make=make) for rank in range(ranks or int(nodes))]
        self.pilots.setdefault(id, []).extend(found)
        return found

    def end(self, id: str, state: str) -> None:
        if self.jobs[id][1] in ("PENDING", "RUNNING"):
            self.jobs[id][1] = state
            for one in self.pilots.get(id, ()):
                one.pilot.signalled(15)

    def killed(self, id: str) -> None:
        """With its pilots, which say nothing any more."""
        self.jobs[id][1] = "NODE_FAIL"
        for one in self.pilots.pop(id, ()):
            one.task.cancel()


class Disk:
    """A store on a disk that may be full."""

    def __init__(self, store: Store) -> None:
        self._store, self.is_full = store, False

    def write(self, change: Callable[[Book], T]) -> T:
        if self.is_full:
            raise NoSpace("leases.sqlite: no space left on device")
        return self._store.write(change)

    def read(self, look: Callable[[Book], T]) -> T:
        return self._store.read(look)

    def close(self) -> None:
        self._store.close()


class House:
    """The service, and what owners see."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        known = Settings(
            address="127.0.0.1", jobs=folder / "jobs", images=("debian12*",), door=folder / "door", cycle=0.1, barrier=1.0,
            silence=5.0, default_time=3600.0, lost=5.0, heartbeat=0.5, unseen=0.3, grace=1.0, staging=20.0, pilot="belljar",
        )  # fmt: skip
        self.settings = replace(known, **settings)
        self.slurm = PlayedSlurm(folder)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.daemon: Daemon
        self.disk: Disk
        self.jobs: Jobs
        self.desk: Desk
        self.door: Door

    @asynccontextmanager
    async def up(self, clock: Callable[[], float] = time.time) -> AsyncIterator[House]:
        """As a process: what it knows afterwards is in its files."""
        pin = own_certificate(self.folder / "service.pem", ("127.0.0.1",))
        store = self.disk = Disk(open_store("", self.folder))
        jobs = Jobs(self.settings, pilots_of("slurm"), SITE_KEY, pin, self.slurm.command)
        self.jobs = jobs
        self.daemon = Daemon(self.settings, store, jobs, SITE_KEY, lambda *a, **k: self.told.append((a[0], k)), clock)
        self.desk = Desk(store, self.settings, lambda: (Policy("all", users=("*",)),), jobs.queue, now=clock)
        port = self.settings.port if self.settings.port != 8470 else 0
        server = await self.daemon.channel.serve("127.0.0.1", port, self.folder / "service.pem")
        self.settings = replace(self.settings, port=server.sockets[0].getsockname()[1])
        jobs._settings = self.settings
        looking = asyncio.ensure_future(self.daemon.looks())
        try:
            with patch.object(service_jobs, "FRESH", 0.1):  # as short as the cycle
                yield self
        finally:
            looking.cancel()
            server.close()
            for task in asyncio.all_tasks():  # as a process that is killed: its connections are gone
                if "Channel._take" in str(task.get_coro()):
                    task.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            store.close()

    async def opened(self, path: Path) -> asyncio.Server:
        """The owners' door."""
        sizes = {"small": Size(1, 512 * MIB)}
        keys = partial(keyring.answer, self.daemon.store, SITE_KEY)
        return await Door(self.desk, self.daemon, self.jobs, sizes, keys).serve(path)

    def ask(self, count: int = 1, **more: Any) -> str:
        facts = {"size": Size(1, GIB), "seconds": 3600.0, **more}
        lease, _ = self.desk.run(OWNER, Wanted("debian12", count, **facts))
        self.daemon.wake()
        return lease.id

    def lease(self, id: str) -> Lease:
        return next(one for one in self.desk.leases(OWNER) if one.id == id)

    def states(self, id: str) -> list[str]:
        return [one.instance.state.value for one in self.desk.machines(OWNER) if one.lease.id == id]

    async def until(self, what: Callable[[], object], limit: float = 20.0) -> None:
        end = time.monotonic() + limit
        while not what():
            assert time.monotonic() < end, (self.told, self.slurm.jobs)
            await asyncio.sleep(0.05)

    async def until_state(self, id: str, state: LeaseState) -> None:
        await self.until(lambda: self.lease(id).state is state)


async def test_from_a_request_to_nothing(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        file = tmp_path / "jobs" / f"belljar-{id}-1"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert json.loads(file.read_text())["key"] not in file.with_suffix(".sh").read_text()
        (run,) = house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"])
        started = next(iter(run.machines.started.values()))
        assert (started.image, started.memory, started.owner) == ("debian12", GIB, "alice")
        house.desk.release(OWNER, id)
        await house.until_state(id, LeaseState.RELEASED)
        await run.ended()
        await house.until(lambda: not file.exists())
        assert house.states(id) == ["terminated"]


async def test_a_submission_whose_answer_was_lost_is_found_by_its_name(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        house.slurm.loses_answers = 1
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        assert len(house.slurm.jobs) == 1 and house.lease(id).job == "1"


async def test_a_job_that_the_batch_system_loses_is_tried_again_under_another_name(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        name = house.slurm.jobs.pop("1")[0]
        await house.until(lambda: house.slurm.jobs and house.lease(id).state is LeaseState.QUEUED)
        ((again, *_),) = house.slurm.jobs.values()
        assert name.endswith("-1") and again == name[:-1] + "2"


async def test_a_job_that_is_there_twice_is_there_once_afterwards(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        house.slurm.jobs["2"] = list(house.slurm.jobs["1"])
        await house.until(lambda: sorted(one[1] for one in house.slurm.jobs.values()) == ["CANCELLED", "PENDING"])
        assert house.lease(id).state is LeaseState.QUEUED


async def test_a_job_of_ours_that_no_lease_has_is_cancelled(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        house.slurm.jobs["1"] = [f"belljar-r-{'0' * 17}-1", "PENDING", "", "1"]
        house.slurm.jobs["2"] = ["somebody-elses", "PENDING", "", "1"]
        await house.until(lambda: house.slurm.jobs["1"][1] == "CANCELLED")
        assert house.slurm.jobs["2"][1] == "PENDING"


async def test_what_the_batch_system_refuses_for_good_fails_with_its_words(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        house.slurm.refuses = "Batch job submission failed: Invalid account or account/partition combination specified"
        id = house.ask()
        await house.until_state(id, LeaseState.FAILED)
        assert "Invalid account" in house.lease(id).why


async def test_a_batch_system_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        house.slurm.is_silent = "squeue: exit 1: Unable to contact slurm controller (connect failure)"
        id = house.ask()
        await house.until(lambda: "squeue" in house.slurm.asked)
        await asyncio.sleep(0.5)
        assert house.lease(id).state is LeaseState.REQUESTED and house.slurm.jobs == {}
        house.slurm.is_silent = ""
        await house.until_state(id, LeaseState.QUEUED)
        failed = [one for one in house.told if one[0] == "failed"]
        assert len(failed) == 1 and "Unable to contact" in str(failed[0])  # once


async def test_two_nodes_begin_together(tmp_path: Path) -> None:
    async with House(tmp_path, barrier=10.0).up() as house:
        id = house.ask(2)
        await house.until_state(id, LeaseState.QUEUED)
        first, second = house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"] * 2)
        assert len(first.machines.started) == len(second.machines.started) == 1
        house.desk.release(OWNER, id)
        await house.until_state(id, LeaseState.RELEASED)
        await first.ended()
        await second.ended()


async def test_a_node_that_does_not_come_costs_the_others_their_job_and_another_is_tried(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask(2)
        await house.until_state(id, LeaseState.QUEUED)
        (alone,) = house.slurm.start("1", ranks=1)
        await house.until(lambda: "2" in house.slurm.jobs)
        await alone.ended()
        assert alone.machines.started == {} and house.lease(id).attempt == 2
        await house.until(lambda: house.slurm.jobs["1"][1] != "RUNNING")


async def test_a_service_that_is_killed_goes_on_from_its_records(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.up():
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        (run,) = house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"])
        before = house.desk.machines(OWNER)
    await asyncio.sleep(0.5)
    async with house.up():
        assert [one.instance for one in house.desk.machines(OWNER)] == [one.instance for one in before]
        await house.until(lambda: house.daemon.channel.connected)
        assert run.machines.living and len(house.slurm.jobs) == 1
        run.machines.end(next(iter(run.machines.living)))
        await house.until_state(id, LeaseState.RELEASED)
        await run.ended()


async def test_what_cannot_be_written_down_is_not_acknowledged_and_comes_again(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        (run,) = house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"])
        house.disk.is_full = True
        run.machines.end(next(iter(run.machines.living)))
        await asyncio.sleep(1.0)
        assert house.states(id) == ["running"] and not run.task.done()
        house.disk.is_full = False
        await house.until_state(id, LeaseState.RELEASED)
        await run.ended()
        assert [one.instance.cause.value for one in house.desk.machines(OWNER) if one.instance.cause] == [
            "Client.InstanceInitiatedShutdown"
        ]


async def test_a_pilot_that_vanishes_with_its_job_ends_the_lease(tmp_path: Path) -> None:
    async with House(tmp_path, silence=1.5).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"])
        house.slurm.killed("1")
        await house.until_state(id, LeaseState.FAILED)
        assert house.desk.machines(OWNER)[0].instance.cause.value == "Server.NodeLost"  # type: ignore[union-attr]


async def test_a_pilot_of_a_cancelled_lease_is_void_whenever_it_comes(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        job = jobfile.read(tmp_path / "jobs" / f"belljar-{id}-1")
        house.desk.release(OWNER, id)
        await house.until_state(id, LeaseState.CANCELLED)
        late = Running(job, tmp_path)
        await late.ended()
        assert late.machines.started == {}


async def test_a_pilot_that_lies_about_its_node_gets_nothing(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        job = jobfile.read(tmp_path / "jobs" / f"belljar-{id}-1")
        for rank in (1, 77):
            wrong = Running(job, tmp_path, rank)
            await wrong.ended()
            assert wrong.machines.started == {}
        other = Running(replace(job, attempt=9), tmp_path)
        await other.ended()
        assert house.lease(id).state is LeaseState.QUEUED


async def test_a_node_whose_clock_is_minutes_off_is_not_used_and_not_asked_for_again(tmp_path: Path) -> None:
    async with House(tmp_path).up(lambda: time.time() + 600) as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        (run,) = house.slurm.start("1")
        await run.ended()
        assert run.machines.started == {}
        await house.until(lambda: house.lease(id).attempt == 2)
        assert house.lease(id).shunned == ("node1",) and "600 s off" in house.lease(id).why


async def test_a_clock_that_is_a_little_off_makes_no_lease_shorter(tmp_path: Path) -> None:
    async with House(tmp_path).up(lambda: time.time() - 200) as house:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        (run,) = house.slurm.start("1")
        await house.until(lambda: house.states(id) == ["running"])
        left = run.pilot._ends - asyncio.get_running_loop().time()
        assert 3600 < left < 3700
        house.desk.release(OWNER, id)
        await run.ended()


async def test_files_of_leases_that_ended_unseen_are_swept_at_the_next_start(tmp_path: Path) -> None:
    house = House(tmp_path)
    (tmp_path / "jobs").mkdir(mode=0o700)
    old = [tmp_path / f"jobs/belljar-r-{'0' * 17}-1{suffix}" for suffix in ("", ".sh", ".log")]
    for one in old:
        one.touch()
    old.append(tmp_path / f"jobs/belljar-r-{'1' * 17}-1.log")
    old[3].touch()
    os.utime(old[3], (0, time.time() - 8 * 86400))
    async with house.up():
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        await house.until(lambda: not old[0].exists() and not old[1].exists())
        assert old[2].exists() and not old[3].exists() and (tmp_path / f"jobs/belljar-{id}-1").exists()


async def test_a_token_is_forgotten_long_after_its_lease_ended(tmp_path: Path) -> None:
    house, later = House(tmp_path), [0.0]
    async with house.up(lambda: time.time() + later[0]):
        old = house.ask(token="t")
        house.desk.release(OWNER, old)
        await house.until_state(old, LeaseState.CANCELLED)
        later[0] = house.settings.token_time + 60
        other = house.ask(token="t")
        assert other != old and house.ask(token="t") == other


async def knock(path: Path, *lines: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.suppress(OSError):
        writer.writelines(lines)
        await writer.drain()
    answer = await reader.readline()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return dict(json.loads(answer)) if answer else {}


async def test_the_door_answers_what_can_be_asked_and_refuses_the_rest(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        for line, error in (
            (b"\n", "BadRequest"), (b"[]\n", "BadRequest"), (b'{"do":"reign"}\n', "BadRequest"),
            (b'{"do":"run"}\n', "BadRequest"), (b'{"do":"run","wanted":{"image":"windows"}}\n', "BadRequest"),
            (b'{"do":"run","wanted":{"image":"debian12","count":0}}\n', "BadRequest"),
            (b'{"do":"run","wanted":{"image":"debian12","size":{"cpus":-8}}}\n', "BadRequest"),
            (b'{"do":"run","wanted":{"image":"debian12","key":"theirs"}}\n', "BadRequest"),
            (b'{"do":"run","wanted":{"image":"debian12"},"public":"ssh-rsa AAAA\\nssh-rsa BBBB"}\n', "BadRequest"),
            (b'{"do":"release","id":"r-nobodys"}\n', "NoSuchLease"), (b'{"do":"connect","id":"i-none"}\n', "NoSuchLease"),
            (b'{"do":"extend","id":"r-nobodys","seconds":true}\n', "BadRequest"), (b"[" * 70_000 + b"\n", "BadRequest"),
        ):  # fmt: skip
            assert (await knock(tmp_path / "door", line)).get("error") == error, line[:80]
        assert (await knock(tmp_path / "door", b"x" * 300_000 + b"\n")).get("error", "BadRequest") == "BadRequest"
        wanted = b'{"do":"run","wanted":{"image":"debian12"},"public":"ssh-ed25519 AAAA me@here"}\n'
        lease = (await knock(tmp_path / "door", wanted))["lease"]
        assert lease["wanted"]["key"].startswith("ssh-") and lease["wanted"]["size"]["memory"] == 512 * MIB
        found = await knock(tmp_path / "door", json.dumps({"do": "status", "lease": lease["id"]}).encode() + b"\n")
        assert [one["state"] for one in found["machines"]] == ["queued"]
        steps = (await knock(tmp_path / "door", b'{"do":"explain","wanted":{"image":"debian12","count":2}}\n'))["steps"]
        assert all(one["met"] for one in steps) and steps[-1]["what"] == "its job waits for nodes"
        assert (await knock(tmp_path / "door", b'{"do":"usage"}\n'))["machines"] == []
        told = await knock(tmp_path / "door", json.dumps({"do": "events", "lease": lease["id"]}).encode() + b"\n")
        assert (told["events"][0]["of"], told["events"][0]["after"]) == (lease["id"], "requested")
        for line in (b'{"do":"events","lease":"r-nobodys"}\n', b'{"do":"events"}\n'):
            assert (await knock(tmp_path / "door", line))["error"] == "NoSuchLease"
        assert (await knock(tmp_path / "door", b'{"do":"usage","back":"x"}\n'))["error"] == "BadRequest"
        connect = json.dumps({"do": "connect", "id": lease["id"]}).encode() + b"\n"
        assert (await knock(tmp_path / "door", connect))["error"] == "MachineBusy"
        assert os.stat(tmp_path / "door").st_mode & 0o777 == 0o666
        server.close()


async def test_a_lease_is_extended_at_the_batch_system_at_its_pilot_and_in_the_records(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        wanted = b'{"do":"run","wanted":{"image":"debian12","seconds":3600}}\n'
        id = (await knock(tmp_path / "door", wanted))["lease"]["id"]
        await house.until(lambda: house.slurm.jobs)
        (run,) = house.slurm.start("1")
        status = json.dumps({"do": "status", "lease": id}).encode() + b"\n"

        def is_its_machines() -> bool:
            """The lease's end is the deadline of its one machine, as the pilot told it."""
            lease, machine = house.daemon.store.read(lambda book: (book.find(Lease)[0], book.find(Instance)[0]))
            return bool(lease.job) and machine.deadline is not None and machine.deadline == lease.ends

        await house.until(lambda: run.machines.living and is_its_machines())
        before, ends = (await knock(tmp_path / "door", status))["leases"][0]["ends"], run.pilot._ends
        longer = json.dumps({"do": "extend", "id": id, "seconds": 1800}).encode() + b"\n"
        assert await knock(tmp_path / "door", longer) == {"ok": True}
        await house.until(lambda: run.pilot._ends - ends > 1700)
        assert set(run.pilot._seconds.values()) == {5400.0}
        await house.until(is_its_machines)
        assert (await knock(tmp_path / "door", status))["leases"][0]["ends"] == pytest.approx(before + 1800, abs=5)
        assert house.slurm.limits[0][:3] == ("scontrol", "update", "JobId=1")
        house.slurm.end("1", "CANCELLED")
        await run.ended()
        server.close()


async def test_a_limit_that_the_batch_system_does_not_move_is_no_extension(tmp_path: Path) -> None:
    async def refuse(argv: tuple[str, ...]) -> bytes:
        raise CommandFailed("scontrol: exit 1: Access/permission denied for job 7")

    jobs = Jobs(Settings(), pilots_of("slurm"), SITE_KEY, "0" * 64, refuse)
    with pytest.raises(MachineBusy, match="permission denied"):
        await jobs.extend("7", 7200.0)
