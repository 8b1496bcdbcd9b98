"""What is around a factory: its settings read again, orders, log lines, systemd, VacMon."""

import asyncio
import io
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image import http_server
from tests.unit.vacuum.factory.site import until

from belljar.errors import BadSetting, HostError
from belljar.host.locks import try_lock
from belljar.records import replace
from belljar.service.kept import LOCK
from belljar.service.systemd import notify, serving
from belljar.service.telling import teller
from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus
from belljar.vacuum.factory.daemon import ORDER, Daemon, Order, give_order, order, push, serve
from belljar.vacuum.factory.factory import finish
from belljar.vacuum.factory.keeper import Living
from belljar.vacuum.factory.present import ended_status
from belljar.vacuum.protocol.query import Snapshot
from belljar.vacuum.settings import settings

SETTINGS = """
[space]
name = "vac.example.org"
factories = ["127.0.0.2"]
port = 9950
[factory]
name = "127.0.0.2"
processors = 2
[machinetype.atlas]
share = 1
image = "debian12"
"""
SPACE = Space("vac.example.org", "127.0.0.2")


@pytest.mark.parametrize(
    ("ours", "told", "together"),
    [
        ((False, None), (False, None), (False, None)),
        ((False, 50.0), (True, None), (True, 50.0)),
        ((False, 50.0), (True, 40.0), (True, 40.0)),
        ((True, 50.0), (False, 60.0), (True, 50.0)),
    ],
)
def test_an_order_only_makes_it_stricter(ours: Any, told: Any, together: Any) -> None:
    space = Order(*told).applied(replace(SPACE, draining=ours[0], shutdown_time=ours[1]))
    assert (space.draining, space.shutdown_time) == together


def test_an_order_is_read_again_and_a_broken_one_is_none(tmp_path: Path) -> None:
    assert order(tmp_path) == Order()
    give_order(tmp_path, Order(True, 77.0))
    assert order(tmp_path) == Order(True, 77.0)
    (tmp_path / ORDER).write_text('{"draining": "yes"}')
    assert order(tmp_path) == Order()


def test_lines_of_the_log_cannot_be_forged() -> None:
    file = io.StringIO()
    teller(file, as_json=False)("machine ended", machine="0123", message='200 "done"\n\x1b[1mroot', cause=None)
    line = file.getvalue()
    assert line.count("\n") == 1 and "\x1b" not in line
    assert line.endswith('machine ended machine=0123 message="200 \\"done\\"??[1mroot"\n')
    file = io.StringIO()
    teller(file, as_json=True)("failed", about="atlas", why="a\nb")
    assert json.loads(file.getvalue())["why"] == "a\nb" and file.getvalue().count("\n") == 1


def test_systemd_is_told_where_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify("READY=1")  # nobody asks
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notify("READY=1", "STATUS=1 machines")
        assert sock.recv(100) == b"READY=1\nSTATUS=1 machines"
    notify("READY=1")  # it is gone


async def test_systemd_is_told_of_start_reload_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.Event().wait()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        async with asyncio.timeout(30):
            await serving(work(), reload=lambda: os.kill(os.getpid(), signal.SIGTERM))
        said = [sock.recv(100).split(b"=")[0] for _ in range(4)]
    assert said == [b"READY", b"RELOADING", b"READY", b"STOPPING"]


