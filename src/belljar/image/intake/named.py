"""Images that are named by where they come from, an http(s) address or a path: imported when one is first wanted, and again when
its source has another.

    images/named/<key>.json      what its source said of the version that was imported, and when it was asked
    images/named/<key>.lock      held by the process that asks or imports

Who wants an image that is here waits for nobody: while another process asks or imports, and where the source cannot be asked, the
one that is here is taken.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.errors import BelljarError, ImageUnknown, InputMissing
from belljar.host.files import PRIVATE_FILE, read_json, write_whole
from belljar.host.locks import try_lock
from belljar.image import name_of
from belljar.image.intake import fetch, intake, sources
from belljar.image.progress import shown
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.image.store.store import Store

FOLDER = "named"


@dataclass(frozen=True)
class Known:
    """What was known of a source when it was asked last."""

    version: str = ""  # as the source calls it; "" where it does not say
    asked: float = 0.0
    problem: str = ""  # why it could not be asked, or not imported


def ensure(
    store: Store,
    source: str,
    surveyor: intake.Surveyor | None = None,
    now: float | None = None,
    *,
    public_only: bool = False,
) -> Known:
    """Make sure that the image of this source is here, by its name (`name_of`). A source is asked no more often than
    `image.sync_interval` says. *public_only*: from no address of this host or of a private network, whatever a name leads to.
    Raises what keeps an image from being imported that is not here."""
    moment = time.time() if now is None else now
    order = sources.Order(source, name_of(source), is_disc=None, public_only=public_only)
    place = store.work_folder(FOLDER) / f"{fetch.key(source)}.json"
    known = _known(place)
    if not _is_here(store, source):
        with shown() as progress, intake.alone(store, place.stem, f"import {fetch.shown(source)}", progress, FOLDER):
            if not _is_here(store, source):
                return _import(store, order, _version(store, order), place, moment, surveyor)
        return _known(place)
    if known.asked <= moment < known.asked + store.settings.sync_interval:
        return known
    if (lock := try_lock(place.with_suffix(".lock"))) is None:
        return known
    try:
        return _renewed(store, order, known, place, moment, surveyor)
    finally:
        lock.release()


def _renewed(
    store: Store, order: sources.Order, known: Known, place: Path, now: float, surveyor: intake.Surveyor | None
) -> Known:
    """Import it again where the source has another version. What goes wrong is noted, and the image that is here stays."""
    try:
        version = _version(store, order)
        if version and version != known.version:
            return _import(store, order, version, place, now, surveyor)
        return _note(place, order.source, Known(version or known.version, now))
    except BelljarError as exc:
        return _note(place, order.source, Known(known.version, now, exc.message))


def _import(
    store: Store, order: sources.Order, version: str, place: Path, now: float, surveyor: intake.Surveyor | None
) -> Known:
    sources.bring(store, order, surveyor)
    return _note(place, order.source, Known(version, now))


def _is_here(store: Store, source: str) -> bool:
    with suppress(ImageUnknown):
        store.find(source)
        return True
    return False


def _version(store: Store, order: sources.Order) -> str:
    """What the source calls the version that it has now. Raises DownloadFailed, DownloadStalled, InputMissing."""
    if "://" in order.source:
        return fetch.version(order.source, store.settings, public_only=order.public_only)
    try:
        file = Path(order.source).stat()
    except OSError as exc:
        raise InputMissing(f"{order.source}: {exc.strerror}", hint="Correct the path.") from exc
    return f"{file.st_size} {file.st_mtime_ns}"


def _known(place: Path) -> Known:
    with suppress(OSError, ValueError, KeyError, TypeError, BelljarError):
        note = read_json(place)
        return Known(str(note["version"]), float(note["asked"]), str(note["problem"]))
    return Known()


def _note(place: Path, source: str, known: Known) -> Known:
    facts = {"source": fetch.shown(source), "version": known.version, "asked": known.asked, "problem": known.problem}
    write_whole(place, json.dumps(facts).encode(), mode=PRIVATE_FILE)
    return known
