"""The image store: a folder of images known by digest, and names that point to them.

    images/sha256-<digest>/{disk.qcow2,kernel,initrd,manifest.json,lock}     published by one rename, then never written
    images/names/<name>        a symbolic link to ../sha256-<digest>
    images/cache/<digest>      initial ramdisks with the present agent in them
    images/drafts/<word>/      images in the making; their maker holds a lock on the file `maker` in it
    images/modules/<digest>    the kernel's modules of that image, as the last layer of container images
    images/downloads/          what `fetch` has of a file so far, with its locks
    images/changes.lock        held while names and images are put in place or taken away

A machine holds a shared lock on `lock` of its image; removing an image takes an exclusive one. `build` and `intake` make
images; `manifest` reads and writes what is known of one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.agent import bundle
from belljar.errors import BadOption, ImageCorrupt, ImageInUse, ImageMismatch, ImageUnknown, NoStore, NotPermitted
from belljar.hints import TYPE_CHECKING
from belljar.host.files import private_folder, remove_tree, sync, write_whole
from belljar.host.locks import Lock, locked, try_lock
from belljar.host.quick_imports import sha256
from belljar.image import HOLD_TIMEOUT, BootFiles, Image, Settings, Surveyor, Users, is_source, name_of
from belljar.image.boot import initramfs
from belljar.image.store import manifest
from belljar.model import Context, Firmware, MachineId

if TYPE_CHECKING:
    from belljar.host.python.interpreter import Interpreter

PREFIX = "sha256-"
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP)  # readlink's errors for what is not a name
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")
HEX = re.compile(r"[0-9a-f]{8,64}")


class Store:
    """A private store that is written to, and behind it the site's, which is only read. Without a *surveyor* no file system of a
    disk that comes in is looked into."""

    is_of_job = False  # of a batch job: nothing is built

    def __init__(
        self,
        own: Path,
        site: Path | None,
        settings: Settings,
        users: Users = lambda digest: [],
        surveyor: Surveyor | None = None,
    ) -> None:
        self.folder = own / "images"
        self.site = site / "images" if site and site != own else None
        self._stores = [self.folder, *([self.site] if self.site else [])]
        self.settings, self.users, self.surveyor = settings, users, surveyor
        self._settled: dict[str, str] = {}  # name -> digest, even where a store has another image of that name

    # ---- finding

    def resolve(self, reference: str) -> Image:
        """The image of this name, digest or unique digest prefix (8 digits or more), checked cheaply against what was stored (size,
        mtime, inode, qcow2 header). Raises ImageUnknown, ImageCorrupt, NoStore."""
        folder, names = self._find(reference)
        try:
            return manifest.read(folder, names)
        except ImageCorrupt as exc:
            with suppress(ImageCorrupt, NoStore):
                exc.hint = self.remedy(manifest.read_unchecked(folder, names))
            raise

    def find(self, reference: str) -> Image:
        """As `resolve`, without looking at the image's files: to show, verify or remove one that is corrupt."""
        folder, names = self._find(reference)
        return manifest.read_unchecked(folder, names)

    def images(self) -> list[Image]:
        """Every image, the private store's first, with all its names. Those without a readable manifest are left out."""
        images: dict[str, Image] = {}
        names = [_names(store) for store in self._stores]
        for folder in (folder for store in self._stores for folder in _image_folders(store)):
            if folder.name not in images:
                called = dict.fromkeys(name for known in names for name in known.get(folder.name, ()))
                with suppress(ImageCorrupt, NoStore):
                    images[folder.name] = manifest.read_unchecked(folder, tuple(called))
        return list(images.values())

    def own_images(self) -> list[Image]:
        """Those of this very store, without the site's."""
        return [image for image in self.images() if image.store == self.folder]

    # ---- using

    def boot_files(self, image: Image, context: Context = Context.AUTO) -> BootFiles:
        """What to boot it with, for a context that `Image.facts` allow. An image that is booted directly has one ramdisk for
        all, the image's part with the present agent appended, cached by digest: RAMDISK (and AUTO) end in belljar's own init;
        CLOUD_INIT and NONE in the image's init (`belljar.init=`); INJECT too, after agent and unit were written into the root
        file system (`belljar.inject`). With a kernel and ramdisk the importer gave, or by firmware, the context changes nothing."""
        if image.kernel is None:
            firmware = firmware_of(image)
            return BootFiles(None, None, "", "uefi" if firmware is Firmware.UEFI else "", firmware)
        if image.initrd is None or not image.facts.get("agent_in_initrd"):
            return BootFiles(image.kernel, image.initrd, image.append, image.digest)
        digest = initramfs.boot_digest(image)
        cached = self.folder / "cache" / digest
        # It was written in one step: it is whole, or somebody truncated it below the image's own part.
        if not (cached.exists() and cached.stat().st_size > image.initrd.stat().st_size):
            self.work_folder("cache")
            data = image.initrd.read_bytes() + initramfs.agent_part(self.interpreter())
            write_whole(cached, data, mode=self.file_mode | 0o200)
        if context not in initramfs.OWN_INIT:
            return BootFiles(image.kernel, cached, image.append, digest)
        init = str(image.facts.get("init") or initramfs.DEFAULT_INIT)
        append = f"{image.append} belljar.init={init}" + " belljar.inject" * (context is Context.INJECT)
        return BootFiles(image.kernel, cached, append, sha256(f"{digest}\n{append}".encode()).hexdigest(), init=init)

    def interpreter(self) -> Interpreter:
        """The agent with this host's Python, packed for guests. Raises HostError, LockTimeout, NoSpace."""
        from belljar.host.python.interpreter import interpreter

        return interpreter(self.work_folder("interpreters"), bundle.key(), bundle.source)

    @contextmanager
    def hold(self, image: Image, id: MachineId) -> Iterator[None]:
        """Keep the image from being removed inside the block. The hold ends when the process that holds it dies. Raises ImageUnknown
        for an image that was removed before."""
        lock = image.disk.parent / "lock"
        try:
            held = locked(lock, timeout=HOLD_TIMEOUT, what=f"use image {image.called} for {id}", shared=True)
        except FileNotFoundError:
            raise ImageUnknown(f"image {image.called} was removed before {id} could use it") from None
        with held:
            with suppress(PermissionError, FileNotFoundError):
                os.utime(lock)  # when it was used last; the site's images are not ours to mark
            yield

    def complaint(self, image: Image) -> str:
        """Why it cannot be used, as far as that is known without reading all of it; else ""."""
        try:
            _ = manifest.read(image.disk.parent, image.names).recipe
        except ImageCorrupt as exc:
            return exc.message
        return ""

    def remedy(self, image: Image) -> str:
        """What to do about a damaged image."""
        again = f"Sync, import or build it again; it came from {image.source}."
        if image.store == self.folder:
            return again
        return f"It lies in the site's store {image.store}, which only its owner can change. As root: {again}"

    def verify(self, image: Image) -> list[str]:
        """What is wrong with its files, by their full digests; empty: nothing. It is marked with that where the store is ours:
        `resolve` refuses it then."""
        ours = image.store == self.folder
        return manifest.verify(image.disk.parent, mode=self.file_mode if ours else None)

    # ---- changing

    def tag(self, image: Image, name: str) -> Image:
        """Give it one more name. A name of another image is moved to this one. Raises ImageUnknown for an image that
        was removed meanwhile."""
        check_name(name)
        self._ours(image, "named")
        with self._changing(f"name {image.called} {name}"):
            return self._tag(image, name)

    def untag(self, name: str) -> None:
        """Remove a name. Removing a missing one is success."""
        (self.folder / "names" / name).unlink(missing_ok=True)

    def remove(
        self, image: Image, *, force: bool = False, nameless: bool = False, patience: float | None = None
    ) -> None:
        """Remove it and its names. Raises ImageInUse while a machine holds it, and without *force* while a template
        needs it (the template is then useless and rebuilt). *nameless*: only if it has no name at that moment."""
        self._ours(image, "removed")
        folder = image.disk.parent
        if not force and (users := self.users(image.digest)):
            raise ImageInUse(f"image {image.called} is used by {', '.join(users)}")
        with self._changing(f"remove image {image.called}", patience), suppress(FileNotFoundError):
            if not (lock := try_lock(folder / "lock")):
                raise ImageInUse(f"image {image.called} is used by a machine: {folder / 'lock'} is held")
            with lock:
                names = _names(self.folder).get(folder.name, ())
                if nameless and names:
                    raise ImageInUse(f"image {image.called} has the name {names[0]} by now")
                for name in names:
                    self.untag(name)
                remove_tree(self._aside(folder))

    def drop(self, reference: str, *, force: bool = False) -> None:
        """Remove a name, and the image with its last name, whatever is left of its files. With *force* the whole image."""
        folder, names = self._find(reference)
        others = [name for name in _names(folder.parent).get(folder.name, ()) if name not in names]
        if names == (reference,) and others and not force and folder.parent == self.folder:
            return self.untag(reference)
        return self.remove(manifest.unread(folder, names), force=force)

    def publish(self, draft: Path, what: manifest.Facts, name: str | None, *, ordered: str = "") -> Image:
        """Turn a finished draft into an image and give it its name. When the same image is there already, that one stays and the draft
        is dropped. *ordered*: the digest it must have, else ImageMismatch."""
        (draft / "lock").touch()
        (draft / "lock").chmod(0o644)
        for file in manifest.PARTS:
            with suppress(FileNotFoundError):
                (draft / file).chmod(self.file_mode)
                sync(draft / file)
        digest = manifest.write(draft, what, mode=self.file_mode)
        if ordered not in ("", digest):
            raise ImageMismatch(f"image {name}: ordered {ordered}, got {digest}")
        folder = self.folder / f"{PREFIX}{digest}"
        with self._changing(f"store {name}"):
            self._place(draft, folder)
            (folder / "maker").unlink(missing_ok=True)  # only now: `gc` removes drafts without a lock
            image = manifest.read(folder)
            return self._tag(image, name) if name else image

    # ---- inside

    @property
    def shared(self) -> bool:
        """Can other users read it? Root's store is public, an ordinary user's is private."""
        return os.geteuid() == 0

    @property
    def file_mode(self) -> int:
        return 0o444 if self.shared else 0o400

    def work_folder(self, name: str = "") -> Path:
        """A folder beside the images, made when it is missing."""
        mode = 0o755 if self.shared else 0o700
        private_folder(self.folder.parent, mode=mode)
        private_folder(self.folder, mode=mode)
        return private_folder(self.folder / name, mode=mode)

    def _ours(self, image: Image, done: str) -> None:
        if image.store != self.folder:
            raise NotPermitted(f"image {image.called} lies in {image.store} and can only be {done} by its owner")

    def _changing(self, what: str, patience: float | None = None) -> Lock:
        """Inside, no other process puts an image or a name in its place, or takes one away. Raises LockTimeout."""
        timeout = self.settings.lock_timeout if patience is None else patience
        return locked(self.work_folder() / "changes.lock", timeout=timeout, what=what)

    def _tag(self, image: Image, name: str) -> Image:
        if not image.disk.parent.is_dir():
            raise ImageUnknown(f"image {image.called} was removed before it could be named {name}")
        names = self.work_folder("names")
        draft = names / f".{name}.{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(f"../{PREFIX}{image.digest}")
        draft.rename(names / name)
        return manifest.read_unchecked(image.disk.parent, tuple(_names(self.folder).get(PREFIX + image.digest, ())))

    def _place(self, draft: Path, folder: Path) -> None:
        """Put it in its place. Where the same image is stored, that stays if every byte of it is right."""
        if not folder.exists():
            draft.rename(folder)
            return sync(self.folder)
        with suppress(ImageCorrupt):
            manifest.read(folder)
            if not manifest.verify(folder, mode=None):
                return remove_tree(draft)
        aside = self._aside(folder)
        draft.rename(folder)
        remove_tree(aside)

    def _aside(self, folder: Path) -> Path:
        """Take an image out of the store, in one step, to be removed: after a crash `gc` does."""
        aside = self.work_folder("drafts") / f"removed-{folder.name[len(PREFIX) :][:16]}-{os.getpid()}"
        return folder.rename(aside)

    def _find(self, reference: str) -> tuple[Path, tuple[str, ...]]:
        """The folder of an image. Names go before digests, the private store before the site's."""
        settled = self._settled.get(reference)
        if is_source(reference) and not settled:
            with suppress(ImageUnknown):
                return self._find_in(self._stores, name_of(reference))
            raise ImageUnknown(f"the image of {reference} is not here", hint="Import it: `belljar image import`.")
        return self._find_in(self._stores, f"sha256:{settled}" if settled else reference)

    def _find_in(self, stores: Sequence[Path], reference: str) -> tuple[Path, tuple[str, ...]]:
        for store in stores if NAME.fullmatch(reference) else ():
            try:
                folder = store / os.path.basename(os.readlink(store / "names" / reference))
            except OSError as exc:
                if exc.errno not in ABSENT:  # it may be in a store that cannot be read
                    raise NoStore(f"{exc.filename}: {exc.strerror}") from exc
            else:
                if folder.is_dir():  # else the next store may have it
                    return folder, (reference,)
        digits = reference.removeprefix("sha256:").removeprefix(PREFIX)
        if not HEX.fullmatch(digits):
            raise ImageUnknown(f"no image is called {reference!r}")
        folders = [folder for store in stores for folder in _image_folders(store)]
        fits = [folder for folder in folders if folder.name.startswith(PREFIX + digits)]
        if len({folder.name for folder in fits}) > 1:
            raise ImageUnknown(f"more than one image has a digest that begins with {digits}", hint="Give more digits.")
        if not fits:
            raise ImageUnknown(f"no image has a name or digest {reference!r}")
        folder = fits[-1]  # the site's where both have it: what a user could write under a digest is not that digest's
        return folder, tuple(_names(folder.parent).get(folder.name, ()))


def firmware_of(image: Image) -> Firmware:
    """The firmware a disk without a kernel of ours is started by. Where nothing is known of it, BIOS."""
    kinds = [image.facts["use_firmware"]] if image.facts.get("use_firmware") else image.facts.get("firmware")
    return Firmware.UEFI if kinds == [Firmware.UEFI.value] else Firmware.BIOS


def check_name(name: str) -> None:
    """Raise BadOption unless *name* can be an image's name."""
    if not NAME.fullmatch(name) or HEX.fullmatch(name):
        hint = "Letters, digits, dots, dashes and underscores, not looking like a digest."
        raise BadOption(f"{name!r} cannot be the name of an image", hint=hint)


def _names(store: Path) -> dict[str, list[str]]:
    """Folder name -> names that point to it."""
    names: dict[str, list[str]] = {}
    with suppress(FileNotFoundError):
        for name in filter(NAME.fullmatch, sorted(os.listdir(store / "names"))):
            with suppress(OSError):
                names.setdefault(os.path.basename(os.readlink(store / "names" / name)), []).append(name)
    return names


def _image_folders(store: Path) -> list[Path]:
    try:
        return [store / name for name in sorted(os.listdir(store)) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise NoStore(f"{store}: {exc.strerror}") from exc
