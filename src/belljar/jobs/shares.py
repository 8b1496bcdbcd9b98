"""What `--share`, `batch.shares`, `--network` and `--publish` may say: host folders, networks, ports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from belljar.errors import BadOption, BadSetting
from belljar.hypervisor.devices import share_kind, share_names
from belljar.model import NetworkMode, Port, Share

GUESTS_OWN = ("/", "/proc", "/sys", "/dev", "/run")
NO_EXPORTS = (
    "Mount it on this host and share the folder; docs/jobs/data.md says how a guest mounts it itself, with Kerberos."
)
PORTS, LAST_PORT = r"(?:(?:(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):)?([0-9]*):)?([0-9]+)", 65535
MOST_FOLDERS = 20  # each is a device in a slot of its own; the bus has 32, some for what every machine has


def shares(texts: Iterable[str], before: str = "--share ") -> tuple[Share, ...]:
    """Read every `--share`. Raises BadOption."""
    folders = tuple(share(text, before) for text in texts)
    check_number(before.rstrip(": "), len(folders))
    return folders


def check_number(option: str, count: int) -> None:
    """Raises BadOption for more folders than a machine takes."""
    if count > MOST_FOLDERS:
        hint = "Share a folder above several of them."
        raise BadOption(f"{option}: {count} folders, and a machine takes at most {MOST_FOLDERS}", hint=hint)


def of_site(texts: Iterable[str], left_out: Callable[[str], object] = str) -> tuple[Share, ...]:
    """Read `batch.shares`; *left_out* gets each folder that this host does not have. Raises BadSetting."""
    try:
        folders = shares(texts, "batch.shares: ")
    except BadOption as exc:
        raise BadSetting(exc.message, hint=exc.hint) from None
    targets = [folder.target for folder in folders]
    if twice := [target for target in targets if targets.count(target) > 1]:
        raise BadSetting(f"batch.shares: two folders at {twice[0]}")
    missing = [folder for folder in folders if not os.path.isdir(folder.source)]
    for folder in missing:
        left_out(folder.source)
    return tuple(folder for folder in folders if folder not in missing)


def share(text: str, before: str = "--share ") -> Share:
    """[KIND:]SRC[:DST][:ro|rw]. The usual kind needs no word, so a folder may have its name. Raises BadOption."""
    if text.lower().startswith("nfs://"):
        raise BadOption(f"{before}{text[:80]!r}: an export is not a folder of this host", hint=NO_EXPORTS)
    kinds = "|".join(name for name in share_names() if not share_kind(name).is_usual)
    match = re.fullmatch(rf"(?:({kinds}):)?([^:]+)(?::(/[^:]*))?(?::(ro|rw))?", text, re.DOTALL)
    if match is None:
        raise BadOption(f"{before}{text}: not of the form [{kinds}:]SRC[:DST][:ro|rw] with an absolute DST")
    kind, source, target, access = match.groups()
    target = os.path.normpath(target or os.path.abspath(source))
    if target in GUESTS_OWN:
        raise BadOption(f"{before}{text}: {target} is the guest's own", hint="Name another folder as DST.")
    return Share(os.path.realpath(source), target, access != "rw", kind or "")


def network_of(text: str) -> tuple[NetworkMode, str]:
    """none, user, bridge, bridge:NAME or isolated:GROUP. Raises BadOption; whether it exists is seen later."""
    match = re.fullmatch(r"(none|user|bridge)|(bridge|isolated):(.+)", text, re.DOTALL)
    if match is None:
        hint = "Give none, user, bridge, bridge:NAME (of `network.bridges`), or isolated:GROUP."
        raise BadOption(f"--network {text[:80]!r}: no such kind of network", hint=hint)
    return NetworkMode(match[1] or match[2]), match[3] or ""


def port_of(text: str, before: str = "--publish ") -> Port:
    """[[ADDR:]HOST:]GUEST; HOST may be empty or 0 for a free one. Raises BadOption."""
    match = re.fullmatch(PORTS, text, re.ASCII)
    if match is None:
        hint = "For example 8888:80; 0:80 for a free port; 0.0.0.0:8888:80 or [::]:8888:80 for other hosts, too."
        raise BadOption(f"{before}{text[:80]!r}: not of the form [[ADDR:]HOST:]GUEST", hint=hint)
    host, guest = int(match[3] or "0"), int(match[4])
    if host > LAST_PORT or not 1 <= guest <= LAST_PORT:
        raise BadOption(f"{before}{text[:80]}: a port is a number from 1 to {LAST_PORT}")
    return Port(guest, host, match[1] or match[2] or Port.address)
