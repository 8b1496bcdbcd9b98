"""Our lines in a site's file, between two marks. Bytes in, bytes out; whoever calls reads and writes the file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from belljar.errors import NotOurs

BEGIN, END = "belljar begin", "belljar end"


def block(lines: Sequence[str], comment: str) -> bytes:
    """The lines with their marks."""
    return "".join(f"{line}\n" for line in (f"{comment} {BEGIN}", *lines, f"{comment} {END}")).encode()


def put(text: bytes, lines: Sequence[str], comment: str, where: str) -> bytes:
    """*text* with our lines: where our marks stand already, else at its end. Raises NotOurs for marks that do not pair."""
    span = _span(text, comment, where)
    if span is not None:
        return text[: span[0]] + block(lines, comment) + text[span[1] :]
    return text + (b"\n" if text and not text.endswith(b"\n") else b"") + block(lines, comment)


def take(text: bytes, comment: str, where: str) -> bytes:
    """*text* without our lines and marks."""
    span = _span(text, comment, where)
    return text if span is None else text[: span[0]] + text[span[1] :]


def clashes(text: bytes, patterns: Sequence[str], comment: str, where: str) -> list[str]:
    """`line N: TEXT` for each line outside our marks, comments apart, that begins with one of the patterns."""
    span = _span(text, comment, where) or (0, 0)
    found, at = [], 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        is_ours = span[0] <= at < span[1]
        at += len(line)
        plain = line.decode("utf-8", "replace").strip()
        if is_ours or plain.startswith(comment):
            continue
        if any(re.match(pattern, plain, re.IGNORECASE) for pattern in patterns):
            found.append(f"line {number}: {plain[:100]}")
    return found


def _span(text: bytes, comment: str, where: str) -> tuple[int, int] | None:
    """Where our marks begin and end, in bytes; None when there are none."""
    begins, ends, at = [], [], 0
    for line in text.splitlines(keepends=True):
        word = line.strip()
        if word == f"{comment} {BEGIN}".encode():
            begins.append(at)
        at += len(line)
        if word == f"{comment} {END}".encode():
            ends.append(at)
    if not begins and not ends:
        return None
    if len(begins) != 1 or len(ends) != 1 or ends[0] <= begins[0]:
        raise NotOurs(
            f"{where}: the marks `{comment} {BEGIN}` and `{comment} {END}` do not pair",
            hint="Repair the file by hand: each mark once, the first before the second.",
        )
    return begins[0], ends[0]
