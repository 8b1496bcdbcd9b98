"""Stock disks that start as on a real machine: SeaBIOS or OVMF, GRUB, their own initial ramdisk and init. The agent was put into
the disk by the steps of docs/jobs/images.md, or belljar brings it: by the workshop, or by cloud-init."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.build import CACHE, ROOT_AT, build, execute, recipe_of
from tests.live.stock.images import BOOT_TIMEOUT, stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SUITES = ("bookworm", "bullseye", "trixie")
UNIT = "belljar-agent.service"
INSTALL = f"""\
mkdir /usr/lib/belljar
cd /usr/lib/belljar
write agent.py agent.py
cd /etc/systemd/system
write {UNIT} {UNIT}
cd multi-user.target.wants
symlink {UNIT} ../{UNIT}
"""


@pytest.fixture
def belljar(tmp_path: Path) -> Iterator[Belljar]:
    command = Belljar(tmp_path, store=tmp_path / "store", settings={"BELLJAR_QEMU_BOOT_TIMEOUT": BOOT_TIMEOUT})
    yield command
    command.close()
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def with_agent(belljar: Belljar, name: str, folder: Path) -> Path:
    """The stock disk, raw, with the agent and its unit in it."""
    raw = folder / "disk.raw"
    execute("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(build(recipe_of(name))), str(raw))
    (folder / "agent.py").write_bytes(belljar("image", "agent", "--print").stdout)
    (folder / UNIT).write_bytes(belljar("image", "agent", "--unit").stdout)
    (folder / "orders").write_text(INSTALL)
    execute("sh", "-c", 'cd "$0" && debugfs -w -f orders "$1"', str(folder), f"{raw}?offset={ROOT_AT}")
    return raw


@pytest.mark.parametrize("firmware", ["bios", "uefi"])
def test_a_stock_disk_boots_by_its_own_loader_and_is_cloned(belljar: Belljar, tmp_path: Path, firmware: str) -> None:
    disk = with_agent(belljar, "bookworm", tmp_path)
    done = belljar("image", "import", str(disk), "--name", "mine", "--firmware", firmware)
    disk.unlink()
    assert done.returncode == 0, done.stderr.decode()
    facts = belljar.json("image", "show", "mine")["facts"]
    assert (facts["boots_by"], facts["use_firmware"], facts["agent"]) == ("firmware", firmware, True)
    report = tmp_path / "report"
    script = "test -d /sys/firmware/efi && echo uefi || echo bios; cat /proc/cmdline; systemctl is-system-running"
    for number in range(2):
        words = ["--image", "mine", "--memory", "1G", "--start", "clone", "--report", str(report)]
        done = belljar.run(*words, "--", "sh", "-c", script, timeout=1600)
        outcome, lines = json.loads(report.read_bytes()), done.stdout.decode().splitlines()
        assert outcome["start"] == "clone", (number, outcome, done.stderr.decode())
        assert lines[0] == firmware and lines[1].startswith("BOOT_IMAGE=/boot/vmlinuz-"), lines
    assert belljar.leftovers() == [] and CACHE.exists()


@pytest.mark.parametrize("firmware", ["bios", "uefi"])
@pytest.mark.parametrize("context", ["inject", "cloud-init"])
@pytest.mark.parametrize("suite", SUITES)
def test_the_agent_is_brought_into_a_disk_that_boots_by_its_own_loader(
    belljar: Belljar, tmp_path: Path, suite: str, firmware: str, context: str
) -> None:
    image = stock(belljar, suite, "--firmware", firmware)
    facts = belljar.json("image", "show", image)["facts"]
    assert (facts["boots_by"], facts["use_firmware"]) == ("firmware", firmware)
    assert "agent" not in facts
    script = (
        "test -d /sys/firmware/efi && echo uefi || echo bios; cat /proc/cmdline; cat /proc/1/comm; hostname; exit 7"
    )
    hosts = set()
    for _ in range(2):
        words = ["--image", image, "--context", context, "--memory", "1G", "--start", "clone"]
        done = belljar.run(*words, "--report", str(tmp_path / "report"), "--", "sh", "-c", script, timeout=1600)
        outcome, lines = json.loads((tmp_path / "report").read_bytes()), done.stdout.decode().splitlines()
        assert done.returncode == 7, (outcome, done.stderr.decode())
        assert (outcome["start"], outcome["context"]) == ("clone", context), outcome
        assert (lines[0], lines[2]) == (firmware, "systemd") and lines[1].startswith("BOOT_IMAGE=/boot/vmlinuz-"), lines
        hosts.add(lines[3])
    assert len(hosts) == 2 and belljar.leftovers() == []


def test_a_host_without_uefi_firmware_says_what_to_install(belljar: Belljar, tmp_path: Path) -> None:
    disk = with_agent(belljar, "bookworm", tmp_path)
    assert belljar("image", "import", str(disk), "--name", "mine", "--firmware", "uefi").returncode == 0
    disk.unlink()
    done = belljar.run("--image", "mine", "--", "true", env={"BELLJAR_QEMU_UEFI": "/no/such/OVMF.fd"})
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 125 and "/no/such/OVMF.fd: no readable file" in lines[0] and "qemu.uefi" in lines[1]
    assert belljar.leftovers() == []
