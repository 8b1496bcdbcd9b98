"""Files out of and into disks that nobody trusts: the work is done in a machine, links lead nowhere else."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import STORE, Belljar

from belljar.image import agent_unit

MIB = 1 << 20
SECTOR = 512
LINUX = 0x83
SITE = {"BELLJAR_PATHS_SITE_STORE": str(STORE)}
UUID = "6d3c5a52-5d6a-4f4e-9b1f-0d5b6f0c3a11"


def tree(folder: Path) -> Path:
    """A small system whose links point where they should not lead."""
    for name in ("etc", "usr/lib/systemd", "var/log/app", "opt", "boot"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/os-release").write_text('PRETTY_NAME="Foreign"\n')
    (folder / "etc/hostname").write_text("the foreign one\n")
    (folder / "etc/shadow").write_text("the foreign shadow\n")
    (folder / "etc/fstab").write_text(f"UUID={UUID} /boot ext4 defaults 0 0\nproc /proc proc defaults 0 0\n")
    (folder / "usr/lib/systemd/systemd").write_text("")
    (folder / "var/log/app/one.log").write_text("first\n")
    (folder / "var/log/app/one.log").chmod(0o640)
    os.chown(folder / "var/log/app/one.log", 1234, 4321)
    (folder / "var/log/app/odd\nname \udcff").write_text("odd\n")
    (folder / "opt/absolute").symlink_to("/etc")
    (folder / "opt/upwards").symlink_to("../../../../../../etc/shadow")
    (folder / "opt/circle").symlink_to("circle")
    return folder


def file_system(path: Path, size: int, content: Path, *words: str) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", *words, "-d", str(content), str(path)], check=True)


def table(disk: Path, parts: list[tuple[int, int, int]]) -> None:
    """An MBR with these (kind, offset, size)."""
    entries = b"".join(
        struct.pack("<B3sB3sII", 0, b"\0\0\0", kind, b"\0\0\0", at // SECTOR, size // SECTOR)
        for kind, at, size in parts
    )
    with open(disk, "r+b") as file:
        file.seek(446)
        file.write(entries.ljust(64, b"\0") + b"\x55\xaa")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions: /boot and the root."""
    folder = tmp_path_factory.mktemp("foreign")
    root, boot, whole = folder / "root.raw", folder / "boot.raw", folder / "disk.raw"
    (folder / "b").mkdir()
    (folder / "b/loader").write_text("of the boot partition\n")
    file_system(boot, 4 * MIB, folder / "b", "-U", UUID)
    file_system(root, 24 * MIB, tree(folder / "r"))
    with open(whole, "wb") as file:
        file.truncate(30 * MIB)
        for part, at in ((boot, MIB), (root, 5 * MIB)):
            file.seek(at)
            file.write(part.read_bytes())
    table(whole, [(LINUX, MIB, 4 * MIB), (LINUX, 5 * MIB, 24 * MIB)])
    return whole


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Path:
    """A store with the image `foreign`."""
    folder = tmp_path_factory.mktemp("imported")
    done = Belljar(folder, folder / "store", SITE)("image", "import", str(disk), "--name", "foreign")
    assert done.returncode == 0, done.stderr.decode()
    return folder / "store"


@pytest.fixture
def store(belljar: Belljar, tmp_path: Path, imported: Path) -> Belljar:
    """A store of the test's own before the common one, with the image `foreign`."""
    subprocess.run(["cp", "-a", str(imported), str(tmp_path / "store")], check=True)
    belljar.env |= {"BELLJAR_PATHS_STORE": str(tmp_path / "store"), **SITE}
    assert belljar("image", "verify", "foreign").returncode == 0  # as after a restore
    return belljar


