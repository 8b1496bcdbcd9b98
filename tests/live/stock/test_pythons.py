"""Stock images without a Python that fits: the agent brings its interpreter, by every way in.

*bare* has none, and no cloud-init. *old* is Debian 12 whose python3 calls itself 3.5: cloud-init runs by it, belljar must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.build import ROOT_AT, build, execute, recipe_of
from tests.live.stock.images import BOOT_TIMEOUT, stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
AGE = """\
ln /usr/bin/python3.11 /usr/bin/python3.5
sif /usr/bin/python3.11 links_count 2
rm /usr/bin/python3
symlink /usr/bin/python3 python3.5
"""
OURS = "/usr/lib/belljar/python/loader"
# Whose command line names the agent: the payload's parent.
ASKS = "tr '\\0' '\\n' < /proc/$PPID/cmdline | head -n 1; cat /proc/1/comm; hostname; exit 7"


def ran(belljar: Belljar, image: str, context: str, start: str, *words: str) -> list[str]:
    report = belljar.folder / "report.json"
    argv = ("--image", image, "--context", context, "--start", start, "--report", str(report), *words)
    done = belljar.run(*argv, "--", "sh", "-c", ASKS, timeout=1600)
    outcome = json.loads(report.read_bytes())
    assert done.returncode == 7, (outcome, done.stderr.decode())
    assert (outcome["start"], outcome["context"]) == (start, context)
    program, init, hostname = done.stdout.decode().split()
    assert hostname == f"belljar-{outcome['id']}" and belljar.leftovers() == []
    return [program, init]


@pytest.mark.parametrize("context", ["ramdisk", "inject"])
def test_an_image_without_any_python_is_brought_one(belljar: Belljar, context: str) -> None:
    image = stock(belljar, "bookworm-bare")
    assert belljar.json("image", "show", image)["facts"]["python"] == ""
    for start in ("clone", "clone", "cold"):
        program, init = ran(belljar, image, context, start)
        expected = ("/run/belljar/python/loader", "init") if context == "ramdisk" else (OURS, "systemd")
        assert (program, init) == expected


def test_a_disk_without_any_python_that_boots_by_its_firmware_is_brought_one_by_the_workshop(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm-bare", "--firmware", "bios")
    for _ in range(2):
        assert ran(belljar, image, "inject", "clone", "--memory", "1G") == [OURS, "systemd"]


@pytest.fixture(scope="module")
def folder_of_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture
def old(tmp_path: Path, folder_of_own: Path) -> Iterator[Belljar]:
    settings = {"BELLJAR_QEMU_BOOT_TIMEOUT": BOOT_TIMEOUT, "BELLJAR_IMAGE_DEFAULT": "old"}
    command = Belljar(tmp_path, store=folder_of_own / "store", settings=settings)
    if command("image", "show", "old").returncode:
        raw, orders = tmp_path / "old.raw", tmp_path / "orders"
        execute("qemu-img", "convert", "-O", "raw", str(build(recipe_of("bookworm"))), str(raw))
        orders.write_text(AGE)
        execute("debugfs", "-w", "-f", str(orders), f"{raw}?offset={ROOT_AT}")
        done = command("image", "import", str(raw), "--name", "old")
        assert done.returncode == 0, done.stderr.decode()
        raw.unlink()
    assert command.json("image", "show", "old")["facts"]["python"] == "3.5"
    yield command
    command.close()


@pytest.mark.parametrize("context", ["cloud-init", "inject"])
def test_a_python_that_is_too_old_is_left_alone(old: Belljar, context: str) -> None:
    for start in ("clone", "clone"):
        assert ran(old, "old", context, start) == [OURS, "systemd"]
