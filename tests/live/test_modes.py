"""Who can read what belljar leaves on disk, as docs/reference/files.md tells it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.live.conftest import ROOT, STORE, Belljar

from belljar.machine import DOUBTS

SCRATCH_MODE = 0o711
OF_AN_IMAGE = ("disk.qcow2", "kernel", "initrd", "manifest.json")
OF_A_TEMPLATE = ("state", "disk.qcow2", "clone.qcow2")


def modes(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            yield path, stat.S_IMODE(path.stat().st_mode)


def test_the_folders_of_machines_are_their_owners_alone(belljar: Belljar) -> None:
    assert belljar.run("--keep", "--name", "kept", "--", "true").returncode == 0
    found = {path: mode for folder in (belljar.run_folder, belljar.logs) for path, mode in modes(folder)}
    assert {path.name for path in found} >= {"outcome.json", "journal.jsonl", "overlay.qcow2", "console.log"}
    wrong = {str(path): oct(mode) for path, mode in found.items() if mode != (0o700 if path.is_dir() else 0o600)}
    assert wrong == {}
    assert stat.S_IMODE(belljar.scratch.stat().st_mode) == SCRATCH_MODE


def test_images_and_templates_are_as_the_page_says() -> None:
    page = (ROOT / "docs/reference/files.md").read_text()
    assert re.search(r"`state`, `disk.qcow2` and `clone.qcow2` of a template.*\| 0444", page)
    of_image = 0o444 if os.geteuid() == 0 else 0o400
    images = [image for image in (STORE / "images").iterdir() if image.name.startswith("sha256-")]
    assert images
    for image in images:
        assert {path.name for path in image.iterdir()} <= {*OF_AN_IMAGE, "lock"}
        for path, mode in modes(image):
            assert mode == (0o644 if path.name == "lock" else of_image), path
    templates = [one for one in (STORE / "templates").iterdir() if (one / "manifest.json").exists()]
    assert templates
    for template in templates:
        folder = stat.S_IMODE(template.stat().st_mode)
        serves_all = os.geteuid() == 0 and folder == 0o755  # a base template of root's
        assert serves_all or folder == 0o700
        rest = 0o644 if serves_all else 0o600
        for path, mode in modes(template):
            allowed = {0o444} if path.name in OF_A_TEMPLATE else {rest, 0o444} if path.name == "ram" else {rest}
            assert mode in allowed or (path.name == DOUBTS and mode == 0o600), path
