"""A container image's disk and kernel. umoci unpacks all layers into a folder, mke2fs writes that into an ext4 file system: nothing is
mounted, and an ordinary user does it in a user namespace. The kernel is that of `debian12`, built once per store like any other; its
modules are laid over the image as one more layer, so that umoci looks after links that lead elsewhere.

Why ext4 and not squashfs below an overlay: docs/develop/decisions/0028-container-images.md."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, ImageTooLarge, ImageUnfit
from belljar.host.files import free_bytes
from belljar.image import USUAL, Image
from belljar.image.build.debian import usual
from belljar.image.container import layout, sources
from belljar.image.container.sources import Fetched
from belljar.image.intake import fetch, intake, sandbox
from belljar.image.intake.survey import RELEASES, pretty_name
from belljar.image.progress import Progress, shown
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.model import GIB, Account, Container, to_json

# What a machine mounts on, or writes to at its start; scratch images have none of them.
PLACES = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "etc": 0o755, "tmp": 0o1777}
# Modules that software asks for, or a machine's own devices. All others are for hardware and take as much again.
USEFUL = re.compile(
    r"kernel/(crypto|arch/x86/crypto|drivers/(block|md/dm-|virtio|vhost|net/(bonding|ipvlan|vxlan|wireguard|[^/]*\.ko))"
    r"|fs|net/(\d|bridge|ipv4|ipv6|key|netfilter|packet|sched|tls|unix|vmw_vsock|xfrm))"
)
LARGEST_ID = 0xFFFF_FFFE
OTHER_USER = "Say --user UID of another image."
DISK_SIZE = 8 * GIB
SPARE_FILES = 500_000  # that a machine can make
# Facts of the kernel's image that hold for each machine with this kernel and ramdisk.
KERNEL_FACTS = ("root", "fstype", "release", "boots_by", "agent_in_initrd", "kernel_form", "least_memory", "mounts")
BARE = "belljar.bare"  # of the command line: a root that may have no shell and no init
MKE2FS = ("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m", "0")


def bring(store: Store, source: str, name: str) -> Image:
    """Import the image and give it its name; one that is here already, by its manifest, gets only that. One import of a source at a
    time: others wait for it."""
    sources.check(source)
    kernel = _kernel_image(store)
    with shown() as progress, intake.alone(store, fetch.key(source), f"import {source}", progress):
        with intake.draft(store, name) as folder:
            work = folder / "work"
            work.mkdir(mode=0o700)  # programs with the rights of others are in it for a while
            fetched = sources.fetch(source, work / "layout", store.settings, progress)
            if image := stored(store, fetched.manifest):
                image = store.tag(image, name)
            else:
                image = _take(store, folder, source, name, fetched, kernel, progress)
        origins = sorted({*image.facts.get("origins", ()), f"{name} {sources.shown(source)}"})  # see `follow`
        manifest.set_facts(image.disk.parent, {"origins": origins}, mode=store.file_mode)
        progress.step(f"Image {name} is ready ({image.digest:.12})")
        return image


def stored(store: Store, digest: str) -> Image | None:
    """The image of this manifest with the present kernel, where it is in the store and good."""
    facts = {"manifest": digest, "kernel_of": _kernel_image(store).digest}
    ours = (image for image in store.images() if image.store == store.folder and facts.items() <= image.facts.items())
    return next((image for image in ours if not store.complaint(image)), None)


def _take(
    store: Store, folder: Path, source: str, name: str, fetched: Fetched, kernel: Image, progress: Progress
) -> Image:
    work, raw = folder / "work", folder / intake.RAW
    layout.add(work / "layout", _modules(store, kernel, progress))
    size = _write_disk(work, raw, source, store.settings.max_size, progress)
    progress.step("Writing the disk")
    sandbox.convert(raw, "raw", folder / manifest.DISK, "qcow2", size + size // 64 + intake.SPARE)
    container = _container(raw, source, fetched.config)
    os_name = next(filter(None, (pretty_name(_read(raw, path)) for path in RELEASES)), "")
    raw.unlink()
    sandbox.remove(work)
    ours = (image for image in store.images() if image.store == store.folder)
    twin = next((image for image in ours if image.facts.get("kernel_of") == kernel.digest), kernel)
    assert twin.kernel and twin.initrd
    for file, stored in ((manifest.KERNEL, twin.kernel), (manifest.INITRD, twin.initrd)):
        _same_file(stored, folder / file)
    facts = {name: kernel.facts[name] for name in KERNEL_FACTS if name in kernel.facts}
    facts |= {
        "init": "", "init_system": "", "cloud_init": False, "manifest": fetched.manifest, "layers": fetched.layers,
        "kernel_of": kernel.digest, "container": to_json(container),
    }  # fmt: skip
    append = f"{intake.APPEND} belljar.sectors={size // 512} {BARE}"
    return store.publish(folder, manifest.Facts(sources.shown(source), append, time.time(), os_name, size, facts), name)


def _kernel_image(store: Store) -> Image:
    """The image with the kernel of all container images. Raises ImageUnknown, ImageUnfit."""
    image = usual(store)
    facts = image.facts
    if not (image.kernel and image.initrd and facts.get("root") == "/dev/vda" and facts.get("agent_in_initrd")):
        hint = f"`belljar image build debian --name {USUAL}` makes one that has it."
        raise ImageUnfit(f"image {USUAL}: has no kernel that container images can use", hint=hint)
    return image


def _modules(store: Store, kernel: Image, progress: Progress) -> Path:
    """The layer with the kernel's modules, and the folders that a machine needs: made once for each kernel."""
    path = store.work_folder("modules") / f"{kernel.digest}.tar"
    if path.exists():
        return path
    release = str(kernel.facts["release"])
    inside = f"lib/modules/{release}"
    with (
        intake.alone(store, kernel.digest, "read the kernel's modules", progress, "modules"),
        intake.draft(store, "modules") as folder,
    ):
        progress.step(f"Reading the kernel's modules out of {kernel.called}, once")
        sandbox.convert(kernel.disk, "qcow2", folder / intake.RAW, "raw", kernel.virtual_size)
        tree = folder / "tree"
        (tree / "lib/modules").mkdir(parents=True)
        for name, mode in PLACES.items():
            (tree / name).mkdir()
            (tree / name).chmod(mode)
        words = ["-R", f"rdump /usr/lib/modules/{release} tree/lib/modules", intake.RAW]
        sandbox.run_in(folder, ["debugfs", *words], sandbox.CONVERSION, kernel.virtual_size)
        if not (tree / inside / "modules.dep").exists():
            raise ImageUnfit(f"image {kernel.called}: no modules of its kernel {release} were found in it")
        _thin_out(tree / inside)
        words = ["--create", "--directory=tree", "--sort=name", "--owner=0", "--group=0", "--mtime=@0"]
        draft = folder / "modules.tar"
        sandbox.run_in(folder, ["tar", *words, *PLACES, inside], sandbox.CONVERSION, kernel.virtual_size, stdout=draft)
        draft.chmod(store.file_mode)
        draft.rename(path)
    return path


