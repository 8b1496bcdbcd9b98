"""The kinds of things on a machine's bus. Each has one file here, which says all that is special about it, and is imported for
machines that have something of the kind. `--share NAME:SRC` asks for a shared folder of the kind in share_NAME.py.

The agent knows no kinds: what it mounts, and the modules that it loads for that, go to it as data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module

from belljar.errors import BadOption, UsageError
from belljar.hints import TYPE_CHECKING, Any, Protocol, cast
from belljar.hypervisor import LAST_RESORT

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from belljar.errors import BelljarError
    from belljar.hypervisor import DomainSpec, Settings
    from belljar.hypervisor.libvirt import Ends
    from belljar.hypervisor.qemu.process.launch import Launch
    from belljar.model import FileSystem, MachineId, Share

Complaint = tuple[str, type["BelljarError"], "str | None"]  # what QEMU says, as a pattern; our error for it; a hint
MODERN = "virtio-non-transitional"  # libvirt's word
LACKS = "Ask for a machine without it; docs/batch/libvirt.md tells what libvirt's machines lack."
SHARE = "share_"  # begins the name of each file with a kind of shared folder
MARK = b"BELLJAR_SERVES="  # of a process beside QEMU, on its command line; then the machine's id and a colon


class Kind:
    """All that a machine has of one kind."""

    complaints: tuple[Complaint, ...] = ()

    def words(self, launch: Launch) -> list[str]:
        """QEMU's command line."""
        return []

    def plugged(self, spec: DomainSpec) -> list[dict[str, Any]]:
        """What is plugged into a clone when its state is loaded, as QMP's `device_add` takes it."""
        return []

    def xml(self, spec: DomainSpec, ends: Ends, place: Callable[[], str]) -> Iterator[str]:
        """libvirt's elements; *place* is the address of the next one. Raises UsageError for what libvirt has not."""
        return iter(())


class Server(Protocol):
    """A process beside QEMU that serves a folder. `line` is QEMU's end of its socket, ours to close when QEMU has it."""

    line: socket.socket
    over: asyncio.Future[int]

    async def ready(self) -> None: ...
    def usage(self) -> tuple[float, float, int]: ...
    def kill(self) -> None: ...
    def loss(self) -> BelljarError: ...


class ShareKind:
    """One way in which a guest sees a folder of this host: KIND of its file."""

    is_usual = False  # `--share SRC` means this one
    is_served = False  # by a process beside QEMU, whose device takes part in no migration: it is plugged into a clone
    device = ""  # QEMU's
    traits: Mapping[str, Any] = {}  # of the device of one that is served, beside tag, line and port
    filesystem: FileSystem  # the guest's side
    capabilities: tuple[str, ...] = ()  # that root's QEMU keeps for it
    complaints: tuple[Complaint, ...] = ()

    @property
    def name(self) -> str:
        return self.filesystem.type

    def check(self, settings: Settings) -> None:
        """Refuse what this host cannot give. Raises CommandMissing, HostError."""

    def words(self, tag: str, share: Share) -> list[str]:
        """Of one that is not served: hardware that every clone has."""
        return []

    def serve(self, spec: DomainSpec, tag: str, share: Share, settings: Settings) -> Server:
        """Start the server of one that is served. A socket of its in the machine's folder is NAME.sock, which was journaled."""
        raise NotImplementedError

    def xml(self, tag: str, share: Share, place: str) -> str:
        """Raises UsageError."""
        hint = f"Share the folder without `{self.name}:`; docs/batch/libvirt.md tells what machines by libvirt do not have."
        raise UsageError(f"a folder shared by {self.name}: not with machines by libvirt", hint=hint)


class Shares(Kind):
    """Those that are served have a port each, which is free in a template."""

    def words(self, launch: Launch) -> list[str]:
        spec = launch.spec
        words = [word for tag, share in tagged(spec.shares) for word in share_kind(share.kind).words(tag, share)]
        for number, _ in enumerate(served(spec)):
            words += ["-device", f"pcie-root-port,id=port{number},chassis={number + 1},io-reserve=0"]
        devices = self.plugged(spec) if launch.folders else []  # nobody serves a template's
        for number, (device, fd) in enumerate(zip(devices, launch.folders, strict=True)):
            words += ["-chardev", f"socket,id=folder{number},fd={fd}"]
            words += ["-device", joined(device)] if launch.incoming < 0 else []
        return words

    def plugged(self, spec: DomainSpec) -> list[dict[str, Any]]:
        rows = [(tag, share_kind(share.kind)) for tag, share in served(spec)]
        return [
            {"driver": kind.device, "tag": tag, **kind.traits, "chardev": f"folder{number}", "bus": f"port{number}"}
            for number, (tag, kind) in enumerate(rows)
        ]

    def xml(self, spec: DomainSpec, ends: object, place: Callable[[], str]) -> Iterator[str]:
        return (share_kind(share.kind).xml(tag, share, place()) for tag, share in tagged(spec.shares))


