"""From a raw disk to an image: its partitions, its kernel, its ramdisk; nothing is mounted, nothing is trusted."""

from __future__ import annotations

import lzma
import os
import select
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.image.image_parts import SECTOR, bzimage, elf, ext4, gpt, mbr, pvh_note, surveyor, system

from belljar.errors import CommandMissing, HostError, ImageCorrupt, ImageTooLarge
from belljar.host import commands
from belljar.image import Image
from belljar.image.boot import kernel, modules
from belljar.image.intake import disk, intake, sandbox
from belljar.image.intake.survey import Survey
from belljar.image.progress import Progress
from belljar.image.store.store import Store
from belljar.model import MIB


def take(store: Store, disk: Path, root: Path | None = None, number: int = 0, **origin: object) -> Image:
    """Stored as a disk whose root file system, on the partition of this number, has what lies in *root*."""
    store.surveyor = surveyor(root, number=number, fstype="ext4") if root else None
    with intake.draft(store, "test") as folder:
        raw = folder / "disk.raw"
        commands.run(["cp", "--sparse=always", str(disk), str(raw)], timeout=30)
        return intake.take(store, folder, intake.Origin("test", "small", **origin), Progress())  # type: ignore[arg-type]


def test_a_disk_without_partitions_is_its_file_system(store: Store, tmp_path: Path) -> None:
    image = take(store, ext4(tmp_path / "disk"), system(tmp_path / "root"))
    assert image.kernel and image.kernel.read_bytes().startswith(b"\x7fELF")
    assert image.initrd and b"virtio_blk.ko" in image.initrd.read_bytes()
    assert image.os == "Small Linux 1" and image.append == f"{intake.APPEND} belljar.sectors={4 * MIB // 512}"
    expected = {
        "release": "6.1.0-9-amd64",
        "boots_by": "kernel",
        "agent_in_initrd": True,
        "kernel_form": "elf",
        "root": "/dev/vda",
        "fstype": "ext4",
        "init": "",
        "init_system": "",
        "cloud_init": False,
        "mounts": ["9p"],
        "firmware": [],
        "least_memory": 8 * MIB,
    }
    assert image.facts == expected
    assert image.virtual_size == 4 * MIB and store.verify(image) == []


@pytest.mark.parametrize("number", [1, 14])
def test_the_root_in_a_partition_is_named_by_it(store: Store, tmp_path: Path, number: int) -> None:
    disk = ext4(tmp_path / "disk", offset=2048 * SECTOR)
    mbr(disk, 2048)
    assert (
        take(store, disk, system(tmp_path / "root"), number).append == f"{intake.APPEND} belljar.root=/dev/vda{number}"
    )


def test_the_newest_kernel_with_modules_is_taken(store: Store, tmp_path: Path) -> None:
    root = system(tmp_path / "root")
    for release, has_modules in (("6.1.0-10-amd64", True), ("6.9.0-1-amd64", False)):
        (root / "boot" / f"vmlinuz-{release}").write_bytes(bzimage(elf((4, pvh_note())), release))
        if has_modules:
            commands.run(
                ["cp", "-r", str(root / "usr/lib/modules/6.1.0-9-amd64"), str(root / "usr/lib/modules" / release)],
                timeout=10,
            )
    assert take(store, ext4(tmp_path / "disk"), root).facts["release"] == "6.1.0-10-amd64"


def test_what_its_kernel_can_mount_is_known_from_its_modules(store: Store, tmp_path: Path) -> None:
    """As a module or built in. What is not told is not known."""
    dep = "kernel/virtio_blk.ko:\nkernel/ext4.ko:\nkernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz\n"
    root = system(tmp_path / "root", dep=dep)
    for name in ("9pnet_virtio", "9pnet"):
        (root / "usr/lib/modules/6.1.0-9-amd64/kernel/net/9p").mkdir(parents=True, exist_ok=True)
        file = root / f"usr/lib/modules/6.1.0-9-amd64/kernel/net/9p/{name}.ko.xz"
        file.write_bytes(lzma.compress(elf((1, name.encode()))))
    assert take(store, ext4(tmp_path / "disk"), root).facts["mounts"] == ["9p"]
    (root / "usr/lib/modules/6.1.0-9-amd64/modules.builtin").unlink()
    assert "mounts" not in take(store, ext4(tmp_path / "third"), root).facts


