"""The parts of the libvirt driver that need no libvirt: its logs, the mark, the refusals."""

from __future__ import annotations

import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.hypervisor.libvirt.test_xml import COLD

from belljar.errors import (
    BadSetting,
    BelljarError,
    DomainDied,
    LibvirtRefused,
    NoSpace,
    TemplateError,
    UsageError,
)
from belljar.host.guard.egress import Egress
from belljar.hypervisor import LibvirtSettings, Nic, Settings, load
from belljar.hypervisor.libvirt import connection, domain, driver
from belljar.hypervisor.qemu import host
from belljar.model import NetworkMode

SYSTEM, MAC = "libvirt:qemu:///system", "52:01:02:03:04:05"


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
    domain.take_over(libvirts, into)
    assert into.read_bytes() == b"before\n" + SAID and not libvirts.exists()


def test_what_is_left_of_a_machine_in_libvirts_logs_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "all_pids", list)
    monkeypatch.setattr(domain, "LOCKS", tmp_path)
    for id in ("0123456789ab", "0123456789ac"):
        (tmp_path / f"belljar-{id}.log").touch()
        (tmp_path / f"LCK.._channel_target_domain-8-belljar-{id}_org.belljar.agent").touch()
    settings = LibvirtSettings(log_folder=str(tmp_path))
    load(Settings(), tmp_path / "store", SYSTEM, settings).discard("0123456789ab")
    assert [path.name for path in tmp_path.glob("*.log")] == ["belljar-0123456789ac.log"]
    assert [path.name for path in tmp_path.glob("LCK*")] == [
        "LCK.._channel_target_domain-8-belljar-0123456789ac_org.belljar.agent"
    ]


# -- the driver ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["libvirt", "libvirt:", "libvirt:qemu+ssh://host/system", "libvirt:qemu://host/system", "libvirt:lxc:///system", "kvm",
     "libvirt:qemu:///system?socket=/a b"],
)  # fmt: skip
def test_a_driver_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"machine\.hypervisor"):
        load(Settings(), tmp_path, name)


def test_a_domain_of_libvirts_lives_as_long_as_its_connection_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is init though its supervisor lives."""
    monkeypatch.setattr(host, "has_no_parent", lambda pid: True)
    for name, held, is_kept in (
        (b"guest=belljar-x,debug-threads=on", "x", True), (b"guest=belljar-x,debug-threads=on", "y", False), (b"guest=belljar-x", "x", False),
    ):  # fmt: skip
        monkeypatch.setattr(host, "command_line", lambda pid, name=name: [b"qemu-system-x86_64", b"-name", name])
        monkeypatch.setattr(connection, "is_held", lambda id, held=held: id == held)
        for driver_name in ("qemu", SYSTEM):
            assert load(Settings(), tmp_path, driver_name).is_kept("x", 1) is is_kept


@pytest.mark.parametrize(
    ("nic", "named"),
    [
        (Nic(NetworkMode.USER, MAC, egress=Egress()), "libvirt has no guard"),
        (Nic(NetworkMode.BRIDGE, MAC, has_line=True), "--network bridge"),
        (Nic(NetworkMode.ISOLATED, MAC, has_line=True), "--network isolated"),
    ],
)
def test_a_network_that_libvirt_does_not_have_is_refused_by_name(tmp_path: Path, nic: Nic, named: str) -> None:
    hypervisor = load(Settings(), tmp_path, SYSTEM)
    with pytest.raises(UsageError, match=named):
        hypervisor.check(replace(COLD, nic=nic))
    hypervisor.check(replace(COLD, nic=Nic(NetworkMode.USER, MAC)))


def test_xen_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="guests under Xen are not supported"):
        load(Settings(), tmp_path, "libvirt:xen:///system")


def test_clones_are_refused_in_words(tmp_path: Path) -> None:
    hypervisor = load(Settings(), tmp_path, SYSTEM)
    with pytest.raises(TemplateError, match="booted cold"):
        _ = hypervisor.cloning


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
    told = driver.complaint(refused, tmp_path / "qemu.log")
    assert isinstance(told, kind)
    assert said.encode() in (tmp_path / "qemu.log").read_bytes()
    assert stat.S_IMODE(os.stat(tmp_path / "qemu.log").st_mode) == 0o600


def test_sigkill_is_what_a_wait_status_says() -> None:
    assert os.waitstatus_to_exitcode(domain.KILLED) == -signal.SIGKILL
    assert os.waitstatus_to_exitcode(domain.FAILED) == 1
