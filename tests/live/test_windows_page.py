"""What docs/operate/windows.md says of belljar, with a disk that looks like a Windows to it: a GPT, an EFI system partition, NTFS."""

from __future__ import annotations

import re
import subprocess
import uuid
from pathlib import Path

import pytest
from tests.live.conftest import ROOT, Belljar
from tests.live.stock import build

PAGE = (ROOT / "docs/operate/windows.md").read_text()
BASIC_DATA = uuid.UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")


@pytest.fixture
def windows(belljar: Belljar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Imported as the page says."""
    disk = tmp_path / "windows.raw"
    with open(disk, "wb") as file:
        file.truncate(build.DISK_SIZE)
    monkeypatch.setattr(build, "LINUX_X86_64_ROOT", BASIC_DATA)
    build.write_table(build.recipe_of("bookworm"), disk)
    with open(disk, "r+b") as file:
        file.seek(build.ROOT_AT)
        file.write(b"\xeb\x52\x90NTFS    ".ljust(510, b"\0") + b"\x55\xaa")
    system = f"{disk}@@{build.ESP_AT}"
    subprocess.run(
        ["mformat", "-i", system, "-F", "-T", str((build.ROOT_AT - build.ESP_AT) // build.SECTOR), "::"], check=True
    )
    subprocess.run(["mmd", "-i", system, "::/EFI", "::/EFI/Microsoft"], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(disk), str(tmp_path / "windows.qcow2")], check=True)
    belljar.env |= {
        "BELLJAR_PATHS_SITE_STORE": belljar.env["BELLJAR_PATHS_STORE"],
        "BELLJAR_PATHS_STORE": str(tmp_path / "store"),
    }
    (words,) = re.findall(r"^belljar (image import .*)$", PAGE, re.MULTILINE)
    done = belljar(*words.replace("windows.qcow2", str(tmp_path / "windows.qcow2")).split())
    assert done.returncode == 0, done.stderr.decode()
    return "windows"


def test_own_work_runs_and_what_the_page_calls_refused_is_refused(
    belljar: Belljar, windows: str, tmp_path: Path
) -> None:
    for words, why in (
        (("--context", "ramdisk"), "no kernel that belljar can start"),
        (("--start", "clone"), "waited 2 s for the template's agent"),
    ):
        done = belljar.run("--image", windows, *words, "--", "cmd", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "2"})
        assert done.returncode == 125 and why in done.stderr.decode(), done.stderr
    (script,) = re.findall(r"^cat >work.ps1 <<'END'\n(.*?)^END$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "work.ps1").write_text(script)
    (words,) = re.findall(r"^belljar (run --image windows .*)$", PAGE, re.MULTILINE)
    asked = (
        words.replace("8h", "2s")
        .replace("2m", "1s")
        .replace("8G", "512M")
        .replace("--cpus 4", "--cpus 1")
        .replace("work.ps1", str(tmp_path / "work.ps1"))
        .split()
    )
    clone = belljar(*asked, "--start", "clone")
    assert clone.returncode == 125 and b"it knows its own work" in clone.stderr
    done = belljar(*asked)
    assert b"the time limit of 2 s was reached" in done.stderr, "nothing in there can power it off"
    assert belljar.leftovers() == []
