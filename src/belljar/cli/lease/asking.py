"""What verbs ask the lease service on this host, by its socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, HostError, NotPermitted

LARGEST_ANSWER = 64 << 20
KEYS = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
DOOR = "--door PATH :path =/run/belljar-lease/door | the service's socket on this host"


def ask(path: Path, do: str, **facts: Any) -> dict[str, Any]:
    """Raises what the service refused with, as the class it was."""
    with connected(path) as door:
        say(door, do, **facts)
        return answer(door)


def connected(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.connect(str(path))
    except PermissionError as exc:
        door.close()
        raise NotPermitted(f"{path}: {exc.strerror}") from exc
    except OSError as exc:
        door.close()
        raise HostError(
            f"{path}: {exc.strerror or exc}",
            hint="Is `belljar lease serve` up on this host? --door names another socket.",
        ) from exc
    return door


def say(door: socket.socket, do: str, **facts: Any) -> None:
    from belljar.model import dumps

    door.sendall(dumps({"do": do, **facts}) + b"\n")


def answer(door: socket.socket) -> dict[str, Any]:
    import json

    from belljar.machine.outside.detached import error_of

    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LARGEST_ANSWER:
        data = door.recv(1)  # not one byte more: what follows may be the machine's
        if not data:
            raise HostError("the lease service closed the connection", hint="See what it says in its log.")
        line += data
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise error_of(answer)
    return answer


def public_key(path: Path | None) -> str:
    """The file's, or that of the usual places; "" where there is none."""
    known = [path] if path else [Path.home() / ".ssh" / name for name in KEYS]
    for one in known:
        try:
            text = one.read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            if path:
                raise BadOption(f"--key {path}: {exc}", hint="Give the public half: id_ed25519.pub.") from exc
            continue
        if "PRIVATE KEY" in text:
            raise BadOption(f"--key {path}: this is a private key", hint="Give the public half, which ends in .pub.")
        return text
    return ""
