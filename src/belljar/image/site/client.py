"""A repository as a node sees it: what it offers now.

    images/sources/<key>/       the metadata that was verified last: nothing older is accepted later
    images/sources/<key>.lock   held by the process that asks the repository

TUF's own client decides what is true: it refuses what is expired, older than what was seen, put together from several states,
larger than stated, or not signed by enough keys of its role. This module reads what is left, and words the refusals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from tuf.api import exceptions as refusals
from tuf.api.exceptions import DownloadError, DownloadHTTPError, RepositoryError
from tuf.api.metadata import Metadata, Snapshot, TargetFile, Targets
from tuf.ngclient import FetcherInterface, Updater

from belljar.errors import BelljarError, DownloadFailed, HostError, ImageTooLarge, RepositoryRefused, UnsafeFolder
from belljar.host.files import private_folder, read_capped
from belljar.image.intake import fetch, intake
from belljar.image.progress import Progress
from belljar.image.site import Source, source_of, target_path
from belljar.image.store.manifest import DISK, INITRD, KERNEL, PARTS
from belljar.image.store.store import HEX, NAME, Store
from belljar.image.warm import read as read_recipe
from belljar.model import Context, Firmware
from belljar.reading import from_json
from belljar.records import dataclass

LARGEST_ROOT, MOST_ROOTS = 512 << 10, 256
STALE = "Its site has to run `belljar image publish --refresh` (a timer should). A mirror may be behind."
UNSIGNED = "Ask its site who changed it. A repository that was made anew has another root: correct `image.sources`."
UNREACHED = "Check `image.sources`: the folder that `belljar image publish` writes, or its address on a web server."


@dataclass(frozen=True)
class Statement:
    """What is signed of an image beside its packed files."""

    digest: str
    virtual_size: int
    append: str
    os: str
    made_from: str
    sizes: dict[str, int]  # of PARTS, unpacked


@dataclass(frozen=True)
class Offer:
    """This name is this image, says a role of the repository."""

    source: Source
    name: str
    role: str
    image: Statement
    facts: Mapping[str, Any]
    targets: Mapping[str, TargetFile]  # of PARTS, packed


@dataclass(frozen=True)
class Catalog:
    """What a source offers, the most trusted role's first; and what it offers in a way that is refused."""

    source: Source
    offers: Mapping[str, Offer]
    refused: Mapping[str, str]  # a name, or a pattern of names -> why

    def find(self, reference: str) -> Offer | None:
        """What it offers under this name or digest. Raises RepositoryRefused."""
        if offer := self.offers.get(reference):
            return offer
        digest = reference.removeprefix("sha256:")
        offer = next((offer for offer in self.offers.values() if offer.image.digest == digest), None)
        if offer is None:
            self.check(reference)
        return offer

    def check(self, name: str) -> None:
        """Raise RepositoryRefused for a name that is refused."""
        for pattern, why in self.refused.items():
            if fnmatchcase(name, pattern):
                raise RepositoryRefused(why)


def ask(store: Store, line: str, progress: Progress) -> Catalog:
    """What the source in a line of `image.sources` offers now. One process asks at a time. Raises RepositoryRefused, DownloadFailed,
    BadSetting."""
    source, key = source_of(line), fetch.key(line)
    folder, fetcher = store.work_folder("sources") / key, Fetcher(store.settings.stall_timeout)
    with intake.alone(store, key, f"ask {source.shown}", progress, "sources"):
        progress.step(f"Asking {source.shown}")
        private_folder(folder)
        try:
            root = pinned_root(source, fetcher, (folder / "root_history").glob("*.root.json"))
            updater = Updater(str(folder), f"{source.address}/metadata/", fetcher=fetcher, bootstrap=root)
            updater.refresh()
            return _catalog(source, updater, folder)
        except (DownloadError, RepositoryError) as exc:
            _refuse(exc, source, fetcher.file)


