"""Rules of the house that a machine can check."""

import ast
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from belljar import errors
from belljar.agent import bundle
from belljar.cli import HIDDEN, VERBS, parser_of
from belljar.config import SECTIONS, every_setting, load

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/belljar"
MODULES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINTED = (
    "src",
    "tests",
    "bench",
    "scripts/demo",
    "scripts/reference",
    "examples/pi",
    "examples/whereami",
    "examples/executor",
)
# Each module of the guest agent, and the one file that is made of them.
AGENT = [
    *(pytest.param((SOURCE / "agent" / name).read_bytes(), id=name) for name in bundle.PARTS),
    pytest.param(bundle.source(), id="bundle"),
]
LONGEST_MODULE, LONGEST_FUNCTION = 500, 60
ERRORS = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.BelljarError)),
    key=lambda one: one.__name__,
)


def tool(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# -- tools -------------------------------------------------------------------------------------------------------------


def test_types_are_right() -> None:
    tool("mypy")


def test_lint_is_clean() -> None:
    tool("ruff", "check", *LINTED)


def test_format_is_right() -> None:
    tool("ruff", "format", "--check", *LINTED)


# -- modules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_opens_with_what_it_is_for_and_its_functions_fit_in_the_head(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    assert ast.get_docstring(tree) or not tree.body, "no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{node.name} is too long"


@pytest.mark.parametrize("path", [*MODULES, *DOCS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_speaks_of_the_place_where_it_was_written(path: Path) -> None:
    if path == Path(__file__):
        return
    words = re.compile(r"/work/(main|shared)|\bissue\s*#?\d|\bTODO\b|\bFIXME\b", re.IGNORECASE)
    assert not (found := words.search(path.read_text())), found


@pytest.mark.parametrize("text", AGENT)
def test_the_agent_can_be_read_by_an_old_python(text: bytes) -> None:
    ast.parse(text, feature_version=(3, 6))


@pytest.mark.parametrize("text", AGENT)
def test_the_agent_imports_only_the_standard_library(text: bytes) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            ours = {
                name for name in names if name.startswith("belljar.agent.")
            }  # none in the one file, see test_bundle
            assert {name.split(".")[0] for name in {*names} - ours} <= sys.stdlib_module_names


# -- errors and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_tells_what_to_do_next_and_is_explained(error: type[errors.BelljarError]) -> None:
    assert error.hint.endswith((".", ")")) and "\n" not in error.hint
    assert error.__doc__
    assert error.exit_code == 125


def test_the_tree_of_errors_names_every_branch() -> None:
    branches = [error.__name__ for error in ERRORS if errors.BelljarError in error.__bases__]
    assert errors.__doc__ and len(branches) > 5
    assert [name for name in branches if name not in errors.__doc__] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_a_setting_has_a_help_text_and_a_default(section: str) -> None:
    assert is_dataclass(SECTIONS[section])
    for one in fields(SECTIONS[section]):
        assert one.metadata.get("help"), f"{section}.{one.name}"


# -- verbs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_can_explain_itself(verb: str) -> None:
    text = parser_of(verb).format_help()
    assert "usage: belljar" in text
    assert len(text.split("\n\n")) > 1, "no description"


def test_every_reading_verb_speaks_json() -> None:
    for verb in ("ps", "show", "events", "reap", "doctor", "config", "version", "kill-all"):
        assert "--format {table,json}" in parser_of(verb).format_help(), verb


# -- docs --------------------------------------------------------------------------------------------------------------


def test_the_pages_made_from_the_sources_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_name_every_verb_setting_and_error() -> None:
    cli = (ROOT / "docs/reference/cli.md").read_text()
    assert [verb for verb in VERBS if f"belljar {verb}" not in cli and verb not in HIDDEN] == []
    settings = (ROOT / "docs/reference/settings.md").read_text()
    assert [
        key for _, key, *_ in every_setting(load(environ={}, etc=Path("/nowhere"))) if f"`{key}`" not in settings
    ] == []
    pages = (ROOT / "docs/reference/errors.md").read_text()
    assert [error.__name__ for error in ERRORS if f"`{error.__name__}`" not in pages] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        page = path.parent / target if target else path
        assert "://" in target or page.exists(), target
        assert not heading or heading in anchors(page), f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_docs_exist(path: Path) -> None:
    for verb in re.findall(r"`belljar (?:--\S+ )*([a-z][a-z-]+)", path.read_text()):
        assert verb in VERBS, verb


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("[0-9]*.md"))
