"""Cloud nodes on several hosts, of which some do not answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.bait import ON_HOSTS, Settings
from belljar.bait.cloud import PLACED, Made, Placement
from belljar.bait.settings import load
from belljar.errors import BadOption, BadSetting, CommandFailed
from belljar.host.commands import Finished
from belljar.records import replace

SETTINGS = Settings(
    placement=("cloud[1-3] -> wn01 wn02", "cloud[3-4] -> wn02 wn01"), reach=("reach", "{host}", "belljar")
)
LISTS = {"cloud[1-3]": ["cloud1", "cloud2", "cloud3"], "cloud[3-4]": ["cloud3", "cloud4"]}


class Killed(Exception):
    """The program, between two lines."""


class Hosts:
    """Two of them, each with the nodes that it made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there = folder, {"wn01": dict[str, str](), "wn02": dict[str, str]()}
        self.silent, self.full, self.asked = set[str](), set[str](), list[tuple[str, ...]]()
        self.begins: Callable[[str], None] = lambda host: None

    async def ask(self, argv: tuple[str, ...], timeout: float) -> Finished:
        _, host, program, node, act, *words = argv
        assert (program, node) == ("belljar", "node") and tuple(words[-3:]) == ("--here", "--format", "json")
        if host in self.silent:
            return Finished(argv, 255, b"", b"ssh: connect to host wn01 port 22: No route to host\n")
        self.asked.append((host, act, *words[:-3]))
        nodes, names = self.there[host], words[0].split(",") if len(words) > 3 else []
        if act == "list":
            said = dict(nodes)
        elif act == "suspend":
            said = {name: nodes.pop(name) for name in names if name in nodes}
        elif host in self.full:
            said = dict.fromkeys(names, "failed: no memory is left")
        else:
            said = {name: nodes.setdefault(name, f"{host}-{name}") for name in names}
            self.begins(host)
            if host in self.silent:
                return Finished(argv, 255, b"", b"client_loop: send disconnect: Broken pipe\n")
        return Finished(argv, 1 if any(one.startswith("failed") for one in said.values()) else 0, json.dumps({"nodes": said}).encode(), b"")  # fmt: skip

    async def names(self, hostlist: str) -> list[str]:
        return LISTS[hostlist]

    def place(self, settings: Settings = SETTINGS) -> Placement:
        return Placement(settings, self.folder, self.ask, self.names)

    @property
    def acts(self) -> list[tuple[str, ...]]:
        return [one for one in self.asked if one[1] != "list"]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def written(hosts: Hosts) -> dict[str, str]:
    found: dict[str, str] = json.loads((hosts.folder / PLACED).read_text())["nodes"]
    return found


async def test_a_node_is_made_on_the_first_host_of_the_first_line_that_names_it(hosts: Hosts) -> None:
    made = await hosts.place().resume(["cloud1", "cloud3", "cloud4"])
    assert made == Made(
        {"cloud1": "wn01-cloud1", "cloud3": "wn01-cloud3", "cloud4": "wn02-cloud4"},
        {"cloud1": "wn01", "cloud3": "wn01", "cloud4": "wn02"},
    )
    assert sorted(hosts.acts) == [("wn01", "resume", "cloud1,cloud3"), ("wn02", "resume", "cloud4")]
    assert written(hosts) == made.hosts


async def test_a_node_that_lives_is_started_nowhere_else_even_when_nothing_is_written_down(hosts: Hosts) -> None:
    hosts.there["wn02"]["cloud1"] = "there-already"
    for _ in range(2):
        made = await hosts.place().resume(["cloud1"])
        assert made.nodes == {"cloud1": "there-already"} and hosts.acts == []
    assert (await hosts.place().all()).hosts == {"cloud1": "wn02"}
    ended = await hosts.place().suspend(["cloud1", "cloud2"])
    assert ended.nodes == {"cloud1": "there-already"} and hosts.acts == [("wn02", "suspend", "cloud1")]
    assert hosts.there["wn02"] == {} and written(hosts) == {}


