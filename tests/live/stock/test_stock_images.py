"""Images that nobody prepared for belljar: a whole Debian with its boot loader, systemd, cloud-init and sshd."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import STORE, Belljar
from tests.live.stock.build import as_raw, build, recipe_of
from tests.live.stock.images import BOOT_TIMEOUT, served, stock

SUITES = {"bullseye": "11", "bookworm": "12", "trixie": "13"}
slow = pytest.mark.slow


def run(belljar: Belljar, image: str, *words: str, start: str = "auto", **options: Any) -> tuple[dict[str, Any], str]:
    """The outcome of a job in this image, and what it said."""
    report = belljar.folder / "report.json"
    done = belljar.run("--image", image, "--start", start, "--report", str(report), *words, **options)
    told = json.loads(report.read_bytes())
    assert done.returncode == told["exit_code"], (told, done.stderr.decode())
    return told, done.stdout.decode()


@slow
@pytest.mark.parametrize("suite", ["bookworm", "bullseye", "trixie"])
def test_a_stock_image_is_understood_at_its_import_and_runs_jobs(belljar: Belljar, suite: str) -> None:
    image = stock(belljar, suite)
    shown = belljar.json("image", "show", image)
    facts = shown["facts"]
    assert shown["os"].startswith(f"Debian GNU/Linux {SUITES[suite]}")
    told = {name: facts[name] for name in ("boots_by", "agent_in_initrd", "init_system", "init", "cloud_init")}
    assert told == {
        "boots_by": "kernel", "agent_in_initrd": True, "init_system": "systemd", "init": "/sbin/init",
        "cloud_init": True,
    }  # fmt: skip
    assert (facts["root"], facts["fstype"]) == ("/dev/vda1", "ext4")
    assert facts["firmware"] == ["bios", "uefi"] and "agent" not in facts and "use_firmware" not in facts
    for start in ("cold", "clone"):
        outcome, said = run(
            belljar, image, "--", "sh", "-c", ". /etc/os-release; echo $VERSION_ID; cat /proc/1/comm", start=start
        )
        assert (outcome["start"], said.split()) == (start, [SUITES[suite], "init"])
    assert belljar.leftovers() == []


FORMS = {
    "disk.raw.zst": ("zstd", "-q", "-1", "-T2", "{raw}", "-o", "{out}"),
    "disk.qcow2": ("qemu-img", "convert", "-f", "qcow2", "-O", "qcow2", "{packed}", "{out}"),
    "disk.qcow2.gz": ("sh", "-c", 'gzip -1 < "$0" > "$1"', "{web}/disk.qcow2", "{out}"),
    "disk.qcow2.xz": ("sh", "-c", 'xz -0 -T2 < "$0" > "$1"', "{web}/disk.qcow2", "{out}"),
}


@slow
@pytest.mark.timeout(3600)
def test_the_same_disk_in_any_form_is_the_same_image_and_runs_jobs(belljar: Belljar, tmp_path: Path) -> None:
    belljar.env["BELLJAR_PATHS_STORE"] = str(tmp_path / "store")
    belljar.env["BELLJAR_PATHS_SITE_STORE"] = str(STORE)  # its image looks into the disks
    belljar.env["BELLJAR_QEMU_BOOT_TIMEOUT"] = BOOT_TIMEOUT
    packed, web = build(recipe_of("bookworm")), tmp_path / "web"
    web.mkdir()
    (web / "packed.qcow2").symlink_to(packed)
    shown = {}
    with as_raw(packed, web) as raw, served(web) as address:
        for name, argv in FORMS.items():
            make([word.format(packed=packed, raw=raw, web=web, out=web / name) for word in argv])
        for file in ("packed.qcow2", raw.name, *FORMS):
            name = file.replace(".", "-")
            done = belljar("image", "import", f"{address}/{file}", "--name", name, timeout=900)
            assert done.returncode == 0, done.stderr.decode()
            shown[name] = belljar.json("image", "show", name)
    first = shown["packed-qcow2"]
    for name, other in shown.items():
        assert (other["digest"], other["os"], without_source(other)) == (
            first["digest"],
            first["os"],
            without_source(first),
        )
        outcome, said = run(belljar, name, "--", "sh", "-c", ". /etc/os-release; echo $VERSION_ID")
        assert (outcome["start"], outcome["image_digest"], said) == ("clone", first["digest"], "12\n")
    assert belljar.leftovers() == []


def without_source(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown["facts"].items() if name != "source_sha256"}


@slow
@pytest.mark.timeout(1200)
def test_a_root_of_xfs_is_read_by_a_machine_and_then_booted_directly(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm-xfs")
    facts = belljar.json("image", "show", image)["facts"]
    told = {name: facts[name] for name in ("boots_by", "fstype", "root", "init_system", "cloud_init", "firmware")}
    assert told == {
        "boots_by": "kernel", "fstype": "xfs", "root": "/dev/vda1", "init_system": "systemd",
        "cloud_init": True, "firmware": ["bios", "uefi"],
    }  # fmt: skip
    for start in ("cold", "clone"):
        outcome, said = run(belljar, image, "--", "sh", "-c", "findmnt -n -o FSTYPE,SOURCE /", start=start)
        assert (outcome["start"], said.split()) == (start, ["xfs", "/dev/vda1"])
    assert belljar.leftovers() == []


HOSTILE = {
    "a backing file": ("it has a backing file", "-b", "/etc/shadow", "-F", "raw", "--", "1M"),
    "a backing file by a JSON name": ("it has a backing file", "-b", 'json:{"driver":"file","filename":"/etc/shadow"}', "-F", "raw", "--", "1M"),
    "an external data file": ("its data lies in another file", "-o", "data_file={folder}/data,data_file_raw=on", "--", "1M"),
    "a disk of an exbibyte": ("the limit is", "-o", "cluster_size=2M", "--", str(1 << 60)),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_qcow2_is_refused_before_anything_opens_it(belljar: Belljar, tmp_path: Path, what: str) -> None:
    says, *words = HOSTILE[what]
    disk = tmp_path / "disk.qcow2"
    *options, _, size = (word.replace("{folder}", str(tmp_path)) for word in words)
    make(["qemu-img", "create", "-q", "-u" if "-b" in options else "-q", "-f", "qcow2", *options, str(disk), size])
    refused(belljar, tmp_path, str(disk), says)


@pytest.mark.parametrize("what", ["a disc without a boot loader", "a name in JSON", "a bomb", "a table that lies"])
def test_what_is_no_image_is_refused_with_its_name(belljar: Belljar, tmp_path: Path, what: str) -> None:
    disk = tmp_path / "disk"
    if what == "a disc without a boot loader":
        disk.write_bytes(bytes(0x8001) + b"CD001" + bytes(1 << 20))
        refused(belljar, tmp_path, str(disk), "no boot loader")
    elif what == "a name in JSON":
        refused(belljar, tmp_path, 'json:{"driver":"file","filename":"/etc/shadow"}', "no readable file")
    elif what == "a bomb":
        with open(disk, "wb") as file:
            make(["sh", "-c", "head -c 300M /dev/zero | gzip -1"], stdout=file)
        belljar.env["BELLJAR_IMAGE_MAX_SIZE"] = "64M"
        refused(belljar, tmp_path, str(disk), "larger than the limit")
    else:
        data = bytearray(1 << 20)
        data[446 + 4], data[510:512] = 0xEE, b"\x55\xaa"
        data[512:520], data[584:592] = b"EFI PART", b"\xff" * 8
        data[592:600] = b"\xff\xff\xff\xff\x80\0\0\0"
        disk.write_bytes(data)
        refused(belljar, tmp_path, str(disk), "behind the end of the disk")


def refused(belljar: Belljar, tmp_path: Path, source: str, says: str) -> None:
    """The import fails in two lines, and leaves nothing in the store."""
    belljar.env["BELLJAR_PATHS_STORE"] = str(tmp_path / "store")
    done = belljar("image", "import", source, "--name", "bad")
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith(("belljar: ", "hint: "))]
    assert done.returncode == 125 and says in lines[-2] and lines[-1].startswith("hint: "), done.stderr
    assert belljar.json("image", "list") == []
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def make(argv: list[str], **options: Any) -> None:
    subprocess.run(argv, check=True, timeout=600, **options)
