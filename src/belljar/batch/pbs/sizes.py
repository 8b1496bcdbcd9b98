"""Sizes as PBS writes them. `batch install openpbs` puts this very text before its hooks, so it is written for Python 3.5."""

import re

SIZE = re.compile(r"([0-9]{1,15})([kmgtp]?)([bw]?)", re.IGNORECASE)
POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
WORD = 8  # bytes; a size may be told in words


def size(text: str) -> "int | None":
    """Bytes of "4gb", "1048576kb", "512mw", "100"; None for what is not a size."""
    match = SIZE.fullmatch((text or "").strip())
    if match is None:
        return None
    return int(match.group(1)) * (WORD if match.group(3).lower() == "w" else 1) << POWERS[match.group(2).lower()]
