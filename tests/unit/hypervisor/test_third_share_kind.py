"""A third kind of shared folder is one file: nothing else is edited, and everything knows it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, LAUNCH, QEMU, devices, words_of
from tests.unit.hypervisor.test_plugging import SPEC

from belljar.agent.guest import mounts, system
from belljar.agent.wire import Words
from belljar.cli import parser_of
from belljar.errors import BadOption, GuestRefused, HostError, UsageError
from belljar.guest.conversation import Conversation
from belljar.hypervisor import LibvirtSettings, Settings, load
from belljar.hypervisor import devices as shelf
from belljar.hypervisor.qemu.cmdline import hardware
from belljar.hypervisor.qemu.process.complaints import explain
from belljar.hypervisor.qemu.template.plugging import commands
from belljar.jobs.shares import share
from belljar.machine.planning.refusal import check_shares
from belljar.model import Share

SOURCE = Path(__file__).parents[3] / "src/belljar"
PAPER = '''"""Folders on paper."""

from belljar.errors import HostError
from belljar.hypervisor.devices import ShareKind
from belljar.model import FileSystem


class Paper(ShareKind):
    is_served, device = True, "paper-pci"
    filesystem = FileSystem("paper", "paper_bus paper", "ink=blue")
    complaints = ((r"paper jam", HostError, "Open the tray."),)

    def check(self, settings):
        if settings.user == "nobody":
            raise HostError("no paper on this host")


KIND = Paper()
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """belljar as it is, with one file more."""
    (tmp_path / "share_paper.py").write_text(PAPER)
    monkeypatch.setattr(shelf, "__path__", [*shelf.__path__, str(tmp_path)])
    shelf.share_names.cache_clear()
    yield tmp_path
    shelf.share_names.cache_clear()
    shelf.share_kind.cache_clear()
    sys.modules.pop("belljar.hypervisor.devices.share_paper", None)


FOLDER = Share("/data", "/in", readonly=False, kind="paper")
WITH = replace(COLD, shares=(Share("/home", "/home"), FOLDER))
PORT = "pcie-root-port,id=port0,chassis=1,io-reserve=0"


def test_it_is_asked_for_by_its_name() -> None:
    assert share("paper:/data:/in:rw") == FOLDER
    with pytest.raises(BadOption, match=r"paper.*:\]SRC\[:DST\]\[:ro\|rw\]"):
        share("paper:")


def test_a_host_without_it_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no paper"):
        load(Settings(user="nobody"), tmp_path).check(WITH)
    load(Settings(user="nobody"), tmp_path).check(replace(WITH, shares=WITH.shares[:1]))
    libvirt = load(Settings(), tmp_path, "libvirt:qemu:///system", LibvirtSettings())
    with pytest.raises(UsageError, match="a folder shared by paper"):
        libvirt.check(WITH)


def test_an_image_whose_kernel_lacks_it_is_refused(tmp_path: Path) -> None:
    asked = SimpleNamespace(machine=SimpleNamespace(shares=(replace(FOLDER, source=str(tmp_path)),)), requester="cli")
    image: Any = SimpleNamespace(facts={"mounts": ["9p"]}, called="debian12")
    with pytest.raises(GuestRefused, match="has no paper"):
        check_shares(asked, image)  # type: ignore[arg-type]
    image.facts["mounts"].append("paper")
    check_shares(asked, image)  # type: ignore[arg-type]


def test_it_is_on_qemus_command_line_and_plugged_into_clones() -> None:
    cold = devices(words_of(WITH, QEMU, replace(LAUNCH, folders=(19,))))
    assert cold[-2:] == [PORT, "paper-pci,tag=share1,chardev=folder0,bus=port0"]
    template = devices(words_of(WITH, QEMU, replace(LAUNCH, ram=17, is_draft=True)))
    assert template[-1] == PORT and not any("paper" in word for word in template)
    arguments = {"driver": "paper-pci", "tag": "share1", "chardev": "folder0", "bus": "port0"}
    assert commands(replace(SPEC, shares=WITH.shares), None) == [("device_add", arguments)]
    assert hardware(WITH, QEMU, "max") != hardware(replace(WITH, shares=WITH.shares[:1]), QEMU, "max")
    assert explain("qemu-system-x86_64: paper jam", 256, "starting").hint == "Open the tray."


async def test_the_guest_is_told_how_it_is_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By an agent that has never heard of it."""
    calls, done = list[tuple[bytes, ...]](), list[Any]()

    async def call(*words: bytes, **_: Any) -> None:
        calls.append(words)

    class Kernel:
        MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
        mount = staticmethod(lambda *words: done.append(words))

    target, host = str(tmp_path / "in"), SimpleNamespace(_call=call)
    filesystem = shelf.share_kind("paper").filesystem
    await Conversation.mount(host, replace(FOLDER, target=target), "share1", filesystem)  # type: ignore[arg-type]
    await Conversation.prepare_for(host, filesystem)  # type: ignore[arg-type]
    monkeypatch.setattr(mounts, "libc", Kernel)
    monkeypatch.setattr(system, "MODPROBES", ("/",))
    monkeypatch.setattr(os, "spawnv", lambda how, program, argv: done.append(argv[-1]))
    guest = mounts.Mounts()
    for name, *words in calls:
        guest.calls[name](Words(words))
    assert done == [
        "paper_bus", "paper", (b"share1", target.encode(), b"paper", 6, b"ink=blue"), "paper_bus", "paper",
    ]  # fmt: skip


def test_templates_can_be_built_for_it() -> None:
    for name in ("belljar.cli.image.template",):
        sys.modules.pop(name, None)
    text = parser_of("template").parse_args(["build", "--paper", "2"])
    assert text.paper == 2
    sys.modules.pop("belljar.cli.image.template", None)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (r"\b9p\b", ["hypervisor/devices/share_9p.py"]),
        (r"\bvirtiofs\b", ["hypervisor/devices/share_virtiofs.py"]),
        (
            r"(?i)vfio|HostDevice\b",
            [
                "host/devices/binding.py",
                "hypervisor/__init__.py",
                "hypervisor/devices/pci.py",
                "machine/extras/__init__.py",
                "machine/extras/devices.py",
            ],
        ),
    ],
)
def test_a_kind_stands_in_its_own_file(pattern: str, most: list[str]) -> None:
    """Comments and what the guest runs, too."""
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    found = [str(path.relative_to(SOURCE)) for path in files if re.search(pattern, path.read_text(errors="replace"))]
    assert sorted(found) == most
