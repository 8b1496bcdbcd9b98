"""Belljar's own initial ramdisk: busybox, a handful of drivers, `/init`. The agent travels in a second, small archive.

Made from the image's kernel modules, so nothing has to be installed in an image but python3. What the two scripts do
is written in `inside/`.
"""

from __future__ import annotations

from pathlib import Path

from belljar.image import cpio
from belljar.image.modules import Selection

INSIDE = Path(__file__).parent / "inside"
AGENT = Path(__file__).parent.parent / "agent" / "agent.py"
APPLETS = (
    "sh", "mount", "insmod", "switch_root", "poweroff", "sleep", "mkdir", "cp", "ln", "ifconfig",
)  # fmt: skip
FOLDERS = ("bin", "dev", "proc", "sys", "root", "modules", "belljar")


def image_part(busybox: bytes, selection: Selection) -> bytes:
    """The archive that belongs to the image: the same for every version of the agent."""
    entries = [cpio.folder(name) for name in FOLDERS]
    entries.append(cpio.character_device("dev/console", 5, 1))
    entries.append(cpio.file("bin/busybox", busybox, 0o755))
    entries += [cpio.link(f"bin/{name}", "busybox") for name in APPLETS]
    entries.append(cpio.file("init", (INSIDE / "init").read_bytes(), 0o755))
    entries += [cpio.file(f"modules/{name}", data) for name, data in sorted(selection.files.items())]
    for group, names in sorted(selection.groups.items()):
        entries.append(cpio.file(f"modules/{group}", "".join(f"{name}\n" for name in names).encode()))
    return cpio.archive(entries)


def agent_part() -> bytes:
    """The archive that belongs to this version of belljar: what /init copies to /run/belljar of the guest."""
    return cpio.archive(
        [
            cpio.folder("belljar"),
            cpio.file("belljar/init", (INSIDE / "guest-init").read_bytes(), 0o755),
            cpio.file("belljar/agent.py", AGENT.read_bytes()),
        ]
    )
