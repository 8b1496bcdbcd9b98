"""HTCondor's ClassAds, as text: `Name = expression` on a line each, as the starter writes them.

Only literals become values; what must be evaluated stays an `Expression`, and what cannot be read is left out.
https://htcondor.readthedocs.io/en/latest/classads/classad-mechanism.html
"""

from __future__ import annotations

import re

from belljar.records import dataclass

LARGEST = 4 << 20  # bytes; an ad that is larger is not read
MOST = 5000  # attributes
NAME = re.compile(r"\s*('(?:[^'\\]|\\.)*'|[A-Za-z_][A-Za-z0-9_]*)\s*=(?![=?!])\s*")
NUMBER = re.compile(r"[+-]?(?:([0-9]{1,19})|(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?)\Z")


@dataclass(frozen=True)
class Expression:
    """What only HTCondor can evaluate."""

    text: str


Value = str | int | float | bool | Expression | None


class Ad(dict[str, Value]):
    """One ad. Names of attributes have no case, and are in small letters here; the last one of a name counts."""

    def text(self, name: str) -> str:
        """A string literal; "" where there is none."""
        value = self.get(name.lower())
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        """A literal number, cut to an integer; None where there is none or it makes no sense."""
        value = self.get(name.lower())
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return int(value) if 0 <= value < 2**62 else None


def parse(data: bytes) -> Ad:
    """The first ad of a text: an empty line ends it. Never raises: what is not an ad has no attributes."""
    ad = Ad()
    for line in data[:LARGEST].decode("utf-8", "surrogateescape").split("\n"):
        if match := NAME.match(line):
            ad[match[1].strip("'").lower()] = value_of(line[match.end() :].strip())
        if len(ad) >= MOST or (ad and not line.strip()):
            break
    return ad


def value_of(text: str) -> Value:
    """A literal's value, else the expression as it stands."""
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("undefined", "error"):
        return None
    if len(text) < 40 and (number := NUMBER.match(text)):
        return int(text) if number[1] else float(text)
    # In a string a backslash means something only before a quotation mark; a bare mark shows that it is more than one.
    if len(text) >= 2 and text[0] == '"' == text[-1] and '"' not in text[1:-1].replace('\\"', ""):
        return text[1:-1].replace('\\"', '"')
    return Expression(text)


def string(text: str) -> str:
    """A string literal, fit to be printed into an ad: plain ASCII on one line, and no backslash."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)
    return '"' + plain.replace("\\", "/").replace('"', "'") + '"'