class Fetcher(FetcherInterface):
    """Fetches metadata as all else is fetched: with passwords, proxies, and limits in size and time."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.file = ""  # that was asked for last

    def _fetch(self, url: str) -> NoReturn:
        raise NotImplementedError("files larger than metadata are fetched by `sync`")

    def download_bytes(self, url: str, max_length: int) -> bytes:
        self.file = unquote(url.rpartition("/")[2])
        try:
            if path := fetch.local_path(url):
                return read_capped(path, max_length)
            return fetch.small_file(url, max_length, patience=self.patience)
        except (OSError, BelljarError) as exc:
            # Whatever it is, a next root that cannot be fetched counts as missing, and what comes after it fails for itself.
            raise DownloadHTTPError(str(exc), 404) from exc


def pinned_root(source: Source, fetcher: Fetcher, known: Iterable[Path] = ()) -> bytes:
    """The root metadata with the digest that the setting has: among files that are *known*, else from the repository."""
    for path in known:
        if sha256(data := path.read_bytes()).hexdigest() == source.root:
            return data
    with suppress(DownloadHTTPError):
        for version in range(1, MOST_ROOTS):
            data = fetcher.download_bytes(f"{source.address}/metadata/{version}.root.json", LARGEST_ROOT)
            if sha256(data).hexdigest() == source.root:
                return data
    fetcher.download_bytes(f"{source.address}/metadata/1.root.json", LARGEST_ROOT)  # raises where none could be fetched
    raise RepositoryError(f"no version of its root has the digest {source.root:.12}... of `image.sources`")


def _refuse(exc: Exception, source: Source, file: str) -> NoReturn:
    """Raise TUF's error as one of ours."""
    cause = exc.__cause__
    if isinstance(cause, (DownloadFailed, HostError)) and not isinstance(cause, UnsafeFolder):
        raise cause
    if isinstance(exc, DownloadError) and not isinstance(cause, ImageTooLarge):
        raise DownloadFailed(f"{source.shown}: {file}: {cause}", hint=UNREACHED) from exc
    is_stale = isinstance(exc, (refusals.ExpiredMetadataError, refusals.BadVersionNumberError))
    where = "" if isinstance(cause, ImageTooLarge) else f"{source.shown}: "
    raise RepositoryRefused(f"{where}{exc} (reading {file})", hint=STALE if is_stale else UNSIGNED) from exc


def _catalog(source: Source, updater: Updater, folder: Path) -> Catalog:
    """All that TUF accepts. A delegated role that it refuses, or that offers what it may not, leaves the others as they are."""
    offers: dict[str, Offer] = {}
    refused: dict[str, str] = {}
    top = Metadata[Targets].from_bytes((folder / "targets.json").read_bytes()).signed
    snapshot = Metadata[Snapshot].from_bytes((folder / "snapshot.json").read_bytes()).signed
    delegated = (top.delegations and top.delegations.roles) or {}
    # A role that is not in the snapshot has published nothing yet.
    for role in (Targets.type, *(role for role in delegated if f"{role}.json" in snapshot.meta)):
        patterns = (delegated[role].paths or []) if role in delegated else []
        may = ", ".join(pattern.removesuffix("/*") for pattern in patterns) or "*"
        try:
            for pattern in patterns:
                updater.get_targetinfo(pattern)  # this loads and verifies the role, for a pattern fits itself
            paths = Metadata[Targets].from_bytes((folder / f"{quote(role, '')}.json").read_bytes()).signed.targets
        except (DownloadError, RepositoryError, OSError) as exc:
            refused |= dict.fromkeys(may.split(", "), f"{source.shown}: the role {role}: {exc}")
            continue
        for name in sorted({path.partition("/")[0] for path in paths} - set(offers)):
            try:
                if role in delegated and not delegated[role].is_delegated_path(target_path(name, DISK)):
                    raise ValueError("outside of its delegation")
                offers[name] = _offer(source, updater, name, role)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                refused[name] = f"{source.shown}: the role {role} (for {may}) offers {name!r}: {exc}"
    return Catalog(source, offers, refused)


def _offer(source: Source, updater: Updater, name: str, role: str) -> Offer:
    """What is signed of an image, each value of the type that its users expect. Raises ValueError, KeyError, TypeError,
    AttributeError."""
    custom = dict(_target(updater, name, DISK).custom)
    properties = {**custom.pop("facts")}
    image = from_json(Statement, custom)
    files = set(image.sizes)
    if not NAME.fullmatch(name) or HEX.fullmatch(name) or not HEX.fullmatch(image.digest):
        raise ValueError("not a name of an image, or not a digest")
    if DISK not in files or not files <= set(PARTS) or (INITRD in files and KERNEL not in files):
        raise ValueError("an image without a disk, or with files of unknown names")
    if min(image.virtual_size, *image.sizes.values()) < 1:
        raise ValueError("an empty file, or an empty disk")
    items = [item for fact in properties.values() for item in (fact if isinstance(fact, list) else [fact])]
    if not all(isinstance(item, (str, int)) for item in items) or not f"{image.append}{image.os}".isprintable():
        raise ValueError("a fact that is not text or a number, or a text of several lines")
    if not isinstance(properties.get("least_memory", 0), int):
        raise ValueError("least_memory is not a number")
    Context(properties.get("context", "auto"))
    if "warm" in properties:
        read_recipe(str(properties["warm"]))
    list(map(Firmware, (properties.get("use_firmware", "bios"), *properties.get("firmware", []))))
    return Offer(source, name, role, image, properties, {part: _target(updater, name, part) for part in image.sizes})


def _target(updater: Updater, name: str, part: str) -> TargetFile:
    target = updater.get_targetinfo(target_path(name, part))
    if target is None or "sha256" not in target.hashes:
        raise ValueError(f"no role that may publish this name has its {part}")
    return target
