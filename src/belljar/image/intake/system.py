"""What kind of system lies in a root file system, as far as starting it and leading a job into it goes. Reads names and
links and very few files; what it cannot find is not there."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Protocol

from belljar.errors import ImageCorrupt

INITS = ("/usr/sbin", "/sbin")
SERVERS = {"sshd": ("/usr/sbin", "/usr/bin"), "dropbear": ("/usr/sbin", "/usr/bin", "/usr/local/sbin")}
PROGRAMS = ("/usr/bin", "/bin", "/usr/local/bin")
SYSTEMD = ("/usr/lib/systemd", "/lib/systemd")
WANTED = "/etc/systemd/system/multi-user.target.wants"
UNIT = "belljar-agent.service"
PYTHONS = (("/usr/bin", "python3"), ("/usr/local/bin", "python3"), ("/usr/libexec", "platform-python"))
PYTHON = re.compile(r"python(\d+\.\d+)")


class Tree(Protocol):
    """A file system that can be read."""

    def names(self, path: str) -> list[str]: ...
    def read(self, path: str) -> bytes: ...
    def link(self, path: str) -> str: ...


def describe(root: Tree) -> tuple[str, dict[str, Any]]:
    """The system's name, and the facts `belljar.image.FACTS` speaks of."""
    facts: dict[str, Any] = {
        "python": _python(root),
        **_init(root),
        "cloud_init": _cloud_init(root),
        "sshd": _sshd(root),
    }
    if UNIT in root.names(WANTED):
        facts["agent"] = True
    with suppress(ImageCorrupt):
        facts["packages"] = root.read("/var/lib/dpkg/status").count(b"\nStatus: install ok installed\n")
    return _name(root), facts


def _name(root: Tree) -> str:
    for path in ("/usr/lib/os-release", "/etc/os-release"):
        with suppress(ImageCorrupt):
            text = root.read(path).decode("utf-8", "replace")
            if found := re.search(r'^PRETTY_NAME="?([^"\n]{1,100})', text, re.MULTILINE):
                return "".join(char for char in found[1] if char.isprintable())
    return ""


def _python(root: Tree) -> str:
    """3.11 where /usr/bin/python3 is a link to python3.11, 3 where it leads elsewhere; empty where there is none."""
    if found := PYTHON.fullmatch(root.link("/usr/bin/python3").removeprefix("/usr/bin/")):
        return found[1]
    return "3" if any(name in root.names(folder) for folder, name in PYTHONS) else ""


def _init(root: Tree) -> dict[str, str]:
    """The path the kernel would start, and whether that is systemd."""
    for folder in INITS:
        if "init" in root.names(folder):
            is_systemd = root.link(f"{folder}/init").endswith("/systemd")
            return {"init": "/sbin/init", "init_system": "systemd" if is_systemd else "other"}
    for folder in SYSTEMD:
        if "systemd" in root.names(folder):
            return {"init": f"{folder}/systemd", "init_system": "systemd"}
    return {"init": "", "init_system": ""}


def _cloud_init(root: Tree) -> bool:
    return any("cloud-init" in root.names(folder) for folder in PROGRAMS)


def _sshd(root: Tree) -> str:
    for name, folders in SERVERS.items():
        for folder in folders:
            if name in root.names(folder):
                return f"{folder}/{name}"
    return ""
