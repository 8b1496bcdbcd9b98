"""Which image a batch job's is: the site's before a private one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.errors import ImageUnknown, NoStore, NotPermitted
from belljar.image import Image, Settings, name_of
from belljar.image.container import disk
from belljar.image.images import Images
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.machine.planning.refusal import class_of_error
from belljar.model import OutcomeClass

Publish = Callable[..., Image]


@pytest.fixture
def site(tmp_path: Path, settings: Settings) -> Store:
    return Images(tmp_path / "site", None, settings)


@pytest.fixture
def user(tmp_path: Path, settings: Settings) -> Store:
    """The store of a user before the site's."""
    return Images(tmp_path / "store", tmp_path / "site", settings)


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
def test_a_private_copy_under_the_digest_of_a_sites_image_is_not_taken(
    site: Store, user: Store, publish: Publish
) -> None:
    """Whoever can write a disk can write one that is not what its folder's name says."""
    public = publish("base", b"site", to=site)
    shutil.copytree(public.disk.parent, user.folder / public.disk.parent.name)
    user.settle("base", own=False)
    assert user.resolve("base").store == user.resolve(public.digest).store == site.folder


@pytest.mark.usefixtures("as_user")
def test_a_private_image_passes_where_ones_own_are_meant_and_else_not(
    site: Store, user: Store, publish: Publish
) -> None:
    own = publish("debian-mine", b"own", to=user)
    user.settle("debian-mine", own=True)
    assert user.resolve("debian-mine").digest == own.digest
    for reference in ("debian-mine", own.digest, own.digest[:9]):
        with pytest.raises(NotPermitted, match=f"image {reference}: the site has no image of this name"):
            user.settle(reference, own=False)
    with pytest.raises(ImageUnknown):
        user.settle("nothing", own=False)
    site.settle("nothing", own=False)  # root's store is the site's


# -- a store that cannot be read ---------------------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Root may read everything, so the system call says it."""

    def close(folder: Path) -> None:
        def denied(path: os.PathLike[str] | str, readlink: Callable[..., str] = os.readlink) -> str:
            if Path(path).is_relative_to(folder):
                raise PermissionError(13, "Permission denied", str(path))
            return readlink(path)

        monkeypatch.setattr(os, "readlink", denied)

    return close


@pytest.mark.usefixtures("as_user")
def test_a_store_that_cannot_be_read_is_this_nodes_fault_and_no_image_is_built_for_it(
    tmp_path: Path, settings: Settings, publish: Publish, closed: Callable[[Path], None]
) -> None:
    site, user = Images(tmp_path / "site", None, settings), Images(tmp_path / "store", tmp_path / "site", settings)
    publish(settings.default, b"site", to=site)
    closed(site.folder)
    for act in (lambda: user.settle(settings.default, own=True), lambda: user.ensure(settings.default)):
        with pytest.raises(NoStore, match=r"site/images/names/.*: Permission denied") as caught:
            act()
        assert "force" not in caught.value.hint and "build" not in caught.value.hint
        assert class_of_error(caught.value) is OutcomeClass.NODE
    assert not user.folder.exists()


def test_another_store_that_has_the_image_will_do(
    site: Store, user: Store, publish: Publish, closed: Callable[[Path], None]
) -> None:
    own = publish("base", b"own", to=user)
    closed(site.folder)
    assert user.resolve("base").digest == own.digest


def test_no_image_is_built_inside_a_batch_job(user: Store, settings: Settings) -> None:
    user.settle(settings.default, own=True)
    with pytest.raises(NoStore, match="none is built inside a batch job"):
        user.ensure(settings.default)


def test_a_manifest_that_may_not_be_read_is_no_corrupt_image(
    user: Store, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("base", b"own", to=user)

    def denied(path: Path, limit: int) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(manifest, "read_json", denied)
    with pytest.raises(NoStore, match=r"manifest.json: Permission denied"):
        user.resolve("base")
    assert user.images() == []


SOURCE = "docker://hub.example.org/tool:1"


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were asked for."""
    asked: list[str] = []
    monkeypatch.setattr(Images, "_ensure_source", lambda store, source, *_: asked.append(source) or "")
    return asked


@pytest.mark.usefixtures("as_user")
def test_a_job_pulls_the_image_that_it_may_pull_and_no_other(user: Store, pulls: list[str]) -> None:
    assert isinstance(user, Images)
    user.settle(SOURCE, own=True)
    user.ensure(SOURCE)
    assert pulls == []
    user.settle(SOURCE, own=True, pulls=True)
    user.ensure(SOURCE)
    user.ensure("docker://hub.example.org/other")
    assert pulls == [SOURCE]


@pytest.mark.usefixtures("as_user")
def test_a_job_pulls_nothing_that_the_site_has(site: Store, user: Store, publish: Publish, pulls: list[str]) -> None:
    public = publish(name_of(SOURCE), b"site", to=site)
    assert isinstance(user, Images)
    user.settle(SOURCE, own=True, pulls=True)
    user.ensure(SOURCE)
    assert user.resolve(SOURCE).digest == public.digest and pulls == []


@pytest.mark.usefixtures("as_user")
def test_a_jobs_pull_builds_no_kernel(user: Store) -> None:
    assert isinstance(user, Images)
    user.settle(SOURCE, own=True, pulls=True)
    with pytest.raises(NoStore, match="debian12: this node has none"):
        disk.bring(user, SOURCE, "x")
