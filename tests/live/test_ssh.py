"""Machines that are reached by ssh alone: stock images, cold and cloned, and what becomes of those nobody gets into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.images import stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SAYS = "cat; echo err >&2; hostname; id -un; cat /etc/machine-id /sys/class/net/e*/address; exit 7"


@pytest.fixture
def image(belljar: Belljar) -> str:
    return stock(belljar, "bookworm")


def ran(belljar: Belljar, image: str, start: str, *words: str, says: str = SAYS) -> tuple[list[str], dict[str, object]]:
    """What a job said, and its outcome."""
    report = belljar.folder / "report.json"
    done = belljar(
        "run", "--image", image, "--context", "ssh", "--start", start, "--cwd", "/", "--report", str(report), *words,
        "--", "sh", "-c", says, input=b"heard\n",
    )  # fmt: skip
    assert done.returncode == 7, done.stderr.decode()
    assert b"err\n" in done.stderr
    return done.stdout.decode().split(), json.loads(report.read_text())


def test_a_stock_image_runs_jobs_by_ssh_cold_and_cloned_and_no_two_are_the_same(belljar: Belljar, image: str) -> None:
    machines = []
    for start in ("cold", "clone", "clone"):
        said, outcome = ran(belljar, image, start)
        assert said[0] == "heard" and said[1] == f"belljar-{outcome['id']}"
        assert (outcome["start"], outcome["context"], outcome["exit_code"]) == (start, "ssh", 7)
        machines.append(said)
    for what in zip(*(said[1:2] + said[3:4] for said in machines), strict=True):
        assert len(set(what)) == len(machines)


def test_files_go_in_and_come_out(belljar: Belljar, image: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/data").write_bytes(bytes(range(256)))
    says = "cp -r /tmp/in /tmp/out; echo err >&2; exit 7"
    out = f"/tmp/out:{tmp_path}/out"
    ran(belljar, image, "auto", "--in", f"{tmp_path}/in:/tmp/in", "--out", out, says=says)
    assert (tmp_path / "out/data").read_bytes() == bytes(range(256))
