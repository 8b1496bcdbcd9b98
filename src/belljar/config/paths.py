"""Where belljar keeps its files, for root and for an ordinary user. Computes the defaults; makes no folder."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SITE_STORE = Path("/var/lib/belljar")
NODE_PARTS = ("run", "scratch", "store", "logs")  # of a user's folder on a batch node


@dataclass(frozen=True)
class Paths:
    """`[paths]` in the settings files."""

    run: Path = field(
        metadata={
            "help": "folders of the machines that run; short-lived, wants a fast file system",
            "default": "root: /run/belljar; users: $XDG_RUNTIME_DIR/belljar, else /run/user/UID/belljar, else /var/tmp/belljar-UID/run",
        }
    )
    store: Path = field(
        metadata={
            "help": "images and templates; large",
            "default": "root: /var/lib/belljar; users: $XDG_DATA_HOME/belljar, else ~/.local/share/belljar",
        }
    )
    site_store: Path | None = field(
        metadata={
            "help": "the site's read-only images, looked at after one's own; empty: none",
            "default": "root: none; users: /var/lib/belljar",
        }
    )
    scratch: Path = field(
        metadata={
            "help": "writable disks of the machines that run; a full scratch ends jobs, nothing else",
            "default": "root: /var/lib/belljar/scratch; users: /var/tmp/belljar-UID/scratch",
        }
    )
    logs: Path = field(
        metadata={
            "help": "records of ended machines: journal, console, QEMU's words, outcome",
            "default": "root: /var/log/belljar; users: the store's folder logs",
        }
    )
    node: Path | None = field(
        default=None,
        metadata={
            "help": "on a batch node: a local folder in which each user but root gets one, UID/, for run, scratch, store and logs",
            "default": "none",
        },
    )


def default_paths(uid: int, environ: Mapping[str, str]) -> Paths:
    """The places for this user."""
    if uid == 0:
        return Paths(
            run=Path("/run/belljar"),
            store=SITE_STORE,
            site_store=None,
            scratch=SITE_STORE / "scratch",
            logs=Path("/var/log/belljar"),
        )
    own = Path(f"/var/tmp/belljar-{uid}")
    store = _absolute(environ.get("XDG_DATA_HOME")) or home(uid, environ) / ".local/share"
    return Paths(
        run=_runtime_folder(uid, environ) or own / "run",
        store=store / "belljar",
        site_store=SITE_STORE,
        scratch=own / "scratch",
        logs=store / "belljar/logs",
    )


def on_node(paths: Paths, uid: int, given: Container[str]) -> Paths:
    """The places on a batch node: below `node`, where that is set, but for the keys somebody gave (`paths.run`, ...)."""
    if paths.node is None or uid == 0:
        return paths
    own = of_user(paths.node, uid)
    parts = {key: own / key for key in NODE_PARTS if f"paths.{key}" not in given}
    return replace(paths, **parts)


def of_user(node: Path, uid: int) -> Path:
    """The one folder of this user below the node's."""
    return node / str(uid)


def home(uid: int, environ: Mapping[str, str]) -> Path:
    """The user's home folder: $HOME, else what the user database says (batch systems may start us without HOME)."""
    if named := _absolute(environ.get("HOME")):
        return named
    import pwd

    try:
        return Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        return Path(f"/var/tmp/belljar-{uid}")


def _runtime_folder(uid: int, environ: Mapping[str, str]) -> Path | None:
    """The session's runtime folder, if it is this user's: `su` keeps the variable of the user before."""
    for candidate in (_absolute(environ.get("XDG_RUNTIME_DIR")), Path(f"/run/user/{uid}")):
        try:
            if candidate is not None and os.stat(candidate).st_uid == uid:
                return candidate / "belljar"
        except OSError:
            continue
    return None


def _absolute(text: str | None) -> Path | None:
    """The path, unless it is missing, empty or relative: the XDG base directory specification ignores such."""
    return Path(text) if text and text.startswith("/") else None