def test_vacmon_is_told_that_an_ended_machine_is_shut_down_and_what_it_said() -> None:
    labels = {"machinetype": "atlas", "slot": "1", "fizzle": "600", "fqan": "/atlas"}
    event: dict[str, Any] = {"time": 2000.0, "started": 1000.0, "shutdown_code": 200, "shutdown_message": "Done"}
    ended = ended_status(SPACE, "0123456789ab", finish(None, event, labels, "", SPACE), event, labels)
    now = Snapshot(
        SPACE.name, SPACE.factory, types=(TypeStatus(SPACE.factory, "atlas"),), own=FactoryStatus(SPACE.factory)
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(10)
        assert now.own is not None
        push((f"127.0.0.1:{sock.getsockname()[1]}", "nowhere.invalid:1", "nonsense"), [ended, now.own, *now.types], now)
        machine, factory, kind = (json.loads(sock.recv(10240)) for _ in range(3))
    assert (machine["state"], machine["shutdown_message"], machine["shutdown_time"]) == ("Shut down", "200 Done", 2000)
    assert (machine["cookie"], machine["uuid"], machine["fqan"]) == ("0", "0123456789ab", "/atlas")
    assert (factory["message_type"], kind["machinetype"]) == ("factory_status", "atlas")
    assert isinstance(ended, MachineStatus)


async def test_systemd_and_vacmon_are_told_of_each_cycle(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as vacmon,
    ):
        systemd.bind(str(tmp_path / "n"))
        systemd.setblocking(False)
        vacmon.bind(("127.0.0.1", 0))
        vacmon.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        daemon.factory.space = replace(daemon.factory.space, vacmon=(f"127.0.0.1:{vacmon.getsockname()[1]}",))
        daemon.factory._reports.put_nowait(None)
        reporting = asyncio.ensure_future(daemon._report())
        told = [json.loads(await asyncio.get_running_loop().sock_recv(vacmon, 10240)) for _ in range(2)]
        reporting.cancel()
        assert [one["message_type"] for one in told] == ["factory_status", "machinetype_status"]
        assert systemd.recv(100).startswith(b"WATCHDOG=1\nSTATUS=0 machines, ")


# -- settings --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def daemon(tmp_path: Path, told: list[tuple[str, dict[str, Any]]]) -> Iterator[Daemon]:
    file = tmp_path / "vacuum.toml"
    file.write_text(SETTINGS)
    yield Daemon(file, tmp_path, lambda event, **facts: told.append((event, facts)), settings.load(file))


def test_settings_are_read_again(daemon: Daemon, tmp_path: Path, told: list[tuple[str, dict[str, Any]]]) -> None:
    (tmp_path / "vacuum.toml").write_text(SETTINGS.replace("processors = 2", "processors = 1"))
    daemon.reload()
    assert daemon.factory.space.processors == 1 and told[-1][0] == "settings read"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("processors = 2", "processors = 0", "processors"),
        ("port = 9950", "port = 9951", "port: is not changed in a running factory"),
    ],
)
def test_settings_that_cannot_be_obeyed_change_nothing_and_are_told(
    daemon: Daemon, tmp_path: Path, told: list[tuple[str, dict[str, Any]]], before: str, after: str, words: str
) -> None:
    was = daemon.factory.space
    (tmp_path / "vacuum.toml").write_text(SETTINGS.replace(before, after))
    daemon.reload()
    assert daemon.factory.space == was and words in daemon.factory.status.settings_error
    assert told[-1][0] == "settings refused" and words in told[-1][1]["why"]
    give_order(tmp_path, Order(True))
    daemon.obey()  # an order is obeyed meanwhile, and the complaint stays
    assert daemon.factory.space.draining and daemon.factory.status.settings_error
    (tmp_path / "vacuum.toml").write_text(SETTINGS)
    daemon.reload()
    assert daemon.factory.status.settings_error == ""


def test_machines_that_live_get_the_site_s_new_token_and_a_missing_one_is_told_once(
    daemon: Daemon, tmp_path: Path, told: list[tuple[str, dict[str, Any]]]
) -> None:
    token, kind = tmp_path / "token", daemon.factory.space.types[0]
    token.write_text("ey.first")
    daemon.factory.space = replace(daemon.factory.space, types=(replace(kind, token_file=token),))
    one = Living("atlas", 1, 9e9, id="0123456789ab", began=1.0, pid=1, folder=str(tmp_path / "machine"))
    begins = replace(one, id="ba9876543210", began=None, folder=str(tmp_path / "other"))
    for each in (one, begins):
        Path(each.folder).mkdir()
    daemon.factory.living = [one, begins]
    asyncio.run(daemon.renew_credentials())
    assert (tmp_path / "machine/credentials/token").read_text() == "ey.first"
    assert not (tmp_path / "other/credentials").exists()
    token.unlink()
    asyncio.run(daemon.renew_credentials())
    asyncio.run(daemon.renew_credentials())
    why = f"NoCredentials: {token}: No such file or directory"
    assert told == [("failed", {"about": "credentials of atlas", "why": why})]
    token.write_text("ey.second")
    asyncio.run(daemon.renew_credentials())
    assert told[1:] == [("works again", {"about": "credentials of atlas"})]


