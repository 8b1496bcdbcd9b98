"""The payload contract in a stock image that is reached by ssh alone: every test of it, but for those a shell cannot carry, and
what such a machine does instead. docs/contexts.md tells the user the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import test_contract
from tests.live.conftest import Belljar
from tests.live.stock.images import stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SUITES = ["bookworm", "bullseye", "trixie"]

# What a shell cannot carry, why, and the test below that says what happens instead.
DIFFERENT = {
    "test_a_reader_that_goes_away_ends_the_payload_by_sigpipe": (
        "ssh does not tell the writing process: the whole payload gets the signal",
        "test_a_reader_that_goes_away_ends_the_whole_payload",
    ),
}

for _name, _test in vars(test_contract).items():
    if _name.startswith("test_") and _name not in DIFFERENT:
        globals()[_name] = _test


@pytest.fixture(params=SUITES, scope="module")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image is there, and its templates."""
    first, name = Belljar(tmp_path_factory.mktemp("first")), str(request.param)
    try:
        stock(first, name)
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
    command.env["BELLJAR_IMAGE_DEFAULT"] = stock(command, suite)
    command.env["BELLJAR_MACHINE_CONTEXT"] = "ssh"
    yield command
    command.close()


def test_every_difference_has_a_test_of_what_happens_instead() -> None:
    for name, (why, instead) in DIFFERENT.items():
        assert name in vars(test_contract) and name not in globals()
        assert why and callable(globals()[instead])


def test_a_reader_that_goes_away_ends_the_whole_payload(belljar: Belljar) -> None:
    keeper = belljar.popen("run", "--", "sh", "-c", "yes; echo $? >&2")
    assert keeper.stdout is not None and keeper.stderr is not None
    keeper.stdout.read(10)
    keeper.stdout.close()
    assert keeper.stderr.read() == b"" and keeper.wait(120) == -13
