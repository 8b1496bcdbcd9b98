"""Which image a batch job's is: the site's before a private one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.errors import ImageNotAllowed, ImageUnknown
from belljar.image import Image, Settings
from belljar.image.store import Store

Publish = Callable[..., Image]


@pytest.fixture
def site(tmp_path: Path, settings: Settings) -> Store:
    return Store(tmp_path / "site", None, settings)


@pytest.fixture
def user(tmp_path: Path, settings: Settings) -> Store:
    """The store of a user before the site's."""
    return Store(tmp_path / "store", tmp_path / "site", settings)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "shared", property(lambda store: store.site is None))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("own", [True, False])
def test_for_a_batch_job_a_private_image_does_not_stand_before_the_sites(
    site: Store, user: Store, publish: Publish, own: bool
) -> None:
    public = publish("base", b"site", to=site)
    publish("base", b"own", to=user)
    (user.folder / "names" / public.digest).symlink_to(os.readlink(user.folder / "names/base"))
    user.settle("base", own=own)
    found = user.resolve("base")
    assert (found.digest, found.store, found.names) == (public.digest, site.folder, ("base",))
    site.untag("base")
    assert user.resolve("base").digest == public.digest, "settled is settled"


@pytest.mark.usefixtures("as_user")
def test_a_private_image_passes_where_ones_own_are_meant_and_else_not(
    site: Store, user: Store, publish: Publish
) -> None:
    own = publish("debian-mine", b"own", to=user)
    user.settle("debian-mine", own=True)
    assert user.resolve("debian-mine").digest == own.digest
    for reference in ("debian-mine", own.digest, own.digest[:9]):
        with pytest.raises(ImageNotAllowed, match=f"image {reference}: the site has none of this name"):
            user.settle(reference, own=False)
    with pytest.raises(ImageUnknown):
        user.settle("nothing", own=False)
    site.settle("nothing", own=False)  # root's store is the site's
