"""Takes the pieces of a site out again, each with the way to put it back; siting_engine.py says which, and when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.batch.install import marks
from belljar.batch.install.files import Undo, drop_copy, put, read, remove
from belljar.batch.install.pieces import Change, OurFile, Piece
from belljar.batch.install.record import Record, digest
from belljar.errors import BelljarError, CommandFailed, NotOurs

Execute = Callable[[tuple[str, ...], bytes], bytes]  # (argv, stdin) -> stdout; raises CommandFailed, CommandMissing


def undo_change(piece: Change, record: Record, is_gone: bool, execute: Execute, undo: Undo) -> Iterator[str]:
    """One setting. What is gone already needs no command. Raises CommandFailed with the piece's own hint."""
    if not is_gone:
        undo.append(lambda: run_all(piece.do, piece.stdin, execute))
        try:
            for argv in piece.undo:
                execute(argv, b"")
        except CommandFailed as exc:
            raise CommandFailed(f"{piece.purpose}: {exc.message}", hint=piece.undo_hint) from exc
        yield f"undid: {piece.purpose}"
    record.changes.remove(piece.purpose)


def take_lines(path: Path, comment: str, record: Record, undo: Undo) -> Iterator[str]:
    """Our lines out of a file of the site's; the file too, if it was made for them and nothing else is in it."""
    facts = record.edited.pop(str(path))
    text = read(path)
    if text is None:
        return
    left = marks.take(text, comment, str(path))
    if left == text:
        return
    if not left.strip() and not facts.existed:
        remove(path, undo)
        yield f"removed {path}"
        return
    put(path, left[:-1] if facts.lacked_newline and left.endswith(b"\n") else left, 0o644, os.stat(path), undo)
    drop_copy(path, undo)
    yield f"took our lines out of {path}"


def remove_file(name: str, record: Record, undo: Undo) -> Iterator[str]:
    """A file that is ours alone."""
    with suppress(FileNotFoundError):
        remove(Path(name), undo)
        yield f"removed {name}"
    del record.files[name]


def drop_empty_folders(ours: set[Path], pieces: list[Piece]) -> None:
    """*ours*, and the folders that pieces lay in."""
    found = ours | {
        one for piece in pieces if isinstance(piece, OurFile) for one in [*piece.path.parents][: piece.folders]
    }
    for folder in sorted(found, reverse=True):  # what lies in a folder stands before it
        with suppress(OSError):  # it is not empty, or not there
            os.rmdir(folder)


def run_all(commands: tuple[tuple[str, ...], ...], stdin: bytes, execute: Execute) -> None:
    """Each command, whatever becomes of the others."""
    for argv in commands:
        with suppress(BelljarError):
            execute(argv, stdin)


def refuse_changed(record: Record) -> None:
    """Raises NotOurs where a file of ours was changed by hand."""
    changed = [
        name for name, known in record.files.items() if (text := read(Path(name))) is not None and digest(text) != known
    ]
    if changed:
        raise NotOurs(
            "\n".join(f"{name}: changed since belljar wrote it" for name in changed),
            hint="Look at it first; `belljar batch uninstall --force` removes it all the same.",
        )


def refuse_called(pieces: list[Piece], record: Record) -> None:
    """What a site's own script starts with would be missing from it: some daemons do not start then, some drain nodes."""
    ours = [piece for piece in pieces if isinstance(piece, OurFile) and str(piece.path) in record.files]
    found = []
    for caller in dict.fromkeys(piece.caller for piece in ours if piece.caller):
        with suppress(OSError):
            text = read(caller) or b""
            for piece in ours:  # the launchers by their paths, whoever asked for them
                word = piece.path.name if piece.caller == caller else str(piece.path)
                if os.fsencode(word) in text:
                    found.append(f"{caller}: calls {piece.path}")
    if found:
        raise NotOurs("\n".join(found), hint="Take that out of your file first.")
