"""Kernel modules: which ones a guest needs, in which order, as plain ELF bytes.

Works on a `Reader`, a function that returns a file of the image by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from belljar.errors import ImageCorrupt
from belljar.host.python.elf import MAGIC
from belljar.image.intake import sandbox
from belljar.records import dataclass

Reader = Callable[[str], bytes]

# Loaded in this order. A name a kernel has built in, or does not know, is left out.
ALWAYS = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "crc32c_generic")
FILESYSTEMS = {"ext4": ("ext4",), "ext3": ("ext4",), "xfs": ("xfs",), "btrfs": ("btrfs",)}
# Loaded only where the machine has such a device. /init knows the numbers of the devices.
BY_DEVICE = {
    "net": ("virtio_net",),
    "scsi": ("virtio_scsi", "sd_mod"),
    "ahci": ("ahci", "sd_mod"),
    "pvpanic": ("pvpanic", "pvpanic-pci", "pvpanic-mmio"),
}
# All that a ramdisk can have, besides its root's file system and what these need.
NAMES = sorted({name.replace("-", "_") for names in (ALWAYS, *BY_DEVICE.values()) for name in names})
LARGEST_MODULE = 64 << 20
MOST_MODULES, LARGEST_MODULES = 500, 256 << 20  # of one guest: a ramdisk has some twenty, of a few MiB


@dataclass(frozen=True)
class Selection:
    """What goes into an initial ramdisk: module files by name, and per group the names in load order."""

    files: Mapping[str, bytes]
    groups: Mapping[str, list[str]]


def select(read: Reader, folder: str, filesystem: str) -> Selection:
    """The modules a guest with this root file system needs, from the image's own *folder* (/lib/modules/VERSION)."""
    lines = [line.partition(":") for line in read(f"{folder}/modules.dep").decode("utf-8", "replace").splitlines()]
    # For each name its file and those it needs, in the order in which they are loaded.
    index = {module_name(path): [*reversed(needs.split()), path] for path, _, needs in lines}
    groups = {"always": _in_load_order(index, (*ALWAYS, *FILESYSTEMS.get(filesystem, (filesystem,))))}
    groups |= {group: _in_load_order(index, names, groups["always"]) for group, names in BY_DEVICE.items()}
    needed = sorted({path for paths in groups.values() for path in paths})
    if len(needed) > MOST_MODULES:
        raise ImageCorrupt(f"{folder}/modules.dep: {len(needed)} modules are needed")
    files: dict[str, bytes] = {}
    for path in needed:
        files[path] = plain(read(path if path.startswith("/") else f"{folder}/{path}"), path)
        if sum(map(len, files.values())) > LARGEST_MODULES:
            raise ImageCorrupt(f"{folder}: the modules that are needed have more than {LARGEST_MODULES} bytes")
    return Selection(
        {f"{module_name(path)}.ko": data for path, data in files.items()},
        {group: [f"{module_name(path)}.ko" for path in paths] for group, paths in groups.items() if paths},
    )


def _in_load_order(index: Mapping[str, Sequence[str]], names: Iterable[str], loaded: Sequence[str] = ()) -> list[str]:
    """Paths of these modules and of all they need, each once, needed ones first; without those in *loaded*."""
    paths = dict.fromkeys(path for name in names for path in index.get(name.replace("-", "_"), ()))
    return [path for path in paths if path not in loaded]


def mounts(read: Reader, folders: Iterable[str]) -> list[str]:
    """File systems that one of these kernels can mount, as a module or built in; each kernel is known by the *folder* of its
    modules. Raises ImageCorrupt where a list of modules is missing."""
    listed = [read(f"{folder}/{name}") for folder in folders for name in ("modules.dep", "modules.builtin")]
    paths = (line.partition(":")[0] for line in b"\n".join(listed).decode("utf-8", "replace").splitlines())
    return sorted({module_name(path) for path in paths if "/fs/" in path})


def module_name(path: str) -> str:
    """The kernel's name of a module file: dashes are underscores, endings do not count."""
    return path.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def plain(data: bytes, path: str) -> bytes:
    """The module's ELF bytes, unpacked. Raises ImageCorrupt."""
    data = sandbox.unpacked(data, LARGEST_MODULE, path)
    if not data.startswith(MAGIC):
        raise ImageCorrupt(f"{path}: not a kernel module")
    return data
