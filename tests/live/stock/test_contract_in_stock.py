"""The payload contract, every test of it, in images nobody prepared for belljar, by each way into them. The same tests as in
the default image: only the machine is another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import test_contract
from tests.live.conftest import Belljar
from tests.live.stock.images import stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WAYS = [
    ("bookworm", "ramdisk"), ("bullseye", "ramdisk"), ("trixie", "ramdisk"),
    ("bookworm", "inject"), ("bullseye", "inject"), ("trixie", "inject"),
    ("bookworm", "cloud-init"), ("bullseye", "cloud-init"), ("trixie", "cloud-init"),
]  # fmt: skip

for _name, _test in vars(test_contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture(params=WAYS, ids="-".join, scope="module")
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The image is there, and its templates: the contract is about jobs, and a whole Debian boots for a minute or more."""
    suite, context = request.param
    first = Belljar(tmp_path_factory.mktemp("first"))
    try:
        stock(first, suite)
        for user in (), ("--user", "54321:54322"):  # QEMU runs as the payload's user, so that is another template
            done = first.run("--image", suite, "--context", context, *user, "--", "true", timeout=1600)
            assert done.returncode == 0, done.stderr.decode()
    finally:
        first.close()
    return suite, context


@pytest.fixture
def belljar(tmp_path: Path, way: tuple[str, str]) -> Iterator[Belljar]:
    suite, context = way
    command = Belljar(tmp_path)
    command.env["BELLJAR_IMAGE_DEFAULT"] = stock(command, suite)
    command.env["BELLJAR_MACHINE_CONTEXT"] = context
    yield command
    command.close()
