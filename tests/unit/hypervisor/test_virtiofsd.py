"""Folders by virtiofs on the host's side: which program, its words, its ends, a clone's memory, and the order of QMP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, FOLDERS

from belljar.errors import BelljarError, CommandMissing, HostError, NotPermitted, ShareLost, UsageError
from belljar.host import commands as programs
from belljar.hypervisor import DomainSpec, EventKind, Settings, load
from belljar.hypervisor.devices import SHARES, serve, server_of, stop_serving
from belljar.hypervisor.devices import share_virtiofs as virtiofs
from belljar.hypervisor.devices.share_virtiofs import FolderServer, command_line
from belljar.hypervisor.qemu.cmdline import marked
from belljar.hypervisor.qemu.domain import Command, Lines, QemuDomain
from belljar.hypervisor.qemu.process.launch import Launch
from belljar.hypervisor.qemu.template import making
from belljar.model import MIB, Share

# In place of virtiofsd: takes the connection, says that it is there, and does what it is told.
STAND_IN = """#!/usr/bin/python3 -IS
import os, socket, sys
if "--version" in sys.argv:
    sys.exit(print("virtiofsd 1.13.2"))
fd = next(int(word[5:]) for word in sys.argv if word.startswith("--fd="))
line, _ = socket.socket(fileno=fd).accept()
assert line.recv(12)[0] == 1
folder = next(word[13:] for word in sys.argv if word.startswith("--shared-dir="))
line.send(bytes(20) + b"here " + " ".join(sorted(os.listdir(folder))).encode())
said = line.recv(100)
if said:
    sys.exit(said.decode())
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "virtiofsd"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def spec(tmp_path: Path) -> DomainSpec:
    """A machine with two folders by virtiofs and one by 9p."""
    shares = []
    for number, kind in enumerate(("virtiofs", "9p", "virtiofs")):
        folder = tmp_path / f"shared{number}"
        folder.mkdir()
        (folder / f"file{number}").touch()
        shares.append(Share(str(folder), "/in", True, kind))
    place = tmp_path / "machine"
    place.mkdir(mode=0o700)
    return replace(COLD, shares=tuple(shares), folder=place, owner=(os.geteuid(), os.getegid()))


# -- which program -----------------------------------------------------------------------------------------------------


def test_the_program_of_the_settings_is_taken(program: str) -> None:
    assert virtiofs.find(program) == program
    for wrong in (program + "x", os.path.dirname(program) + "/nothing", "no-such-virtiofsd"):
        with pytest.raises(CommandMissing, match="no such program"):
            virtiofs.find(wrong)


def test_one_that_is_nowhere_is_refused_and_its_package_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "which", lambda name: None)
    monkeypatch.setattr(virtiofs, "PLACES", ("/nowhere",))
    with pytest.raises(CommandMissing) as caught:
        virtiofs.find("")
    assert "package `virtiofsd`" in caught.value.hint and "on Debian 12" in caught.value.hint


def test_the_refusal_comes_before_anything_is_made(tmp_path: Path, spec: DomainSpec) -> None:
    hypervisor = load(Settings(virtiofsd="/nowhere/virtiofsd"), tmp_path / "store")
    with pytest.raises(CommandMissing):
        hypervisor.check(spec)
    hypervisor.check(replace(spec, shares=spec.shares[1:2]))  # by 9p it is not asked for


def test_a_machine_by_libvirt_has_none(tmp_path: Path, spec: DomainSpec) -> None:
    hypervisor = load(Settings(), tmp_path / "store", "libvirt:qemu:///system")
    with pytest.raises(UsageError) as caught:
        hypervisor.check(spec)
    assert "virtiofs" in caught.value.message and "without `virtiofs:`" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "is_taken"),
    [
        ("virtiofsd 1.13.2", True),
        ("virtiofsd 2.0.0", True),
        ("virtiofsd 1.10.0", False),
        ("virtiofsd version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", False),  # the one in C
        ("setgroups() failed with error=1:Operation not permitted", False),  # the same, for a user with further groups
        ("", False),
    ],
)
def test_the_one_in_rust_is_taken_and_no_other(tmp_path: Path, line: str, is_taken: bool) -> None:
    program = tmp_path / "virtiofsd"
    program.write_text(f"#!/bin/sh\necho '{line}'\n")
    program.chmod(0o755)
    if is_taken:
        assert virtiofs.find(str(program)) == str(program)
        return
    with pytest.raises(HostError, match="need the virtiofsd in Rust") as caught:
        virtiofs.find(str(program))
    assert (
        line[:40] in caught.value.message and "on Debian 12 share the folder without `virtiofs:`" in caught.value.hint
    )


