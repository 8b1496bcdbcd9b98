"""A machine's own disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.errors import NoSpace, OverLimit
from belljar.host import commands
from belljar.image import Image, Settings
from belljar.image.store import qcow2
from belljar.image.store.qcow2 import LARGEST_DISK, Overlays
from belljar.model import GIB, MIB

Publish = Callable[..., Image]


@pytest.mark.parametrize(
    ("asked", "got"),
    [(None, 16 * MIB), (16 * MIB, 16 * MIB), (1 * GIB + 1, 1 * GIB + 512), (LARGEST_DISK, LARGEST_DISK)],
)
def test_a_disk_is_as_large_as_asked_in_whole_sectors(
    tmp_path: Path, settings: Settings, publish: Publish, asked: int | None, got: int
) -> None:
    path = tmp_path / "overlay.qcow2"
    assert Overlays(settings).create(path, publish("base"), asked) == got
    assert qcow2.virtual_size(path) == got
    assert commands.run(["qemu-img", "check", "-q", str(path)], timeout=30).code == 0


@pytest.mark.parametrize("size", [1, 16 * MIB - 512, LARGEST_DISK + 512])
def test_a_disk_smaller_than_the_image_or_beyond_all_measure_is_impossible(
    tmp_path: Path, settings: Settings, publish: Publish, size: int
) -> None:
    with pytest.raises(OverLimit):
        Overlays(settings).create(tmp_path / "overlay.qcow2", publish("base"), size)
    assert not (tmp_path / "overlay.qcow2").exists()


def test_a_full_host_is_told_before_the_machine_starts(tmp_path: Path, settings: Settings, publish: Publish) -> None:
    overlays = Overlays(replace(settings, reserve=1 << 60))
    with pytest.raises(NoSpace, match="free"):
        overlays.create(tmp_path / "overlay.qcow2", publish("base"), None)


def test_discarding_is_idempotent(tmp_path: Path, settings: Settings, publish: Publish) -> None:
    overlays, path = Overlays(settings), tmp_path / "overlay.qcow2"
    overlays.create(path, publish("base"), None)
    overlays.discard(path)
    overlays.discard(path)
    assert not path.exists()


def test_a_second_overlay_at_the_same_place_is_refused_and_the_first_stays(
    tmp_path: Path, settings: Settings, publish: Publish
) -> None:
    overlays, path, image = Overlays(settings), tmp_path / "overlay.qcow2", publish("base")
    overlays.create(path, image, None)
    with pytest.raises(FileExistsError):
        overlays.create(path, image, None)
    assert path.exists()
