"""What a service tells of itself on its output: one line an event, for people or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from belljar.errors import BelljarError, printable


class Tell(Protocol):
    def __call__(self, event: str, **details: Any) -> None: ...


def teller(file: TextIO, *, as_json: bool) -> Tell:
    """Details that are None or empty are left out; no text of a stranger begins a line or steers a terminal."""

    def tell(event: str, **details: Any) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        known = {key: value for key, value in details.items() if value not in (None, "")}
        if as_json:
            line = json.dumps({"time": moment, "event": event, **known}, default=str)
        else:
            line = " ".join([moment, event, *(f"{key}={_shown(value)}" for key, value in known.items())])
        with suppress(OSError, ValueError):
            file.write(line + "\n")
            file.flush()

    return tell


class Troubles:
    """What goes wrong just now, by what it is about: told once when it begins or becomes another, and once when it is over."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self.now = tell, dict[str, str]()

    def note(self, about: str, why: object = "") -> None:
        """*why*: an error, or words; "" where all is well."""
        text = "" if why == "" else _told(why)
        if text and self.now.get(about) != text:
            self._tell("failed", about=about, why=text)
        elif not text and about in self.now:
            self._tell("works again", about=about)
        self.now.pop(about, None)
        if text:
            self.now[about] = text

    @contextmanager
    def noted(self, about: str) -> Iterator[None]:
        """What goes wrong within is noted, and goes no further."""
        try:
            yield
            self.note(about)
        except (BelljarError, OSError, ValueError) as exc:
            self.note(about, exc)


def _told(why: object) -> str:
    """One line."""
    kind = f"{type(why).__name__}: " if isinstance(why, BelljarError) else ""
    return f"{kind}{str(why) or type(why).__name__}".replace("\n", " ")


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if text and " " not in text and '"' not in text else json.dumps(text, ensure_ascii=False)