def test_a_users_folder_is_his_alone_in_the_guest_and_roots_is_as_it_is(spec: DomainSpec) -> None:
    folder = replace(spec.shares[0], readonly=False)
    words = command_line(replace(spec, owner=(1000, 100)), "share0", folder, "/virtiofsd", 9)
    assert {"--user", "--map-root-user", "--fd=9", f"--shared-dir={folder.source}", "--sandbox=namespace"} <= {*words}
    assert {"--translate-uid=host:0:1000:1", "--translate-gid=host:0:100:1"} <= {*words} and "--readonly" not in words
    of_root = command_line(replace(spec, owner=(0, 0)), "share0", spec.shares[0], "/virtiofsd", 9)
    assert not [word for word in of_root if word.startswith(("--translate", "--user"))] and "--readonly" in of_root


# -- its processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "machine"),
    [(b"/usr/bin/setpriv", "0123456789ab"), (b"unshare", "0123456789ab"), (b"grep", None), (b"virtiofsd", None)],
)
def test_a_process_is_known_by_its_mark(program: bytes, machine: str | None) -> None:
    assert server_of([program, b"--", b"env", b"BELLJAR_SERVES=0123456789ab:share0", b"virtiofsd"]) == machine
    assert server_of([program, b"--", b"env"]) is None and server_of([]) is None


async def test_each_folder_by_virtiofs_is_served_and_nothing_of_it_stays(spec: DomainSpec, program: str) -> None:
    servers = await serve(spec, Settings(virtiofsd=program))
    assert [server.share for server in servers] == [spec.shares[0], spec.shares[2]]
    assert [server.line.recv(100) for server in servers] == [b"here file0", b"here file2"]
    assert sorted(path.name for path in spec.folder.iterdir()) == ["virtiofsd.log"]  # the socket has no name any more
    await stop_serving(servers)
    assert all(server.over.done() for server in servers)
    assert [server.line.fileno() for server in servers] == [-1, -1]


async def test_it_is_found_by_the_machines_id_and_ended(spec: DomainSpec, program: str, tmp_path: Path) -> None:
    hypervisor = load(Settings(), tmp_path / "store")
    spec = replace(spec, id=os.urandom(6).hex())
    servers = await serve(spec, Settings(virtiofsd=program))
    found = [pid for id, pid in hypervisor.alive() if id == spec.id]
    assert len(found) == 2
    hypervisor.discard(spec.id)
    await asyncio.wait_for(asyncio.gather(*(server.over for server in servers)), 10)
    assert [pid for id, pid in hypervisor.alive() if id == spec.id] == []
    await stop_serving(servers)


async def test_it_ends_by_itself_when_its_line_is_closed(spec: DomainSpec, program: str) -> None:
    (server, *others) = await serve(spec, Settings(virtiofsd=program))
    assert server.line.recv(100) == b"here file0"
    server.line.close()
    assert os.waitstatus_to_exitcode(await asyncio.wait_for(asyncio.shield(server.over), 10)) == 0
    await stop_serving([server, *others])


async def test_what_it_said_last_is_why_it_is_lost(spec: DomainSpec, program: str) -> None:
    servers = await serve(spec, Settings(virtiofsd=program))
    servers[0].line.send(b"the disk is on fire")
    await asyncio.wait_for(asyncio.shield(servers[0].over), 10)
    loss = servers[0].loss()
    assert isinstance(loss, ShareLost) and loss.message.endswith("virtiofsd ended: the disk is on fire")
    assert spec.shares[0].source in loss.message
    await stop_serving(servers)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ("ERROR virtiofsd] /data does not exist", NotPermitted, "the payload's user must be able to enter"),
        ("virtiofsd] Error entering sandbox: OpenNewRoot(Os { code: 13 })", NotPermitted, "able to enter"),
        ("unshare: unshare failed: No space left on device", HostError, "user.max_user_namespaces"),
        ("unshare: write failed /proc/self/uid_map: Operation not permitted", HostError, "user namespaces"),
        ("virtiofsd] Error entering sandbox: MountProc(Os { code: 1 })", HostError, "user namespaces"),
        ("env: 'virtiofsd': Permission denied", HostError, "`qemu.virtiofsd` that can be run"),
        ("something new", HostError, "without `virtiofs:`"),
    ],
)
async def test_one_that_never_answers_says_why_and_none_is_left(
    spec: DomainSpec, tmp_path: Path, words: str, error: type[BelljarError], says: str
) -> None:
    program = tmp_path / "virtiofsd"
    program.write_text(f'#!/bin/sh\necho "{words}" >&2\nexit 1\n')
    program.chmod(0o755)
    spec = replace(spec, id=os.urandom(6).hex())
    with pytest.raises(error, match=f"--share virtiofs:{spec.shares[0].source}: ") as caught:
        await serve(spec, Settings(virtiofsd=str(program)))
    assert says.lower() in caught.value.hint.lower()
    await gone(spec, tmp_path)


