"""Who imports container images, from where and into which store: what the tests of them have in common."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.batch.lab.pulls import drafts
from tests.batch.lab.site import Site
from tests.live import container_lab as lab
from tests.live.conftest import STORE, Belljar, Completed
from tests.live.container_lab import Hub, Layout
from tests.unit.image.http_server import Server, serving

SHELL = {"Entrypoint": ["/bin/sh", "-c"], "Env": ["PATH=/bin"]}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with lab.registry(tmp_path_factory.mktemp("hub"), login=True) as hub:
        yield hub


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this module: what its images leave is gone with it. The kernel's image is that of the other tests."""
    return tmp_path_factory.mktemp("containers") / "store"


@pytest.fixture
def belljar(tmp_path: Path, store: Path) -> Iterator[Belljar]:
    command = Belljar(tmp_path, store, {"BELLJAR_PATHS_SITE_STORE": str(STORE)})
    yield command
    command.close()
    assert [str(path) for path in drafts_of(store)] == []


def drafts_of(store: Path) -> list[Path]:
    """Drafts and downloads that are still there."""
    places = [store / "images" / name for name in ("drafts", "downloads")]
    return [path for place in places if place.is_dir() for path in place.iterdir() if path.suffix != ".lock"]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def bring(belljar: Belljar, source: str, **env: str) -> Completed:
    return belljar("image", "import", source, "--name", "made", env=env)


def refused(done: Completed, *words: str) -> str:
    """It failed by one line, which is returned, and a hint; before that it told only how far it was."""
    text = done.stderr.decode()
    *steps, line, hint = text.splitlines() or ["", ""]
    assert done.returncode == 125 and line.startswith("belljar: ") and hint.startswith("hint: "), text
    assert all(step.startswith("belljar: ") for step in steps) and len(line) < 1000, text
    assert all(word in f"{line} {hint}" for word in words), text
    return line


class Importer(NamedTuple):
    """Somebody who imports. *place*: a folder of theirs, where images may lie."""

    run: Callable[..., Completed]
    place: Path

    def bring(
        self, layers: Sequence[bytes], config: Mapping[str, Any] | None = None, *, how: str = "gzip", **env: str
    ) -> Completed:
        layout = Layout(self.place / "layout")
        layout.image("x", layers, config, how=how)
        return self.run("image", "import", f"oci:{layout.path}:x", "--name", "made", env=env)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """With ordinary users, who have subordinate ids."""
    site = Site("containers")
    yield site
    site.close()


@pytest.fixture(params=["root", pytest.param("bjalice", marks=pytest.mark.slow)])
def importer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Importer]:
    if request.param == "root":
        yield Importer(request.getfixturevalue("belljar"), tmp_path)
        return
    site: Site = request.getfixturevalue("site")
    place = site.home(request.param) / "place"
    place.mkdir()
    os.chown(place, site.home(request.param).stat().st_uid, -1)
    yield Importer(lambda *words, **more: site.command(*words, user=request.param, check=False, **more), place)
    shutil.rmtree(place)
    assert drafts(site.node) == [] and site.leftovers() == []


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.put("/v2/a/blobs/there", redirect="/v2/a/blobs/there")
        yield server


def until_asked(server: Server, blob: str, process: subprocess.Popen[bytes]) -> None:
    while not any(blob in path for path, *_ in server.requests):
        assert server.asked.wait(60) and process.poll() is None
        server.asked.clear()
