"""Networks with real packets again, by libvirt: the guest is the daemon's, what carries its frames is ours."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import libvirt_lab, test_networks
from tests.live.conftest import Belljar, command_line
from tests.live.libvirt_lab import Daemon
from tests.live.net_lab import lab
from tests.live.test_libvirt import nothing_is_left
from tests.live.test_libvirt_contract import again
from tests.live.test_networks import InLab, host

__all__ = ["host", "lab"]

ALWAYS = ("test_a_guarded_machine_reaches_the_world_and_nothing_inside",)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with libvirt_lab.running() as daemon:
        yield daemon


@pytest.fixture
def belljar(tmp_path: Path, daemon: Daemon) -> Iterator[Belljar]:
    command = Belljar(tmp_path, settings=daemon.settings)
    yield command
    command.close()


for _name, _test in vars(test_networks).items():
    if _name.startswith("test_") and isinstance(_test, types.FunctionType) and "host" in _test.__annotations__:
        globals()[_name] = again(_test, always=ALWAYS)


def carriers(belljar: Belljar) -> list[int]:
    return [pid for pid in belljar.domains() if "\0-M\0none\0" in command_line(pid)]


@pytest.mark.parametrize("victim", ["carrier", pytest.param("guest", marks=pytest.mark.slow)])
def test_a_machine_ends_when_what_carries_its_network_is_killed(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, victim: str
) -> None:
    report = tmp_path / "r"
    keeper = belljar.popen("run", "--network", "user", "--report", str(report), "--", "sh", "-c", "echo up; sleep 100")
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    (carrier,) = carriers(belljar)
    (guest,) = set(belljar.domains()) - {carrier}
    os.kill(carrier if victim == "carrier" else guest, signal.SIGKILL)
    _, err = keeper.communicate(timeout=60)
    assert keeper.returncode == 125, err
    told = json.loads(report.read_text())
    if victim == "carrier":
        assert (told["class"], told["error"]) == ("node", "NetworkFailed"), told
    nothing_is_left(belljar, daemon)


def test_nothing_carries_on_when_the_supervisor_is_killed(belljar: Belljar, daemon: Daemon) -> None:
    keeper = belljar.popen("run", "--network", "user", "--", "sh", "-c", "echo up; sleep 100")
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    (carrier,) = carriers(belljar)
    keeper.kill()
    keeper.wait(10)
    assert belljar("reap").returncode == 0
    assert command_line(carrier) == ""
    nothing_is_left(belljar, daemon)


@pytest.mark.slow
def test_a_guest_reads_its_user_data_from_the_metadata_service(host: InLab, tmp_path: Path, daemon: Daemon) -> None:
    (tmp_path / "data").write_text("hello\n")
    code = "import urllib.request as r; print(r.urlopen('http://169.254.169.254/latest/user-data', timeout=20).read())"
    done = host("run", "--network", "user", "--user-data", str(tmp_path / "data"), "--", "python3", "-c", code)
    assert (done.returncode, done.stdout) == (0, b"b'hello\\n'\n"), done.stderr
    nothing_is_left(host.belljar, daemon)


@pytest.mark.slow
def test_guest_and_carrier_are_both_the_user_that_qemu_is_to_be(daemon: Daemon) -> None:
    """In folders that this user can walk through; QEMU opens its disk by name."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o711)
    belljar = Belljar(folder, settings={**daemon.settings, "BELLJAR_QEMU_USER": "nobody"})
    try:
        belljar.scratch.mkdir(mode=0o711)
        keeper = belljar.popen("run", "--network", "user", "--", "sh", "-c", "echo up; read line; echo $line", stdin=-1)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n", keeper.stderr and keeper.stderr.read()
        assert {os.stat(f"/proc/{pid}").st_uid for pid in belljar.domains()} == {pwd.getpwnam("nobody").pw_uid}
        assert len(belljar.domains()) == 2
        out, err = keeper.communicate(b"well\n", timeout=60)
        assert (keeper.returncode, out) == (0, b"well\n"), err
        nothing_is_left(belljar, daemon)
    finally:
        belljar.close()
        shutil.rmtree(folder)
