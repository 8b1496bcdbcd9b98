"""A master store as a node sees it: its index, verified, and the files it names.

    images/sources/<key>.json      what this node knows of a source: the last good index, and the versions that were seen
    images/sources/<key>.lock      held by the process that asks the source; others wait, and use its result

Nothing from a source is used before its signature was verified, and nothing that is older than what was seen.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from belljar import errors
from belljar.errors import (
    BadSetting,
    BelljarError,
    DownloadFailed,
    ImageError,
    IndexStale,
    NotAnIndex,
    SignatureRefused,
)
from belljar.host.files import read_capped, read_json, write_whole
from belljar.host.locks import locked
from belljar.image import Settings
from belljar.image.intake import fetch, intake
from belljar.image.progress import Progress
from belljar.image.site import index, trust
from belljar.image.site.index import Entry, Index
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from datetime import datetime

    from belljar.image.store.store import Store

LARGEST_STATE = 32 << 20
CLOCK_SLACK = 300.0  # seconds a publisher's clock may be ahead of ours


@dataclass(frozen=True)
class Place:
    """Where a master store is: a folder, or an address of one."""

    address: str  # without a slash at its end; a path for a folder
    folder: Path | None

    def of(self, *parts: str) -> str:
        """The address of a file in it."""
        return "/".join((self.address, *parts))

    @property
    def shown(self) -> str:
        """Its address in messages, without a password."""
        return fetch.shown(self.address)


def place_of(source: str) -> Place:
    """The place a line of `image.sources` means. Raises BadSetting."""
    source = source.removesuffix("/" + index.INDEX).rstrip("/")
    try:
        parts = urlsplit(source)
        parts.port  # noqa: B018 - it is checked when it is asked for
    except ValueError as exc:
        raise BadSetting(f"image.sources: {source!r} is not a valid address: {exc}") from exc
    if "://" not in source or parts.scheme == "file":
        folder = Path(unquote(parts.path) if "://" in source else source)
        if not folder.is_absolute():
            raise BadSetting(
                f"image.sources: {source!r} is not an absolute path", hint="Write /PATH or https://HOST/PATH."
            )
        return Place(str(folder), folder)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadSetting(f"image.sources: {source!r}: folders, file, http and https are understood")
    return Place(source, None)


@dataclass(frozen=True)
class Copy:
    """The bytes of an index, with its signatures."""

    data: bytes
    signatures: bytes


@dataclass
class Seen:
    """What this node knows of a source. `versions` of names, and `version` of the index, never go down."""

    checked: float = 0.0  # when a good index came last
    tried: float = 0.0  # when the source was asked last
    trouble: str = ""  # the message of the error, if there was one,
    kind: str = ""  # and its class
    version: int = 0
    digest: str = ""  # of the index with that version
    versions: dict[str, int] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)  # names that came from there -> digest they were given
    copy: Copy | None = None


class Master:
    """One source, for one store."""

    def __init__(self, store: Store, source: str) -> None:
        self.store, self.place = store, place_of(source)
        self.settings = store.settings
        self.rules = trust.read_rules(store.settings.trust)

    # ---- what it offers

    def current(self, progress: Progress, *, youngest: float, now: float | None = None) -> Index:
        """Its index. The source is asked unless it was asked less than *youngest* seconds ago; one process asks, others use its
        result. Where it cannot be reached, the last good index serves for `image.stale_limit`. Raises NotAnIndex,
        IndexStale, SignatureRefused, DownloadFailed."""
        began = time.time() if now is None else now
        seen = self.seen()
        if seen.copy is not None and 0 <= began - seen.checked < youngest:
            return self._kept(seen.copy, seen, began)
        word, what = fetch.key(self.place.address), f"ask {self.place.shown}"
        with intake.alone(self.store, word, what, progress, "sources") as was_second:
            seen = self.seen()
            if not was_second or seen.tried < began:
                return self._ask(seen, progress, began)
        if not seen.trouble and seen.copy is not None:  # the result of the process that was waited for
            return self._kept(seen.copy, seen, began)
        return self._last_good(seen, began)

    def check(self, entry: Entry, now: float | None = None) -> None:
        """Raise SignatureRefused or IndexStale for what is not signed by one who may, or is older than what was seen."""
        self.signer(entry, now)
        name, version = entry.statement.name, entry.statement.version
        if version < (before := self.seen().versions.get(name, 0)):
            raise IndexStale(f"{self.place.shown}: offers version {version} of {name}, and had {before} before")

    def signer(self, entry: Entry, now: float | None = None) -> str:
        """Who signed it; "" where nobody had to. Raises SignatureRefused."""
        from belljar.image.site.signing import STATEMENT

        return trust.judge(
            entry.statement.name, STATEMENT + entry.data, entry.signatures, self.rules, _moment(now),
            shown=f"{entry.statement.name} of {self.place.shown}",
        )  # fmt: skip

    # ---- what was seen

    def seen(self) -> Seen:
        """What this node knows of it; nothing, where that was lost or is broken. Raises OSError where it cannot be read at the
        moment: versions that were seen must not be forgotten by that."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, BelljarError):
            value = read_json(self._path(".json"), LARGEST_STATE)
            copy = value.pop("copy")
            return Seen(**value, copy=None if copy is None else _copy(copy))
        return Seen()

    def note(self, name: str, version: int, digest: str) -> None:
        """Remember that this name was taken from there."""
        with locked(self._path(".lock"), timeout=self.settings.lock_timeout, what=f"note what {self.place.shown} has"):
            seen = self.seen()
            seen.versions[name] = max(version, seen.versions.get(name, 0))
            seen.ours[name] = digest
            self._save(seen)

    def forget(self) -> None:
        """Forget what was seen: the next index is accepted whatever its version."""
        with locked(self._path(".lock"), timeout=self.settings.lock_timeout, what=f"forget {self.place.shown}"):
            self._path(".json").unlink(missing_ok=True)

    def _save(self, seen: Seen) -> None:
        copy = seen.copy and {
            **vars(seen.copy),
            "data": seen.copy.data.decode("latin-1"),
            "signatures": seen.copy.signatures.decode("latin-1"),
        }
        write_whole(self._path(".json"), json.dumps({**vars(seen), "copy": copy}).encode(), durable=True)

    def _path(self, ending: str) -> Path:
        return self.store.work_folder("sources") / f"{fetch.key(self.place.address)}{ending}"

    # ---- asking

    def _ask(self, seen: Seen, progress: Progress, now: float) -> Index:
        """Get its index and verify it; a good one is kept. The caller holds the lock."""
        seen.tried, seen.trouble, seen.kind = now, "", ""
        try:
            copy = self._fetch(seen.copy, progress)
            made = self._judged(copy, seen, now)
        except ImageError as exc:
            seen.trouble, seen.kind = exc.message, type(exc).__name__
            self._save(seen)
            return self._last_good(seen, now)

        seen.checked, seen.copy = now, copy
        seen.version, seen.digest = made.version, sha256(copy.data).hexdigest()
        self._save(seen)
        return made

    def _last_good(self, seen: Seen, now: float) -> Index:
        """The last good index, while it is not too old; else raises why there is no newer one. A newer index that was refused
        is an error in any case."""
        trouble: type[ImageError] = getattr(errors, seen.kind, DownloadFailed)
        if issubclass(trouble, (IndexStale, SignatureRefused)):
            raise trouble(seen.trouble)
        if seen.copy is None or now - seen.checked > self.settings.stale_limit:
            had = "" if seen.copy is None else f" (its last index is {int(now - seen.checked)} s old)"
            raise trouble(f"{seen.trouble}{had}")
        made = self._kept(seen.copy, seen, now)
        tell(f"{seen.trouble}; using its index of {int(now - seen.checked)} s ago")
        return made

    def _kept(self, copy: Copy, seen: Seen, now: float) -> Index:
        """The index that was kept here, verified as a new one is."""
        try:
            return self._judged(copy, seen, now)
        except NotAnIndex as exc:
            text = f"{self.place.shown}: what this host has kept of its index cannot be read"
            raise NotAnIndex(text, hint="`belljar image sync --forget` starts anew.") from exc

    def _judged(self, copy: Copy, seen: Seen, now: float) -> Index:
        """The index in a copy, verified by the present settings. Raises NotAnIndex, SignatureRefused, IndexStale."""
        from belljar.image.site.signing import INDEX

        shown = self.place.shown
        made = index.read(copy.data, shown)
        signatures = index.read_signatures(copy.signatures, f"{shown}: signatures")
        trust.judge_index(INDEX + copy.data, signatures, self.rules, _moment(now), shown=shown)
        if made.expires and made.expires < now:
            raise IndexStale(f"{shown}: its index expired {int(now - made.expires)} s ago")
        is_another = made.version == seen.version and sha256(copy.data).hexdigest() != seen.digest
        if made.version < seen.version or is_another:
            raise IndexStale(
                f"{shown}: its index has version {made.version}, and {'another' if is_another else seen.version} was seen"
            )
        if made.version > now + CLOCK_SLACK and made.created > now + CLOCK_SLACK:
            raise IndexStale(
                f"{shown}: its index is from the future", hint="Set the clock of this host, or of its publisher."
            )
        return made

    def _fetch(self, before: Copy | None, progress: Progress) -> Copy:
        """The index with its signatures. They belong together: the name of a file of signatures is its index' digest."""
        if self.place.folder is not None:
            data = _read(self.place.folder / index.INDEX, index.LARGEST_INDEX)
            place = self.place.folder / index.SIGNATURES / f"{sha256(data).hexdigest()}.json"
            return Copy(data, _read(place, index.LARGEST_SIGNATURES))
        progress.step(f"Asking {self.place.shown}")
        data = fetch.small_file(self.place.of(index.INDEX), index.LARGEST_INDEX, self.settings)
        if before is not None and before.data == data:
            return before
        address = self.place.of(index.SIGNATURES, f"{sha256(data).hexdigest()}.json")
        return Copy(data, fetch.small_file(address, index.LARGEST_SIGNATURES, self.settings))


