"""Files as `batch install` reads and writes them: templates with words filled in, our block in a file of the site's."""

from __future__ import annotations

import difflib
import os
import re
import stat
from pathlib import Path

from belljar.host.files import read_capped, write_whole

LARGEST_FILE = 16 << 20
BEGIN, END = "# belljar begin", "# belljar end"


def filled(template: Path, **words: object) -> bytes:
    """A template with a word for each `@name@` in it."""
    return re.sub("@([a-z_]+)@", lambda match: str(words[match[1]]), template.read_text()).encode()


def names(script: Path, word: str) -> bool:
    """Does a script of the site's have this in it?"""
    try:
        return word in script.read_text(errors="replace")
    except OSError:
        return False


def read(path: Path) -> bytes | None:
    """The file; None where there is none."""
    try:
        return read_capped(path, LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def replace_text(path: Path, text: bytes) -> None:
    """Another text for a file of the site's, whole, with its owner and mode; a link stays one."""
    path = path.resolve()
    was = os.stat(path) if path.exists() else None
    write_whole(path, text, mode=0o600, durable=True)
    if was is not None:
        os.chown(path, was.st_uid, was.st_gid)
    os.chmod(path, stat.S_IMODE(was.st_mode) if was else 0o644)


def span(text: bytes) -> tuple[int, int]:
    """Where our block begins and ends, in bytes; twice the end of the text where there is none. Raises ValueError."""
    begins = [match.start() for match in re.finditer(rb"(?m)^# belljar begin\s*?$", text)]
    ends = [match.end() for match in re.finditer(rb"(?m)^# belljar end\s*?(?:\n|\Z)", text)]
    if not begins and not ends:
        return len(text), len(text)
    if len(begins) != 1 or len(ends) != 1 or ends[0] <= begins[0]:
        raise ValueError(f"the lines `{BEGIN}` and `{END}` do not pair: each has to stand there once, in this order")
    return begins[0], ends[0]


def outside(text: bytes) -> bytes:
    """The text without our block. Raises ValueError."""
    begin, end = span(text)
    return text[:begin] + text[end:]


def difference(path: Path, before: bytes, after: bytes) -> str:
    """As `diff -u` shows it."""
    old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def mode_of(content: bytes) -> int:
    return 0o755 if content.startswith(b"#!") else 0o644


def mode_at(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)
