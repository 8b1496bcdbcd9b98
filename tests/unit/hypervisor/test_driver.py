"""What the driver decides without starting anything: the mark, the command that confines, what events mean."""

import errno
import os
import signal
import stat
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.hypervisor.test_template import make

from belljar.errors import CommandMissing, HostError, ImageCorrupt, NotPermitted, TemplateError
from belljar.host.processes import start_time
from belljar.hypervisor import Accelerator, Boot, DomainSpec, EventKind, Settings, Traces, account, guest_uuid, load
from belljar.hypervisor.qemu import driver, proof
from belljar.hypervisor.qemu.cmdline import marked
from belljar.hypervisor.qemu.domain import translate
from belljar.hypervisor.qemu.process import launch as process
from belljar.hypervisor.qemu.process.launch import Wiring
from belljar.hypervisor.qemu.template.folders import DISK
from belljar.model import MIB


@pytest.mark.parametrize(
    ("argv", "machine"),
    [
        ([b"/usr/bin/qemu-system-x86_64", b"-nodefaults", b"-name", b"guest=belljar-0123456789ab"], "0123456789ab"),
        ([b"/usr/libexec/qemu-kvm", b"-name", b"guest=belljar-0123456789ab,debug-threads=on"], "0123456789ab"),
        ([b"/usr/bin/setpriv", b"--", b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=belljar-0123456789ab"], "0123456789ab"),
        ([b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=belljar-0123456789ab", b"-uuid", guest_uuid("0123456789ab").encode()], "0123456789ab"),
        ([b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=belljar-0123456789ab", b"-uuid", b"somebody-elses"], None),
        ([b"/usr/bin/qemu-system-x86_64", b"-name", b"guest=somebody-elses"], None),
        ([b"/usr/bin/qemu-system-x86_64", b"-name"], None),
        ([b"/usr/bin/qemu-system-x86_64"], None),
        ([b"grep", b"-name", b"guest=belljar-0123456789ab"], None),
        ([b"vi", b"guest=belljar-0123456789ab"], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_process_is_known_by_its_mark_and_by_nothing_else(argv: list[bytes], machine: str | None) -> None:
    assert marked(argv) == machine


@contextmanager
def claiming(id: str, user: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says it is this machine's QEMU."""
    argv = ["qemu-system-x86_64", "-c", "print('up', flush=True); input()", "-name", f"guest=belljar-{id}"]
    process = subprocess.Popen(
        argv, executable="/usr/bin/python3", stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, cwd="/"
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


STRANGER = 61_234


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_strangers_process_is_no_machines_whatever_its_command_line_says(tmp_path: Path) -> None:
    id, hypervisor = os.urandom(6).hex(), load(Settings(), tmp_path)
    with claiming(id, STRANGER) as strangers, claiming(id) as ours:
        assert {pid for found, pid in hypervisor.alive() if found == id} == {strangers.pid, ours.pid}
        hypervisor.discard(id)
        assert ours.wait(10) == -signal.SIGKILL and strangers.poll() is None
        hypervisor.discard(id, Traces(frozenset({STRANGER + 1}), frozenset({(strangers.pid, 1)})))
        assert strangers.poll() is None
        hypervisor.discard(id, Traces(frozenset({STRANGER})))  # as who this machine's QEMU runs
        assert strangers.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_an_ordinary_user_is_not_stopped_by_a_process_of_such_a_name(tmp_path: Path) -> None:
    id = os.urandom(6).hex()
    with claiming(id) as strangers:
        child = os.fork()
        if child == 0:
            os.setresuid(STRANGER, STRANGER, STRANGER)
            try:
                traces = Traces(frozenset({0}), frozenset({(strangers.pid, start_time(strangers.pid) or 0)}))
                load(Settings(), tmp_path).discard(id, traces)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0 and strangers.poll() is None


def test_the_process_that_was_started_is_found_though_it_says_nothing(tmp_path: Path) -> None:
    """A guest that broke out of its QEMU can write what it likes on that command line."""
    hypervisor = load(Settings(), tmp_path)
    silent, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        began = start_time(silent.pid), start_time(other.pid)
        assert began[0] is not None and began[1] is not None
        hypervisor.discard("0123456789ab", Traces(processes=frozenset({(silent.pid, began[0]), (other.pid, 7)})))
        assert silent.wait(10) == -signal.SIGKILL and other.poll() is None
    finally:
        for process in (silent, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("name", "details", "kind"),
    [
        ("SHUTDOWN", {"guest": True, "reason": "guest-shutdown"}, EventKind.SHUTDOWN),
        ("SHUTDOWN", {"guest": True, "reason": "guest-reset"}, EventKind.RESET),
        ("SHUTDOWN", {"guest": True, "reason": "guest-panic"}, None),
        ("SHUTDOWN", {"guest": False, "reason": "host-qmp-quit"}, None),
        ("GUEST_PANICKED", {"action": "poweroff", "info": {}}, EventKind.PANICKED),
        ("BLOCK_IO_ERROR", {"nospace": True, "action": "stop", "reason": "No space left on device"}, EventKind.DISK_FULL),
        ("BLOCK_IO_ERROR", {"nospace": False, "reason": "Input/output error"}, EventKind.DISK_ERROR),
        ("RTC_CHANGE", {"offset": 1}, None),
        ("STOP", {}, None),
    ],
)  # fmt: skip
def test_what_qemu_reports_is_told_in_our_words(name: str, details: dict[str, object], kind: EventKind | None) -> None:
    event = translate(name, details)
    assert (event.kind if event else None) is kind


def test_root_gives_every_privilege_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = process.confined(["qemu"], (1000, 100))
    assert words[1:] == [
        "--pdeathsig=KILL", "--no-new-privs", "--reuid=1000", "--regid=100", "--clear-groups", "--bounding-set=-all",
        "--inh-caps=-all", "--ambient-caps=-all", "--", "qemu",
    ]  # fmt: skip


def test_root_keeps_for_a_share_what_9p_needs_and_for_kvm_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = process.confined(["qemu"], (0, 0), capabilities=("chown", "fowner"), groups=(106,))
    assert "--bounding-set=-all,+chown,+fowner" in words
    assert "--groups=106" in words


def test_an_ordinary_user_stays_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert process.confined(["qemu"], (1000, 100))[1:] == ["--pdeathsig=KILL", "--no-new-privs", "--", "qemu"]


def test_a_host_without_setpriv_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.commands.which", lambda name: None)
    with pytest.raises(CommandMissing) as caught:
        process.confined(["qemu"], (0, 0))
    assert "util-linux" in caught.value.hint


def test_tcg_by_the_settings_asks_nobody(tmp_path: Path) -> None:
    hypervisor = load(Settings(accelerator=Accelerator.TCG, binary="/no/such/qemu"), tmp_path)
    assert hypervisor.accelerator(Boot())[0] is Accelerator.TCG
    assert list(tmp_path.iterdir()) == []


def test_without_kvm_auto_falls_back_and_kvm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "obstacle", lambda: "/dev/kvm does not exist")
    auto, insisting = (load(Settings(accelerator=Accelerator(name)), tmp_path) for name in ("auto", "kvm"))
    assert auto.accelerator(Boot()) == (Accelerator.TCG, "/dev/kvm does not exist")
    with pytest.raises(HostError, match="does not exist"):
        insisting.accelerator(Boot())


def test_a_proof_that_could_not_be_tried_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has no process to spare for a moment has KVM all the same."""
    monkeypatch.setattr(proof, "obstacle", lambda: "")
    monkeypatch.setattr(proof, "has_native_flag", lambda cpuinfo: True)
    tried = list[Sequence[str]]()

    def refused(argv: Sequence[str], **more: object) -> int:
        tried.append(argv)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    hypervisor = driver.QemuHypervisor(Settings(), tmp_path)
    assert hypervisor.abilities.binary  # asked before there is no process to spare
    monkeypatch.setattr(subprocess, "Popen", refused)
    for _ in range(2):
        why = "the tiny guest could not be started: Resource temporarily unavailable"
        assert hypervisor.accelerator(Boot()) == (Accelerator.TCG, why)
    assert len(tried) == 2 and not list((tmp_path / "qemu").glob("kvm-*.json"))


def test_a_qemu_that_is_missing_is_an_error_before_anything_is_made(tmp_path: Path) -> None:
    hypervisor = driver.QemuHypervisor(Settings(binary="/no/such/qemu"), tmp_path)
    with pytest.raises(CommandMissing, match="/no/such/qemu"):
        _ = hypervisor.abilities


def test_a_file_of_ours_is_lent_by_a_path_that_needs_no_walk(tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(b"kernel")
    (tmp_path / "kernel").chmod(0o644)
    with Wiring((os.geteuid() + 1, 1)) as wires:
        path = wires.readable(tmp_path / "kernel")
        assert Path(path).read_bytes() == b"kernel"
        assert len(wires.fds) == 1


def test_a_file_that_qemus_user_may_not_read_is_lent_as_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel").write_bytes(b"kernel")
    (tmp_path / "kernel").chmod(0o600)
    with Wiring((os.geteuid() + 1, 1)) as wires:
        path = wires.readable(tmp_path / "kernel")
        assert Path(path).read_bytes() == b"kernel"
        assert os.stat(path).st_mode & stat.S_IROTH
        fds = list(wires.fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_missing_file_and_a_link_are_not_lent(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with Wiring((0, 0)) as wires:
        with pytest.raises(ImageCorrupt, match="missing"):
            wires.open(tmp_path / "gone", os.O_RDONLY)
        with pytest.raises(HostError, match="cannot be opened"):
            wires.open(tmp_path / "link", os.O_RDONLY)
        assert wires.fds == []


def test_kvm_is_tried_by_the_account_that_qemu_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may have given the device to a role account alone. This host's user database stands in for that site's."""
    accounts = {"qemu": (107, 36), "belljar": (990, 990)}

    def getpwnam(name: str) -> SimpleNamespace:
        uid, gid = accounts[name]
        return SimpleNamespace(pw_uid=uid, pw_gid=gid)

    monkeypatch.setattr("pwd.getpwnam", getpwnam)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert account("qemu") == (107, 36)
    assert account("auto") == (990, 990)
    del accounts["belljar"]
    assert account("auto") == (65534, 65534)
    with pytest.raises(NotPermitted, match="ghost"):
        account("ghost")


# -- templates -----------------------------------------------------------------------------------------------------------


def test_a_clone_is_not_mixed_of_a_template_and_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job makes the template anew while this one opens its files."""
    hypervisor = driver.QemuHypervisor(Settings(), tmp_path)
    template = make(hypervisor._templates)
    base = os.fsencode(template.folder / DISK)
    (template.folder / DISK).chmod(0o600)
    (template.folder / DISK).write_bytes(b"QFI\xfb" + bytes(60))
    overlay = tmp_path / "overlay"
    overlay.write_bytes(b"QFI\xfb" + struct.pack(">IQI", 3, 20, len(base)) + base)
    spec = DomainSpec(
        "0123456789ab", 1, 8 * MIB, "d" * 64, Boot(), overlay, MIB, Accelerator.TCG, tmp_path, owner=(os.geteuid(), os.getegid())
    )  # fmt: skip
    started = []
    monkeypatch.setattr(hypervisor, "_run", lambda *_: started.append("mixed"))
    opened = Wiring.disk

    def then_made_anew(wires: Wiring, overlay: Path) -> dict[Path, int]:
        fds = opened(wires, overlay)
        make(hypervisor._templates, created=2000.0)
        return fds

    monkeypatch.setattr(Wiring, "disk", then_made_anew)
    with pytest.raises(TemplateError, match="cannot be used any more"):
        hypervisor.start(spec, template)
    assert started == []
