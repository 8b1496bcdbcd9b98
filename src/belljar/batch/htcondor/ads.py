"""HTCondor's ClassAds, as text: read in the old and the new form, one attribute after the other.

Only literals become values: strings, numbers, true and false. Whatever must be evaluated stays an `Expression`, whose
meaning is HTCondor's affair. Nothing an ad holds is ever executed, and what cannot be read is left out.
https://htcondor.readthedocs.io/en/latest/classads/classad-mechanism.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST = 4 << 20  # bytes; an ad that is larger is not read
MOST = 5000  # attributes
NAME = re.compile(r"\s*('(?:[^'\\]|\\.)*'|[A-Za-z_][A-Za-z0-9_]*)\s*=(?![=?!])\s*")
INTEGER = re.compile(r"[+-]?[0-9]+\Z")
REAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?\Z")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
OPENING, CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Expression:
    """What only HTCondor can evaluate."""

    text: str


Value = str | int | float | bool | Expression | None


class Ad:
    """One ad. Names of attributes have no case; the last one of a name counts."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def get(self, name: str) -> Value:
        return self._values.get(name.lower())

    def text(self, name: str) -> str:
        """A string literal; "" where there is none."""
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        """A literal number, cut to an integer; None where there is none or it makes no sense."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return int(value) if 0 <= value < 2**62 else None

    def __len__(self) -> int:
        return len(self._values)


def parse(data: bytes) -> Ad:
    """The first ad of a text. Never raises: what is no ad has no attributes."""
    text = data[:LARGEST].decode("utf-8", "surrogateescape")
    pairs = _new(text) if text.lstrip().startswith("[") else _old(text)
    values: dict[str, Value] = {}
    for name, value in pairs:
        values[name.lower()] = value
        if len(values) >= MOST:
            break
    return Ad(values)


def _old(text: str) -> Iterator[tuple[str, Value]]:
    """`Name = expression` on a line each; an empty line ends the ad. In its strings a backslash means something only
    before a quotation mark."""
    started = False
    for line in text.split("\n"):
        match = NAME.match(line)
        if match:
            started = True
            yield _unquoted(match[1]), value_of(line[match.end() :].strip(), old=True)
        elif started and not line.strip():
            return


def _new(text: str) -> Iterator[tuple[str, Value]]:
    """`[ Name = expression; ... ]`."""
    at = text.index("[") + 1
    while match := NAME.match(text, at):
        end = _end(text, match.end())
        yield _unquoted(match[1]), value_of(text[match.end() : end].strip(), old=False)
        if end >= len(text) or text[end] != ";":
            return
        at = end + 1


def _end(text: str, at: int) -> int:
    """Where an expression of the new form ends: at the `;` or `]` that belongs to the ad itself."""
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in OPENING:
            depth += 1
        elif depth and char in CLOSING:
            depth -= 1
        elif not depth and char in ";]":
            return at
        at += 1
    return at


def value_of(text: str, *, old: bool) -> Value:
    """A literal's value, else the expression as it stands."""
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("undefined", "error"):
        return None
    if INTEGER.match(text) and len(text) < 20:
        return int(text)
    if REAL.match(text) and len(text) < 40:
        return float(text)
    if len(text) >= 2 and text[0] == '"' and text[-1] == '"':
        found = _old_string(text[1:-1]) if old else _new_string(text[1:-1])
        if found is not None:
            return found
    return Expression(text)


def _old_string(inner: str) -> str | None:
    """None where a quotation mark in the middle shows that this is more than one string."""
    rest = inner.replace('\\"', "")
    return None if '"' in rest else inner.replace('\\"', '"')


def _new_string(inner: str) -> str | None:
    parts, at = [], 0
    while at < len(inner):
        char = inner[at]
        if char == '"':
            return None
        if char == "\\":
            at += 1
            if at == len(inner):
                return None  # the mark behind it is no end
            octal = re.compile(r"[0-3]?[0-7]{1,2}").match(inner, at)
            if octal:
                parts.append(chr(int(octal[0], 8)))
                at = octal.end()
                continue
            char = ESCAPES.get(inner[at], inner[at])
        parts.append(char)
        at += 1
    return "".join(parts)


def _unquoted(name: str) -> str:
    return name[1:-1] if name.startswith("'") else name


def string(text: str) -> str:
    """A string literal of any form, fit to be printed into an ad: plain ASCII on one line, and no backslash."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)
    return '"' + plain.replace("\\", "/").replace('"', "'") + '"'
