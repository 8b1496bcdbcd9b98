"""A seventh batch system is one folder: nothing else is edited, and everything knows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INIT = '''"""A system that was made up."""

from belljar.batch import System

SYSTEM = System(
    __name__, "Paper Engine", hooks={"fold": "hooks:fold"}, ends_words=True, node_variable="PAPER_NODE", untried="made up",
)
'''
DIALECT = """
from dataclasses import replace

from belljar.batch.job.terms import Command, Dialect, Ending, Job, Surroundings
from belljar.errors import NotInAJob


class Paper(Dialect):
    name = "paper"

    def read(self, here):
        if not here.var("PAPER_JOB"):
            raise NotInAJob("no job of Paper Engine")
        return Job("paper", here.var("PAPER_JOB"), native=Command(here.argv[0], here.argv))

    def tell(self, job, verdict, outcome, tries, settings):
        return Ending(outcome.exit_code, outcome.signal)

    def alive(self):
        return ("paperq", "-all")

    def living(self, printed):
        return frozenset(printed.decode().split())

    def close_node(self, node, reason):
        return (("paperadmin", "close", node),)

    def open_node(self, node):
        return (("paperadmin", "open", node),)

    def why_closed(self, node):
        return ("paperadmin", "why", node)

    def closed_by_us(self, printed):
        return printed.startswith(b"belljar")

    def epilog(self, env, argv):
        return argv[0], argv[1]


DIALECT = Paper()
"""
SITE = """
from pathlib import Path

from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import OurLines
from belljar.findings import ok


class PaperSite:
    default_folder = Path("/etc/paper")
    needs = Needs(("paperq", "paperadmin"))

    def pieces(self, place):
        return [OurLines("starter of jobs", place.folder / "paper.conf", (f"starter {place.wrapper}",))]

    def findings(self, place):
        return [ok("paper is white", place.run(("paperadmin", "colour")).decode().strip())]

    def after(self, place):
        return (("paperadmin", "reread"),)


SITE = PaperSite()
"""
HOOKS = """
def fold(call):
    print("folded", *call.words, call.asker().user)
    return 7
"""
PROGRAM = """#!/bin/sh
case "$1" in
-all) echo 4711 ;;
why) echo "belljar: $2 is torn" ;;
colour) echo white ;;
esac
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """belljar as it is, and one folder more."""
    top = tmp_path_factory.mktemp("seventh")
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", top / "src", ignore=left_out)
    shutil.copytree(ROOT / "docs", top / "docs", ignore=left_out)
    shutil.copytree(ROOT / "scripts", top / "scripts", ignore=left_out)
    folder = top / "src/belljar/batch/paper"
    folder.mkdir()
    for name, text in (("__init__", INIT), ("dialect", DIALECT), ("site", SITE), ("hooks", HOOKS)):
        (folder / f"{name}.py").write_text(text)
    (top / "etc").mkdir()
    for name in ("paperq", "paperadmin"):
        (top / "bin").mkdir(exist_ok=True)
        (top / "bin" / name).write_text(PROGRAM)
        (top / "bin" / name).chmod(0o755)
    return top


def belljar(lib: Path, *words: str, code: int = 0, **env: str) -> str:
    program = [sys.executable, "-m", "belljar", *words]
    if words[0].endswith("reference"):
        program = [sys.executable, *words]
    paths = {name: str(lib / name) for name in ("run", "store", "logs", "scratch")}
    settings = {f"BELLJAR_PATHS_{name.upper()}": path for name, path in paths.items()}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=60, check=False, cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(lib / "src"), "HOME": str(lib), **settings, **env},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_help_knows_it(lib: Path) -> None:
    assert "paper (experimental)" in belljar(lib, "batch", "install", "--help")
    assert "slurm" in belljar(lib, "batch", "install", "--help")


def test_the_pages_know_it(lib: Path) -> None:
    belljar(lib, str(lib / "scripts/reference"))
    assert (
        "| Paper Engine, **experimental**: made up | [paper.md](paper.md) |"
        in (lib / "docs/batch/index.md").read_text()
    )
    assert "paper (experimental)" in (lib / "docs/reference/cli.md").read_text()


def test_it_is_installed_checked_and_taken_out(lib: Path) -> None:
    where = ("paper", "--folder", str(lib / "etc"), "--prefix", str(lib / "opt"))
    belljar(lib, "batch", "install", *where, "--commands", str(lib / "bin"))
    assert f"starter {lib}/opt/libexec/paper/wrap-paper\n" in (lib / "etc/paper.conf").read_text()
    words = (lib / "opt/libexec/paper/wrap-paper").read_text()
    assert "'paper', '--'" in words, "all that follows is the job's"
    found = json.loads(belljar(lib, "batch", "check", *where, "--format", "json", code=1))["findings"]
    good = {one["name"]: one["text"] for one in found if one["grade"] == "ok"}
    assert good["paper is white"] == "white" and "commands of paper" in good
    belljar(lib, "batch", "uninstall", *where)
    assert not (lib / "etc/paper.conf").exists() and not (lib / "opt/libexec").exists()


def test_its_jobs_hooks_and_node_are_served(lib: Path) -> None:
    path = {"PATH": f"{lib}/bin:{os.environ['PATH']}"}
    assert belljar(lib, "internal", "wrap", "paper", "--", "/bin/echo", "-n", "--x", PAPER_JOB="1") == "-n --x\n"[3:-1]
    assert belljar(lib, "internal", "hook", "paper", "fold", "a", "--b", code=7).startswith("folded a --b ")
    assert belljar(lib, "internal", "ask", "paper", **path) == "it knows of 1 running jobs\n"
    belljar(lib, "internal", "prolog", "paper", "4711", "nobody")
    belljar(lib, "reap", "--batch", "paper", **path)
    said = belljar(lib, "batch", "node", "paper", "status", PAPER_NODE="sheet1", **path)
    assert said.startswith("node sheet1: closed by belljar\n")


def test_its_name_begins_an_id(lib: Path) -> None:
    """`belljar cp paper:4711:/x .`: of a job that never was."""
    assert "paper:4711" in belljar_says(lib, "cp", "paper:4711:/x", str(lib))


def belljar_says(lib: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "belljar", *words], capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(lib / "src"), "HOME": str(lib)},
    )  # fmt: skip
    return done.stderr


def test_nothing_of_the_others_is_imported_for_its_jobs(lib: Path) -> None:
    """Nor of its own what only an administrator needs."""
    code = (
        "import sys; from belljar import batch; batch.load('paper').dialect;"
        "print(*sorted(name for name in sys.modules if name.startswith('belljar.batch.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(lib / "src")},
    )  # fmt: skip
    rooms = {name.split(".")[2] for name in done.stdout.split()}
    assert rooms == {"job", "paper"} and "belljar.batch.paper.site" not in done.stdout.split()
