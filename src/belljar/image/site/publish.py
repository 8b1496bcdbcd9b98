"""Put images into a master store: a folder on a file system the site's hosts share, or that a web server serves.

Files first, then signatures, then the index in one rename: a reader sees the old index or the new one, whole. Publishers
on several hosts take turns at the index (flock on `.publish.lock`), and pack side by side.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from belljar.errors import BadOption, CommandFailed, ImageCorrupt, ImageUnknown, OutputUnwritable
from belljar.host.files import no_space_as_error, sync, write_whole
from belljar.host.locks import locked
from belljar.image import Image
from belljar.image.progress import Progress
from belljar.image.site import index
from belljar.image.site.index import Entry, Index, Part, Statement
from belljar.image.store import manifest
from belljar.image.store.store import check_name
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.image.site.signing import Signer
    from belljar.image.store.store import Store

PACKING_TIMEOUT = 4 * 3600
LOCK = ".publish.lock"
LOCK_TIMEOUT = 600.0
DRAFT = f".{index.INDEX}."
FILE, FOLDER = 0o644, 0o755  # readable by all: a web server runs as another user
WRITING_AGE = 3600.0
UNUSED_AGE = 7 * 86400.0  # seconds; so long a file stays for downloads that began with an older index
LEVEL = "-6"  # of a Debian image: a few per cent larger than with -9, in a bit more than half the time


@dataclass(frozen=True)
class Change:
    """What is to be done to a master store."""

    names: Mapping[str, Image]  # name there -> image here
    remove: tuple[str, ...] = ()
    signer: Signer | None = None
    valid: float = 0.0  # seconds until the index expires; 0: never
    prune: bool = False


def folder_of(target: str) -> Path:
    """The folder of a master store one can publish to. Raises BadOption."""
    parts = urlsplit(target)
    if "://" in target and parts.scheme != "file":
        raise BadOption(
            f"--to {target}: belljar publishes into folders only",
            hint="Publish into the folder that the web server serves.",
        )
    return Path(unquote(parts.path)) if "://" in target else Path(target)


def publish(
    store: Store, folder: Path, change: Change, progress: Progress, now: Callable[[], float] = time.time
) -> Index:
    """Carry out the change; returns the index that is there then. Without names it is only renewed. Raises ImageCorrupt for
    an image that is not what was stored, ImageUnknown for a name to remove that is not there."""
    for name in change.names:
        check_name(name)
    if change.signer is not None:
        from belljar.image.site.signing import needed

        needed()
    with _as_unwritable(folder):
        _make(folder)
        _make(folder / index.BLOBS)
        _make(folder / index.SIGNATURES)
        with suppress(FileExistsError):  # for all of a group's publishers
            os.close(os.open(folder / LOCK, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660))
    images = {one.digest: one for one in change.names.values()}
    with ExitStack() as held:
        for image in images.values():
            held.enter_context(store.hold(image, "publish"))
        before = read_index(folder)
        parts = {digest: _parts(store, folder, image, before, progress) for digest, image in images.items()}
        progress.step("Writing the index")
        held.enter_context(locked(folder / LOCK, timeout=LOCK_TIMEOUT, what=f"publish in {folder}"))
        present = read_index(folder)
        for digest in parts:  # somebody may have pruned meanwhile
            if not all(_is_there(folder, part) for part in parts[digest].values()):
                parts[digest] = _parts(store, folder, images[digest], present, progress)
        made = _changed(present, change, parts, int(now()))
        _write(folder, made, change.signer)
        _tidy(folder, now())
        if change.prune:
            _prune(folder, made, now())
    return made


def read_index(folder: Path) -> Index:
    """What is published there; an empty index where nothing is. Raises NotAnIndex."""
    path = folder / index.INDEX
    try:
        with open(path, "rb") as file:
            return index.read(file.read(index.LARGEST_INDEX + 1), str(path))
    except FileNotFoundError:
        return Index(0, 0, 0)


def _changed(present: Index, change: Change, parts: Mapping[str, Mapping[str, Part]], moment: int) -> Index:
    """The next index. Versions never go back, not even where a master store is made anew: they are at least the time."""
    entries = dict(present.entries)
    for name in change.remove:
        if entries.pop(name, None) is None:
            raise ImageUnknown(f"{name}: not published there", hint="Its index.json tells what is.")
    for name, image in change.names.items():
        entries[name] = _entry(name, image, entries.get(name), parts[image.digest], change.signer, moment)
    expires = moment + int(change.valid) if change.valid else 0
    return Index(max(present.version + 1, moment), moment, expires, entries)


def _entry(
    name: str, image: Image, before: Entry | None, parts: Mapping[str, Part], signer: Signer | None, moment: int
) -> Entry:
    old = before.statement if before else None
    previous: tuple[str, ...] = ()
    if old is not None:
        kept = (old.digest, *old.previous) if old.digest != image.digest else old.previous
        previous = tuple(one for one in dict.fromkeys(kept) if one != image.digest)[: index.MOST_PREVIOUS]
    statement = Statement(
        name=name, version=max(old.version + 1 if old else 0, moment), published=moment, digest=image.digest,
        virtual_size=image.virtual_size, append=image.append, os=_one_line(image.os), created=int(image.created),
        made_from=_one_line(str(image.facts.get("made_from") or image.source)), boot_digest=image.boot_digest,
        facts=_facts(image.facts), parts=parts, previous=previous,
    )  # fmt: skip
    data = index.statement_bytes(statement)
    from belljar.image.site.signing import STATEMENT

    return Entry(statement, () if signer is None else (signer.sign(STATEMENT, data),), data)


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are published: none about how the image came here."""
    ours = ("published", "signer", "made_from")
    return {
        name: list(fact) if isinstance(fact, tuple) else fact
        for name, fact in facts.items()
        if name not in ours and isinstance(fact, (str, int, list, tuple))
    }


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[: index.LARGEST_WORDS]