def test_a_broken_kernel_falls_back_to_the_one_before(store: Store, tmp_path: Path) -> None:
    root = system(tmp_path / "root")
    (root / "usr/lib/modules/6.2.0").mkdir()
    (root / "usr/lib/modules/6.2.0/modules.dep").write_text("kernel/ext4.ko:\n")
    (root / "boot/vmlinuz-6.2.0").write_bytes(bzimage(elf((4, pvh_note()))))
    assert take(store, ext4(tmp_path / "disk"), root).facts["release"] == "6.1.0-9-amd64"


def test_a_kernel_without_pvh_is_stored_as_it_is(store: Store, tmp_path: Path) -> None:
    root = system(tmp_path / "root")
    data = bzimage(elf((1, b"text")))
    (root / "boot/vmlinuz-6.1.0-9-amd64").write_bytes(data)
    image = take(store, ext4(tmp_path / "disk"), root)
    assert image.kernel and image.kernel.read_bytes() == data and image.facts["kernel_form"] == "bzimage"


def test_a_disk_without_a_kernel_boots_by_firmware(store: Store, tmp_path: Path) -> None:
    image = take(store, ext4(tmp_path / "disk"))
    assert image.kernel is None and image.initrd is None and image.facts == {"boots_by": "firmware", "firmware": []}


def test_a_given_kernel_gets_a_ramdisk_from_the_disks_modules(store: Store, tmp_path: Path) -> None:
    root = system(tmp_path / "root")
    given = (root / "boot/vmlinuz-6.1.0-9-amd64").rename(tmp_path / "kernel")
    image = take(store, ext4(tmp_path / "disk"), root, kernel=given, append="my words")
    assert (
        image.append == f"my words belljar.sectors={4 * MIB // 512}" and image.facts["agent_in_initrd"] and image.initrd
    )


