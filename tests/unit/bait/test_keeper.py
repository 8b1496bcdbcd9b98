"""The machines of a bait: what it asks belljar itself."""

from __future__ import annotations

import pytest
from tests.unit.bait.test_decide import SETTINGS

from belljar import api
from belljar.bait.machines.keeper import Machines
from belljar.errors import ImageCorrupt, ImageUnknown
from belljar.pool import load


@pytest.mark.parametrize(
    ("broken", "says"), [({"worker"}, ""), ({"worker", "el9"}, "ImageCorrupt: worker: its kernel is gone")]
)
def test_a_store_that_has_none_of_its_images_whole_is_a_reason_to_close(
    monkeypatch: pytest.MonkeyPatch, broken: set[str], says: str
) -> None:
    def image_digest(name: str) -> str:
        if name in broken:
            raise ImageCorrupt("worker: its kernel is gone") if name == "worker" else ImageUnknown(f"no image {name}")
        return "sha256-0"

    monkeypatch.setattr(api, "image_digest", image_digest)
    assert Machines(SETTINGS, load("slurm"), ()).room(0).no_image == says
