"""Which variables of a job reach its guest: all but those that are about the host."""

from __future__ import annotations

from collections.abc import Iterable

from belljar.batch import Settings

Pairs = tuple[tuple[bytes, bytes], ...]

# What tells a program of the host where things of the host are, or speaks to a daemon of the host's session.
HOST_ONLY = (
    "LD_*", "DBUS_*", "XDG_RUNTIME_DIR", "XDG_SESSION_*", "XDG_SEAT", "XDG_VTNR", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION",
    "SSH_CLIENT", "SSH_TTY", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "KRB5CCNAME", "NOTIFY_SOCKET", "LISTEN_*",
    "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_*", "GPG_AGENT_INFO", "BELLJAR_*", "GLIBC_TUNABLES", "MALLOC_*",
)  # fmt: skip
SYSTEM_PATH = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")
ALSO_THERE = (*SYSTEM_PATH, b"/usr/local/games", b"/usr/games")


def for_guest(env: Pairs, settings: Settings, inside: Iterable[str]) -> Pairs:
    """The job's variables without the host's own, in order. PATH keeps the folders every system has and those below
    the folders *inside*, which the guest sees at the same path."""
    kept = tuple(word.encode() for word in settings.keep_env)
    dropped = tuple(word.encode() for word in (*HOST_ONLY, *settings.drop_env))
    folders = tuple(folder.rstrip("/").encode("utf-8", "surrogateescape") for folder in inside)
    result = []
    for name, value in env:
        if name and (_fits(name, kept) or not _fits(name, dropped)):
            result.append((name, _path(value, folders) if name == b"PATH" else value))
    return tuple(result)


def _fits(name: bytes, patterns: tuple[bytes, ...]) -> bool:
    return any(name.startswith(one[:-1]) if one.endswith(b"*") else name == one for one in patterns)


def _path(value: bytes, folders: tuple[bytes, ...]) -> bytes:
    """What of a search path the guest can have. Never empty: an empty PATH means the current folder."""

    def is_there(entry: bytes) -> bool:
        if not entry.startswith(b"/"):
            return True  # "." and its like
        return entry.rstrip(b"/") in ALSO_THERE or any(entry == f or entry.startswith(f + b"/") for f in folders)

    entries = [entry for entry in value.split(b":") if is_there(entry)]
    if not any(entry in SYSTEM_PATH for entry in entries):
        entries += SYSTEM_PATH
    return b":".join(entries)