async def gone(spec: DomainSpec, folder: Path) -> None:
    """The kernel kills what is in its namespace a moment after the first process."""
    async with asyncio.timeout(10):
        while [pid for id, pid in load(Settings(), folder / "store").alive() if id == spec.id]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_whoever_gives_up_waiting_leaves_none(
    spec: DomainSpec, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def never(self: FolderServer) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(FolderServer, "ready", never)
    spec = replace(spec, id=os.urandom(6).hex())
    task = asyncio.ensure_future(serve(spec, Settings(virtiofsd=program)))
    await begun.wait()
    assert [pid for id, pid in load(Settings(), tmp_path / "store").alive() if id == spec.id]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(spec, tmp_path)


async def test_one_that_never_answers_is_not_waited_for_for_ever(
    spec: DomainSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "virtiofsd"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(virtiofs, "READY_TIMEOUT", 0.1)
    with pytest.raises(HostError, match=r"waited 0\.1 s for virtiofsd"):
        await serve(spec, Settings(virtiofsd=str(program)))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_clones_memory_is_its_templates_and_its_holes_are_holes(tmp_path: Path) -> None:
    source = tmp_path / "ram"
    with open(source, "wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 17 * MIB + 12345, 64 * MIB - 5):
            file.seek(at)
            file.write(b"words")
    fd = making.make_memory(64 * MIB, source)
    try:
        assert os.fstat(fd).st_size == 64 * MIB and os.fstat(fd).st_blocks * 512 < MIB
        assert os.pread(fd, 64 * MIB, 0) == source.read_bytes()
        os.pwrite(fd, b"other", 0)
        assert source.read_bytes()[:5] == b"words"
    finally:
        os.close(fd)


# -- a clone's devices -------------------------------------------------------------------------------------------------


class PlayedQemu:
    """A domain whose process does nothing; the test speaks for its monitor."""

    def __init__(self, folder: Path, servers: list[FolderServer]) -> None:
        lines = Lines("monitor", "channel", "console")
        self._lines = lines
        launch = Launch(replace(COLD, folder=folder), (), "testing")
        self.domain = QemuDomain(launch, ["/bin/sleep", "1000"], [], lines, servers, timeout=10)
        self.monitor: socket.socket = lines.theirs["monitor"]
        self._buffer = b""

    def said(self) -> list[dict[str, object]]:
        """The commands that came since the last look."""
        self.monitor.setblocking(False)
        try:
            while data := self.monitor.recv(1 << 16):
                self._buffer += data
        except BlockingIOError:
            pass
        *whole, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in whole]

    def says(self, message: dict[str, object]) -> None:
        self.monitor.setblocking(True)
        self.monitor.sendall(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        await self.domain.quit(grace=0)
        self._lines.__exit__(True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def plugged(*devices: dict[str, object]) -> Callable[[object], list[Command]]:
    return lambda _: [("device_add", device) for device in devices]


async def commands(qemu: PlayedQemu) -> list[dict[str, object]]:
    """The next ones."""
    arrived, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(qemu.monitor, arrived.set)
    await arrived.wait()
    loop.remove_reader(qemu.monitor)
    return qemu.said()


async def test_a_clones_devices_are_plugged_in_after_the_load_and_before_it_runs(folder: Path) -> None:
    qemu = PlayedQemu(folder, [])
    try:
        qemu.domain.go_on("fd:7", plugged(*SHARES.plugged(replace(COLD, shares=FOLDERS))))
        connecting = asyncio.ensure_future(qemu.domain.connect())
        first = qemu.said()
        assert [one["execute"] for one in first] == [
            "qmp_capabilities", "migrate-set-capabilities", "migrate-set-parameters", "migrate-incoming",
        ]  # fmt: skip
        for one in first:
            qemu.says({"return": {}, "id": one["id"]})
        qemu.says({"event": "MIGRATION", "data": {"status": "active"}})
        await asyncio.sleep(0.05)
        assert qemu.said() == [] and not connecting.done()
        qemu.says({"event": "MIGRATION", "data": {"status": "completed"}})
        then = await commands(qemu)
        assert [one["execute"] for one in then] == ["device_add", "device_add", "cont"]
        assert then[1]["arguments"] == {
            "driver": "vhost-user-fs-pci", "tag": "share2", "queue-size": 1024, "chardev": "folder1", "bus": "port1",
        }  # fmt: skip
        assert not connecting.done()
        for one in then:
            qemu.says({"return": {}, "id": one["id"]})
        await asyncio.wait_for(connecting, 10)
    finally:
        await qemu.close()


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_disk_grows_when_the_clone_runs_for_newer_qemus_refuse_it_before(folder: Path, is_paused: bool) -> None:
    qemu = PlayedQemu(folder, [])
    try:
        qemu.domain.go_on("fd:7", lambda _: [("device_add", {"id": "cpu1"}), ("block_resize", {"size": 7})])
        connecting = asyncio.ensure_future(qemu.domain.connect())
        pausing = asyncio.ensure_future(qemu.domain.pause()) if is_paused else None
        await asyncio.sleep(0)
        for one in qemu.said():
            qemu.says({"return": {}, "id": one["id"]})
        if pausing is not None:
            await asyncio.wait_for(pausing, 10)
        qemu.says({"event": "MIGRATION", "data": {"status": "completed"}})
        then = await commands(qemu)
        assert [one["execute"] for one in then] == [
            "device_add",
            "cont",
            "block_resize",
            "stop" if is_paused else "cont",
        ]
        for one in then:
            qemu.says({"return": {}, "id": one["id"]})
        await asyncio.wait_for(connecting, 10)
    finally:
        await qemu.close()


async def test_a_device_that_qemu_refuses_is_a_failed_start(folder: Path) -> None:
    from belljar.errors import PlugRefused

    qemu = PlayedQemu(folder, [])
    try:
        qemu.domain.go_on("fd:7", plugged(*SHARES.plugged(replace(COLD, shares=FOLDERS[:1]))))
        connecting = asyncio.ensure_future(qemu.domain.connect())
        for one in qemu.said():
            qemu.says({"return": {}, "id": one["id"]})
        qemu.says({"event": "MIGRATION", "data": {"status": "completed"}})
        for one in await commands(qemu):
            qemu.says({"error": {"class": "GenericError", "desc": "no port"}, "id": one["id"]})
        with pytest.raises(PlugRefused, match="no port"):
            await asyncio.wait_for(connecting, 10)
    finally:
        await qemu.close()


async def test_qemu_is_asked_for_its_processors_before_it_loads_and_a_clone_without_enough_does_not_run(
    folder: Path,
) -> None:
    from belljar.errors import PlugRefused
    from belljar.hypervisor.qemu.template.plugging import processors

    qemu = PlayedQemu(folder, [])
    try:
        qemu.domain.go_on("fd:7", lambda slots: [("device_add", it) for it in processors(2, slots)], asks_cpus=True)
        connecting = asyncio.ensure_future(qemu.domain.connect())
        for one in qemu.said():
            asked = one["execute"] == "query-hotpluggable-cpus"
            free = [{"type": "max-x86_64-cpu", "props": {"core-id": 1}}]
            qemu.says({"return": free if asked else {}, "id": one["id"]})
        qemu.says({"event": "MIGRATION", "data": {"status": "completed"}})
        with pytest.raises(PlugRefused, match="room for 1 more"):
            await asyncio.wait_for(connecting, 10)
        assert qemu.said() == []
    finally:
        await qemu.close()


async def test_a_qemu_that_ends_while_it_loads_is_not_waited_for(folder: Path) -> None:
    from belljar.errors import BelljarError

    qemu = PlayedQemu(folder, [])
    try:
        qemu.domain.go_on("fd:7", plugged(*SHARES.plugged(replace(COLD, shares=FOLDERS[:1]))))
        connecting = asyncio.ensure_future(qemu.domain.connect())
        for one in qemu.said()[:1]:
            qemu.says({"return": {}, "id": one["id"]})
        qemu.domain.kill()
        with pytest.raises(BelljarError):
            await asyncio.wait_for(connecting, 10)
    finally:
        await qemu.close()


async def test_a_server_that_ends_is_told_of_and_one_that_ends_with_its_qemu_is_not(
    spec: DomainSpec, program: str, folder: Path
) -> None:
    servers = await serve(spec, Settings(virtiofsd=program))
    qemu = PlayedQemu(folder, servers)
    servers[0].line.send(b"broken")
    event = await asyncio.wait_for(anext(aiter(qemu.domain.events())), 10)
    assert event.kind is EventKind.SHARE_LOST and isinstance(event.why, ShareLost) and "broken" in event.why.message
    assert servers[1].line.recv(100) == b"here file2"
    servers[1].line.close()
    os.kill(qemu.domain.pid, signal.SIGKILL)
    kinds = [event.kind async for event in qemu.domain.events()]
    assert kinds == [EventKind.SHARE_LOST, EventKind.EXITED]
    await qemu.close()
    assert all(server.over.done() for server in servers)


def test_the_mark_of_qemu_is_not_the_mark_of_a_server() -> None:
    assert marked([b"virtiofsd:belljar-0123456789ab:share0"]) is None