def tell(text: str) -> None:
    """Write a note to stderr."""
    with suppress(OSError, ValueError):
        os.write(2, f"belljar: {text}\n".encode(errors="replace"))


def _read(path: Path, largest: int) -> bytes:
    try:
        return read_capped(path, largest)
    except OSError as exc:
        raise DownloadFailed(f"{path}: {exc.strerror}", hint="Check `image.sources`: is that folder there?") from exc
    except errors.UnsafeFolder as exc:
        raise NotAnIndex(exc.message) from exc


def _copy(value: dict[str, Any]) -> Copy:
    return Copy(value["data"].encode("latin-1"), value["signatures"].encode("latin-1"))


def _moment(now: float | None) -> datetime:
    return trust.moment(time.time() if now is None else now)


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each value of `[image]` that could not be used; each is read as it is when it is used. No source is
    asked, and no file looked at."""
    looks: list[tuple[str, Callable[[], object]]] = [
        *(("trust", lambda line=line: trust.read_rules((line,))) for line in settings.trust),
        *(("sources", lambda source=source: place_of(source)) for source in settings.sources),
    ]
    for key, look in looks:
        try:
            look()
        except BadSetting as exc:
            yield key, exc
    if settings.sources and not settings.trust:
        yield (
            "sources",
            BadSetting(
                "without lines in `image.trust` nothing is taken from a source",
                hint="say there who may publish which names: docs/image-life.md",
            ),
        )
