"""Container images as machines: fetched by skopeo, unpacked by umoci, written to an ext4 disk, started by a kernel of the store's.

sources    what is asked for -> an OCI layout with one image in it: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
trees      images that are a tree of files -> its only layer
trust      whose signature an image of a registry must have
disk       the layout, with the kernel's modules as its last layer -> an image of the store
follow     names that follow a tag
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from belljar.errors import BelljarError, ImageCorrupt

LAYOUT = "layout"  # the folder of the layout, where an image is made
IMAGE = f"{LAYOUT}:image"  # the only one in it
ARCHITECTURE = "amd64"
FOREIGN = "Name an image for x86_64: belljar emulates no other architecture."


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Raises ImageCorrupt for what is not of the form it should have."""
    try:
        yield
    except BelljarError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError, struct.error) as exc:
        raise ImageCorrupt(f"{what}: not a container image of a known form ({type(exc).__name__}: {exc})") from exc
