"""Surroundings that were recorded, as the dialects get them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from belljar.batch.job.terms import Surroundings
from belljar.jobs.wrap import surroundings

FOLDER = Path(__file__).resolve().parents[2] / "recordings"


def recorded(system: str, name: str) -> Surroundings:
    """One of tests/recordings, its argument list read as `belljar internal wrap` reads it."""
    raw = json.loads((FOLDER / system / f"{name}.json").read_text())
    words = surroundings([_bytes(word).decode("utf-8", "surrogateescape") for word in raw["argv"]])
    return made(
        words.argv, [(_bytes(key), _bytes(value)) for key, value in raw["env"]], options=words.options,
        stdin=_bytes(raw.get("stdin", "")), files={_bytes(path): _bytes(text) for path, text in raw["files"].items()},
        cwd=_bytes(raw["cwd"]),
    )  # fmt: skip


def made(
    argv: tuple[bytes, ...], env: list[tuple[bytes, bytes]], *, options: Mapping[str, str] | None = None,
    stdin: bytes | None = None, files: Mapping[bytes, bytes] | None = None, cwd: bytes = b"/home/bjalice",
) -> Surroundings:  # fmt: skip
    def read(path: bytes) -> bytes:
        try:
            return (files or {})[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None

    def standard_input() -> bytes:
        assert stdin is not None, "standard input is the job's own and must not be read"
        return stdin

    return Surroundings(
        argv=argv, env=tuple(env), cwd=cwd, uid=1001, gid=1001, groups=(1001,), options=options or {},
        stdin=standard_input, read=read,
    )  # fmt: skip


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
