"""The Ansible role on fresh nodes: an unpacked Debian, and a node with Slurm. A second play changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.live.conftest import ROOT, STORE
from tests.roots import STATE, Room, folder_for_all, root

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="a room wants root"),
]
WHEELS = "/srv/wheels"
SETTINGS = {
    "paths": {"node": "/var/lib/belljar-node"},
    "batch": {"shares": ["/home:rw"], "grace": 20, "allow": ["* *"]},
}


@pytest.fixture(scope="module")
def wheels() -> Path:
    """A wheel of this checkout, and the wheels of all that it needs."""
    folder = folder_for_all(STATE / "wheels")
    for old in folder.glob("belljar-*"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("belljar-*.whl")
    words = ["download", "--quiet", "--dest", str(folder), "--find-links", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
    return folder


def variables(wheels: Path, **more: Any) -> dict[str, Any]:
    (wheel,) = wheels.glob("belljar-*.whl")
    return {
        "belljar_wheel": f"{WHEELS}/{wheel.name}",
        "belljar_wheelhouse": WHEELS,
        "belljar_settings": SETTINGS,
        **more,
    }


def page() -> dict[str, Any]:
    """The variables of the play that the guides name for more nodes."""
    play = re.search(r"^```yaml\n(- hosts: nodes\n.*?)^```$", (ROOT / "docs/batch/index.md").read_text(), re.M | re.S)
    assert play is not None
    (role,) = yaml.safe_load(play[1])[0]["roles"]
    return {name: value for name, value in role.items() if name.startswith("belljar_")}


def played(room: Room, *plays: dict[str, Any]) -> list[dict[str, int]]:
    words = [str(ROOT / ".venv/bin/python"), "-m", "tests.batch.lab.ansible", *map(json.dumps, plays)]
    done = room.run(*words, cwd=str(ROOT), check=False, timeout=1500, BELLJAR_TEST_STATE="/var/tmp/state")
    print(done.stdout.decode(), done.stderr.decode())
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def published(room: Room) -> str:
    """The line for `image.sources` of a repository with one image, `tiny`, made by the belljar of the room."""
    room.path("/srv/tiny.raw").write_bytes(b"\xf4".ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    belljar, own = "/usr/local/bin/belljar", {"BELLJAR_PATHS_STORE": "/srv/made"}
    room.run(belljar, "image", "import", "/srv/tiny.raw", "--name", "tiny", "--context", "none", **own)
    said = room.run(belljar, "image", "publish", "--init", "--to", "/srv/images", "--key", "/root/keys", **own)
    line = next(word for word in said.stdout.decode().split() if "#sha256=" in word)
    room.run(belljar, "image", "publish", "tiny", "--to", line, "--key", "/root/keys", **own)
    return line


def test_an_unpacked_root_becomes_a_host_with_belljar_and_a_second_play_changes_nothing(wheels: Path) -> None:
    packages = ["python3", "python3-venv", "qemu-utils", "zstd"]
    with Room(root("bookworm", packages), host="node1", binds={ROOT: str(ROOT), wheels: WHEELS}) as room:
        first = variables(wheels)
        wrong = {**first, "belljar_settings": {"batch": {"grace": "soon"}}}
        counts = played(room, first, first, wrong)
        assert [(row["changed"] > 0, row["failed"]) for row in counts] == [(True, 0), (False, 0), (False, 1)]
        settings = {**SETTINGS, "batch": {"grace": 30}, "image": {"sources": [published(room)]}}
        other = {**first, "belljar_settings": settings, "belljar_images": ["tiny"]}
        counts = played(room, other, other)
        assert [(row["changed"], row["failed"]) for row in counts] == [(2, 0), (0, 0)], "the settings, and the image"
        shown = json.loads(room.run("/usr/local/bin/belljar", "config", "show", "--format", "json").stdout)
        assert (shown["batch"]["grace"], shown["paths"]["node"]) == (30, "/var/lib/belljar-node")
        assert b"tiny" in room.run("/usr/local/bin/belljar", "image", "list").stdout


def test_a_node_with_slurm_runs_jobs_in_machines_after_one_play(wheels: Path) -> None:
    binds = {ROOT: str(ROOT), wheels: WHEELS, STORE: "/var/lib/belljar"}
    with Room(Path("/"), host="fresh", binds=binds) as room:
        node = {**page(), **variables(wheels), "belljar_settings": page()["belljar_settings"]}
        assert node["belljar_batch"] == "slurm"
        counts = played(room, node, node)
        assert [(row["changed"] > 0, row["failed"]) for row in counts] == [(True, 0), (False, 0)]
        assert "belljar" in room.path("/srv/slurm/etc/slurm.conf").read_text()
