"""The payload contract in images the agent is brought to over ssh: stock ones, and one of busybox and dropbear that has no Python.
Every test of it, for it is the same agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import test_contract
from tests.live.conftest import Belljar
from tests.live.stock.images import stock
from tests.live.stock.lean import lean

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SUITES = ["bookworm", "bullseye", "trixie", "lean-dropbear"]

for _name, _test in vars(test_contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


def made(belljar: Belljar, name: str) -> str:
    """Point *belljar* at a store with this image."""
    return lean(belljar, name.removeprefix("lean-")) if name.startswith("lean-") else stock(belljar, name)


@pytest.fixture(params=SUITES, scope="module")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image is there, and its templates."""
    first, name = Belljar(tmp_path_factory.mktemp("first")), str(request.param)
    try:
        made(first, name)
        for user in (), ("--user", "54321:54322"):  # QEMU runs as the payload's user, so that is another template
            words = ("--image", name, "--context", "ssh", "--start", "clone", *user)
            done = first.run(*words, "--", "true", timeout=1600)
            assert done.returncode == 0, done.stderr.decode()
    finally:
        first.close()
    return name


@pytest.fixture
def belljar(tmp_path: Path, suite: str) -> Iterator[Belljar]:
    command = Belljar(tmp_path)
    command.env["BELLJAR_IMAGE_DEFAULT"] = made(command, suite)
    command.env["BELLJAR_MACHINE_CONTEXT"] = "ssh"
    yield command
    command.close()
