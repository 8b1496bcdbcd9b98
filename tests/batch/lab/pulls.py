"""A registry whose image jobs name. *inside*: words before its commands, as of a batch system's own network.

with pulled(home, folder) as (hub, image):
    system.submit(script, image)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.live import container_lab as lab
from tests.live.container_lab import Hub, Layout

NAME = "team/tool"
ENV = ["PATH=/opt/tool:/bin", "TOOL_HOME=/opt/tool", "HOME=/image"]
# What a job says that runs in it. Its PATH is looked through for a program of the image.
SCRIPT = '#!/bin/sh\nid -u; echo "$TOOL_HOME"; [ "$HOME" != /image ] && tool; exit 7\n'
TOOL = "#!/bin/sh\necho the tool\n"


def printed(home: Path) -> bytes:
    """What SCRIPT prints for the owner of this home: the image's variables reach it, but not those that are the user's."""
    return f"{home.stat().st_uid}\n/opt/tool\nthe tool\n".encode()


@contextmanager
def pulled(home: Path, folder: Path, inside: tuple[str, ...] = ()) -> Iterator[tuple[Hub, str]]:
    """The registry, which the owner of this home trusts, and how jobs name its image."""
    layout = Layout(folder / "layout")
    tool = lab.layer(lab.file("opt/tool/tool", TOOL, mode=0o755), lab.file("noise", os.urandom(1 << 20)))
    layout.image("x", [lab.busybox("sh", "id", "sleep"), tool], {"Env": ENV})
    with lab.registry(folder / "registry", inside=inside) as hub:
        hub.push(layout, "x", f"{NAME}:1")
        trust(home, hub.address, folder / "registry/registry.pem")
        yield hub, hub.reference(f"{NAME}:1")


def trust(home: Path, address: str, pem: Path | None = None) -> None:
    """The owner of this home does so: by the certificate, or without any."""
    shutil.rmtree(home / ".config", ignore_errors=True)
    lab.environment(home, address, pem)
    owner = home.stat()
    for path in (home / ".config", *(home / ".config").rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)


def drafts(node: Path) -> list[str]:
    """What unfinished imports of any user left on a node."""
    return [str(path) for path in node.glob("*/store/images/drafts/*")]
