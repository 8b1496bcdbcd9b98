"""The guest's side of a folder by virtiofs: the module is loaded, the bus looked at anew, and a kernel without says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rehearsal import Rehearsal

from belljar.agent.guest import mounts, system
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import Refused
from belljar.agent.wire import Words
from belljar.errors import GuestRefused
from belljar.guest.process import refusal


class Kernel:
    """Answers mounts, and remembers what was asked of it."""

    MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4

    def __init__(self, *answers: int) -> None:
        self.answers, self.mounts, self.rescans, self.loaded = list(answers), list[tuple[bytes, int]](), 0, list[str]()
        self.known = b"nodev\tvirtiofs\n"

    def mount(self, source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
        assert (kind, options) == (b"virtiofs", b"")
        self.mounts.append((source, flags))
        if number := self.answers.pop(0):
            raise OSError(number, os.strerror(number))

    def write_file(self, path: str, data: bytes, flags: int = 0) -> None:
        assert (path, data) == ("/sys/bus/pci/rescan", b"1")
        self.rescans += 1


class Events:
    """The kernel's events, of which there is always another."""

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= mounts.PATIENCE

    def recv(self, size: int) -> bytes:
        return b"add@/devices/pci"

    def close(self) -> None:
        pass


def play_modules(monkeypatch: pytest.MonkeyPatch, loaded: list[str], known: Callable[[], bytes]) -> None:
    """A kernel with these file systems, whose modules are only noted."""
    monkeypatch.setattr(system, "read_file", lambda path: known())
    monkeypatch.setattr(system, "MODPROBES", ("/",))
    monkeypatch.setattr(os, "spawnv", lambda how, program, argv: loaded.append(argv[-1]))


@pytest.fixture
def mounting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Kernel, Callable[[], bytes]]]:
    def prepare(*answers: int, how: bytes = b"rw") -> tuple[Kernel, Callable[[], bytes]]:
        kernel = Kernel(*answers)
        monkeypatch.setattr(mounts, "libc", kernel)
        monkeypatch.setattr(mounts, "kernel_events", Events)
        monkeypatch.setattr(mounts, "write_quietly", kernel.write_file)
        play_modules(monkeypatch, kernel.loaded, lambda: kernel.known)
        guest = Guest()
        target = os.fsencode(tmp_path / "place")
        call = [b"virtiofs", b"share0", target, how, b"", b"virtiofs"]
        return kernel, lambda: guest.calls[b"mount"](Words(call)) or guest.mounts[-1]

    return prepare


Mounting = Callable[..., tuple[Kernel, Callable[[], bytes]]]


def test_a_device_that_is_known_is_mounted_at_once(mounting: Mounting, tmp_path: Path) -> None:
    kernel, mount = mounting(0)
    assert mount() == os.fsencode(tmp_path / "place") and (tmp_path / "place").is_dir()
    assert (kernel.mounts, kernel.rescans, kernel.loaded) == ([(b"share0", 6)], 0, [])


def test_a_folder_that_may_only_be_read_is_mounted_so(mounting: Mounting) -> None:
    kernel, mount = mounting(0, how=b"ro")
    mount()
    assert kernel.mounts == [(b"share0", 7)]


def test_the_bus_is_looked_at_anew_once_and_events_are_waited_for(mounting: Mounting) -> None:
    kernel, mount = mounting(errno.EINVAL, errno.EINVAL, errno.EINVAL, 0)
    mount()
    assert len(kernel.mounts) == 4 and kernel.rescans == 1


def test_the_module_is_loaded_where_the_kernel_does_not_know_it(mounting: Mounting) -> None:
    kernel, mount = mounting(0)
    kernel.known = b"nodev\text4\n"
    mount()
    assert kernel.loaded == ["virtiofs"]


def test_a_kernel_without_it_is_told_of_as_that(mounting: Mounting) -> None:
    _, mount = mounting(errno.ENODEV)
    with pytest.raises(Refused) as caught:
        mount()
    assert caught.value.kind == "no-filesystem"
    assert isinstance(refusal(b"no-filesystem\0the guest's kernel has no virtiofs file system"), GuestRefused)


def test_a_device_that_never_comes_is_given_up(mounting: Mounting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "PATIENCE", 0.01)
    _, mount = mounting(*([errno.EINVAL] * 100_000))
    with pytest.raises(OSError, match="Invalid argument"):
        mount()


def test_a_template_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()
    play_modules(monkeypatch, loaded, lambda: b"")
    Guest().calls[b"prepare"](Words([b"9p", b"9pnet_virtio 9p"]))
    assert loaded == ["9pnet_virtio", "9p"]


def test_a_rehearsal_mounts_nothing() -> None:
    with pytest.raises(Refused):
        Rehearsal().calls[b"mount"](Words([b"virtiofs", b"share0", b"/data", b"rw", b"", b""]))
