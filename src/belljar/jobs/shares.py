"""What `--share`, `batch.shares` and `--network` may say: host folders, by 9p or virtiofs, exports of NFS servers; networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from belljar.errors import BadOption, BadSetting, NoSuchNetwork
from belljar.model import NetworkMode, Share, ShareKind
from belljar.records import replace

GUESTS_OWN = ("/", "/proc", "/sys", "/dev", "/run")
SCHEME = "nfs://"
BY_VIRTIOFS = "virtiofs:"
MOST_FOLDERS = 20  # each is a device in a slot of its own; the bus has 32, some for what every machine has


def shares(texts: Iterable[str], before: str = "--share ") -> tuple[Share, ...]:
    """Of all `--share`. Raises BadOption."""
    found = tuple(share(text, before) for text in texts)
    check_number(before.rstrip(": "), len([one for one in found if one.kind is not ShareKind.NFS]))
    return found


def check_number(option: str, count: int) -> None:
    """Raises BadOption for more folders than a machine takes."""
    if count > MOST_FOLDERS:
        raise BadOption(
            f"{option}: {count} folders, and a machine takes at most {MOST_FOLDERS}",
            hint="Share a folder above several of them.",
        )


def of_site(texts: Iterable[str], left_out: Callable[[str], object] = str) -> tuple[Share, ...]:
    """Of `batch.shares`: a folder that this host does not have is told to *left_out*. Raises BadSetting."""
    try:
        found = shares(texts, "batch.shares: ")
    except BadOption as exc:
        raise BadSetting(exc.message) from None
    targets = [one.target for one in found]
    for one in targets:
        if targets.count(one) > 1:
            raise BadSetting(f"batch.shares: two folders at {one}")
    missing = [share for share in found if share.kind is not ShareKind.NFS and not os.path.isdir(share.source)]
    for gone in missing:
        left_out(gone.source)
    return tuple(one for one in found if one not in missing)


def share(text: str, before: str = "--share ") -> Share:
    """[virtiofs:]SRC[:DST][:ro|rw], or nfs://HOST[:PORT]/EXPORT:DST[:ro|rw]. Raises BadOption."""
    is_export, is_virtiofs = text.lower().startswith(SCHEME), text.startswith(BY_VIRTIOFS)
    shown = "".join(char if char.isprintable() else "?" for char in text) if is_export else text
    try:
        if is_export:
            found = _export(text)
        else:
            found = _folder(text.removeprefix(BY_VIRTIOFS), BY_VIRTIOFS if is_virtiofs else "")
    except ValueError as exc:
        raise BadOption(f"{before}{shown}: {exc}") from None
    if found.target in GUESTS_OWN:
        raise BadOption(f"{before}{shown}: {found.target} is the guest's own", hint="Name another folder as DST.")
    return replace(found, kind=ShareKind.VIRTIOFS) if is_virtiofs else found


def _folder(text: str, before: str) -> Share:
    """A folder of this host. Raises ValueError."""
    parts = text.split(":")
    readonly = True
    if len(parts) > 1 and parts[-1] in ("ro", "rw"):
        readonly = parts.pop() == "ro"
    if len(parts) > 2 or not parts[0] or (len(parts) == 2 and not parts[1].startswith("/")):
        raise ValueError(f"not of the form {before}SRC[:DST][:ro|rw] with an absolute DST")
    target = os.path.normpath(parts[1] if len(parts) == 2 else os.path.abspath(parts[0]))
    return Share(os.path.realpath(parts[0]), target, readonly)


def _export(text: str) -> Share:
    """An export of an NFS server. Raises ValueError."""
    from belljar.network.nfs import read

    head, _, mode = text.rpartition(":")
    source, colon, target = (head if mode in ("ro", "rw") else text).rpartition(":")
    if not colon or not target.startswith("/") or target.startswith("//"):
        raise ValueError("not of the form nfs://HOST[:PORT]/EXPORT:DST[:ro|rw] with an absolute DST")
    found = read(source)
    if any(not char.isprintable() for char in target):
        raise ValueError("DST holds a character that cannot be printed")
    return Share(str(found), os.path.normpath(target), mode != "rw", ShareKind.NFS)


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