def _thin_out(folder: Path) -> None:
    """Leave the useful modules, and what they need."""
    lines = (line.partition(":") for line in (folder / "modules.dep").read_text().splitlines())
    needs = {path: {path, *others.split()} for path, _, others in lines}
    kept = set[str]().union(*(paths for path, paths in needs.items() if USEFUL.match(path)))
    for path in folder.rglob("*.ko*"):
        if str(path.relative_to(folder)) not in kept:
            path.unlink()


def _write_disk(work: Path, raw: Path, source: str, largest: int, progress: Progress) -> int:
    """Unpack the layers and write the file system. Returns its size. Raises ImageTooLarge, ImageCorrupt, NoSpace."""
    progress.step("Unpacking its layers")
    start = free_bytes(work)

    def watch() -> None:
        if start - free_bytes(work) > largest:  # others write too, but not as much as an image may have
            raise ImageTooLarge(f"{source}: unpacks to more than {largest} bytes")

    with sources.refusals(source):
        words = ["raw", "unpack", "--image", f"layout:{layout.NAME}", "tree"]
        sandbox.run_in(work, ["umoci", *words], sandbox.CONVERSION, largest, with_owners=True, watch=watch)
        counts = [
            sandbox.run_in(work, ["du", "-s", how, "tree"], sandbox.CONVERSION, 1 << 20, with_owners=True)
            for how in ("--block-size=1", "--inodes")
        ]
        used, files = (int(printed.split()[0]) for printed in counts)
        if used > largest:
            raise ImageTooLarge(f"{source}: unpacks to {used} bytes, the limit is {largest}")
        size = max(DISK_SIZE, -(-2 * used // GIB) * GIB)
        progress.step("Making its file system")
        words = [*MKE2FS, "-L", "belljar", "-d", "tree", "-N", str(files + SPARE_FILES), "disk.raw", f"{size >> 10}k"]
        sandbox.run_in(work, words, sandbox.CONVERSION, size, with_owners=True)
    sandbox.remove(work / "tree")
    (work / "disk.raw").rename(raw)
    return size


def _same_file(stored: Path, target: Path) -> None:
    """One file of the store under one more name; a copy where it lies in another store."""
    try:
        os.link(stored, target)
    except OSError:
        target.write_bytes(stored.read_bytes())


def _container(raw: Path, source: str, config: dict[str, Any]) -> Container:
    """How the image wants to be started. Raises ImageCorrupt, ImageUnfit."""
    with layout.malformed(source):
        said = config.get("config") or {}
        words = {key: tuple(map(str, said.get(key) or ())) for key in ("Entrypoint", "Cmd", "Env")}
        env = tuple(
            (name, value) for name, equals, value in (pair.partition("=") for pair in words["Env"]) if name and equals
        )
        account = _account(raw, source, str(said.get("User") or ""))
        return Container(
            words["Entrypoint"], words["Cmd"], env, os.path.join("/", str(said.get("WorkingDir") or "")), account
        )


def _account(raw: Path, source: str, user: str) -> Account:
    """NAME|UID[:GROUP|GID] by the image's own lists. Raises ImageUnfit for a name that is not in them."""
    name, _, group = user.partition(":")
    users = [line.split(":") for line in _read(raw, "/etc/passwd").splitlines() if line.count(":") == 6]
    groups = [line.split(":") for line in _read(raw, "/etc/group").splitlines() if line.count(":") == 3]
    name = name or "0"
    row = next((row for row in users if name in (row[0], row[2])), None)
    if row is None:
        if not name.isdecimal():
            raise ImageUnfit(f"{source}: its user {name!r} is not in its /etc/passwd", hint=OTHER_USER)
        row = ["root" if name == "0" else f"user{name}", "", name, "0", "", "/root" if name == "0" else "/", "/bin/sh"]
    if group:
        found = next((each for each in groups if group in (each[0], each[2])), None)
        if found is None and not group.isdecimal():
            raise ImageUnfit(f"{source}: its group {group!r} is not in its /etc/group", hint=OTHER_USER)
        row[3] = found[2] if found else group
    names = {0: "root"} | {int(each[2]): each[0] for each in groups if each[2].isdecimal()}
    uid, gid = int(row[2]), int(row[3])
    if max(uid, gid) > LARGEST_ID:
        raise ImageUnfit(f"{source}: no user can have the number {max(uid, gid)}", hint=OTHER_USER)
    others = tuple(
        (int(each[2]), each[0]) for each in groups
        if not group and each[2].isdecimal() and int(each[2]) != gid and row[0] in each[3].split(",")
    )  # fmt: skip
    return Account(row[0], uid, gid, names.get(gid, f"group{gid}"), others, row[5] or "/", row[6] or "/bin/sh")


def _read(raw: Path, path: str) -> str:
    """A file of the file system, by its links as the machine would follow them; "" where there is none."""
    with suppress(BelljarError):
        data = sandbox.run(["debugfs", "-R", f"cat {path}", "{0}"], [raw], sandbox.UNPACKING, 1 << 20)
        return data.decode("utf-8", "replace")
    return ""
