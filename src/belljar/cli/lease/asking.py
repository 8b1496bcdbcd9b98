"""What verbs ask the lease service on this host, by its socket."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, HostError, NotPermitted
from belljar.jobs import complain
from belljar.machine.outside.detached import error_of
from belljar.model import dumps

LARGEST_ANSWER = 64 << 20
HELD = 20.0  # seconds for which the service holds a question until there is news
ANSWER = 120.0  # seconds; it may ask the batch system twice, and a pilot
KEYS = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
DOOR = "--door SOCKET =/run/belljar-lease/door | the service's socket on this host"


def ask(path: Path, do: str, **fields: Any) -> dict[str, Any]:
    """Raises what the service refused with, as the class it was."""
    with connected(path) as door:
        send(door, do, **fields)
        return receive(door)


def watched(path: Path, do: str, limit: float, **fields: Any) -> Iterator[dict[str, Any]]:
    """A status as it is, and then whenever it is another, for *limit* seconds; 0: without end."""
    end, tag = time.monotonic() + (limit or float("inf")), ""
    while True:
        status = ask(path, do, tag=tag, wait=max(0.0, min(HELD, end - time.monotonic())), **fields)
        yield status
        if time.monotonic() >= end:
            return
        tag = status.get("tag", "")


def connected(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.connect(str(path))
        door.settimeout(ANSWER)  # not before: a full backlog would be an error then
        return door
    except OSError as exc:
        door.close()
        if isinstance(exc, PermissionError):
            raise NotPermitted(f"{path}: {exc.strerror}") from exc
        hint = "Is `belljar lease serve` up on this host? --door names another socket."
        raise HostError(f"{path}: {exc.strerror or exc}", hint=hint) from exc


def send(door: socket.socket, do: str, **fields: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # it may have answered all the same
        door.sendall(dumps({"do": do, **fields}) + b"\n")


def receive(door: socket.socket, *, exactly: bool = False) -> dict[str, Any]:
    """The answer; with *exactly*, no byte of what follows it is taken from the socket."""
    import json

    try:
        with door.makefile("rb", 0 if exactly else -1) as file:
            line = file.readline(LARGEST_ANSWER)
    except TimeoutError as exc:
        hint = "Try again: what was asked may be done all the same."
        raise HostError(f"no answer of the lease service in {ANSWER:.0f} s", hint=hint) from exc
    except ConnectionResetError:
        line = b""
    if not line.endswith(b"\n"):
        hint = "It serves 32 at a time of one user, and each `belljar lease ssh` is one; else see its log."
        raise HostError("the lease service closed the connection", hint=hint)
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise error_of(answer)
    return answer


def public_key(path: Path | None) -> str:
    """The file's, or that of the usual places; "" where there is none."""
    home = Path.home() / ".ssh"
    for file in [path] if path else [home / name for name in KEYS]:
        try:
            text = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            if path:
                raise BadOption(f"--key {path}: {exc}", hint="Give the public half: id_ed25519.pub.") from exc
            continue
        if "\n" in text or not re.match(r"[a-z][\w@.-]+ AAAA", text):  # in base64, how long the name of its kind is
            what = f"{'--key ' if path else ''}{file}: not one public key"
            raise BadOption(what, hint="`ssh-keygen -t ed25519` makes one: give the file that ends in .pub.")
        return text
    complain(f"no public key in {home}: nobody can log in to these machines; --key FILE gives one", "")
    return ""
