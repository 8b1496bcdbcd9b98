"""The page's server: who may read what, readers that do not read, a port that is taken, nodes that are silent."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.monitor.test_outcomes import row

from belljar.bait.journal import Status as Bait
from belljar.cli import main
from belljar.cli.monitor import leased, modes
from belljar.cli.monitor.top import SORTS, screen
from belljar.errors import BadOption, HostError
from belljar.host.locks import try_lock
from belljar.journal import JOURNAL, Ledger
from belljar.machine import CONSOLE_LOG, LOCK, OUTCOME, REQUEST, Folders
from belljar.machine.outside.registry import Machines
from belljar.monitor import Machine, Outcomes, ended_of, live, nodes, server
from belljar.monitor.live import Host, console_tail, living, paths_of, story
from belljar.monitor.metrics import Tally, collected
from belljar.monitor.nodes import Remote, node_of
from belljar.monitor.view import Counted, Mode, Node, percentiles, view
from belljar.service import kept
from belljar.service.streams import first_of
from belljar.vacuum.factory.state import Status as Factory

TOKEN, LIVE = "a token of many characters", "0123456789ab"
NAMES = ("ada", "slurm:4711", "debian12-secret", LIVE, "wn01", "BootTimeout after 7 s", "queue")
NO_REAPER: Any = None  # whoever only reads needs none
WITH = {"Authorization": f"Bearer {TOKEN}"}


def lost(id: str = "f" * 12, **changes: Any) -> dict[str, Any]:
    why = {
        "cause": "boot-failed",
        "class": "transient",
        "error": "BootTimeout",
        "reason": "BootTimeout after 7 s",
        "account": "ada",
    }
    return row(id, **why, phases={"prepare": 0.5}, started=time.time() - 9, ended=time.time() - 1, **changes)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    """One machine that runs, one that could not be started."""
    folders = Folders(tmp_path / "run", tmp_path / "scratch", tmp_path / "store", tmp_path / "logs")
    folder = folders.machine(LIVE)
    folder.mkdir(parents=True)
    folders.logs.mkdir()
    account = {"name": "ada", "uid": 1000}
    machine = {"image": "debian12-secret", "cpus": 2, "memory": 1 << 30}
    work = {"payload": {"account": account, "env": ["PASSWORD=1"], "argv": ["sh"]}}
    (folder / REQUEST).write_text(
        json.dumps({"id": LIVE, "name": "\ud800", "requester": "slurm:4711", "machine": machine, "work": work})
    )
    (folder / CONSOLE_LOG).write_bytes(b"\x1b[31m<script>alert(1)</script>\r\nlogin\x07: \x9b\n")
    tell(folders, "preparing", at=100.0)
    tell(folders, "starting", at=101.0, start="clone")
    tell(folders, "running", at=102.5)
    Ledger(folders.logs).append(lost(), time.time())
    with try_lock(folder / LOCK) or pytest.fail("it is locked"):
        yield folders


def tell(folders: Folders, state: str, at: float, **facts: Any) -> None:
    with open(folders.machine(LIVE) / JOURNAL, "a") as file:
        file.write(json.dumps({"time": at, "event": "state", "state": state, **facts}) + "\n")


def look(folders: Folders) -> tuple[list[Machine], list[Mode], set[Path]]:
    machines = living(Machines(folders, NO_REAPER).living())
    return machines, [], paths_of(folders, machines)


def host_of(folders: Folders) -> Host:
    def outcomes(since: float) -> Outcomes:
        return Outcomes({folders.logs: "wn01"}, since=since)

    return Host("wn01", lambda: look(folders), outcomes, lambda: iter(()))


class Site:
    """A monitor that runs, and a client of it."""

    def __init__(self, hub: server.Hub, port: int) -> None:
        self.hub, self.port = hub, port

    async def ask(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body, of which a stream's is its first piece."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = [
                f"{method} {path} HTTP/1.1",
                "Host: x",
                "Connection: close",
                *(f"{key}: {value}" for key, value in (headers or {}).items()),
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            answered = {key.lower(): value for key, value in (line.split(": ", 1) for line in head[1:-2])}
            body = await (
                reader.readuntil(b"\n\n") if "event-stream" in answered.get("content-type", "") else reader.read()
            )
            return int(head[0].split()[1]), answered, body
        finally:
            writer.close()

    async def view(self, headers: dict[str, str] | None = None) -> Any:
        return json.loads((await self.ask("/api/view", headers))[2])


@asynccontextmanager
async def monitored(folders: Folders, *remotes: Remote) -> AsyncIterator[Site]:
    end = server.listening("127.0.0.1:0")
    hub = server.Hub(host_of(folders), remotes)
    metrics = Tally(lambda positions: Outcomes({folders.logs: "wn01"}, positions))
    app = server.app(hub, server.Access(TOKEN), lambda id: story(folders, id), collected(metrics, lambda: ()))
    work = asyncio.ensure_future(first_of(hub.watch(), server.serve(end, app)))
    try:
        await until(lambda: hub.host.is_read)
        yield Site(hub, end.getsockname()[1])
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        end.close()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE", 0.0)
    monkeypatch.setattr(live, "PAUSE", 0.0)


# -- who may read what ---------------------------------------------------------------------------------------------------


async def test_without_the_token_there_are_numbers_and_causes_and_no_names(folders: Folders) -> None:
    async with monitored(folders) as site:
        status, _, body = await site.ask("/api/view")
        values = json.loads(body)
        assert status == 200 and values["totals"]["live"] == 1 and values["causes"][0]["count"] == 1
        assert values["causes"][0]["hint"]
        values["about"].pop("node")  # which a reader may know who found this port
        assert not [name for name in NAMES if name in json.dumps(values)]
        assert (await site.ask(f"/api/machines/{LIVE}"))[0] == 401
        assert (await site.ask("/api/node"))[0] == 401


async def test_with_the_token_there_are_names_and_what_to_do(folders: Folders) -> None:
    async with monitored(folders) as site:
        values = await site.view(WITH)
        alive, failed = values["machines"]
        assert (alive["id"], alive["user"], alive["state"], alive["start"]) == (LIVE, "ada", "running", "clone")
        assert alive["phases"] == [["preparing", 100.0], ["starting", 101.0], ["running", 102.5]]
        assert failed["state"] == "failed" and values["causes"][0]["machine"] == failed["id"]
        assert f"belljar logs {failed['id']} --console" in values["causes"][0]["hint"]
        assert values["users"][0]["user"] == "ada" and values["users"][0]["live"] == 1


async def test_wrong_tokens_are_refused_and_after_some_not_even_looked_at_while_the_right_one_still_works(
    folders: Folders,
) -> None:
    async with monitored(folders) as site:
        answers = [await site.ask("/api/view", {"Authorization": f"Bearer {word}"}) for word in ["wrong"] * 14]
        assert [status for status, *_ in answers][:10] == [401] * 10 and answers[-1][0] == 429
        assert answers[0][1]["www-authenticate"] == "Bearer" and answers[-1][1]["retry-after"]
        assert (await site.view(WITH))["about"]["trusted"]
        assert (await site.ask("/api/events", {"Authorization": "Basic eDp5"}))[0] == 429


async def test_a_machine_has_a_story_without_its_secrets_and_with_a_harmless_console(folders: Folders) -> None:
    async with monitored(folders) as site:
        told = json.loads((await site.ask(f"/api/machines/{LIVE}", WITH))[2])
        assert told["console"] == "<script>alert(1)</script>\nlogin\\x07: �\n"
        assert "PASSWORD" not in json.dumps(told) and told["request"]["requester"] == "slurm:4711"
        assert [event["state"] for event in told["events"]] == ["preparing", "starting", "running"]
        for id in ("ffffffffffff", "..", "%2e%2e%2flogs", "0123456789AB"):
            assert (await site.ask(f"/api/machines/{id}", WITH))[0] == 404


async def test_a_browser_gets_nothing_from_outside_and_nothing_can_be_changed(folders: Folders) -> None:
    async with monitored(folders) as site:
        for path in ("/", "/page.js", "/page.css", "/icon.svg", "/api/view", "/nothing"):
            status, headers, body = await site.ask(path)
            assert status == (404 if path == "/nothing" else 200)
            assert (
                "default-src 'none'" in headers["content-security-policy"]
                and headers["x-content-type-options"] == "nosniff"
            )
            assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)|innerHTML|<style|style=| on[a-z]+=\"", body), (
                path
            )
        assert (await site.ask("/api/view", WITH, "POST"))[0] == 405


async def test_prometheus_finds_its_numbers_beside_the_page(folders: Folders) -> None:
    async with monitored(folders) as site:
        _, headers, body = await site.ask("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
        assert headers["content-type"].startswith("application/openmetrics-text")
        assert b"belljar_machines_ended_total{" in body and b'cause="boot-failed"' in body


# -- events ----------------------------------------------------------------------------------------------------------------


async def test_a_reader_gets_everything_and_then_what_changed_as_it_happens(folders: Folders) -> None:
    async with monitored(folders) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode())
        try:
            first = await piece(reader)
            assert first["totals"]["states"] == {"running": 1} and first["hours"]
            tell(folders, "stopping", at=103.0)
            second = await piece(reader)
            assert second["totals"]["states"] == {"stopping": 1} and "hours" not in second
            Ledger(folders.logs).append(lost("e" * 12), time.time())
            third = await piece(reader)
            assert third["totals"]["machines"] == 2 and third["causes"][0]["count"] == 2
        finally:
            writer.close()
        await until(lambda: site.hub.readers == 0)


async def piece(reader: asyncio.StreamReader) -> Any:
    """The next one that is more than a sign of life."""
    async with asyncio.timeout(20):
        while not (line := await reader.readline()).startswith(b"data:"):
            assert line
        return json.loads(line[5:])


async def test_a_browser_that_never_reads_is_dropped(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL", 0.2)
    async with monitored(folders) as site:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", site.port))
        sock.sendall(b"GET /api/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: site.hub.readers == 1)

        def look(*, is_trusted: bool) -> dict[str, str]:
            site.hub.ring()
            return {"about": str(time.monotonic()) * 100_000}

        monkeypatch.setattr(site.hub, "sections", look)
        site.hub.ring()
        await until(lambda: site.hub.readers == 0)
        sock.close()


@pytest.mark.parametrize("before", [b"", b"GET /api/view HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_browser_that_never_ends_its_request_is_dropped(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD", 0.2)
    async with monitored(folders) as site, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        if before:
            writer.write(before)
            assert b"200 OK" in await reader.readline()
        writer.write(b"GET /api/events HTTP/1.1\r\nHost:")
        with suppress(ConnectionResetError):
            assert b"GET" not in await reader.read()  # to its end
        assert (await site.ask("/api/view"))[0] == 200
        writer.close()


async def test_there_are_only_so_many_readers(folders: Folders) -> None:
    async with monitored(folders) as site:
        site.hub.readers = server.MOST_READERS
        status, headers, _ = await site.ask("/api/events")
        assert (status, headers["retry-after"]) == (503, "30")
        site.hub.readers = 0


def test_two_monitors_on_one_port_are_refused_with_a_remedy() -> None:
    with server.listening("127.0.0.1:0") as end:
        with pytest.raises(HostError, match="Address already in use") as refused:
            server.listening(f"127.0.0.1:{end.getsockname()[1]}")
    assert "ss -ltnp" in refused.value.hint


# -- other nodes -------------------------------------------------------------------------------------------------------------


async def test_another_node_is_shown_with_its_machines_and_their_stories(folders: Folders, tmp_path: Path) -> None:
    empty = Folders(*(tmp_path / "empty" / name for name in ("run", "scratch", "store", "logs")))
    empty.logs.mkdir(parents=True)
    async with monitored(folders) as far:
        async with monitored(empty, Remote(f"wn02=http://127.0.0.1:{far.port}", TOKEN)) as near:
            await until(lambda: not near.hub.remotes[0].node.why)
            values = await near.view(WITH)
            assert [(node["node"], node["live"], node["failed"]) for node in values["nodes"]] == [
                ("wn01", 0, 0),
                ("wn02", 1, 1),
            ]
            told = json.loads((await near.ask(f"/api/machines/{LIVE}?node=wn02", WITH))[2])
            assert told["console"].startswith("<script>")


async def test_a_node_that_is_silent_is_shown_as_silent_with_what_it_last_told(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SILENT", 1.0)
    async with monitored(folders) as site:
        remote = Remote(f"http://127.0.0.1:{site.port}", TOKEN)
        watch = asyncio.ensure_future(remote.watch(lambda: None))
        await until(lambda: not remote.node.why)
        heard = remote.node.heard
        await until(lambda: remote.node.why)
        watch.cancel()
        assert "timed out" in remote.node.why and remote.node.name == "wn01"
        assert heard <= remote.node.heard < time.time() - 0.2 and remote.node.living[0].id == LIVE


async def test_a_node_with_another_token_says_so_and_what_cannot_be_meant_is_refused(folders: Folders) -> None:
    async with monitored(folders) as site:
        remote = Remote(f"http://127.0.0.1:{site.port}", "another token, long")
        watch = asyncio.ensure_future(remote.watch(lambda: None))
        await until(lambda: "another token" in remote.node.why)
        watch.cancel()
    for line in (
        b"data:{}",
        b"data:[1]",
        b'data:{"node":{"name":"n","living":[{}]}}',
        b'data:{"node":{"name":"n","counts":7}}',
        b'data:{"node":{"name":"n","counts":[["causes","x","machines",1]]}}',
        b'data:{"node":{"name":"n","counts":[["hours","noon","machines",1]]}}',
        b"data:" + b"[" * 100_000,
    ):
        with pytest.raises(ValueError):
            node_of(line)
    for place in ("wn01", "ftp://wn01", "http://wn01/path", "wn01=//x"):
        with pytest.raises(BadOption):
            Remote(place, TOKEN)


# -- what is counted -----------------------------------------------------------------------------------------------------------


def test_failures_are_counted_by_cause_and_a_payload_of_its_own_will_is_not_one() -> None:
    counted = Counted()
    rows = (
        lost("a" * 12),
        lost("b" * 12, hint="Ask the site."),
        row("c" * 12, exit_code=3),
        row("d" * 12, cause="cancelled"),
        row("e" * 12, cause="checkpointed", **{"class": "cancelled"}),
    )
    for line in rows:
        ended = ended_of(line, "wn01")
        assert ended is not None
        counted.count(ended)
    seen = view([counted.node("wn01"), counted.node("wn02")], is_trusted=True)
    assert (seen["totals"]["machines"], seen["totals"]["failed"], seen["users"][0]["machines"]) == (10, 4, 10)
    assert seen["starts"][0]["spread"] == [(2.0, 6)]
    (failures,) = seen["causes"]
    assert failures["cause"] == "boot-failed: BootTimeout" and failures["count"] == 4
    assert (failures["machine"], failures["hint"]) == ("b" * 12, "Ask the site.")
    assert "Ask the site." not in json.dumps(view([counted.node("wn01")], is_trusted=False))


def test_percentiles_are_of_all_starts() -> None:
    counts = {"0.3": 89, "0.5": 10, "16": 1}
    assert percentiles(counts) | {"spread": 0} == {
        "count": 100,
        "p50": 0.3,
        "p90": 0.5,
        "p99": 0.5,
        "max": 16.0,
        "spread": 0,
    }


async def test_a_machine_that_nobody_keeps_is_said_to_be_abandoned_at_once(folders: Folders) -> None:
    host, lock = host_of(folders), folders.machine("e" * 12) / LOCK
    lock.parent.mkdir()
    (lock.parent / JOURNAL).write_text('{"time": 5.0, "event": "state", "state": "running"}\n')
    held = try_lock(lock)
    assert held is not None
    watch = asyncio.ensure_future(host.watch(lambda: None))
    await until(lambda: states(host).get("e" * 12) == "running")
    held.release()
    await until(lambda: states(host).get("e" * 12) == "abandoned")
    assert states(host)[LIVE] == "running"
    watch.cancel()


async def test_the_first_machine_of_a_host_is_seen_though_there_was_no_folder_for_it(tmp_path: Path) -> None:
    folders = Folders(*(tmp_path / name for name in ("run", "scratch", "store", "logs")))
    host = host_of(folders)
    watch = asyncio.ensure_future(host.watch(lambda: None))
    await until(lambda: host.is_read)
    folders.machine(LIVE).mkdir(parents=True)
    await until(lambda: states(host) == {LIVE: "abandoned"})
    tell(folders, "running", at=1.0)
    await until(lambda: host.nodes()[0].living[0].states)
    folders.logs.mkdir()
    Ledger(folders.logs).append(lost(), time.time())
    await until(lambda: host.nodes()[0].ended)
    watch.cancel()


def states(host: Host) -> dict[str, str]:
    return {machine.id: machine.state for machine in host.nodes()[0].living}


async def test_a_row_older_than_a_day_is_not_counted_and_a_machine_that_has_ended_is_not_shown(
    folders: Folders,
) -> None:
    host = host_of(folders)
    Ledger(folders.logs).append(lost("d" * 12) | {"ended": time.time() - 90_000}, time.time())
    folders.machine("e" * 12).mkdir()
    (folders.machine("e" * 12) / OUTCOME).write_text('{"ended": 5.0}')
    watch = asyncio.ensure_future(host.watch(lambda: None))
    await until(lambda: host.is_read)
    values = view(host.nodes(), is_trusted=True)
    watch.cancel()
    assert values["totals"]["machines"] == 1 and [machine["id"] for machine in values["machines"]] == [LIVE, "f" * 12]


def test_a_vacuum_a_bait_and_leases_are_shown_where_there_are_some(tmp_path: Path) -> None:
    assert modes(tmp_path) == []
    vacuum, bait = tmp_path / "vacuum", tmp_path / "bait"
    vacuum.mkdir()
    bait.mkdir()
    verdict = {"machinetype": "lhcb", "hs06": 10.0, "target": 20.0, "why": "it backs off"}
    kept.keep(
        vacuum / "status.json", Factory("vac01", "wn01", 1, 0.0, 60.0, 5.0, draining=True, settings_error="a typo")
    )
    (vacuum / "decisions.jsonl").write_text(json.dumps({"verdicts": [verdict]}) + "\n")
    (mode,) = modes(tmp_path)
    assert (mode.name, mode.state, mode.why) == ("wn01 in vac01", "draining", "a typo")
    assert mode.bars == (("lhcb", 10.0, 20.0, "it backs off"),)
    (vacuum / "decisions.jsonl").write_text('{"verdicts": [{"ma')
    assert modes(tmp_path)[0].bars == ()
    kept.keep(bait / "status.json", Bait("b", "slurm", 1, 0.0, 5.0, jobs={"running": 2}))
    mode = modes(tmp_path)[1]
    assert (mode.kind, mode.name, mode.state, mode.bars) == ("bait", "b of slurm", "open", (("running", 2, None, ""),))
    machine = {"lease": "l-1", "owner": "ada", "image": "el9", "cpus": 2, "ended": None}
    mode = leased([machine, machine, {**machine, "ended": 5.0}])
    assert mode.bars == (("l-1: ada, el9", 4, None, ""),)


def test_a_console_that_is_a_pipe_or_not_there_is_empty(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    assert console_tail(tmp_path / "pipe") == console_tail(tmp_path / "none") == ""


def test_no_text_of_a_user_steers_the_terminal_that_shows_it() -> None:
    states = (("running", time.time() - 5),)
    machine = Machine(
        "", LIVE, name="\x1b[2J[red]x", account="ada", image="el9", cpus=1, state="running", states=states
    )
    values = view([Node("wn01", (machine,))], is_trusted=True)
    for order in SORTS:
        console = Console(file=io.StringIO(), width=140)
        console.print(screen(values, order, 24))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b" not in shown and "[red]x" in shown and "1 machines (1 running)" in shown


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "belljar.monitor.server")
    monkeypatch.delattr("belljar.monitor.server")
    assert main(["monitor", "serve"]) == 125
    assert "the library uvicorn is not installed" in capsys.readouterr().err
