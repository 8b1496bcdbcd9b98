# ruff: noqa: B905 - for Python 3.5
"""Sizes, times and selections as PBS writes them. `batch install openpbs` puts this very text before its hooks, so it is written for Python 3.5."""

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE = re.compile(r"([0-9]{1,15})([kmgtp]?)([bw]?)", re.IGNORECASE)
POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
WORD = 8  # bytes; a size may be told in words


def size(text: str) -> "int | None":
    """Bytes of "4gb", "1048576kb", "512mw", "100"; None for what is not a size."""
    match = SIZE.fullmatch((text or "").strip())
    if match is None:
        return None
    return int(match.group(1)) * (WORD if match.group(3).lower() == "w" else 1) << POWERS[match.group(2).lower()]


def seconds(text: str) -> "int | None":
    """Of "90", "1:30" or "02:00:00" (with days in front in Torque); None for what is not a time."""
    parts = text.strip().partition(".")[0].split(":")
    if len(parts) > 4 or not all(re.match(r"[0-9]{1,11}\Z", part) for part in parts):
        return None
    return sum(int(part) * factor for part, factor in zip(reversed(parts), (1, 60, 3600, 86400)))


def chunks(selection: object) -> "list[dict[str, str]]":
    """The resources of each chunk, by name; one chunk without any where nothing is selected."""
    texts = str(selection or "").split("+")
    words = [[word.partition("=") for word in text.split(":") if "=" in word] for text in texts]
    return [dict((name, value.strip("\"'")) for name, _, value in chunk) for chunk in words]


def asked(job: "Any", name: str, selection: object) -> str:
    """A resource as the whole job asks for it, or the first chunk of its selection; "" where neither does."""
    value = job.Resource_List[name]
    return str(value) if value else chunks(selection)[0].get(name, "")
