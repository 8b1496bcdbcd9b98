"""A clone takes into use what was plugged in: files of the kernel, played by files of the test."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from belljar.agent.guest import growth, system
from belljar.agent.guest.growth import grow_root, hold_back, limit_for, take_all

MIB = 1 << 20


class Silence:
    """Events of a kernel that has nothing to tell."""

    def recv(self, most: int) -> bytes:
        raise TimeoutError("nothing more comes")

    def close(self) -> None: ...


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A guest with four blocks of memory and one processor, and whatever a test adds."""
    blocks, processors = tmp_path / "memory", tmp_path / "cpu"
    for folder in (*(blocks / f"memory{number}" for number in range(4)), processors / "cpu0"):
        folder.mkdir(parents=True)
    for number in range(4):
        (blocks / f"memory{number}/state").write_text("online\n")
    (blocks / "block_size_bytes").write_text("8000000\n")
    monkeypatch.setattr(growth, "BLOCKS", str(blocks))
    monkeypatch.setattr(growth, "PROCESSORS", str(processors))
    monkeypatch.setattr(growth, "kernel_events", Silence)
    monkeypatch.setattr(growth.os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path


def test_new_processors_are_put_online_and_blocks_are_awaited_until_the_kernel_has_done_so(kernel: Path) -> None:
    for number in (32, 33):
        (kernel / f"memory/memory{number}").mkdir()
        (kernel / f"memory/memory{number}/state").write_text("online\n")
    (kernel / "cpu/cpu1").mkdir()
    (kernel / "cpu/cpu1/online").write_text("0\n")
    take_all(4, 2, 256 * MIB, 0, 0, 0)
    assert (kernel / "cpu/cpu1/online").read_text()[0] == "1"
    (kernel / "memory/memory33/state").write_text("offline\n")
    with pytest.raises(TimeoutError):
        take_all(4, 2, 256 * MIB, 0, 0, 0)


@pytest.mark.parametrize(("cpus", "plugged"), [(2, 128 * MIB), (3, 0)])
def test_what_is_not_there_is_waited_for(kernel: Path, cpus: int, plugged: int) -> None:
    with pytest.raises(TimeoutError):
        take_all(4, cpus, plugged, 0, 0, 0)


def test_a_processor_that_gives_no_sign_of_life_is_tried_again(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel / "cpu/cpu1").mkdir()
    (kernel / "cpu/cpu1/online").write_text("0\n")
    failures = [OSError(5, "I/O error")] * 2

    real = system.write_file

    def write(path: str, data: bytes, **more: int) -> None:
        if failures:
            raise failures.pop()
        real(path, data, **more)

    monkeypatch.setattr(system, "write_file", write)
    take_all(4, 2, 0, 0, 0, 0)
    assert not failures and (kernel / "cpu/cpu1/online").read_text()[0] == "1"


def test_memory_that_was_not_asked_for_is_held_back_or_the_guest_says_no(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "nr_hugepages"
    held.write_text("3\n")
    monkeypatch.setattr(growth, "HELD", str(held))
    monkeypatch.setattr(growth, "meminfo", lambda name: 2 * MIB)
    hold_back(68 * MIB, 0, True)
    assert held.read_text().split()[0] == "37"
    monkeypatch.setattr(growth, "write_file", lambda *a, **k: None)  # a kernel that has no such pages left
    with pytest.raises(system.Refused, match="136 MiB"):
        hold_back(136 * MIB, 68 * MIB, True)


def test_a_clone_holds_back_what_is_not_its_own_whatever_its_template_held(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "nr_hugepages"
    held.write_text("47\n")  # 13 of the image's own
    monkeypatch.setattr(growth, "HELD", str(held))
    monkeypatch.setattr(growth, "meminfo", lambda name: 2 * MIB)
    hold_back(0, 68 * MIB, True)
    assert int(held.read_text().split()[0]) == 13
    hold_back(100 * MIB, 0, True)
    hold_back(68 * MIB, 100 * MIB, True)
    assert int(held.read_text().split()[0]) == 47


def test_whole_blocks_that_were_not_asked_for_go_offline_so_that_the_guest_does_not_report_them(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = kernel / "nr_hugepages"
    held.write_text("00\n")
    monkeypatch.setattr(growth, "HELD", str(held))
    monkeypatch.setattr(growth, "meminfo", lambda name: 2 * MIB)
    write = system.write_file

    def refuse_the_kernels_own(path: str, data: bytes, **more: int) -> None:
        if path.endswith("memory0/state"):
            raise OSError(16, "Device or resource busy")
        write(path, data, **more)

    monkeypatch.setattr(system, "write_file", refuse_the_kernels_own)
    assert hold_back(300 * MIB, 0, True) == 44 * MIB
    states = [(kernel / f"memory/memory{number}/state").read_text() for number in range(4)]
    assert [state.startswith("offline") for state in states] == [False, True, True, False]
    assert int(held.read_text()) == 22
    hold_back(600 * MIB, 300 * MIB, False)  # a template's blocks stay: its clones may get that memory
    assert [(kernel / f"memory/memory{number}/state").read_text()[:6] for number in (0, 3)] == ["online", "online"]


@pytest.mark.parametrize(("size", "filled"), [(64 * MIB, 64 * MIB), (0, 100 * MIB)])
def test_the_root_fills_what_was_asked_for_or_all_of_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, filled: int
) -> None:
    (tmp_path / "size").write_text(f"{100 * MIB // 512}\n")
    asked: list[bytes] = []
    monkeypatch.setattr(growth, "root_device", lambda: str(tmp_path))
    monkeypatch.setattr(growth.fcntl, "ioctl", lambda fd, request, value: asked.append(value))
    grow_root(size)
    assert struct.unpack("Q", asked[0])[0] * os.statvfs("/").f_bsize == filled


@pytest.mark.parametrize(("device", "there"), [("", 100 * MIB), ("none", 0)])
def test_a_root_that_cannot_become_so_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, there: int
) -> None:
    (tmp_path / "size").write_text(f"{100 * MIB // 512}\n")
    monkeypatch.setattr(growth, "root_device", lambda: str(tmp_path / device))
    with pytest.raises(system.Refused, match=f"has {there} bytes, not {200 * MIB}"):
        grow_root(200 * MIB)


def test_a_payload_may_use_what_was_asked_for_less_what_the_kernel_has() -> None:
    assert limit_for(1024 * MIB, 100 * MIB, 0) == (1024 - 100 - 32) * MIB
    assert limit_for(1024 * MIB, 100 * MIB, 512 * MIB) == (512 - 100 - 16) * MIB
    assert limit_for(64 * MIB, 100 * MIB, 0) == 32 * MIB
