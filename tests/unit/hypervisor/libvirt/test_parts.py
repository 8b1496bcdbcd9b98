"""The parts of the libvirt driver that need no libvirt: deadlines, the lines, the mark, the refusals."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.hypervisor.libvirt.test_xml import COLD

from belljar.errors import (
    BadSetting,
    BelljarError,
    DomainDied,
    DriverLacks,
    HostError,
    ImageCorrupt,
    LibvirtRefused,
    NoSpace,
    NotPermitted,
    TemplateError,
)
from belljar.host.guard.egress import Egress
from belljar.hypervisor import DomainSpec, LibvirtSettings, Nic, Settings, cloning_of, load
from belljar.hypervisor.libvirt import driver, lines, link, starting
from belljar.hypervisor.libvirt.lines import Lines, can_reach, has_keeper
from belljar.hypervisor.qemu import abilities
from belljar.hypervisor.qemu import driver as direct
from belljar.hypervisor.qemu.abilities import Abilities
from belljar.hypervisor.qemu.cmdline import machine_uuid
from belljar.model import NetworkMode

ME = (os.geteuid(), os.getegid())
SYSTEM = "libvirt:qemu:///system"


# -- deadlines -----------------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_costs_its_deadline_and_no_more() -> None:
    never = threading.Event()
    begin = time.monotonic()
    with pytest.raises(link.Overdue):
        link.bounded(never.wait, 0.05)
    assert time.monotonic() - begin < 5
    never.set()


def test_a_call_gives_its_result_or_its_error() -> None:
    assert link.bounded(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        link.bounded(lambda: 1 // 0, 5)


def test_only_connections_to_a_daemon_of_libvirt_are_ours_to_shut(tmp_path: Path) -> None:
    found = {}
    for name in ("libvirt-sock", "virtqemud-sock", "something-else"):
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / name))
        server.listen(1)
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(tmp_path / name))
        found[name] = server, client
    ends = link.ends()
    inodes = {name: os.fstat(client.fileno()).st_ino for name, (_, client) in found.items()}
    assert {name for name, inode in inodes.items() if inode in ends} == {"libvirt-sock", "virtqemud-sock"}
    for server, client in found.values():
        server.close()
        client.close()
    for end in ends.values():
        end.close()


# -- the log that libvirt keeps of a domain ------------------------------------------------------------------------------

LOG = b"""2026-11-22 02:17:01.120+0000: starting up libvirt version: 9.0.0, qemu version: 7.2.22, kernel: 6.1, hostname: node
LC_ALL=C \\
/usr/bin/qemu-system-x86_64 \\
-name guest=belljar-0123456789ab,debug-threads=on \\
-msg timestamp=on
2026-11-22T02:17:03.006131Z qemu-system-x86_64: terminating on signal 15 from pid 7
**
ERROR:../util/main.c: should not be reached
2026-11-22 02:17:05.991+0000: shutting down, reason=crashed
"""
SAID = b"".join(LOG.splitlines(keepends=True)[5:8])


def test_libvirts_log_of_a_domain_goes_with_it_and_what_qemu_said_stays(tmp_path: Path) -> None:
    libvirts, into = tmp_path / "log", tmp_path / "qemu.log"
    libvirts.write_bytes(LOG)
    into.write_bytes(b"before\n")
    ours = Lines(tmp_path / "l" / "0123456789ab", ME, log=(libvirts, into))
    ours.open()
    ours.close()
    assert into.read_bytes() == b"before\n" + SAID and not libvirts.exists()
    ours.close()
    assert into.read_bytes() == b"before\n" + SAID


def test_what_is_left_of_a_machine_in_libvirts_logs_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "all_pids", list)
    for id in ("0123456789ab", "0123456789ac"):
        (tmp_path / f"belljar-{id}.log").touch()
    settings = LibvirtSettings(folder=str(tmp_path / "l"), log_folder=str(tmp_path))
    load(Settings(), tmp_path / "store", SYSTEM, settings).discard("0123456789ab")
    assert [path.name for path in tmp_path.glob("*.log")] == ["belljar-0123456789ac.log"]


# -- the lines -----------------------------------------------------------------------------------------------------------


def test_what_connects_is_accepted_and_leaves_no_name_behind(tmp_path: Path) -> None:
    ours = Lines(tmp_path / "l" / "0123456789ab", ME)
    ours.open()
    try:
        assert stat.S_IMODE(os.stat(ours.path("channel")).st_mode) == 0o600
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(ours.path("channel")))
        line = ours.accept("channel")
        assert not line.getblocking() and not ours.path("channel").exists()
        client.close()
        line.close()
        assert has_keeper(tmp_path / "l", "0123456789ab")
    finally:
        ours.close()
    assert not has_keeper(tmp_path / "l", "0123456789ab") and list((tmp_path / "l").iterdir()) == []


def test_a_process_that_never_connects_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ACCEPTING", 0.05)
    ours = Lines(tmp_path / "l" / "0123456789ab", ME)
    ours.open()
    try:
        with pytest.raises(LibvirtRefused, match="has not connected its console"):
            ours.accept("console")
    finally:
        ours.close()


def test_a_folder_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="too long for the path of a socket"):
        Lines(tmp_path / ("x" * 100) / "0123456789ab", ME).open()


def test_what_a_user_may_reach_is_seen_by_the_modes_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "shut").mkdir(mode=0o700)
    stranger = (12345, 12345)
    for folder, mode, reaches in (("open", 0o644, True), ("open", 0o600, False), ("shut", 0o644, False)):
        path = tmp_path / folder / "file"
        path.write_bytes(b"x")
        path.chmod(mode)
        above = all(os.stat(parent).st_mode & 0o1 for parent in tmp_path.resolve().parents)
        assert can_reach(path, stranger) == (reaches and above and bool(os.stat(tmp_path).st_mode & 0o1))
        assert can_reach(path, ME)


def test_a_disk_that_qemu_cannot_reach_is_refused_before_anything_is_asked_for(tmp_path: Path) -> None:
    ours = Lines(tmp_path / "l" / "0123456789ab", (12345, 12345))
    (tmp_path / "disk").write_bytes(b"x")
    (tmp_path / "disk").chmod(0o600)
    with pytest.raises(NotPermitted, match="uid 12345"):
        ours.reached(tmp_path / "disk")
    with pytest.raises(ImageCorrupt, match="missing"):
        ours.reached(tmp_path / "no-disk")


# -- the driver ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["libvirt", "libvirt:", "libvirt:qemu+ssh://host/system", "libvirt:qemu://host/system", "libvirt:lxc:///system", "kvm",
     "libvirt:qemu:///system?socket=/a b"],
)  # fmt: skip
def test_a_driver_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"machine\.hypervisor"):
        load(Settings(), tmp_path, name)


MARKED = [b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=belljar-0123456789ab,debug-threads=on"]


@pytest.mark.parametrize(
    ("argv", "machine"),
    [
        ([*MARKED, b"-uuid", machine_uuid("0123456789ab").encode()], "0123456789ab"),
        ([*MARKED, b"-uuid", machine_uuid("0123456789ac").encode()], None),  # somebody else's domain of this name
        (MARKED, None),
        ([b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=belljar-0123456789ab"], None),  # the direct driver's
        ([b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=other,debug-threads=on"], None),
        ([b"/usr/bin/qemu-system-x86_64", b"-name"], None),
        ([b"virsh", b"-name", b"guest=belljar-0123456789ab,debug-threads=on"], None),
        ([], None),
    ],
)
def test_a_process_of_libvirts_is_known_by_its_mark(argv: list[bytes], machine: str | None) -> None:
    assert driver.marked(argv) == machine


@pytest.mark.parametrize(
    ("argv", "folder"),
    [
        ([b"qemu", b"-chardev", b"socket,id=charchannel0,path=/run/l/0123456789ab/channel"], "/run/l"),
        ([b"qemu", b"-chardev", b"socket,id=charchannel0,path=/run/l/0123456789ab/channel,server=on"], "/run/l"),
        ([b"qemu", b"-chardev", b"socket,id=charchannel0,path=/run/l/ba9876543210/channel"], None),
        ([b"qemu", b"-chardev", b"socket,id=charchannel0,path=l/0123456789ab/channel"], None),
        ([b"qemu"], None),
    ],
)
def test_a_machines_folder_is_known_by_its_command_line(argv: list[bytes], folder: str | None) -> None:
    assert driver.folder_of(argv, "0123456789ab") == (Path(folder) if folder else None)


def test_a_machine_whose_folder_is_not_that_of_the_settings_any_more_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor lives; the site has changed `libvirt.folder` meanwhile."""
    ours = Lines(tmp_path / "old" / "0123456789ab", ME)
    ours.open()
    argv = [b"qemu", b"-chardev", f"socket,id=c,path={ours.path('channel')}".encode()]
    monkeypatch.setattr(driver, "command_line", lambda pid: argv)
    hypervisor = load(Settings(), tmp_path, SYSTEM, LibvirtSettings(folder=str(tmp_path / "new")))
    assert hypervisor.is_kept("0123456789ab", 1)
    ours.close()
    assert not hypervisor.is_kept("0123456789ab", 1)


