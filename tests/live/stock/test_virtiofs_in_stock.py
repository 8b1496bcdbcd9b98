"""Folders by virtiofs where the image's own init runs: its kernel has no 9p, and a clone gets the folder plugged in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.images import stock
from tests.live.test_virtiofs import SOMEBODY, gone, in_rust, left, open_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
__all__ = ["in_rust", "open_folder"]


@pytest.mark.parametrize("start", ["cold", "clone"])
@pytest.mark.parametrize("context", ["cloud-init", "inject"])
@pytest.mark.parametrize("suite", ["bookworm", "bullseye", "trixie"])
def test_a_stock_image_has_the_folder_and_its_files_are_the_callers(
    belljar: Belljar, open_folder: Path, suite: str, context: str, start: str
) -> None:
    shared, fixed = open_folder / "work", open_folder / "fixed"
    for folder in (shared, fixed):
        folder.mkdir()
        (folder / "word").write_text(folder.name)
        os.chown(folder, SOMEBODY, SOMEBODY)
    script = (
        "cat /data/word /fixed/word; echo; cat /proc/1/comm; echo made > /data/file && stat -c %u /data/file;"
        " ! touch /fixed/file 2>/dev/null && grep -c virtiofs /proc/mounts"
    )
    shares = ("--share", f"virtiofs:{shared}:/data:rw", "--share", f"virtiofs:{fixed}:/fixed")
    words = (
        "--image",
        stock(belljar, suite),
        "--context",
        context,
        "--start",
        start,
        "--user",
        f"{SOMEBODY}:{SOMEBODY}",
    )
    done = belljar.run(*words, *shares, "--", "sh", "-c", script, timeout=1600)
    assert (done.returncode, done.stdout.split()) == (0, [b"workfixed", b"systemd", str(SOMEBODY).encode(), b"2"]), (
        done.stderr
    )
    made = shared / "file"
    assert made.read_text() == "made\n" and made.stat().st_uid == SOMEBODY
    assert gone(belljar) == [] and os.listdir(fixed) == ["word"]


def test_a_kernel_without_9p_has_virtiofs_named_instead(belljar: Belljar, tmp_path: Path) -> None:
    """Debian's kernel for clouds has none."""
    words = ("--image", stock(belljar, "bookworm"), "--context", "cloud-init", "--start", "clone")
    done = belljar.run(*words, "--share", f"{tmp_path}:/data", "--", "true", timeout=1600)
    assert done.returncode == 125 and b"9p" in done.stderr and b"virtiofs:" in done.stderr, done.stderr
    assert left(belljar) == []
