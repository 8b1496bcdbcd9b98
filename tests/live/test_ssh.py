"""Machines that are reached by ssh alone: stock images, cold and cloned, and what becomes of those nobody gets into."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar
from tests.live.stock.build import build, recipe_of
from tests.live.stock.images import BOOT_TIMEOUT, stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SAYS = "cat; echo err >&2; hostname; id -un; cat /etc/machine-id /sys/class/net/e*/address; exit 7"


@pytest.fixture
def image(belljar: Belljar) -> str:
    return stock(belljar, "bookworm")


def ran(belljar: Belljar, image: str, start: str, *words: str, says: str = SAYS) -> tuple[list[str], dict[str, object]]:
    """What a job said, and its outcome."""
    report = belljar.folder / "report.json"
    done = belljar(
        "run", "--image", image, "--context", "ssh", "--start", start, "--cwd", "/", "--report", str(report), *words,
        "--", "sh", "-c", says, input=b"heard\n", timeout=1600,
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


def test_agent_and_job_come_before_the_services_that_a_clones_new_name_wakes(belljar: Belljar, image: str) -> None:
    groups = " ".join(
        f"/sys/fs/cgroup/{name}/cpu.weight" for name in ("system.slice", "belljar", "belljar-agent.service")
    )
    says = f"cat {groups}; echo err >&2; exit 7"
    assert ran(belljar, image, "clone", says=says)[0] == ["100", "1000", "1000"]


def test_files_go_in_and_come_out(belljar: Belljar, image: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/data").write_bytes(bytes(range(256)))
    says = "cp -r /tmp/in /tmp/out; echo err >&2; exit 7"
    out = f"/tmp/out:{tmp_path}/out"
    ran(belljar, image, "auto", "--in", f"{tmp_path}/in:/tmp/in", "--out", out, says=says)
    assert (tmp_path / "out/data").read_bytes() == bytes(range(256))


# -- another user than root --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a store that nobody else uses: who logs in is kept with the image."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture
def of_user(tmp_path: Path, folder_of_own: Path) -> Iterator[Belljar]:
    settings = {"BELLJAR_QEMU_BOOT_TIMEOUT": BOOT_TIMEOUT, "BELLJAR_PATHS_SITE_STORE": str(STORE)}
    command = Belljar(tmp_path, store=folder_of_own / "store", settings=settings)
    if command("image", "show", "mine").returncode:
        done = command("image", "import", str(build(recipe_of("bookworm"))), "--name", "mine")
        assert done.returncode == 0, done.stderr.decode()
    yield command
    command.close()


def test_a_user_who_may_not_become_root_is_named(of_user: Belljar) -> None:
    assert of_user("image", "set", "mine", "--ssh-user", "visitor").returncode == 0
    report = of_user.folder / "report.json"
    for start in ("cold", "auto"):
        words = ("--image", "mine", "--context", "ssh", "--start", start, "--report", str(report))
        done = of_user("run", *words, "--", "true", timeout=1600)
        outcome = json.loads(report.read_bytes())
        assert done.returncode == 125 and "visitor" in outcome["reason"] and "sudo" in outcome["reason"], outcome
        assert of_user.leftovers() == []


def test_a_user_who_may_become_root_is_logged_in_as_and_the_job_is_the_callers(of_user: Belljar) -> None:
    assert of_user("image", "set", "mine", "--ssh-user", "debian").returncode == 0
    assert of_user.json("image", "show", "mine")["facts"]["ssh_user"] == "debian"
    for start in ("cold", "clone", "clone"):
        said, outcome = ran(of_user, "mine", start)
        assert said[:3] == ["heard", f"belljar-{outcome['id']}", "root"] and outcome["start"] == start
        said, outcome = ran(of_user, "mine", start, "--user", "54321:54321", says="id -u; echo err >&2; exit 7")
        assert said == ["54321"] and of_user.leftovers() == []
