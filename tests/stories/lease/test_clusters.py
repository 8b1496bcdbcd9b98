"""Clusters, from an owner's document to machines that know each other: the service's own records and connections, a batch system that a
test plays, and machines that are folders, whose programs are run by a real shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import pwd
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.stories.lease.house import SITE_KEY
from tests.stories.lease.test_service import OWNER, House, knock
from tests.unit.lease.broker.shells import Shell

from belljar.cli import parser_of
from belljar.cli.lease.lease import _until_ready
from belljar.cli.lease.lease import machine_of as machine
from belljar.errors import BadOption, BadRequest, HostError, NoSpace, NoSuchLease
from belljar.lease import Instance, Lease, Size
from belljar.lease.broker import Cluster, Context, Member, Role
from belljar.lease.broker.broker import Broker
from belljar.lease.desk import Owner
from belljar.lease.ec2 import keyring
from belljar.lease.service.door import Door
from belljar.model import MIB, to_json
from belljar.records import replace

PROVIDE = b'#!/bin/sh\nprintf secret > "$BELLJAR_CLUSTER/provide/munge_key"\n'
TAKE = b'#!/bin/sh\ncp "$1" "$BELLJAR_CLUSTER/key"\n'
LIST = b'#!/bin/sh\necho "$2 $1" >> "$BELLJAR_CLUSTER/workers"\n'
CLUSTER = Cluster(
    "pi", time=3600.0, limit=60.0,
    roles=(
        Role("head", "debian12", requires=("worker",), provides=("munge_key",),
             files=(("1-ipandhost/worker", LIST), ("2-thishost/localnic", PROVIDE))),
        Role("worker", "debian12-worker", 2, requires=("head",), needs=("munge_key",), files=(("3-data/munge_key", TAKE),)),
    ),
)  # fmt: skip
LARGE = Size(2, 1024 * MIB, 20 * MIB)
Lie = Callable[[str, bytes], bytes]


class Site:
    """A house with a broker, and the machines of its clusters."""

    def __init__(self, house: House, folder: Path) -> None:
        self.house, self.folder = house, folder
        self.shells: dict[str, Shell] = {}
        self.lies: dict[str, Lie] = {}  # by the machine's name: what it says, from its name and its program
        self.answered: list[str] = []
        self.owner, self.told = OWNER, list[dict[str, Any]]()
        self.broker: Broker

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Site]:
        async with self.house.up():
            house, store = self.house, self.house.daemon.store
            sizes, keys = {"small": Size(1, 512 * MIB), "large": LARGE}, partial(keyring.answer, store, SITE_KEY)
            door = Door(house.desk, house.daemon, house.jobs, sizes, keys)
            self.broker = Broker(
                house.desk, house.daemon.channel, door, SITE_KEY, lambda event, **k: self.told.append(k)
            )
            house.daemon.after_look = self.broker.look
            door.acts["cluster"] = self.broker.answer
            server = await door.serve(self.folder / "door")
            yield self
            server.close()

    async def verb(self, *words: str) -> str:
        """What `belljar lease cluster` prints. Raises BelljarError."""
        args = parser_of("lease").parse_args(["cluster", *words[:1], "--door", str(self.folder / "door"), *words[1:]])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert await asyncio.to_thread(args.carry_out, args, None) == 0
        return printed.getvalue()

    async def ask(self, act: str, owner: Owner | None = None, **facts: Any) -> dict[str, Any]:
        return await self.broker.answer(owner or self.owner, json.loads(json.dumps({"act": act, **facts})))

    async def lease(self, cluster: Cluster = CLUSTER) -> str:
        """Its machines run when this returns."""
        id = str((await self.ask("up", cluster=to_json(cluster)))["lease"])
        await self.given_nodes(id)
        return id

    async def given_nodes(self, id: str) -> None:
        self.house.daemon.store.write(self._addressed)
        job = lambda: str(getattr(self.house.daemon.store.read(lambda book: book.get(Lease, id)), "job", ""))  # noqa: E731
        await self.house.until(job)
        for run in self.house.slurm.start(job()):
            run.machines.shell = self.shell

    def _addressed(self, book: Any) -> None:
        book.put(*(replace(one, address=f"10.98.0.{one.index + 1}") for one in book.find(Instance)))

    async def shell(self, instance: str, program: bytes) -> bytes:
        name = program.decode().partition("\nname=")[2].split("\n")[0]
        self.answered.append(name)
        if name in self.lies:
            return self.lies[name](name, program)
        if name not in self.shells:
            self.shells[name] = Shell(self.folder / "machines" / name)
        return await asyncio.to_thread(self.shells[name].told, program.decode())

    async def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("status", name="pi"))["clusters"][-1]
        return found

    async def until(self, is_so: Callable[[dict[str, Any]], bool], limit: float = 20.0) -> dict[str, Any]:
        end = asyncio.get_running_loop().time() + limit
        while not is_so(found := await self.cluster()):
            assert asyncio.get_running_loop().time() < end, found
            await asyncio.sleep(0.05)
        return found

    async def until_state(self, state: str) -> dict[str, Any]:
        return await self.until(lambda found: found["state"] == state)


def at(folder: Path) -> AbstractAsyncContextManager[Site]:
    return Site(House(folder, barrier=60.0), folder).up()


async def test_from_a_document_to_machines_that_know_each_other(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        id = await site.lease()
        found = await site.until_state("ready")
        assert [(one["name"], one["address"], one["state"]) for one in found["nodes"]] == [
            ("head", "10.98.0.1", "ready"), ("worker1", "10.98.0.2", "ready"), ("worker2", "10.98.0.3", "ready"),
        ]  # fmt: skip
        assert site.shells["head"].read("var/lib/belljar/cluster/workers") == "worker1 10.98.0.2\nworker2 10.98.0.3\n"
        assert site.shells["worker2"].read("var/lib/belljar/cluster/key") == "secret"
        started = [one for run in site.house.slurm.pilots["1"] for one in run.machines.started.values()]
        assert sorted(one.image for one in started) == ["debian12", "debian12-worker", "debian12-worker"]
        assert sorted(site.answered) == ["head", "worker1", "worker2"]  # each once
        with pytest.raises(BadRequest, match="has a cluster 'pi' already"):
            await site.ask("up", cluster=to_json(CLUSTER))
        assert [one.id for one in site.house.desk.leases(OWNER)] == [id]  # nothing was leased for the second
        for act in ("status", "release"):
            with pytest.raises(NoSuchLease):
                await site.ask(act, owner=Owner("mallory"), name="pi")
        await site.ask("release", name="pi")
        await site.until_state("ended")


async def test_roles_have_machines_of_their_own_types_and_nodes_are_asked_for_by_the_largest(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        roles = (CLUSTER.roles[0], replace(CLUSTER.roles[1], type="large"))
        with pytest.raises(BadRequest, match="huge: no such type; there are small, large"):
            await site.ask("up", cluster=to_json(replace(CLUSTER, type="huge", roles=roles)))
        assert site.house.desk.leases(OWNER) == []
        await site.lease(replace(CLUSTER, roles=roles))
        await site.until_state("ready")
        started = [one for run in site.house.slurm.pilots["1"] for one in run.machines.started.values()]
        small = (1, 512 * MIB, Size().disk)
        assert sorted((one.cpus, one.memory, one.disk) for one in started) == [small, *2 * [(2, 1024 * MIB, 20 * MIB)]]
        assert "--cpus-per-task=2 " in await asyncio.to_thread(Path(site.house.slurm.jobs["1"][2]).read_text)
        assert [one.instance.size.cpus for one in site.house.desk.machines(OWNER)] == [1, 2, 2]
        await site.ask("release", name="pi")
        await site.until_state("ended")


async def test_a_lease_that_is_no_cluster_has_machines_that_are_alike(tmp_path: Path) -> None:
    async with at(tmp_path):
        for more in ({"images": ["debian12"]}, {"sizes": [to_json(LARGE)]}):
            asked = {"do": "run", "wanted": {"image": "debian12", "count": 2} | more}
            answer = await knock(tmp_path / "door", json.dumps(asked).encode() + b"\n")
            assert "machines of a lease are alike" in answer["message"]


async def test_a_machine_that_is_given_back_is_taken_out_of_the_others(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        head = replace(CLUSTER.roles[0], files=(*CLUSTER.roles[0].files, ("1-gone/worker", LIST)))
        await site.lease(replace(CLUSTER, roles=(head, CLUSTER.roles[1])))
        found = await site.until_state("ready")
        site.house.desk.terminate(OWNER, [found["nodes"][2]["machine"]])
        site.house.daemon.wake()
        found = await site.until(lambda one: one["generation"] == 2 and one["state"] == "ready")
        assert site.shells["head"].read("var/lib/belljar/cluster/workers").splitlines()[2:] == ["worker2 10.98.0.3"]
        assert found["why"] == "role worker: 1 of 2 machines are there" and found["nodes"][2]["state"] == "terminated"


async def test_a_machine_that_has_rebooted_is_not_ready_before_its_services_were_started_again(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        start = ("4-restarts/worker", b'#!/bin/sh\necho started >> "$BELLJAR_CLUSTER/starts"\n')
        head = replace(CLUSTER.roles[0], files=(*CLUSTER.roles[0].files, start))
        await site.lease(replace(CLUSTER, roles=(head, CLUSTER.roles[1])))
        machine = (await site.until_state("ready"))["nodes"][0]["machine"]
        site.lies["head"] = lambda name, program: b""  # it has not come up yet
        (run,) = [one for one in site.house.slurm.pilots["1"] if machine in one.machines.living]
        run.machines.rebooted(machine)
        found = await site.until_state("configuring")
        assert [one["state"] for one in found["nodes"]] == ["configuring", "ready", "ready"]
        del site.lies["head"]
        assert (await site.until_state("ready"))["generation"] == 1
        assert site.shells["head"].read("var/lib/belljar/cluster/starts") == "started\n" * 2
        assert len(site.shells["head"].read("var/lib/belljar/cluster/workers").splitlines()) == 2
        assert [site.answered.count(one) for one in ("worker1", "worker2")] == [1, 1]


async def test_a_service_that_is_killed_goes_on_with_its_clusters(tmp_path: Path) -> None:
    site = Site(House(tmp_path, barrier=10.0), tmp_path)
    cut = asyncio.Event()

    async with site.up():
        id = await site.lease()
        site.lies["worker1"] = lambda name, program: cut.set() or b""  # type: ignore[func-returns-value]
        async with asyncio.timeout(20):
            await cut.wait()
    del site.lies["worker1"]
    async with site.up():
        found = await site.until_state("ready")
        assert found["lease"] == id and found["generation"] == 1
        assert site.shells["head"].read("var/lib/belljar/cluster/workers").count("worker1") == 1
        await site.ask("release", name="pi")
        await site.until_state("ended")


async def test_a_failing_scripts_output_reaches_its_owner(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        fails = replace(CLUSTER.roles[1], files=(("1-ipandhost/head", b"#!/bin/sh\necho no route to $2; exit 7\n"),))
        await site.lease(replace(CLUSTER, roles=(CLUSTER.roles[0], fails)))
        found = await site.until_state("failed")
        failed = next(one for one in found["nodes"] if one["state"] == "failed")
        assert found["why"] == f"{failed['name']}: 1-ipandhost/head: exit 7" and "no route to head" in failed["log"]


def own_token(program: bytes) -> str:
    return program.decode().partition("token=")[2].split("\n")[0]


@pytest.mark.parametrize(
    ("lie", "why", "log"),
    [
        (lambda name, program: b"0" * 64 + b" end 0 -\n", "the machine: exit 255", "another token"),
        (lambda name, program: f"{own_token(program)} data root_key AA==\n".encode(), "the machine: exit 255", "nothing that its role has to say"),
        (lambda name, program: bytes(600_000), "the machine: exit 255", "more than 524288 bytes"),
    ],
)  # fmt: skip
async def test_a_machine_that_lies_fails(tmp_path: Path, lie: Lie, why: str, log: str) -> None:
    async with at(tmp_path) as site:
        site.lies["worker1"] = lie
        await site.lease()
        found = await site.until_state("failed")
        assert (found["nodes"][1]["why"], found["nodes"][2]["name"]) == (why, "worker2")
        assert log in found["nodes"][1]["log"]


async def test_a_machine_that_says_nothing_is_asked_again_until_the_limit(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        site.lies["head"] = lambda name, program: b""
        await site.lease(replace(CLUSTER, limit=3.0))
        found = await site.until_state("failed")
        assert (
            found["why"].startswith("not ready after 3 s: worker1 waits for head") and site.answered.count("head") > 1
        )
        del site.lies["head"]
        await site.until_state("ready")


async def test_a_network_that_is_lost_for_a_while_is_no_script_that_does_not_end(tmp_path: Path) -> None:
    class Cut:
        cuts = 2

        @asynccontextmanager
        async def stream(self, *asked: Any) -> AsyncIterator[Any]:
            async with site.house.daemon.channel.stream(*asked) as streams:
                if self.cuts:
                    self.cuts -= 1
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                yield streams

    async with at(tmp_path) as site:
        site.broker._channel = Cut()  # type: ignore[assignment]
        await site.lease()
        found = await site.until(lambda one: one["state"] in ("ready", "failed"))
        assert found["state"] == "ready", found


async def test_a_machine_cannot_answer_for_another(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        tokens: dict[str, str] = {}

        def copy(name: str, program: bytes) -> bytes:
            tokens[name] = own_token(program)
            other = next((value for known, value in tokens.items() if known != name), "none")
            return f"{other} end 0 -\n".encode()

        site.lies |= {"worker1": copy, "worker2": copy}
        await site.lease()
        found = await site.until(lambda one: all(node["state"] in ("ready", "failed") for node in one["nodes"]))
        assert [one["state"] for one in found["nodes"]] == ["ready", "failed", "failed"]


async def test_a_machine_that_answers_twice_is_heard_once(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        site.lies["worker1"] = lambda name, program: (
            f"{own_token(program)} end 0 -\n{own_token(program)} end 9 -\n".encode()
        )
        await site.lease()
        found = await site.until_state("ready")
        assert found["nodes"][1]["state"] == "ready"


async def test_an_answer_that_could_not_be_written_down_is_asked_for_again(tmp_path: Path) -> None:
    async with at(tmp_path) as site:

        def fills_the_disk(name: str, program: bytes) -> bytes:
            site.house.disk.is_full = True
            return site.shells.setdefault(name, Shell(tmp_path / "machines" / name)).told(program.decode())

        site.lies["head"] = fills_the_disk
        await site.lease()
        await site.house.until(lambda: any(isinstance(one.get("why"), NoSpace) for one in site.told))
        del site.lies["head"]
        site.house.disk.is_full = False
        await site.until_state("ready")
        assert site.shells["head"].read("var/lib/belljar/cluster/workers").count("worker1") == 1


async def test_a_role_that_is_never_filled_fails_at_the_limit(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        id = await site.lease(replace(CLUSTER, limit=1.0))
        site.house.daemon.store.write(lambda book: book.put(replace(book.find(Instance, lease=id)[0], address="")))
        # Without an address it is not there for others.
        found = await site.until_state("failed")
        assert found["why"].startswith("not ready after 1 s: role ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Pi"}, "cluster.name: 'Pi' cannot be a name"),
        ({"roles": ()}, "no roles"),
        ({"roles": (Role("head", "windows"),)}, "windows: not among the images that may be leased"),
        ({"roles": (Role("head", "debian12", needs=("key",)),)}, "role.head.needs: 'key' is provided by none"),
        ({"roles": (Role("head", "debian12", files=(("a", bytes(99_000)),)),)}, "are the most"),
        ({"type": "huge"}, "huge: no such type"),
        ({"roles": (Role("a", "debian12", 1000), Role("b", "debian12"))}, "cluster.name: 1001 machines; 1000 are the most"),
        # Nobody waits for what takes seconds: circles are looked for in what is not too large.
        ({"roles": tuple(Role("".join("abcdefghij"[int(one)] for one in str(n)), "debian12", after=("a",)) for n in range(900))}, "98304 are the most"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
async def test_what_an_owners_program_sends_is_checked_as_a_document_is(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    async with at(tmp_path) as site:
        with pytest.raises(BadRequest, match=says.replace("(", r"\(")):
            await site.ask("up", cluster=to_json(replace(CLUSTER, **change)))
        assert not site.house.daemon.store.read(lambda book: [*book.find(Context), *book.find(Lease)])


async def test_half_of_a_character_is_refused_for_it_would_stop_all_clusters(tmp_path: Path) -> None:
    """It comes as a number in JSON, and cannot be given to a shell."""
    async with at(tmp_path) as site:
        asked = {"do": "cluster", "act": "up", "cluster": to_json(replace(CLUSTER, data=(("key", "\ud800"),)))}
        answer = await knock(tmp_path / "door", json.dumps(asked).encode() + b"\n")
        assert "half of a character" in answer["message"], answer
        assert not site.house.daemon.store.read(lambda book: [*book.find(Context), *book.find(Lease)])
        asked["cluster"] = to_json(replace(CLUSTER, data=(("key", "\N{GRINNING FACE}"),)))  # two numbers in JSON
        assert "lease" in await knock(tmp_path / "door", json.dumps(asked).encode() + b"\n")


async def test_the_verbs_on_the_way_of_a_newcomer_who_makes_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "scripts/2-thishost").mkdir(parents=True)
    (tmp_path / "scripts/2-thishost/localnic").write_text("#!/bin/sh\nprintf 'no \\033[1mdisk\\n'; exit 5\n")
    document = tmp_path / "cluster.toml"
    document.write_text('[cluster]\nname = "pi"\n[role.head]\nimage = "debian12"\nscripts = "scripts"\n')
    async with at(tmp_path) as site:
        site.owner = Owner(pwd.getpwuid(os.getuid()).pw_name)
        lease = (await site.verb("up", str(document))).split()[1]
        with pytest.raises(
            HostError, match=r"only one machine that runs can be logged in to: \S+ is (requested|queued)"
        ):
            args = parser_of("lease").parse_args(["ssh", "--door", str(tmp_path / "door"), "pi/head"])
            await asyncio.to_thread(args.carry_out, args, None)
        await site.given_nodes(lease)
        await site.until_state("failed")
        printed = await site.verb("status", "pi")
        assert "head: 2-thishost/localnic: exit 5" in printed and "no \\x1b[1mdisk\n" in printed
        with pytest.raises(HostError, match="pi: failed: head: 2-thishost/localnic: exit 5"):
            await asyncio.to_thread(_until_ready, tmp_path / "door", "pi", 5.0)
        assert parser_of("lease").parse_args(["run", "debian12", "--wait"]).wait == 0.0  # for as long as it takes
        (found,) = json.loads(await site.verb("status", "--format", "json"))["clusters"]
        assert await asyncio.to_thread(machine, tmp_path / "door", "pi/head") == found["nodes"][0]["machine"]
        with pytest.raises(BadOption, match="pi/tail: no such machine"):
            await asyncio.to_thread(machine, tmp_path / "door", "pi/tail")
        await site.verb("release", "pi")
        await site.until_state("ended")
        with pytest.raises(NoSuchLease):
            await site.verb("release", "po")


async def test_a_name_is_that_of_the_last_cluster_that_was_called_so(tmp_path: Path) -> None:
    """One that ended is listed for a while, and stands in nobody's way who tries again."""
    async with at(tmp_path) as site:
        site.owner = Owner(pwd.getpwuid(os.getuid()).pw_name)
        leases = list[str]()
        for _ in range(4):  # ids are random
            leases.append(await site.lease(replace(CLUSTER, limit=60.0)))
            assert [one["lease"] for one in (await site.ask("status", name="pi"))["clusters"]] == leases[-1:]
            assert [one["lease"] for one in (await site.ask("status"))["clusters"]] == leases
            await site.until_state("ready")
            await asyncio.to_thread(_until_ready, tmp_path / "door", "pi", 5.0)
            await site.ask("release", name="pi")
            await site.until_state("ended")


async def test_bad_requests_are_refused(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        for asked in (
            {"act": "reign"},
            {},
            {"act": "status", "name": "none"},
            {"act": "release"},
            {"act": "status", "name": [1]},
        ):
            with pytest.raises((BadRequest, NoSuchLease)):
                await site.broker.answer(OWNER, asked)
        with pytest.raises(ValueError, match="name: 7: not text"):
            await site.broker.answer(OWNER, {"act": "up", "cluster": {"name": 7}})


async def test_of_a_cluster_that_ended_long_ago_nothing_is_kept(tmp_path: Path) -> None:
    async with at(tmp_path) as site:
        await site.lease()
        await site.until_state("ready")
        await site.ask("release", name="pi")
        await site.until_state("ended")
        store = site.house.daemon.store
        store.write(lambda book: book.put(replace(book.find(Lease)[0], since=1.0)))
        await site.broker.look()
        assert not store.read(lambda book: [*book.find(Context), *book.find(Member)])
