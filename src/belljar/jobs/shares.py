"""What `--share`, `batch.shares` and `--network` may say: host folders, by 9p or virtiofs, exports of NFS servers; networks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from belljar.errors import BadOption, BadSetting, NoSuchNetwork
from belljar.model import NetworkMode, Share, ShareKind

GUESTS_OWN = ("/", "/proc", "/sys", "/dev", "/run")
SCHEME = "nfs://"
BY_VIRTIOFS = "virtiofs:"
MOST_FOLDERS = 20  # each is a device in a slot of its own; the bus has 32, some for what every machine has


def shares(texts: Iterable[str]) -> tuple[Share, ...]:
    """Of all `--share`. Raises BadOption."""
    found = tuple(share(text) for text in texts)
    check_number("--share", len([one for one in found if one.kind is not ShareKind.NFS]))
    return found


def check_number(option: str, count: int) -> None:
    """Raises BadOption for more folders than a machine takes."""
    if count > MOST_FOLDERS:
        raise BadOption(
            f"{option}: {count} folders, and a machine takes at most {MOST_FOLDERS}",
            hint="Share a folder above several of them.",
        )


def share(text: str) -> Share:
    """[virtiofs:]SRC[:DST][:ro|rw], or nfs://HOST[:PORT]/EXPORT:DST[:ro|rw]. Raises BadOption."""
    if text.lower().startswith(SCHEME):
        return export(text)
    return folder_by_virtiofs(text) if text.startswith(BY_VIRTIOFS) else folder(text)


def of_site(texts: Iterable[str]) -> tuple[Share, ...]:
    """Of `batch.shares`: a folder that this host does not have is left out, a server's export never. Raises BadSetting."""
    try:
        found = shares(texts)
    except BadOption as exc:
        raise BadSetting(
            exc.message.replace("--share: ", "--share ", 1).replace("--share ", "batch.shares: ", 1)
        ) from None
    targets = [one.target for one in found]
    for one in targets:
        if targets.count(one) > 1:
            raise BadSetting(f"batch.shares: two folders at {one}")
    return tuple(one for one in found if one.kind is ShareKind.NFS or os.path.isdir(one.source))


def folder(text: str) -> Share:
    """A folder of this host."""
    parts = text.split(":")
    readonly = True
    if len(parts) > 1 and parts[-1] in ("ro", "rw"):
        readonly = parts.pop() == "ro"
    if len(parts) > 2 or not parts[0] or (len(parts) == 2 and not parts[1].startswith("/")):
        raise BadOption(f"--share {text}: not of the form SRC[:DST][:ro|rw] with an absolute DST")
    source = os.path.realpath(parts[0])
    target = os.path.normpath(parts[1] if len(parts) == 2 else os.path.abspath(parts[0]))
    return Share(source, _checked(text, target), readonly)


def folder_by_virtiofs(text: str) -> Share:
    """A folder of this host. One that is itself named `virtiofs` is written `./virtiofs`."""
    try:
        return replace(folder(text.removeprefix(BY_VIRTIOFS)), kind=ShareKind.VIRTIOFS)
    except BadOption as exc:
        what = exc.message.replace("--share ", f"--share {BY_VIRTIOFS}", 1).replace("SRC[", f"{BY_VIRTIOFS}SRC[", 1)
        raise BadOption(what, hint=exc.hint) from None


def export(text: str) -> Share:
    """An export of an NFS server. What is shown of a wrong one cannot steer a terminal."""
    from belljar.network.nfs import read

    said = "".join(char if char.isprintable() else "?" for char in text)
    head, _, mode = text.rpartition(":")
    source, colon, target = (head if mode in ("ro", "rw") else text).rpartition(":")
    if not colon or not target.startswith("/") or target.startswith("//"):
        raise BadOption(f"--share {said}: not of the form nfs://HOST[:PORT]/EXPORT:DST[:ro|rw] with an absolute DST")
    try:
        found = read(source)
    except ValueError as exc:
        raise BadOption(f"--share {said}: {exc}") from None
    if any(not char.isprintable() for char in target):
        raise BadOption(f"--share {said}: DST holds a character that cannot be printed")
    return Share(str(found), _checked(said, os.path.normpath(target)), mode != "rw", ShareKind.NFS)


def _checked(text: str, target: str) -> str:
    if target in GUESTS_OWN:
        raise BadOption(f"--share {text}: {target} is the guest's own", hint="Name another folder as DST.")
    return target


def network_of(text: str) -> tuple[NetworkMode, str]:
    """none, user, bridge, bridge:NAME or isolated:GROUP. Raises NoSuchNetwork; whether there is such a one is seen later."""
    kind, colon, name = text.partition(":")
    try:
        mode = NetworkMode(kind)
    except ValueError:
        raise NoSuchNetwork(f"--network {text[:80]!r}: no such kind of network") from None
    if colon and (mode not in (NetworkMode.BRIDGE, NetworkMode.ISOLATED) or not name):
        raise NoSuchNetwork(f"--network {text[:80]!r}: {'no name may follow' if name else 'the name is missing'}")
    if mode is NetworkMode.ISOLATED and not name:
        raise NoSuchNetwork("--network isolated: the name of the group is missing")
    return mode, name