def _parts(store: Store, folder: Path, image: Image, before: Index, progress: Progress) -> Mapping[str, Part]:
    """The image's files in the master store, packed where they are not there yet, or not as they were."""
    for entry in before.entries.values():
        known = entry.statement.parts
        if _is_same(image, entry.statement) and all(_is_there(folder, part) for part in known.values()):
            progress.step(f"Comparing what is published of {image.digest:.12} with its digests")
            if all(manifest.sha256_of(folder / index.BLOBS / part.blob) == part.blob for part in known.values()):
                return known
    progress.step(f"Comparing {image.digest:.12} with what was stored")
    if wrong := store.verify(image):
        raise ImageCorrupt(f"image {image.digest:.12}: {'; '.join(wrong)}")
    files = {manifest.DISK: image.disk, manifest.KERNEL: image.kernel, manifest.INITRD: image.initrd}
    return {name: _packed(folder, path, progress) for name, path in files.items() if path}


def _is_same(image: Image, statement: Statement) -> bool:
    return (image.digest, image.boot_digest) == (statement.digest, statement.boot_digest)


def _is_there(folder: Path, part: Part) -> bool:
    try:
        return (folder / index.BLOBS / part.blob).stat().st_size == part.blob_size
    except OSError:
        return False


def _packed(folder: Path, path: Path, progress: Progress) -> Part:
    """Pack a file into the master store, under its digest."""
    progress.step(f"Packing {path.name}")
    blobs = folder / index.BLOBS
    draft = blobs / f".{os.urandom(8).hex()}"
    try:
        with no_space_as_error(blobs):
            draft.touch(0o600, exist_ok=False)
            _run_zstd(["zstd", "-q", "-f", "-T0", LEVEL, "-o", str(draft), "--", str(path)], draft)
            draft.chmod(FILE)
            sync(draft)
        blob, size = manifest.sha256_of(draft), draft.stat().st_size
        draft.rename(blobs / blob)
        sync(blobs)
        os.utime(blobs / blob)  # another publisher must not prune it as old
    finally:
        draft.unlink(missing_ok=True)
    return Part(manifest.sha256_of(path), path.stat().st_size, index.ZSTD, blob, size)


def _run_zstd(argv: list[str], draft: Path) -> None:
    from belljar.host import commands

    try:
        commands.run(argv, timeout=PACKING_TIMEOUT, bound=True)
    except CommandFailed as exc:
        if "No space left" in exc.message:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft)) from exc
        raise


def _write(folder: Path, made: Index, signer: Signer | None) -> None:
    from belljar.image.site import signing

    data = index.index_bytes(made)
    if len(data) > index.LARGEST_INDEX:
        raise BadOption(f"{folder}: an index of {len(data)} bytes is too large", hint="Use a second master store.")
    signatures = [] if signer is None else [signer.sign(signing.INDEX, data)]
    place = folder / index.SIGNATURES / f"{sha256(data).hexdigest()}.json"
    write_whole(place, index.canonical(signing.as_json(signatures)), mode=FILE, durable=True)
    write_whole(folder / index.INDEX, data, mode=FILE, durable=True)


def _tidy(folder: Path, now: float) -> None:
    """Remove old files that killed publishers left half written."""
    places = (folder, folder / index.BLOBS, folder / index.SIGNATURES)
    for path in (path for place in places for path in place.iterdir()):
        is_draft = path.name.startswith(DRAFT if path.parent == folder else ".")
        with suppress(FileNotFoundError):
            if is_draft and now - path.stat().st_mtime > WRITING_AGE:
                path.unlink()


def _prune(folder: Path, made: Index, now: float) -> None:
    """Remove files that no statement names, and signatures of other indexes, once they are old."""
    wanted = {part.blob for entry in made.entries.values() for part in entry.statement.parts.values()}
    wanted.add(f"{sha256(index.index_bytes(made)).hexdigest()}.json")
    for path in (*(folder / index.BLOBS).iterdir(), *(folder / index.SIGNATURES).iterdir()):
        with suppress(FileNotFoundError):
            if path.name not in wanted and now - path.stat().st_mtime > UNUSED_AGE:
                path.unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(FOLDER)
        folder.chmod(FOLDER)
    except FileExistsError:
        pass


@contextmanager
def _as_unwritable(folder: Path) -> Iterator[None]:
    try:
        with no_space_as_error(folder):
            yield
    except OSError as exc:
        raise OutputUnwritable(f"{folder}: {exc.strerror}", hint="Name a folder you may write to, with --to.") from exc


def images_of(store: Store, references: Sequence[str], name: str) -> dict[str, Image]:
    """Name there -> image, for images named here. Raises ImageUnknown, BadOption."""
    if name and len(references) != 1:
        raise BadOption("--as gives one image its name", hint="Publish images with other names one by one.")
    found = {}
    for reference in references:
        image = store.resolve(reference)
        called = name or (reference if reference in image.names else next(iter(image.names), ""))
        if not called:
            raise BadOption(f"{reference}: the image has no name", hint="Give it one there, with --as NAME.")
        found[called] = replace(image, names=(called,))
    return found