async def test_the_next_host_makes_what_a_dead_or_a_full_one_does_not(hosts: Hosts) -> None:
    hosts.silent.add("wn01")
    made = await hosts.place().resume(["cloud1"])
    assert made.hosts == {"cloud1": "wn02"}
    assert made.trouble == (
        "wn01 does not answer: no answer of `belljar node list`: ssh: connect to host wn01 port 22: No route to host",
    )
    hosts.silent, hosts.full = set(), {"wn01"}
    assert (await hosts.place().resume(["cloud2"])).hosts == {"cloud2": "wn02"}
    hosts.full = {"wn01", "wn02"}
    made = await hosts.place().resume(["cloud3"])
    assert made.nodes == {"cloud3": "failed: wn02: no memory is left"} and "cloud3" not in written(hosts)
    hosts.silent = {"wn01", "wn02"}
    made = await hosts.place().resume(["cloud3", "login1"])
    assert made.nodes == {
        "cloud3": "failed: no host answers: wn01, wn02", "login1": "failed: no line of `placement` names it",
    }  # fmt: skip


async def test_a_host_that_goes_silent_while_it_starts_a_node_keeps_it(hosts: Hosts) -> None:
    hosts.begins = hosts.silent.add
    made = await hosts.place().resume(["cloud1"])
    assert made.nodes["cloud1"].startswith("failed: wn01: no answer of `belljar node resume`: client_loop:")
    assert written(hosts) == {"cloud1": "wn01"} and hosts.there["wn02"] == {}
    hosts.begins = lambda host: None
    may = "failed: it may live on wn01, which does not answer"
    again = await hosts.place().resume(["cloud1"])
    assert again.nodes == {"cloud1": f"{may}; when it does not: belljar node suspend --forget cloud1"}
    assert (await hosts.place().suspend(["cloud1"])).nodes == {"cloud1": may} and hosts.there["wn02"] == {}
    hosts.silent.clear()
    assert (await hosts.place().resume(["cloud1"])).hosts == {"cloud1": "wn01"}
    hosts.silent.add("wn01")
    assert (await hosts.place().suspend(["cloud1"], forget=True)).nodes == {} and written(hosts) == {}
    assert (await hosts.place().resume(["cloud1"])).hosts == {"cloud1": "wn02"}


async def test_where_a_node_goes_is_on_disk_before_it_is_asked_for(hosts: Hosts) -> None:
    def die(host: str) -> None:
        raise Killed

    hosts.begins = die
    with pytest.raises(Killed):
        await hosts.place().resume(["cloud1"])
    assert written(hosts) == {"cloud1": "wn01"}
    (hosts.folder / PLACED).write_text("{cut")
    with pytest.raises(BadOption, match="cannot be read"):
        await hosts.place().resume(["cloud1"])


async def test_a_program_that_is_not_there_is_a_host_that_does_not_answer(hosts: Hosts) -> None:
    async def ask(argv: tuple[str, ...], timeout: float) -> Finished:
        raise CommandFailed("reach: not finished after 30 s, killed")

    made = await Placement(SETTINGS, hosts.folder, ask, hosts.names).resume(["cloud1"])
    assert made.nodes == {"cloud1": "failed: no host answers: wn01, wn02"} and len(made.trouble) == 2


@pytest.mark.parametrize(
    "line", ["cloud1", "cloud1 ->", "-> wn01", "a b -> wn01", "cloud1 -> -oProxyCommand=x", "cloud1 -> a;b"]
)
def test_a_line_that_is_none_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bait.toml"
    file.write_text(f'[bait]\nimages = ["worker"]\nnetworks = {{ open = "br0" }}\nplacement = ["{line}"]\n')
    with pytest.raises(BadSetting, match="is not NODES -> HOST HOST"):
        load(file)
    file.write_text(file.read_text().replace(f'"{line}"', '"cloud1 -> wn01"') + 'reach = ["ssh", "belljar"]\n')
    with pytest.raises(BadSetting, match=r"\{host\} is in no word of it"):
        load(file)


def test_hosts_are_reached_by_words_and_not_by_a_shell() -> None:
    ON_HOSTS.check("cloud[1-2,7]  ->  wn01 wn-2.site")
    assert replace(SETTINGS).reach == ("reach", "{host}", "belljar")
