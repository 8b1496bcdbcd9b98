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
from belljar.image.container import IMAGE, malformed, sources
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


def bring(store: Store, source: str, name: str) -> Image:
    """Import the image and give it its name; one that is here already, by its manifest, gets only that. One import of a source at a
    time: others wait for it."""
    sources.check(source)
    kernel = _kernel_image(store)
    with shown() as progress, intake.alone(store, fetch.key(source), f"import {source}", progress):
        with intake.draft(store, name) as folder:
            work = folder / "work"
            work.mkdir(mode=0o700)  # programs with the rights of others are in it for a while
            fetched = sources.fetch(source, work, store.settings, progress)
            if image := stored(store, fetched.manifest):
                image = store.tag(image, name)
            else:
                image = _take(store, folder, source, name, fetched, kernel, progress)
        origins = sorted({*image.facts.get("origins", ()), f"{name} {sources.shown(source)}"})  # see `follow`
        manifest.set_facts(image.disk.parent, {"origins": origins}, mode=store.file_mode)
        return image


def stored(store: Store, digest: str) -> Image | None:
    """The image of this manifest with the present kernel, where it is in the store and good."""
    properties = {"manifest": digest, "kernel_of": _kernel_image(store).digest}
    fits = (image for image in store.own_images() if properties.items() <= image.facts.items())
    return next((image for image in fits if not store.complaint(image)), None)


def _take(
    store: Store, folder: Path, source: str, name: str, fetched: Fetched, kernel: Image, progress: Progress
) -> Image:
    work, raw = folder / "work", folder / intake.RAW
    modules = _modules(store, kernel, progress)
    size = _write_disk(work, raw, source, modules, store.settings.max_size, progress)
    progress.step("Writing the disk")
    sandbox.convert(raw, "raw", folder / manifest.DISK, "qcow2", size + size // 64 + intake.SPARE)
    container = _container(raw, source, fetched.config)
    os_name = next(filter(None, (pretty_name(_read(raw, path)) for path in RELEASES)), "")
    raw.unlink()
    sandbox.remove(work)
    twins = (image for image in store.own_images() if image.facts.get("kernel_of") == kernel.digest)
    intake.borrow(store, next(twins, kernel), (manifest.KERNEL, manifest.INITRD), folder)
    properties = {name: kernel.facts[name] for name in KERNEL_FACTS if name in kernel.facts} | {
        "init": "", "init_system": "", "cloud_init": False, "manifest": fetched.manifest, "layers": fetched.layers,
        "kernel_of": kernel.digest, "container": to_json(container),
    }  # fmt: skip
    append = f"{intake.APPEND} belljar.sectors={size // 512} {BARE}"
    what = manifest.Facts(sources.shown(source), append, time.time(), os_name, size, properties)
    return store.publish(folder, what, name)


def _kernel_image(store: Store) -> Image:
    """The image with the kernel of all container images. Raises ImageUnknown, ImageUnfit."""
    image = usual(store)
    fact = image.facts.get
    if not (image.kernel and image.initrd and fact("root") == "/dev/vda" and fact("agent_in_initrd")):
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


def _write_disk(work: Path, raw: Path, source: str, modules: Path, largest: int, progress: Progress) -> int:
    """Unpack the layers, with the modules on top, and write the file system. Returns its size. Raises ImageTooLarge, ImageCorrupt, NoSpace."""
    progress.step("Unpacking its layers")
    start = free_bytes(work)

    def watch() -> None:
        if start - free_bytes(work) > largest:  # others write too, but not as much as an image may have
            raise ImageTooLarge(f"{source}: unpacks to more than {largest} bytes")

    with sources.refusals(source):
        sources.add_layer(work, modules, largest)
        words = ["raw", "unpack", "--image", IMAGE, "tree"]
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
        sandbox.make_ext4(work, raw, size, "-N", str(files + SPARE_FILES))
    return size


def _container(raw: Path, source: str, config: dict[str, Any]) -> Container:
    """How the image wants to be started. Raises ImageCorrupt, ImageUnfit."""
    with malformed(source):
        config = config.get("config") or {}
        entrypoint, command, pairs = (tuple(map(str, config.get(key) or ())) for key in ("Entrypoint", "Cmd", "Env"))
        env = ((name, value) for name, equals, value in (pair.partition("=") for pair in pairs) if name and equals)
        cwd, account = os.path.join("/", str(config.get("WorkingDir") or "")), str(config.get("User") or "")
        return Container(entrypoint, command, tuple(env), cwd, _account(raw, source, account))


def _account(raw: Path, source: str, asked: str) -> Account:
    """NAME|UID[:GROUP|GID] by the image's own lists. Raises ImageUnfit for a name that is not in them."""
    name, _, group = asked.partition(":")
    name, is_root = name or "0", name in ("", "0")
    unlisted = ["root" if is_root else f"user{name}", "", name, "0", "", "/root" if is_root else "/", "/bin/sh"]
    user = next((row for row in _rows(raw, "/etc/passwd", len(unlisted)) if name in (row[0], row[2])), unlisted)
    groups = [row for row in _rows(raw, "/etc/group", 4) if row[2].isdecimal()]
    if group:
        user[3] = next((row[2] for row in groups if group in (row[0], row[2])), group)
    for what, number, file in (("user", user[2], "passwd"), ("group", user[3], "group")):
        if not number.isdecimal():
            raise ImageUnfit(f"{source}: its {what} {number!r} is not in its /etc/{file}", hint=OTHER_USER)
        if int(number) > LARGEST_ID:
            raise ImageUnfit(f"{source}: no {what} can have the number {number}", hint=OTHER_USER)
    names, gid = {0: "root"} | {int(row[2]): row[0] for row in groups}, int(user[3])
    others = [int(row[2]) for row in groups if not group and user[0] in row[3].split(",") and int(row[2]) != gid]
    further = tuple((other, names[other]) for other in others)
    return Account(
        user[0], int(user[2]), gid, names.get(gid, f"group{gid}"), further, user[5] or "/", user[6] or "/bin/sh"
    )


def _rows(raw: Path, path: str, columns: int) -> list[list[str]]:
    return [row for row in (line.split(":") for line in _read(raw, path).splitlines()) if len(row) == columns]


def _read(raw: Path, path: str) -> str:
    """A file of the file system, by its links as the machine would follow them; "" where there is none."""
    with suppress(BelljarError):
        data = sandbox.run(["debugfs", "-R", f"cat {path}", "{0}"], [raw], sandbox.UNPACKING, 1 << 20)
        return data.decode("utf-8", "replace")
    return ""
