"""What a wheel carries is what the source tree has: also the files that are not Python."""

import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from belljar.agent import bundle
from belljar.cli import HIDDEN, VERBS, parser_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("belljar-*.whl")
    return zipfile.ZipFile(path)


def test_a_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "belljar").rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name and not Path(name).name.startswith(".")}
    assert wanted - set(wheel.namelist()) == set()


def test_a_wheel_has_the_license_and_the_command(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist()}
    assert "LICENSE" in names
    assert "belljar = belljar.cli:entry" in wheel.read(names["entry_points.txt"]).decode()


def test_a_wheel_has_a_man_page_for_each_verb_completions_and_units(wheel: zipfile.ZipFile) -> None:
    shared = {name.partition(".data/data/share/")[2] for name in wheel.namelist() if ".data/data/share/" in name}
    verbs = [f"-{verb}" for verb in VERBS if verb not in HIDDEN]
    assert {f"man/man1/belljar{verb}.1" for verb in ("", *verbs)} == {name for name in shared if name.startswith("man")}
    assert "bash-completion/completions/belljar" in shared and "belljar/systemd/belljar-vacuum.service" in shared
    assert wheel.read(f"belljar/agent/{bundle.STAMP}") == bundle._digest()


def test_a_man_page_says_what_the_help_says(wheel: zipfile.ZipFile) -> None:
    page = next(name for name in wheel.namelist() if name.endswith("/belljar-run.1"))
    lines = wheel.read(page).decode().splitlines()
    assert '.B "\\-c, \\-\\-cpus N"' in lines
    assert not [line for line in lines if line.startswith("'")]
    words = [line.split()[0] for line in lines if line.startswith(".")]
    assert set(words) <= {".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".PP", ".nf", ".fi", ".nh", ".ad"}


@pytest.mark.parametrize("unit", sorted((ROOT / "packaging/systemd").glob("*.service")), ids=lambda path: path.stem)
def test_a_unit_starts_what_belljar_understands(unit: Path) -> None:
    words = re.search(r"^ExecStart=belljar (\S+) (.*)$", unit.read_text(), re.MULTILINE)
    assert words is not None
    if words[1] in VERBS:
        parser_of(words[1]).parse_args(words[2].split())


def test_what_builds_a_wheel_has_the_libraries_that_its_man_pages_take() -> None:
    """In a venv of developers others are there, too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, built_with = settings["project"], settings["build-system"]["requires"]
    all_of_them = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    code = "import sys; sys.path[:0] = ['src', 'packaging']; import manpages; manpages.pages(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    names, theirs = ({re.split(r"\W", line)[0] for line in lines} for lines in (all_of_them, built_with))
    assert names & set(done.stdout.split()) <= theirs


def test_versions_agree(wheel: zipfile.ZipFile) -> None:
    import belljar

    assert f"-{belljar.__version__}-" in str(wheel.filename)
    assert f"## {belljar.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nobody_is_sent_to_a_package_index_for_belljar_where_the_name_is_of_another_project() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), ROOT / "Makefile"]
    pages += [path for folder in ("scripts", "packaging") for path in (ROOT / folder).rglob("*") if path.is_file()]
    by_name = r"(pip|pipx|uv)( tool)? (install|add)\s[^\n]{0,40}(?<!/)\bbelljar\b(?!-)|(uvx|pipx run) belljar\b|\bbelljar\[[a-z]"
    assert [str(page) for page in pages if re.search(by_name, page.read_text(errors="replace"))] == []


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": (3, 11)}, "python3"),
        ({"python3": (3, 14), "python3.12": (3, 12)}, "python3"),
        ({"python3": (3, 6), "python3.11": (3, 11), "python3.12": (3, 12)}, "python3.12"),
        ({"python3": (3, 9), "python3.9": (3, 9), "python3.13": (3, 13)}, "python3.13"),
        ({"python3": (3, 10)}, ""),
        ({}, ""),
    ],
)
def test_a_python_that_is_new_enough_is_found_by_its_name(
    tmp_path: Path, there: dict[str, tuple[int, int]], chosen: str
) -> None:
    """EL 8, EL 9 and Ubuntu 22.04 have theirs beside an older python3. The Pythons here are stand-ins that know their version."""
    for name, version in there.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {int(version < (3, 11))}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([ROOT / "scripts/python", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout == (f"{tmp_path}/{chosen}\n" if chosen else "")
    assert (done.returncode, "Python 3.11 or newer" in done.stderr) == ((0, False) if chosen else (1, True))
