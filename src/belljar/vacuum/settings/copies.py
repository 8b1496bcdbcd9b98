"""The document of a vacuum pipe, and the copy of it that is used until it expires and, with its age in the status, as long as no
newer one can be fetched. What it names is a stranger's word: no address of this host or of private networks, unless the site
said that the pipe comes from there itself (`is_public`)."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from belljar.errors import BelljarError
from belljar.host.files import read_json, write_whole
from belljar.host.values import number
from belljar.reading import strict_json
from belljar.records import dataclass, replace
from belljar.vacuum import Pipe

LARGEST, MOST_TYPES = 1 << 20, 200
LARGEST_COPY = 8 << 20
PATIENCE = 30.0  # seconds for one document
USUAL_AGE, LEAST_AGE, MOST_AGE = 3600.0, 60.0, 7 * 86400.0  # of a copy
RETRY = 300.0  # seconds after a failure
NAMED_HOST = re.compile(r"([a-z0-9_-]+\.)+[a-z][a-z0-9-]*\.?")
Fetch = Callable[[str, int], bytes]  # what is at an address, of at most so many bytes


def fetch(url: str, largest: int, *, public_only: bool = False) -> bytes:
    """See `Fetch`. Blocks for up to `PATIENCE`. *public_only*: not from this host or a private network. Raises DownloadFailed,
    ImageTooLarge."""
    from belljar.image import small_file

    return small_file(url, largest, patience=PATIENCE, public_only=public_only)


fetch_public: Fetch = partial(fetch, public_only=True)


@dataclass(frozen=True)
class Copy:
    """What is known of a document. Moments are seconds since the epoch."""

    document: Mapping[str, Any] | None = None
    fetched: float = 0.0
    tried: float = 0.0
    problem: str = ""  # of the last try; "" where it succeeded

    def age(self, now: float) -> float:
        return max(now - self.fetched, 0.0)

    def is_due(self, now: float) -> bool:
        """Should it be fetched? A clock that was set back is not a reason to wait for the future."""
        limit = RETRY if self.problem or self.document is None else lasting(self.document)
        since = self.tried if self.problem else self.fetched
        return not since <= now < since + limit

    def told(self, name: str, now: float) -> str:
        """One line for the log and for people; "" where all is well."""
        if not self.problem:
            return ""
        kept = f"a copy of {self.age(now):.0f} s ago is used" if self.document is not None else "there is no copy of it"
        return f"{name}: {self.problem}; {kept}"


def refresh(pipe: Pipe, folder: Path, now: float, get: Fetch | None = None) -> Copy:
    """The document as it is now, or as it was when it could last be fetched. Raises nothing that the pipe's server can cause."""
    copy, get = kept(pipe, folder), get or (fetch_public if is_public(pipe) else fetch)
    if not copy.is_due(now):
        return copy
    try:
        copy = Copy(read_document(get(pipe.url, LARGEST)), now, now)
    except BelljarError as exc:
        copy = replace(copy, tried=now, problem=exc.message)
    except ValueError as exc:
        copy = replace(copy, tried=now, problem=f"{pipe.url}: {exc}")
    write_whole(_place(pipe, folder), json.dumps({"url": pipe.url, **vars(copy)}).encode())
    return copy


def kept(pipe: Pipe, folder: Path) -> Copy:
    """The copy there is, of this address. Looks at no network."""
    with suppress(OSError, ValueError, KeyError, TypeError, BelljarError):
        entry = read_json(_place(pipe, folder), LARGEST_COPY)
        if entry.pop("url") == pipe.url:
            return Copy(**entry)
    return Copy()


def _place(pipe: Pipe, folder: Path) -> Path:
    return folder / f"{pipe.name}.json"


def read_document(data: bytes) -> dict[str, Any]:
    """The JSON object of a pipe. Raises ValueError for anything else."""
    document = strict_json(data)
    if not isinstance(document, dict) or not isinstance(document.get("machinetypes"), list):
        raise ValueError("no JSON object with a list of machinetypes")
    if len(document["machinetypes"]) > MOST_TYPES:
        raise ValueError(f"{len(document['machinetypes'])} machinetypes; at most {MOST_TYPES}")
    return document


def lasting(document: Mapping[str, Any]) -> float:
    """How long a copy may be used without asking again."""
    with suppress(ValueError):
        return min(max(number(str(document.get("cache_seconds", USUAL_AGE))), LEAST_AGE), MOST_AGE)
    return USUAL_AGE


def is_public(pipe: Pipe) -> bool:
    """Is its server in the whole internet? The site says where it is not, or its address shows it."""
    return not pipe.inside and may_name(pipe.url, "")


def may_name(url: str, source: str) -> bool:
    """May a document from *source* name this address? Not one that is by its looks of this host or its site; where a name leads is
    judged when it is fetched."""
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        if host == urlsplit(source).hostname:
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(host).is_global
        return bool(NAMED_HOST.fullmatch(host)) and not host.rstrip(".").endswith((".localhost", ".local", ".internal"))
    return False
