"""Every way a guest can start, by a real libvirt: by firmware from a disk and from a disc, with the image's own init that is
given the agent by cloud-init, by hand, or not at all. What these guests do else is the other files' affair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live import libvirt_lab
from tests.live.conftest import STORE, Belljar
from tests.live.libvirt_lab import Daemon
from tests.live.stock.images import BOOT_TIMEOUT, stock
from tests.live.stock.test_firmware_of_stock import with_agent
from tests.live.test_discs import cernvm
from tests.live.test_firmware_boot import INIT, bootable_disk, import_as_appliance, install_agent, run_appliance
from tests.live.test_libvirt import nothing_is_left

from belljar.host.python.interpreter import command
from belljar.image import AGENT_PATH, Settings
from belljar.image.store.store import Store

__all__ = ["cernvm"]

slow = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with libvirt_lab.running() as daemon:
        yield daemon


@pytest.fixture
def belljar(tmp_path: Path, daemon: Daemon) -> Iterator[Belljar]:
    command = Belljar(tmp_path, settings=daemon.settings)
    yield command
    command.close()


@pytest.fixture
def own_store(tmp_path: Path, daemon: Daemon) -> Iterator[Belljar]:
    """With a store that is gone afterwards: nobody else boots these disks."""
    settings = {**daemon.settings, "BELLJAR_QEMU_BOOT_TIMEOUT": BOOT_TIMEOUT, "BELLJAR_PATHS_SITE_STORE": str(STORE)}
    command = Belljar(tmp_path / "own", tmp_path / "store", settings)
    (tmp_path / "own").mkdir()
    yield command
    command.close()
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


@pytest.mark.slow
def test_a_disk_with_its_own_boot_loader_runs_jobs(own_store: Belljar, daemon: Daemon, tmp_path: Path) -> None:
    image = Store(STORE, None, Settings()).resolve("debian12")
    (tmp_path / "init").write_text(INIT.format(command=command(AGENT_PATH), folder=AGENT_PATH))
    (tmp_path / "init").chmod(0o755)
    disk = bootable_disk(image, tmp_path, f"{install_agent(own_store, tmp_path)}cd /usr/sbin\nwrite init init\n")
    import_as_appliance(own_store, disk)
    outcome, said = run_appliance(own_store, "auto", "sh", "-c", "cat /proc/cmdline; exit 7")
    assert (outcome["start"], outcome["exit_code"]) == ("cold", 7), outcome
    assert "started-by=syslinux" in said
    nothing_is_left(own_store, daemon)


def test_a_disk_that_nothing_can_be_booted_from_is_found_out_at_once(
    own_store: Belljar, daemon: Daemon, tmp_path: Path
) -> None:
    """libvirt tells its firmware's reset as a power-off: the job ends as it does by the direct driver. The boot loader gives up at
    once (int 0x18)."""
    disk = tmp_path / "data.raw"
    disk.write_bytes((b"\xcd\x18".ljust(64, b"\x90").ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
    assert own_store("image", "import", str(disk), "--name", "data").returncode == 0
    done = own_store.run("--image", "data", "--memory", "128M", "--", "true", timeout=60)
    assert done.returncode == 125
    assert "before a payload was started" in done.stderr.decode()
    nothing_is_left(own_store, daemon)


@pytest.mark.slow
def test_a_disc_is_booted_and_finds_no_metadata_service(cernvm: Belljar, daemon: Daemon, tmp_path: Path) -> None:
    """By libvirt there is none: what such a disc needs is refused, unless the site opens the network."""
    cernvm.env.update(daemon.settings)
    (tmp_path / "pilot").write_text("echo never read\n")
    words = ("--image", "cernvm", "--network", "user", "--user-data", str(tmp_path / "pilot"), "--timeout", "180s")
    assert b"libvirt has no guard" in cernvm.run(*words).stderr
    done = cernvm.run(*words, env={"BELLJAR_NETWORK_EGRESS": "open", "BELLJAR_CONTEXT_METADATA": "off"})
    assert b"the guest powered itself off and said nothing about it" in done.stderr, done.stderr.decode()
    consoles = [path.read_bytes() for path in cernvm.logs.glob("*/console.log")]
    assert any(b"no user data" in console for console in consoles)


@pytest.mark.parametrize("firmware", [pytest.param(name, marks=slow) for name in ("bios", "uefi")])
def test_a_stock_disk_boots_by_its_own_loader(
    own_store: Belljar, daemon: Daemon, tmp_path: Path, firmware: str
) -> None:
    disk = with_agent(own_store, "bookworm", tmp_path)
    done = own_store("image", "import", str(disk), "--name", "mine", "--firmware", firmware)
    disk.unlink()
    assert done.returncode == 0, done.stderr.decode()
    script = "test -d /sys/firmware/efi && echo uefi || echo bios; cat /proc/cmdline"
    outcome, out, err = ran(own_store, "--image", "mine", "--memory", "1G", "--", "sh", "-c", script)
    assert (outcome["start"], outcome["exit_code"]) == ("cold", 0), err
    lines = out.splitlines()
    assert lines[0] == firmware and lines[1].startswith("BOOT_IMAGE=/boot/vmlinuz-"), lines
    nothing_is_left(own_store, daemon)


@pytest.mark.parametrize("context", [pytest.param(way, marks=slow) for way in ("cloud-init", "inject")])
def test_the_images_own_init_is_up_when_the_job_begins(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, context: str
) -> None:
    image = stock(belljar, "bookworm")
    script = "cat /proc/1/comm; hostname; cat; echo err >&2; exit 7"
    words = ["--image", image, "--context", context, "--cwd", "/", "--", "sh", "-c", script]
    outcome, out, err = ran(belljar, *words, data=b"heard\n")
    assert (outcome["exit_code"], outcome["context"], outcome["start"]) == (7, context, "cold"), err
    assert out.split() == ["systemd", f"belljar-{outcome['id']}", "heard"] and err.endswith("err\n")
    nothing_is_left(belljar, daemon)


@pytest.mark.parametrize("context", [pytest.param("cloud-init", marks=slow)])
def test_user_data_of_a_job_is_carried_out_by_cloud_init(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, context: str
) -> None:
    image = stock(belljar, "bookworm")
    (tmp_path / "data").write_text("#cloud-config\nwrite_files:\n- {path: /from-user-data, content: said}\n")
    words = ["--image", image, "--context", context, "--user-data", str(tmp_path / "data"), "--cwd", "/"]
    outcome, out, err = ran(belljar, *words, "--", "cat", "/from-user-data")
    assert (outcome["exit_code"], out) == (0, "said"), err
    nothing_is_left(belljar, daemon)


def ran(belljar: Belljar, *words: str, data: bytes = b"") -> tuple[dict[str, Any], str, str]:
    """A job's outcome, and what it said."""
    report = belljar.folder / "report.json"
    done = belljar.run("--report", str(report), *words, timeout=1700, input=data)
    return json.loads(report.read_bytes()), done.stdout.decode(), done.stderr.decode()