def kinds_of(spec: DomainSpec) -> list[Kind]:
    """The kinds that the machine has, in the order in which they come to its bus."""
    kinds = ("disk:OWN", True), ("card:CARD", spec.nic), (":SHARES", spec.shares), ("pci:DEVICES", spec.devices)
    return [_load(name) for name, has in (*kinds, ("disk:FURTHER", spec.seed or spec.disks)) if has]


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"{__name__}.{module}".rstrip(".")), attribute)


@cache
def share_names() -> tuple[str, ...]:
    """The kinds of shared folders, found by their files."""
    names = (file.removesuffix(".py") for folder in __path__ for file in os.listdir(folder))
    return tuple(sorted(name.removeprefix(SHARE) for name in names if name.startswith(SHARE)))


@cache
def share_kind(name: str) -> ShareKind:
    """The kind of this name; "": the usual one. Raises BadOption."""
    if name and name not in share_names():
        raise BadOption(f"{name[:40]!r}: no such kind of shared folder", hint=f"Known are {', '.join(share_names())}.")
    kinds = (cast("ShareKind", _load(f"{SHARE}{known}:KIND")) for known in ([name] if name else share_names()))
    return next(kind for kind in kinds if name or kind.is_usual)


def share_kinds(spec: DomainSpec) -> list[ShareKind]:
    """Those that the machine has, each once."""
    kinds = {share_kind(share.kind) for share in spec.shares}
    return sorted(kinds, key=lambda kind: kind.name)


def tagged(shares: Sequence[Share]) -> list[tuple[str, Share]]:
    """Each folder with its tag, which is part of the hardware, as its path is not."""
    return [(f"share{number}", share) for number, share in enumerate(shares)]


def served(spec: DomainSpec) -> list[tuple[str, Share]]:
    """Those that a process beside QEMU serves."""
    return [(tag, share) for tag, share in tagged(spec.shares) if share_kind(share.kind).is_served]


async def serve(spec: DomainSpec, settings: Settings) -> list[Server]:
    """A server for each folder that needs one, all running. Raises NotPermitted, HostError, CommandMissing; then none is left."""
    import asyncio  # not by those who only read a command line

    servers: list[Server] = []
    try:
        for tag, share in served(spec):
            servers.append(share_kind(share.kind).serve(spec, tag, share, settings))
        for server in servers:
            await server.ready()
    except BaseException:
        await asyncio.shield(stop_serving(servers))
        raise
    return servers


async def stop_serving(servers: Sequence[Server], *, grace: float = 0.0) -> None:
    """Kill them, and wait until they are gone. In the *grace* they end by themselves: their line is closed."""
    import asyncio

    for seconds in (grace, LAST_RESORT):
        if seconds and servers:
            await asyncio.wait({server.over for server in servers}, timeout=seconds)
        for server in servers:
            server.kill()


def server_of(argv: Sequence[bytes]) -> MachineId | None:
    """The machine whose folder a process with this command line serves; None for any other process."""
    is_one = bool(argv) and argv[0].rpartition(b"/")[2] in (b"unshare", b"setpriv")
    marks = (word.removeprefix(MARK).partition(b":")[0] for word in argv if is_one and word.startswith(MARK))
    return next(marks, b"").decode("ascii", "replace") or None


def complaints() -> list[Complaint]:
    """What QEMU says about things of any kind."""
    kinds: list[Kind | ShareKind] = [_load("pci:DEVICES"), *map(share_kind, share_names())]
    return [row for kind in kinds for row in kind.complaints]


def joined(device: Mapping[str, Any]) -> str:
    """What `device_add` takes, as a word of the command line."""
    return ",".join((str(device["driver"]), *(f"{key}={value}" for key, value in device.items() if key != "driver")))


SHARES = Shares()
