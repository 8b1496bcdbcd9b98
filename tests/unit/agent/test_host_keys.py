"""A clone's ssh server shows keys of its own: those of its template's boot are replaced, those of the image's owner stay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.agent.guest import network
from belljar.agent.guest.network import host_keys_since, renew_host_keys, service_of
from belljar.agent.guest.system import Refused, read_file

KEYGEN = """\
#!/bin/sh
while [ "$1" != -f ]; do [ "$1" = -t ] && kind=$2; shift; done
[ -e "$2" ] && exit 1  # the real one would ask whether to overwrite
echo "new $kind" > "$2"; echo "new $kind public" > "$2.pub"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where keys lie, with a program that makes some."""
    program = tmp_path / "ssh-keygen"
    program.write_text(KEYGEN)
    program.chmod(0o755)
    monkeypatch.setattr(network, "SSH_KEYGEN", str(program))
    monkeypatch.setattr(network, "SSHD_PIDS", ())
    folder = tmp_path / "ssh"
    folder.mkdir()
    return folder


@pytest.fixture
def key(folder: Path) -> Callable[..., str]:
    def make(kind: str, age: float = 0.0) -> str:
        path = folder / f"ssh_host_{kind}_key"
        for file in (path, path.with_name(f"{path.name}.pub")):
            file.write_text(f"old {kind}\n")
            os.utime(file, (time.time() - age, time.time() - age))
        return str(path)

    return make


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_only_keys_that_this_boot_has_made_are_the_templates(folder: Path, key: Callable[..., str]) -> None:
    key("ecdsa", age=100)
    young = key("ed25519", age=10)
    (folder / "sshd_config").write_text("")
    (folder / "ssh_host_rsa_key").symlink_to("/etc/passwd")
    assert host_keys_since(time.time() - 50, str(folder)) == [young]
    assert host_keys_since(0, str(folder / "none")) == []


def test_each_kind_is_made_anew_but_for_those_that_take_long(folder: Path, key: Callable[..., str]) -> None:
    old = [key("ecdsa"), key("ed25519"), key("rsa")]
    (folder / "ssh_host_ed25519_key-cert.pub").write_text("of the old key\n")
    renew_host_keys(old, str(folder))
    kept = {name: (folder / name).read_text() for name in names(folder)}
    assert kept == {
        "ssh_host_ecdsa_key": "new ecdsa\n", "ssh_host_ecdsa_key.pub": "new ecdsa public\n",
        "ssh_host_ed25519_key": "new ed25519\n", "ssh_host_ed25519_key.pub": "new ed25519 public\n",
    }  # fmt: skip


def test_a_server_that_had_an_rsa_key_alone_has_one_key_afterwards(folder: Path, key: Callable[..., str]) -> None:
    renew_host_keys([key("rsa")], str(folder))
    assert names(folder) == ["ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"]


def test_no_keys_of_the_template_is_nothing_to_do(folder: Path) -> None:
    renew_host_keys([], str(folder))
    assert names(folder) == []


def test_what_a_killed_attempt_has_left_is_no_obstacle(folder: Path, key: Callable[..., str]) -> None:
    old = [key("ed25519")]
    (folder / "ssh_host_ed25519_key.new").write_text("half")
    renew_host_keys(old, str(folder))
    assert Path(old[0]).read_text() == "new ed25519\n" and len(names(folder)) == 2


@pytest.mark.parametrize("program", ["/no/such/ssh-keygen", "/bin/false"])
def test_without_new_keys_the_guest_says_so_and_keeps_the_old_ones(
    folder: Path, key: Callable[..., str], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(network, "SSH_KEYGEN", program)
    old = [key("ed25519")]
    with pytest.raises(Refused, match="no host keys of its own"):
        renew_host_keys(old, str(folder))
    assert Path(old[0]).read_text() == "old ed25519\n"


def test_only_an_ssh_server_is_told_to_read_its_keys_anew(
    folder: Path, key: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted: list[int] = []
    pid = folder / "sshd.pid"
    pid.write_text(f"{os.getpid()}\n")  # this process's name is another one
    monkeypatch.setattr(network, "SSHD_PIDS", (str(pid),))
    monkeypatch.setattr(network, "restart_sshd", restarted.append)
    renew_host_keys([key("ed25519")], str(folder))
    assert restarted == []
    real = read_file
    monkeypatch.setattr(network, "read_file", lambda path, most: b"sshd\n" if "comm" in path else real(path, most))
    renew_host_keys([key("ed25519")], str(folder))
    assert restarted == [os.getpid()]


@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        (b"0::/system.slice/ssh.service\n", "ssh.service"),
        (b"12:cpu:/\n1:name=systemd:/system.slice/sshd.service\n", "sshd.service"),
        (b"0::/system.slice/containerd.service/x\n", ""),
        (b"0::/user.slice/user-0.slice/session-1.scope\n", ""),
        (b"0::/\n", ""),
        (b"", ""),
    ],
)
def test_a_server_of_systemd_is_known_by_its_group(groups: bytes, unit: str) -> None:
    assert service_of(groups) == unit


@pytest.mark.parametrize("status", [0, 1])
def test_a_server_of_systemd_is_restarted_by_systemd(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    called = folder / "called"
    systemctl = folder / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" > {called}\nexit {status}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(network, "read_file", lambda path, most=0: b"0::/system.slice/ssh.service\n")
    if status:
        with pytest.raises(Refused, match=r"ssh\.service.*did not start again"):
            network.restart_sshd(1)
    else:
        network.restart_sshd(1)
    assert called.read_text() == "restart ssh.service\n"


def test_any_other_server_reads_its_keys_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(network, "read_file", lambda path, most=0: b"0::/\n")
    monkeypatch.setattr(network, "kill_quietly", lambda *words: signals.append(words))
    network.restart_sshd(7)
    assert signals == [(7, signal.SIGHUP)]
