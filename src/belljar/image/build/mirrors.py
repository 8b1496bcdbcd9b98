"""Where the packages of a Debian suite come from: the mirror of the settings, else the one apt on this host uses."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from belljar.errors import HostError
from belljar.host import commands

TIMEOUT = 30.0
DEFAULT = "http://deb.debian.org/debian"
DEFAULT_SECURITY = "http://deb.debian.org/debian-security"
FORMAT = "$(ORIGIN)|$(LABEL)|$(REPO_URI)"
PROXY = re.compile(r'^Acquire::(https?)::Proxy "([^"]+)";$', re.MULTILINE)


def sources(suite: str, mirror: str) -> list[str]:
    """The lines of sources.list."""
    main, security = _mirrors(mirror)
    lines = [f"deb {main} {suite} main"]
    if suite != "bullseye":  # its point updates moved into the suite itself when its support ended
        lines.append(f"deb {main} {suite}-updates main")
    return [*lines, f"deb {security} {suite}-security main"]


def proxies() -> dict[str, str]:
    """The proxies apt on this host is told to use, as the variables that mmdebstrap's apt obeys; the environment's own
    come first."""
    with suppress(HostError):
        text = commands.run(["apt-config", "dump"], timeout=TIMEOUT).out.decode("utf-8", "replace")
        found = {f"{scheme}_proxy": url for scheme, url in PROXY.findall(text) if url != "DIRECT"}
        return {name: url for name, url in found.items() if name not in os.environ}
    return {}


def _mirrors(mirror: str) -> tuple[str, str]:
    """(main, security). A mirror of the settings is believed to have its security archive beside it when it says debian."""
    if mirror:
        main = mirror.rstrip("/")
        return main, f"{main}-security" if main.endswith("/debian") else DEFAULT_SECURITY
    return read_targets(_targets())


def _targets() -> str:
    try:
        argv = ["apt-get", "indextargets", "--format", FORMAT, "Created-By: Packages"]
        return commands.run(argv, timeout=TIMEOUT).out.decode("utf-8", "replace")
    except HostError:  # no Debian
        return ""


def read_targets(text: str) -> tuple[str, str]:
    """(main, security) from the lines of `apt-get indextargets`; Debian's own where there are none."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        origin, _, rest = line.partition("|")
        label, _, address = rest.partition("|")
        if origin == "Debian" and address.startswith(("http://", "https://")):
            found.setdefault(label, address.rstrip("/"))
    return found.get("Debian", DEFAULT), found.get("Debian-Security", DEFAULT_SECURITY)
