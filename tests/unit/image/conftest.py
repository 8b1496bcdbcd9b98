"""A store for the tests, with images whose disks are a few clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.site import Site, site_in

from belljar.image import Image, Settings
from belljar.image.images import Images
from belljar.image.intake import fetch, intake
from belljar.image.store import manifest
from belljar.image.store.qcow2 import overlay_bytes
from belljar.image.store.store import Store
from belljar.model import MIB

SIZE = 16 * MIB


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that failed is tried again at once."""
    monkeypatch.setattr(fetch, "PAUSE", 0.0)


@pytest.fixture
def settings() -> Settings:
    return Settings(reserve=0, max_size=256 * MIB, stall_timeout=5.0, lock_timeout=20.0)


@pytest.fixture
def store(tmp_path: Path, settings: Settings) -> Store:
    return Images(tmp_path / "store", None, settings)


@pytest.fixture
def publish(store: Store) -> Callable[..., Image]:
    """Put a small image into a store."""

    def publish(
        name: str | None, content: bytes = b"", *, to: Store = store, direct: bool = True, **more: Any
    ) -> Image:
        with intake.draft(to, name or "nameless") as folder:
            disk = bytearray(overlay_bytes(b"", SIZE))
            disk[-len(content) or len(disk) :] = content
            (folder / manifest.DISK).write_bytes(disk)
            if direct:
                (folder / manifest.KERNEL).write_bytes(b"a kernel")
                (folder / manifest.INITRD).write_bytes(b"a ramdisk")
            facts = {"agent_in_initrd": direct, **more}
            what = manifest.Facts("build debian bookworm", "quiet", 1.0, "Debian", SIZE, facts)
            return to.publish(folder, what, name)

    return publish


@pytest.fixture
def site(tmp_path: Path, settings: Settings) -> Site:
    return site_in(tmp_path, settings)
