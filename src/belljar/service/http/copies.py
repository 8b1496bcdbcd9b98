"""A document that lies at an address, and the copy of it that is used until it expires and, with its age told, as long as no newer one
can be had.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from belljar.errors import BelljarError
from belljar.host.files import read_json, write_whole
from belljar.records import dataclass, replace

LARGEST = 8 << 20  # bytes of a copy
RETRY = 300.0  # seconds after a failure
NAMED_HOST = re.compile(r"([a-z0-9_-]+\.)+[a-z][a-z0-9-]*\.?")


@dataclass(frozen=True)
class Copy:
    """What is known of a document. Moments are seconds since the epoch."""

    document: Mapping[str, Any] | None = None
    fetched: float = 0.0
    tried: float = 0.0
    problem: str = ""  # of the last try; "" where it succeeded

    def age(self, now: float) -> float:
        return max(now - self.fetched, 0.0)

    def is_due(self, now: float, lasts: float) -> bool:
        """Should it be fetched? A clock that was set back is not a reason to wait for the future."""
        limit = RETRY if self.problem or self.document is None else lasts
        since = self.tried if self.problem else self.fetched
        return not since <= now < since + limit

    def told(self, name: str, now: float) -> str:
        """One line for the log and for people; "" where all is well."""
        if not self.problem:
            return ""
        kept = f"a copy of {self.age(now):.0f} s ago is used" if self.document is not None else "there is no copy of it"
        return f"{name}: {self.problem}; {kept}"


def refreshed(copy: Copy, url: str, place: Path, now: float, get: Callable[[], Mapping[str, Any]]) -> Copy:
    """The document as it is now, or as it was when it could be had, written to its place. *get* raises BelljarError, ValueError."""
    try:
        copy = Copy(get(), now, now)
    except BelljarError as exc:
        copy = replace(copy, tried=now, problem=exc.message)
    except ValueError as exc:
        copy = replace(copy, tried=now, problem=f"{url}: {exc}")
    facts = {"url": url, **vars(copy)}
    write_whole(place, json.dumps(facts, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return copy


def kept(url: str, place: Path, check: Callable[[Any], object]) -> Copy:
    """The copy there is, of this address; none where *check* raises ValueError."""
    with suppress(OSError, ValueError, KeyError, TypeError, BelljarError):
        facts = read_json(place, LARGEST)
        if facts["url"] == url:
            if facts["document"] is not None:
                check(facts["document"])
            return Copy(facts["document"], float(facts["fetched"]), float(facts["tried"]), str(facts["problem"]))
    return Copy()


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
