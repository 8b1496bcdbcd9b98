"""The folder of checkpoints: one is whole or not there, and whatever is done to its files, nobody goes on from half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from belljar import errors
from belljar.guest import Identity, Standstill
from belljar.host import commands
from belljar.hypervisor import Accelerator, Boot, DomainSpec, ExtraDisk, Frame
from belljar.jobs.starting import restored_request
from belljar.machine import checkpoints
from belljar.machine.checkpoints import FORMAT, Checkpoint, content, draft_in, numbers, take
from belljar.model import MIB, Account, Context, MachineSpec, Payload, Request, RunPayload
from belljar.records import replace

REQUEST = Request(
    "0123456789ab", MachineSpec("debian12", 1, 64 * MIB), RunPayload(Payload((b"\xff",), Account("a", 1, 1, "a")))
)
SPEC = DomainSpec(
    REQUEST.id, 1, 64 * MIB, "sha256:0", Boot(Path("/image/kernel")), Path("/run/disk"), MIB, Accelerator.TCG, Path("/run/machine"),
    disks=(ExtraDisk("scratch", Path("/run/scratch"), "raw", readonly=False),), seed=Path("/run/seed"),
    frame=Frame(1, 64 * MIB, MIB, 4, 1 << 30),
)  # fmt: skip
CHECKPOINT = Checkpoint(
    Path(), FORMAT, "1", {"QEMU": "7.2"}, Context.RAMDISK, SPEC, REQUEST, Identity("host", "a" * 32, "b" * 32, b""),
    Standstill(3, 1, 2, 3), 0, "cat", {},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def write(folder: Path, content: bytes = b"memory") -> int:
    """One more checkpoint."""
    taken = take(folder)
    try:
        draft = draft_in(folder, lambda what, path: None)
        (draft / "memory").write_bytes(content)
        checkpoint = replace(CHECKPOINT, folder=draft, files=checkpoints.seal(draft))
        return checkpoints.publish(checkpoint, lambda point: None)
    finally:
        taken.release()


def newest(folder: Path) -> tuple[str, list[str]]:
    take(folder).release()
    checkpoint, complaints = checkpoints.newest(folder, read_all=True)
    return checkpoint.folder.name if checkpoint else "", complaints


def test_what_was_written_is_read(folder: Path) -> None:
    write(folder)
    checkpoint, again = checkpoints.peek(folder / "1"), checkpoints.peek(folder / "1")
    identity = replace(checkpoint.identity, entropy=b"")
    assert replace(checkpoint, folder=Path(), files={}, identity=identity) == CHECKPOINT
    assert checkpoint.folder == folder / "1" and checkpoint.identity.entropy != again.identity.entropy != b""


def test_the_last_two_are_kept_for_their_owner_alone(folder: Path) -> None:
    assert [write(folder) for _ in range(4)] == [1, 2, 3, 4]
    assert numbers(folder) == [4, 3] and newest(folder) == ("4", [])
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.glob("*")) if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize("name", ["memory", "manifest.json"])
def test_cut_at_any_byte_it_is_damaged_and_the_one_before_is_taken(folder: Path, name: str) -> None:
    write(folder)
    write(folder, b"newer memory")
    whole = (folder / "2" / name).read_bytes()
    for size in range(len(whole)):
        (folder / "2" / name).write_bytes(whole[:size])
        number, (complaint,) = newest(folder)
        assert number == "1" and f"checkpoint 2 in {folder} is damaged: {name}" in complaint
    (folder / "2" / name).write_bytes(whole)
    assert newest(folder) == ("2", [])


def test_a_changed_byte_and_a_missing_file_are_damage_too(folder: Path) -> None:
    write(folder)
    write(folder)
    (folder / "2" / "memory").write_bytes(b"memorY")
    (folder / "1" / "memory").unlink()
    number, complaints = newest(folder)
    assert number == "" and len(complaints) == 2
    with pytest.raises(errors.BelljarError, match="no checkpoint is there"):
        restored_request(str(folder / "missing"), "")
    (folder / "2" / "manifest.json").write_bytes(b"{")
    (folder / "1" / "manifest.json").unlink()
    with pytest.raises(
        errors.BelljarError, match=r"no checkpoint is there; checkpoint 2 in .* damaged: manifest\.json"
    ):
        restored_request(str(folder), "")


def test_what_was_never_finished_is_removed_by_who_comes_next(folder: Path) -> None:
    taken = take(folder)
    (draft_in(folder, lambda what, path: None) / "memory").write_bytes(b"half")
    taken.release()
    assert newest(folder) == ("", []) and os.listdir(folder) == ["lock"]


def test_one_machine_has_the_folder_and_others_are_told(folder: Path) -> None:
    taken = take(folder)
    with pytest.raises(errors.MachineBusy, match="a machine is written to this folder or goes on from it now"):
        take(folder)
    taken.release()
    take(folder).release()


def test_another_form_is_no_damage(folder: Path) -> None:
    write(folder)
    write(folder)
    manifest = json.loads((folder / "2" / "manifest.json").read_text())
    (folder / "2" / "manifest.json").write_text(json.dumps({**manifest, "format": 9, "belljar": "7"}))
    with pytest.raises(errors.CheckpointUnfit, match="written in form 9 by belljar 7, this one reads form 3"):
        newest(folder)


def test_folders_that_others_may_write_or_own_are_not_followed(folder: Path) -> None:
    write(folder)
    for path in (folder / "1", folder):
        mode = path.stat().st_mode
        os.chmod(path, mode | 0o022)
        with pytest.raises(errors.UnsafeFolder):
            newest(folder)
        os.chmod(path, mode)
    if os.geteuid() == 0:
        os.chown(folder / "1", 1234, 1234)
        with pytest.raises(errors.UnsafeFolder):
            newest(folder)


# -- a disk whose QEMU was taken over: what its header names is not opened ----------------------------------------------------


def layer(path: Path, *options: str) -> Path:
    commands.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), "1M"], timeout=60)
    return path


def content_of(disk: Path) -> bytes:
    """All that its guest would see."""
    raw = disk.with_suffix(".raw")
    commands.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(disk), str(raw)], timeout=60)
    return raw.read_bytes()


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_the_files_below_are_belljars_own_whatever_the_header_names(depth: int, tmp_path: Path) -> None:
    secret, base = tmp_path / "secret", layer(tmp_path / "base.qcow2")
    secret.write_bytes(b"secret" + bytes(MIB - 6))
    hostile = layer(tmp_path / "disk", "-F", "raw", "-b", str(secret))
    layers = [layer(tmp_path / f"below{number}", "-F", "raw", "-b", str(secret)) for number in range(depth)]
    written = tmp_path / "disk.qcow2"
    await content.write_disk(hostile, layers, base, written)
    assert content_of(written) == bytes(MIB)
    left = {path for path in os.listdir(tmp_path) if not path.startswith("below")}
    assert left == {"base.qcow2", "disk", "disk.qcow2", "disk.raw", "secret"}


async def test_what_lies_between_a_disk_and_its_image_is_written_too(tmp_path: Path) -> None:
    base, layers, disk = layer(tmp_path / "base"), [tmp_path / "template", tmp_path / "agent"], tmp_path / "disk"
    for number, (path, below) in enumerate(((layers[1], base), (layers[0], layers[1]), (disk, layers[0]))):
        layer(path, "-F", "qcow2", "-b", str(below))
        commands.run(["qemu-io", "-c", f"write -P {number + 1} {64 * number}k 64k", str(path)], timeout=60)
    await content.write_disk(disk, layers, base, tmp_path / "written")
    for path in layers:
        path.unlink()
    whole = content_of(tmp_path / "written")
    assert [whole[number << 16] for number in range(4)] == [1, 2, 3, 0]


async def test_the_copy_of_a_file_that_is_only_read_can_be_written_by_its_owner(tmp_path: Path) -> None:
    below = layer(tmp_path / "below")
    below.chmod(0o444)
    await content.copy(below, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


async def test_a_disk_whose_content_lies_in_another_file_is_refused(tmp_path: Path) -> None:
    base = layer(tmp_path / "base.qcow2")
    secret = tmp_path / "secret"
    hostile = layer(tmp_path / "disk", "-o", f"data_file={secret},data_file_raw=on")
    for disk, layers in ((hostile, ()), (layer(tmp_path / "mine"), (hostile,))):
        with pytest.raises(errors.ImageCorrupt, match="its data lies in another file"):
            await content.write_disk(disk, layers, base, tmp_path / "kept.qcow2")
        (tmp_path / "kept.qcow2").unlink()