def test_links_are_followed_within_the_disk_and_nowhere_else(store: Belljar, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    paths = ["/opt/absolute/hostname", "/opt/upwards", "../../../../etc/os-release", "/boot/loader", "/var/log/app"]
    done = store("image", "extract", "foreign", *paths, "-o", str(out))
    assert done.returncode == 0, done.stderr.decode()
    assert (out / "hostname").read_text() == "the foreign one\n"
    assert (out / "upwards").read_text() == "the foreign shadow\n"
    assert (out / "os-release").read_text() == 'PRETTY_NAME="Foreign"\n'
    assert (out / "loader").read_text() == "of the boot partition\n"
    assert (out / "app/odd\nname \udcff").read_text() == "odd\n"
    assert store.leftovers() == []
    missing = store("image", "extract", "foreign", "/no/such", "-o", str(out))
    assert missing.returncode == 125 and b"/no/such" in missing.stderr
    circle = store("image", "extract", "foreign", "/opt/circle", "-o", f"{out}/c.tar")
    assert circle.returncode in (0, 125) and not list(out.glob(".c.tar*"))


def test_an_archive_keeps_owners_and_modes(store: Belljar, tmp_path: Path) -> None:
    done = store("image", "extract", "foreign", "/var/log", "-o", str(tmp_path / "logs.tar.gz"))
    assert done.returncode == 0, done.stderr.decode()
    with tarfile.open(tmp_path / "logs.tar.gz") as made:
        member = made.getmember("var/log/app/one.log")
        assert (member.uid, member.gid, member.mode) == (1234, 4321, 0o640)
        assert sorted(made.getnames())[0] == "var/log"


def test_a_file_that_is_put_in_makes_another_image_and_leaves_the_first(store: Belljar, tmp_path: Path) -> None:
    source = tmp_path / "site"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_text("new\n")
    (tmp_path / "hostname").write_text("renamed\n")
    before = store.json("image", "show", "foreign")["digest"]
    items = [f"{tmp_path}/hostname:/opt/absolute/hostname", f"{source}:/opt/", f"{tmp_path}/hostname:/opt/upwards"]
    done = store("image", "insert", "foreign", *items, "--name", "changed", "--mode", "0640", "--owner", "7:8")
    assert done.returncode == 0, done.stderr.decode()
    assert store.json("image", "show", "foreign")["digest"] == before != done.stdout.decode().strip()
    archive = tmp_path / "changed.tar"
    assert store("image", "extract", "changed", "/etc", "/opt", "-o", str(archive)).returncode == 0
    with tarfile.open(archive) as made:
        assert made.extractfile("etc/hostname").read() == b"renamed\n"  # type: ignore[union-attr]
        assert made.extractfile("etc/shadow").read() == b"the foreign shadow\n"  # type: ignore[union-attr]
        deep, link = made.getmember("opt/site/deep/file"), made.getmember("opt/upwards")
        assert (deep.uid, deep.gid, deep.mode) == (7, 8, 0o640)
        assert made.getmember("opt/site/deep").mode == 0o750
        assert link.isfile(), "a link at the place itself is replaced, not followed"
    assert store.leftovers() == []


def test_the_logs_of_a_kept_machine_come_out_of_its_disk(belljar: Belljar, tmp_path: Path) -> None:
    done = belljar.run("--keep", "--name", "kept", "--", "sh", "-c", "echo said > /var/log/mine; sync")
    assert done.returncode == 0, done.stderr.decode()
    out = tmp_path / "out"
    out.mkdir()
    done = belljar("image", "extract", "kept", "/var/log/mine", "-o", str(out))
    assert done.returncode == 0, done.stderr.decode()
    assert (out / "mine").read_text() == "said\n"


def test_a_disk_without_a_system_is_refused_with_the_reason(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file_system(tmp_path / "disk.raw", 8 * MIB, tmp_path / "empty")
    belljar.env["BELLJAR_PATHS_SITE_STORE"] = belljar.env["BELLJAR_PATHS_STORE"]
    belljar.env["BELLJAR_PATHS_STORE"] = str(tmp_path / "store")
    assert belljar("image", "import", str(tmp_path / "disk.raw"), "--name", "none").returncode == 0
    done = belljar("image", "extract", "none", "/etc", "-o", str(tmp_path))
    assert done.returncode == 125 and b"no root file system was found" in done.stderr
    assert belljar.leftovers() == []


def test_the_agent_is_put_into_a_disk_once_and_its_image_is_not_written(store: Belljar, tmp_path: Path) -> None:
    before = store.json("image", "show", "foreign")
    code = (
        "import asyncio, sys; from belljar.assembly import Runtime; runtime = Runtime(); image = runtime.images.resolve('foreign')\n"
        "from belljar.machine.planning.contexts import layer_of; keeper = runtime.supervisor()\n"
        "layer = lambda: asyncio.run(layer_of(image, keeper.services, keeper.keep)); first, digest = layer(); again = layer()\n"
        "assert again == (first, digest) and first.disk != image.disk\n"
        "from pathlib import Path\n"
        "paths = ['/usr/lib/belljar', '/etc/systemd/system']\n"
        "asyncio.run(runtime.workshop().extract(first, paths, Path(sys.argv[1])))"
    )
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=store.env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert os.access(out / "belljar/loader", os.X_OK) and (out / "belljar/agent.pyc").exists()
    assert (out / "system/belljar-agent.service").read_text() == agent_unit()
    link = out / "system/multi-user.target.wants/belljar-agent.service"
    assert os.readlink(link) == "/etc/systemd/system/belljar-agent.service"
    assert store("image", "verify", "foreign").returncode == 0
    layers = tmp_path / "store/images/layers"
    assert sorted(path.suffix for path in layers.iterdir()) == [".lock", ".qcow2"]
    assert store("image", "remove", before["digest"][:12]).returncode == 0
    assert store("image", "gc").returncode == 0 and list(layers.iterdir()) == []
    assert store.leftovers() == []


@pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="no mkfs.xfs on this host")
def test_xfs_is_read_by_the_guest(store: Belljar, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text('PRETTY_NAME="On XFS"\n')
    proto = tmp_path / "proto"
    proto.write_text(f"/none\n0 0\nd--755 0 0\netc d--755 0 0\nos-release ---644 0 0 {tmp_path}/os-release\n$\n$\n")
    with open(tmp_path / "xfs.raw", "wb") as file:
        file.truncate(320 * MIB)
    subprocess.run(["mkfs.xfs", "-q", "-p", str(proto), str(tmp_path / "xfs.raw")], check=True)
    assert store("image", "import", str(tmp_path / "xfs.raw"), "--name", "onxfs").returncode == 0
    done = store("image", "extract", "onxfs", "/etc/os-release", "-o", str(tmp_path / "x.tar"))
    assert done.returncode == 0, done.stderr.decode()
    with tarfile.open(tmp_path / "x.tar") as made:
        assert made.extractfile("etc/os-release").read() == b'PRETTY_NAME="On XFS"\n'  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["no inodes", "a root without end", "nothing but the mark"])
def test_an_xfs_of_lies_costs_its_import_nothing_but_the_look(store: Belljar, tmp_path: Path, what: str) -> None:
    """The guest's kernel is what reads it. Whatever that makes of it, this host has an answer."""
    disk = tmp_path / "xfs.raw"
    with open(disk, "wb") as file:
        file.truncate(320 * MIB)
    subprocess.run(["mkfs.xfs", "-q", "-m", "crc=0", str(disk)], check=True)
    with open(disk, "r+b") as file:
        if what == "no inodes":
            file.seek(MIB // 16)
            file.write(os.urandom(8 * MIB))
        elif what == "a root without end":  # the first words of the superblock: its blocks, its root's number
            file.seek(8)
            file.write(struct.pack(">Q", 1 << 60))
            file.seek(56)
            file.write(struct.pack(">Q", (1 << 63) - 1))
        else:
            file.truncate(0)
            file.write(b"XFSB".ljust(MIB, b"\xff"))
    done = store("image", "import", str(disk), "--name", "lies")
    assert done.returncode == 0, done.stderr.decode()
    assert b"could not be looked into" in done.stderr and b"it boots by firmware" in done.stderr, done.stderr.decode()
    done = store("image", "extract", "lies", "/etc", "-o", str(tmp_path / "x.tar"))
    assert done.returncode == 125 and not (tmp_path / "x.tar").exists(), done.stderr.decode()
    assert store.leftovers() == []


def listed(store: Belljar) -> list[dict[str, Any]]:
    """Without the blocks an image takes: ext4 adds one for the file's map when it writes a fresh copy out, 30 s later."""
    return [{**image, "stored": None} for image in store.json("image", "list")]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after-overlay", "payload-started", "before-stop", "after-stop"])
@pytest.mark.parametrize("verb", ["insert", "extract"])
def test_work_on_a_disk_that_is_killed_leaves_its_image_alone_and_nothing_else(
    store: Belljar, tmp_path: Path, verb: str, point: str
) -> None:
    (tmp_path / "hostname").write_text("renamed\n")
    words = {
        "insert": ("insert", "foreign", f"{tmp_path}/hostname:/etc/hostname", "--name", "changed"),
        "extract": ("extract", "foreign", "/etc", "-o", str(tmp_path / "out.tar")),
    }[verb]
    images, before = tmp_path / "store/images", listed(store)
    died = store("image", *words, env={"BELLJAR_TESTING_ABORT_AT": point})
    assert died.returncode == -9, died.stderr.decode()
    assert store("reap").returncode == 0 and store.leftovers() == []
    assert store("image", "gc").returncode == 0
    assert listed(store) == before and list((images / "drafts").iterdir()) == []
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(("out.tar", ".out.tar"))]
    assert store("image", "verify").returncode == 0
    done = store("image", *words)
    assert done.returncode == 0, done.stderr.decode()
    assert store.leftovers() == []