def test_a_given_kernel_and_ramdisk_are_used_as_they_are(store: Store, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(bzimage(elf((4, pvh_note()))))
    (tmp_path / "initrd").write_bytes(b"ramdisk")
    image = take(store, ext4(tmp_path / "disk"), kernel=tmp_path / "kernel", initrd=tmp_path / "initrd")
    assert image.initrd and image.initrd.read_bytes() == b"ramdisk" and not image.facts["agent_in_initrd"]
    assert store.boot_files(image).initrd == image.initrd


def test_a_given_kernel_without_modules_in_the_disk_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(bzimage(elf((4, pvh_note())), "9.9.9"))
    with pytest.raises(ImageCorrupt, match=r"9\.9\.9") as caught:
        take(store, ext4(tmp_path / "disk"), system(tmp_path / "root"), kernel=tmp_path / "kernel")
    assert "--initrd" in caught.value.hint
    assert store.images() == [] and list((store.folder / "drafts").iterdir()) == []


def test_a_disk_beyond_the_limit_is_refused(store: Store, tmp_path: Path) -> None:
    disk = ext4(tmp_path / "disk")
    with open(disk, "r+b") as file:
        file.truncate(store.settings.max_size + 1)
    with pytest.raises(ImageTooLarge):
        take(store, disk)


def test_an_odd_size_is_filled_to_whole_sectors(store: Store, tmp_path: Path) -> None:
    disk = ext4(tmp_path / "disk")
    with open(disk, "r+b") as file:
        file.truncate(4 * MIB + 1)
    assert take(store, disk).virtual_size == 4 * MIB + SECTOR


@pytest.mark.parametrize("text", [b'PRETTY_NAME="\x1b[31mred\x07"\n', b"PRETTY_NAME=plain\n", b"\xff\xfe\n", b""])
def test_a_systems_name_cannot_steer_a_terminal(store: Store, tmp_path: Path, text: bytes) -> None:
    root = system(tmp_path / "root")
    (root / "usr/lib/os-release").write_bytes(text)
    assert take(store, ext4(tmp_path / "disk"), root).os.isprintable()


def test_a_machine_looks_only_where_there_may_be_a_root(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(MIB))
    assert not disk.may_have_a_root(path)
    mbr(path, 0xFFFFFFFF, 2048)  # beyond its end
    assert not disk.may_have_a_root(path)
    gpt(path, p1=1 << 50)
    with pytest.raises(ImageCorrupt, match="no entry"):
        disk.may_have_a_root(path)
    for at, mark in disk.FILE_SYSTEMS:
        with open(tmp_path / "other", "wb") as file:
            file.seek(2048 * SECTOR + at)
            file.write(mark.ljust(4 * MIB, b"\0"))
        gpt(tmp_path / "other", p3=2048)
        assert disk.may_have_a_root(tmp_path / "other"), mark


def test_a_program_in_the_sandbox_writes_no_more_than_it_may(tmp_path: Path) -> None:
    with pytest.raises(ImageTooLarge):
        sandbox.run(["head", "-c", "100000", "/dev/zero"], [], 10, 1000, stdout=tmp_path / "out")
    assert (tmp_path / "out").stat().st_size <= 1000


def test_a_program_in_the_sandbox_is_killed_at_its_deadline() -> None:
    with pytest.raises(ImageCorrupt, match="not finished after 0 s"):
        sandbox.run(["sleep", "60"], [], 0, 1000)


def test_a_program_in_the_sandbox_cannot_read_our_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "given").write_text("given")
    (tmp_path / "given").chmod(0o600)
    argv = ["sh", "-c", 'cat "$0"; cat "$1" 2>&1; id -u', "{0}", str(tmp_path / "secret")]
    printed = sandbox.run(argv, [tmp_path / "given"], 10, 1000)
    assert printed.startswith(b"given")
    import os

    if os.geteuid() == 0:
        assert printed.startswith(b"given") and printed.endswith(b"Permission denied\n65534\n")
        assert (tmp_path / "given").stat().st_uid == 0  # given back


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGXCPU])
def test_a_draft_is_removed_when_its_maker_is_told_to_end_even_twice(store: Store, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended, intake.draft(store, "test") as folder:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # is ignored while it clears up
    assert not folder.exists() and signal.getsignal(number) == before
    assert str(ended.value) == ("" if number == signal.SIGINT else str(128 + number))


def test_a_program_of_ours_hears_no_order_to_end_which_all_processes_of_a_job_get(tmp_path: Path) -> None:
    """Else its end would be seen first, and taken for a failure."""
    words = 'for signal in TERM INT HUP USR1 USR2 XCPU; do kill -$signal "$$"; done; echo lives'
    assert (
        sandbox.run_in(tmp_path, ["sh", "-c", words], 10, 1000)
        == sandbox.run(["sh", "-c", words], [], 10, 1000)
        == b"lives\n"
    )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_a_killed_maker_left_is_removed_by_the_next_one_and_a_living_ones_draft_stays(store: Store) -> None:
    for name in ("removed-test-1", "test-1"):
        (store.work_folder("drafts") / name / "work").mkdir(parents=True)
    with intake.draft(store, "first") as first, intake.draft(store, "second") as second:
        assert sorted((store.folder / "drafts").iterdir()) == [first, second]


def test_a_signal_that_somebody_handles_or_ignores_stays_so_while_an_image_is_made(store: Store) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with intake.draft(store, "test"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    with ThreadPoolExecutor() as threads:  # no signal reaches one

        def make() -> bool:
            with intake.draft(store, "test") as folder:
                return folder.exists()

        assert threads.submit(make).result()


def test_a_draft_in_which_something_is_mounted_is_not_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = store.work_folder("drafts") / "abandoned"
    draft.mkdir()
    table = draft / "mountinfo"
    table.write_text(f"25 30 0:23 / {draft}/root/dev rw - devtmpfs dev rw\n")
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *rest, **more: real(table if path == "/proc/self/mountinfo" else path, *rest, **more),
    )
    with pytest.raises(HostError, match="root/dev is mounted"):
        list(store.gc())
    assert table.exists()


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "which", lambda name: None)
    with pytest.raises(CommandMissing, match="prlimit"):
        sandbox.run(["true"], [], 1, 1)


