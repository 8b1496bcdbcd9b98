"""The real frameworks, from the registry, in a root of Debian 13 (two of them want a newer Python than Debian 12 has): their own
ways to a sandbox lead to a machine."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import STATE, Done, Room, alone, folder_for_all, root

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="a root is made by root"),
]
PACKAGES = ("qemu-system-x86", "qemu-utils", "python3", "python3-venv", "e2fsprogs", "passwd", "virtiofsd")
# What is installed, as our extras name it. NeMo Gym's sandboxes need nothing of what its training brings along.
FRAMEWORKS = {
    "harbor": (["harbor==0.26.0"], []),
    "mini": (["mini-swe-agent==2.4.6"], []),
    "openenv": (["openenv-core==0.3.0"], []),
    "gym": (["omegaconf", "mini-swe-agent==2.4.6"], ["nemo-gym==0.4.0"]),
}
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
FOLDERS = {f"BELLJAR_PATHS_{name.upper()}": f"/belljar/{name}" for name in ("run", "scratch", "logs", "store")}
PAGE = (ROOT / "docs/operate/sandboxes.md").read_text()
LAB = "/checkout/tests/live/harness_lab.py"


class Harness:
    """A virtual environment with one framework and this belljar, in a room."""

    def __init__(self, room: Room, name: str) -> None:
        self.room, self.name = room, name
        self.bin = f"/frameworks/{name}-{digest(name)}/bin"

    def install(self) -> None:
        """Kept between runs."""
        whole, alone_ones = FRAMEWORKS[self.name]
        env = {"PIP_CERT": CERTIFICATES, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        folder = self.bin.removesuffix("/bin")
        if self.room.run("test", "-e", f"{folder}/whole", check=False).returncode:
            self.room.run("python3", "-m", "venv", "--clear", folder)
            pip = (f"{self.bin}/python", "-m", "pip", "install", "-q")
            self.room.run(*pip, "--editable", "/checkout", *whole, timeout=1500, **env)
            if alone_ones:
                self.room.run(*pip, "--no-deps", *alone_ones, timeout=600, **env)
            self.room.run("touch", f"{folder}/whole")

    def __call__(self, *words: str, **env: str) -> Done:
        """A command of the environment. Nothing of its machines is left."""
        env = {"PATH": f"{self.bin}:/usr/sbin:/usr/bin", "PYTHONDONTWRITEBYTECODE": "1", **FOLDERS, **env}
        done = self.room.run(*words, check=False, timeout=1200, **env)
        print(done.stdout.decode(), done.stderr.decode())
        left = [
            str(path)
            for folder in ("run/machines", "scratch")
            for path in self.room.path(f"/belljar/{folder}").glob("*")
        ]
        assert left == []
        return done


def digest(name: str) -> str:
    return hashlib.sha256(repr(FRAMEWORKS[name]).encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()[:12]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    kept = folder_for_all(STATE / "frameworks")
    binds: dict[Path | str, str] = {
        ROOT: "/checkout",
        kept: "/frameworks",
        STORE / "images": "/belljar/store/images",
        CERTIFICATES: CERTIFICATES,
    }
    with alone(STATE / "frameworks.lock"), Room(root("trixie", PACKAGES), host="harness", binds=binds) as made:
        made.run("mkdir", "-m", "0755", "-p", "/belljar/store")
        yield made


@pytest.fixture
def harness(room: Room, request: pytest.FixtureRequest) -> Harness:
    made = Harness(room, request.param)
    made.install()
    return made


only = pytest.mark.parametrize


@only("harness", ["gym"], indirect=True)
def test_nemo_gym_finds_its_provider_and_uses_it(harness: Harness) -> None:
    done = harness("python", LAB, "gym")
    assert done.returncode == 0 and b"all as expected" in done.stdout


@only("harness", ["mini"], indirect=True)
def test_mini_swe_agent_works_in_a_machine(harness: Harness) -> None:
    done = harness("python", LAB, "mini", MSWEA_SILENT_STARTUP="1")
    assert done.returncode == 0 and b"all as expected" in done.stdout


TASK = {
    "task.toml": """schema_version = "1.4"
[environment]
docker_image = "debian12"
workdir = "/app"
cpus = 1
memory_mb = 400
network_mode = "no-network"
[verifier]
environment_mode = "shared"
timeout_sec = 100.0
[agent]
timeout_sec = 100.0
""",
    "instruction.md": "Make /app/hello say hello.",
    "environment/seed.txt": "hello",
    "solution/solve.sh": "#!/bin/bash\nset -o pipefail\ncat seed.txt >/app/hello && ! ip route | grep .\n",
    "tests/test.sh": """#!/bin/bash
grep -qx hello /app/hello && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
""",
}
TRIAL = tuple(shlex.split(next(line for line in PAGE.splitlines() if line.startswith("harbor run "))))


def results(harness: Harness, jobs: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in harness.room.path(jobs).glob("*/*/result.json")]


@only("harness", ["harbor"], indirect=True)
def test_harbor_runs_a_task_in_a_machine(harness: Harness) -> None:
    for name, text in TASK.items():
        path = harness.room.path(f"/task/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = harness(*TRIAL, HARBOR_TELEMETRY="0")
    assert done.returncode == 0
    (trial,) = results(harness, "/jobs")
    assert trial["exception_info"] is None and trial["verifier_result"]["rewards"] == {"reward": 1.0}, trial
    harness(*TRIAL, "--jobs-dir", "/lost", "--ek", "image=oci:/no/such/folder", HARBOR_TELEMETRY="0")
    (trial,) = results(harness, "/lost")
    assert trial["exception_info"]["exception_type"] == "SandboxBuildFailedError" and not trial["reward_valid"]


@only("harness", ["openenv"], indirect=True)
def test_openenv_s_own_environment_echoes_out_of_a_machine(harness: Harness) -> None:
    assert harness("openenv", "init", "echo_test", "--output-dir", "/env").returncode == 0
    done = harness("python", LAB, "openenv", harness.bin)
    assert done.returncode == 0 and b"all as expected" in done.stdout