def test_the_direct_driver_judges_no_domain_of_libvirts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is init though its supervisor lives."""
    monkeypatch.setattr(direct, "has_no_parent", lambda pid: True)
    for name, is_kept in ((b"guest=belljar-x,debug-threads=on", True), (b"guest=belljar-x", False)):
        monkeypatch.setattr(direct, "command_line", lambda pid, name=name: [b"qemu-system-x86_64", b"-name", name])
        assert load(Settings(), tmp_path).is_kept("x", 1) is is_kept


def with_nic(**changes: Any) -> DomainSpec:
    return replace(COLD, nic=replace(Nic(NetworkMode.USER, "52:01:02:03:04:05"), **changes))


OLD = Abilities("/usr/bin/qemu-kvm", "x", (6, 2, 0), "QEMU emulator version 6.2.0", frozenset(), frozenset())


@pytest.mark.parametrize(
    "spec",
    [
        with_nic(), with_nic(egress=Egress()), with_nic(has_line=True),
        with_nic(mode=NetworkMode.BRIDGE, has_line=True), with_nic(mode=NetworkMode.ISOLATED, has_line=True),
    ],
)  # fmt: skip
def test_a_qemu_that_cannot_send_frames_to_a_socket_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: DomainSpec
) -> None:
    monkeypatch.setattr(abilities, "ask", lambda binary, memory: OLD)
    hypervisor = load(Settings(), tmp_path, SYSTEM, LibvirtSettings(folder=str(tmp_path / "l")))
    with pytest.raises(DriverLacks, match=r"6\.2\.0: by libvirt it takes QEMU 7\.2"):
        hypervisor.start(spec)
    assert not (tmp_path / "l").exists()


def test_xen_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="guests under Xen are not supported"):
        load(Settings(), tmp_path, "libvirt:xen:///system")


def test_clones_are_refused_in_words(tmp_path: Path) -> None:
    hypervisor = load(Settings(), tmp_path, SYSTEM)
    assert "booted cold" in str(hypervisor.cloning)
    with pytest.raises(TemplateError, match="booted cold"):
        cloning_of(hypervisor)


# -- what libvirt says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("internal error: process exited while connecting to monitor: 2026-11-20T16:00:00.1Z qemu-system-x86_64: cannot set up guest memory 'pc.ram': Cannot allocate memory", BelljarError),
        ("internal error: qemu unexpectedly closed the monitor: qemu-system-x86_64: -blockdev x: Could not open '/x': No space left on device", NoSpace),
        ("internal error: process exited while connecting to monitor: qemu-system-x86_64: something new", DomainDied),
        ("unsupported configuration: no such thing", LibvirtRefused),
    ],
)  # fmt: skip
def test_a_refusal_that_quotes_qemu_is_qemus(tmp_path: Path, said: str, kind: type[BelljarError]) -> None:
    refused = LibvirtRefused(f"libvirt refused domain belljar-x: {said}")
    told = starting.complaint(refused, replace(COLD, folder=tmp_path))
    assert isinstance(told, kind)
    assert said.encode() in (tmp_path / "qemu.log").read_bytes()
    assert stat.S_IMODE(os.stat(tmp_path / "qemu.log").st_mode) == 0o600


def test_events_wait_for_whoever_listens_late() -> None:
    heard, told = starting.Heard(), list[Any]()
    event = starting.DomainEvent(starting.EventKind.SHUTDOWN)
    heard.tell(event)
    heard.listen(told.append)
    heard.tell(event)
    assert told == [event, event]


def test_sigkill_is_what_a_wait_status_says() -> None:
    from belljar.hypervisor.libvirt import domain

    assert os.waitstatus_to_exitcode(domain.KILLED) == -signal.SIGKILL
    assert os.waitstatus_to_exitcode(domain.FAILED) == 1
