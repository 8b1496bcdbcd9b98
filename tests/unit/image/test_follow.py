"""Names that follow a tag: moved by `image sync` when the tag moves, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from belljar.errors import DownloadFailed
from belljar.image import Image
from belljar.image.container import disk, follow, sources
from belljar.image.images import Images
from belljar.image.site.sync import FAILED, PRESENT, UPDATED

Publish = Callable[..., Image]
TAG, PINNED = "docker://hub/tool:1", f"docker://hub/tool@sha256:{'5' * 64}"
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


@pytest.fixture
def registry(store: Images, publish: Publish, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each source has now; an image is made of its digest."""
    tags = {TAG: OLD}

    def version(source: str, *_: object) -> str:
        if source not in tags:
            raise DownloadFailed(f"{source}: no answer")
        return tags[source]

    def bring(store: Images, source: str, name: str) -> Image:
        origins = [f"{name} {source}"]
        return publish(name, tags[source].encode(), manifest=tags[source], origins=origins)

    monkeypatch.setattr(sources, "version", version)
    monkeypatch.setattr(disk, "bring", bring)
    monkeypatch.setattr(
        disk,
        "stored",
        lambda store, digest: next((it for it in store.images() if it.facts.get("manifest") == digest), None),
    )
    return tags


def test_a_name_moves_with_its_tag(store: Images, registry: dict[str, str]) -> None:
    disk.bring(store, TAG, "tool")
    (row,) = follow.sync(store, follow.names(store))
    assert (row.name, row.what, row.source) == ("tool", PRESENT, f"{TAG}@{OLD}")
    before, registry[TAG] = row.digest, NEW
    (row,) = follow.sync(store, follow.names(store), dry_run=True)
    assert row.what == UPDATED and store.find("tool").digest == before
    (row,) = follow.sync(store, follow.names(store), ["tool", "nothing"])
    assert (row.what, row.source, row.digest) == (
        UPDATED,
        f"{TAG}@{NEW}",
        store.find("tool").digest,
    ) and row.digest != before
    assert [row.what for row in follow.sync(store, follow.names(store))] == [PRESENT]


def test_a_pinned_one_and_one_that_was_given_away_stay(
    store: Images, registry: dict[str, str], publish: Publish
) -> None:
    registry[PINNED] = OLD
    disk.bring(store, PINNED, "pinned")
    disk.bring(store, TAG, "tool")
    publish("tool", b"another")
    assert follow.sync(store, follow.names(store)) == [] and follow.names(store) == {}


def test_the_error_of_one_is_in_its_row(store: Images, registry: dict[str, str]) -> None:
    disk.bring(store, TAG, "tool")
    registry["docker://hub/other"] = OLD + "2"
    disk.bring(store, "docker://hub/other", "other")
    del registry[TAG]
    rows = {row.name: row for row in follow.sync(store, follow.names(store))}
    assert (rows["tool"].what, rows["tool"].error, rows["other"].what) == (FAILED, "DownloadFailed", PRESENT)