async def test_a_pipe_that_cannot_be_had_is_told_once_and_seen_by_monitoring(
    daemon: Daemon, tmp_path: Path, told: list[tuple[str, dict[str, Any]]]
) -> None:
    with http_server.serving() as server:
        url = server.put("/pipe.json", b"<html>")
        (tmp_path / "vacuum.toml").write_text(f"{SETTINGS}[pipe.gds]\nshare = 1\nurl = '{url}'\n")
        daemon.reload()
        del told[:]
        for _ in range(3):
            await daemon.refresh(*daemon._settings.pipes)
        problem = f"{url}: Expecting value: line 1 column 1 (char 0)"
        assert told == [("failed", {"about": "pipe gds", "why": problem})]
        assert "pipe gds" in daemon.factory.troubles.now
        (copy,) = (tmp_path / "pipes").iterdir()
        copy.unlink()
        server.put(
            "/pipe.json", json.dumps({"machinetypes": [{"suffix": "no name"}, {"suffix": "a", "x": 1}]}).encode()
        )
        for _ in range(3):
            await daemon.refresh(*daemon._settings.pipes)
    assert told[1] == ("works again", {"about": "pipe gds"})
    assert [event for event, _ in told[2:]] == ["pipe"] * (len(told) - 2) and len(told) == len(
        {str(one) for one in told}
    )
    assert any("machinetypes[0]" in facts["why"] for _, facts in told[2:])


async def test_slow_pipes_keep_no_decision_and_no_other_pipe_waiting(daemon: Daemon, tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    with http_server.serving() as server:
        server.gate = threading.Event()
        entry = json.dumps({"machinetypes": [{"suffix": "x", "root_image": server.address}]}).encode()
        lines = (f"[pipe.{name}]\nshare = 1\nurl = '{server.put('/' + name, entry)}'\n" for name in names)
        (tmp_path / "vacuum.toml").write_text(SETTINGS + "".join(lines))
        daemon.reload()
        refreshing = asyncio.ensure_future(daemon._refresh())
        await until(lambda: len(server.requests) == 4)  # all are asked before any answers
        async with asyncio.timeout(10):
            assert await daemon._ask() == ((), ())
        server.gate.set()
        await until(lambda: len(daemon.factory.space.types) == 5)
        refreshing.cancel()
        await asyncio.wait([refreshing])
    assert {one.name for one in daemon.factory.space.types} == {"atlas", *(f"{name}-x" for name in names)}


def test_what_does_not_fit_this_host_is_told_at_the_start_and_when_settings_are_read_again(
    daemon: Daemon, tmp_path: Path, told: list[tuple[str, dict[str, Any]]]
) -> None:
    changed = SETTINGS.replace('image = "debian12"', f'image = "{tmp_path}/no.img"\nuser_data = "{tmp_path}/none"')
    (tmp_path / "vacuum.toml").write_text(changed)
    for _ in range(3):
        daemon.reload()
    lines = [facts["why"] for event, facts in told if event == "settings"]
    assert (
        len(lines) == 2 and f"{tmp_path}/no.img is not there" in lines[0] and "machinetype.atlas.user_data" in lines[1]
    )
    (tmp_path / "none").touch()
    daemon.reload()
    (tmp_path / "none").unlink()
    daemon.reload()
    assert len([event for event, _ in told if event == "settings"]) == 3  # it is missing again


async def test_one_factory_works_in_a_folder(tmp_path: Path) -> None:
    held = try_lock(tmp_path / LOCK)
    assert held is not None
    with pytest.raises(HostError, match="another factory works here"):
        await serve(tmp_path / "vacuum.toml", tmp_path, lambda event, **facts: None)
    held.release()
    with pytest.raises(BadSetting):
        await serve(tmp_path / "missing.toml", tmp_path, lambda event, **facts: None)
    again = try_lock(tmp_path / LOCK)
    assert again is not None
    again.release()