@pytest.mark.parametrize("way", ["in the sandbox", "as we are"])
def test_a_program_ends_with_the_process_that_started_it_however_that_dies(tmp_path: Path, way: str) -> None:
    run = {
        "in the sandbox": "sandbox.run(argv, [], 600, 1000)",
        "as we are": "commands.run(argv, timeout=600, bound=True)",
    }[way]
    ours, theirs = os.pipe()
    code = f"""
import subprocess
from belljar.host import commands
from belljar.image.intake import sandbox
real = subprocess.Popen
subprocess.Popen = lambda *words, **named: real(*words, **{{**named, "pass_fds": ({theirs},)}})
argv = ["bash", "-c", "echo up >&{theirs}; exec sleep 600"]
{run}
"""
    parent = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs,))
    os.close(theirs)
    with open(ours, "rb", buffering=0) as pipe:
        assert pipe.readline() == b"up\n"
        parent.kill()
        parent.wait()
        assert select.select([pipe], [], [], 20)[0] and pipe.read(1) == b""  # nobody has its other end any more


def test_a_kernel_or_module_packed_to_burst_is_cut_off(tmp_path: Path) -> None:
    bomb = subprocess.run(["zstd", "-q", "-c"], input=bytes(65 * MIB), capture_output=True, check=True).stdout
    with pytest.raises(ImageCorrupt, match="larger than the limit"):
        modules.plain(bomb, "a.ko.zst")
    huge = subprocess.run(["zstd", "-qc", "-1"], input=bytes(257 * MIB), capture_output=True, check=True).stdout
    with pytest.raises(ImageCorrupt, match="larger than the limit"):
        kernel.unpack(bzimage(b"", pack=lambda _: huge + bytes(4)))
    packed = subprocess.run(["zstd", "-q", "-c"], input=elf((1, b"x")), capture_output=True, check=True).stdout
    assert modules.plain(packed, "a.ko.zst") == elf((1, b"x"))


def test_a_kernel_whose_tables_lie_is_booted_as_it_is() -> None:
    whole = bytearray(elf((1, b"text"), (4, pvh_note())))
    assert kernel.directly_bootable(bzimage(bytes(whole)))
    struct.pack_into("<Q", whole, 32, 1 << 62)
    assert kernel.directly_bootable(bzimage(bytes(whole))) is None


def test_notes_without_end_cost_nothing() -> None:
    data = bytes(8 * MIB)
    many = elf(*[(4, b"")] * 64)
    table = b"".join(struct.pack("<IIQQQQQQ", 4, 4, len(many), 0, 0, len(data), len(data), 4) for _ in range(64))
    began = time.process_time()
    assert not kernel.has_pvh_entry(many[:64] + table + data)
    assert time.process_time() - began < 5


def test_more_modules_than_a_guest_can_need_are_refused(tmp_path: Path) -> None:
    needs = " ".join(f"kernel/{number}.ko" for number in range(1000))

    def read(path: str) -> bytes:
        return f"kernel/virtio_blk.ko: {needs}\n".encode() if path.endswith("dep") else elf((1, b"x"))

    with pytest.raises(ImageCorrupt, match="1001 modules"):
        modules.select(read, "/lib/modules/6.1", "ext4")
    needs = " ".join(f"kernel/{number}.ko" for number in range(100))
    large = elf((1, bytes(3 * MIB)))
    with pytest.raises(ImageCorrupt, match="more than"):
        modules.select(lambda path: read(path) if path.endswith("dep") else large, "/lib/modules/6.1", "ext4")


def test_of_a_thousand_kernels_only_the_newest_are_looked_at(tmp_path: Path) -> None:
    root = system(tmp_path / "root")
    for number in range(200):
        (root / f"usr/lib/modules/9.{number}").mkdir()
        (root / f"boot/vmlinuz-9.{number}").write_bytes(b"no kernel")
    surveyor(root)(tmp_path, 0, tmp_path / "tar")
    assert len(intake._kernels(Survey(tmp_path / "tar", MIB))) == intake.MOST_KERNELS
