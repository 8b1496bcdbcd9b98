"""Rules of the house that a machine can check. Each is one test, which names every offender."""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from tests.rules.offenders import assert_none

from belljar import errors
from belljar.agent import bundle
from belljar.cli import HIDDEN, VERBS, parser_of
from belljar.config import SECTIONS, every_setting, inspect

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
AGENT = {**{name: (SOURCE / "agent" / name).read_bytes() for name in bundle.PARTS}, "bundle": bundle.source()}
LONGEST_MODULE, LONGEST_FUNCTION = 500, 60
SUFFIXES = ("log", "sh", "py")  # `qemu.log` is a file
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


def test_a_module_is_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert_none(f"{name}: {length} lines" for name, length in lengths.items() if length > LONGEST_MODULE)


def test_a_module_opens_with_what_it_is_for_and_its_functions_fit_in_the_head() -> None:
    trees = {path.relative_to(SOURCE): ast.parse(path.read_bytes()) for path in SOURCE.rglob("*.py")}
    assert_none(str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree))
    assert_none(
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    )


def test_nothing_speaks_of_the_place_where_it_was_written() -> None:
    words = re.compile(r"/work/(main|shared)|\bissue\s*#?\d|\bTODO\b|\bFIXME\b", re.IGNORECASE)
    pages = {path: path.read_text() for path in (*MODULES, *DOCS) if path != Path(__file__)}
    assert_none(f"{path}: {found[0]}" for path, text in pages.items() if (found := words.search(text)))


def test_the_agent_imports_only_the_standard_library() -> None:
    assert_none(f"{name}: {module}" for name, text in AGENT.items() for module in foreign_imports(text))


def foreign_imports(text: bytes) -> Iterator[str]:
    """Modules that are neither Python's nor the agent's own; the one file has none of these, see test_bundle."""
    for node in ast.walk(ast.parse(text)):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if not name.startswith("belljar.agent.") and name.split(".")[0] not in sys.stdlib_module_names:
                yield name


def test_files_beside_modules_are_found_without_their_loader() -> None:
    """Modules of an installed belljar come out of one file, whose loader knows of no other files."""
    assert_none(
        str(path)
        for path in SOURCE.rglob("*.py")
        if "importlib.resources" in (text := path.read_text()) or "import resources" in text
    )


# -- errors and settings -----------------------------------------------------------------------------------------------


def test_an_error_tells_what_to_do_next_and_is_explained() -> None:
    explained = {
        error.__name__: bool(error.__doc__) and error.hint.endswith((".", ")")) and "\n" not in error.hint
        for error in ERRORS
    }
    assert_none(name for name, is_explained in explained.items() if not is_explained)
    assert_none(error.__name__ for error in ERRORS if error.exit_code != 125)


def test_the_tree_of_errors_names_every_branch() -> None:
    branches = [error.__name__ for error in ERRORS if errors.BelljarError in error.__bases__]
    assert errors.__doc__ and len(branches) > 5
    assert_none(name for name in branches if name not in errors.__doc__)


def test_a_setting_has_a_help_text_and_a_default() -> None:
    assert all(map(is_dataclass, SECTIONS.values()))
    assert_none(
        f"{section}.{one.name}"
        for section, settings in SECTIONS.items()
        for one in fields(settings)
        if not one.metadata.get("help")
    )


# -- verbs -------------------------------------------------------------------------------------------------------------


def test_a_verb_can_explain_itself() -> None:
    helps = {verb: parser_of(verb).format_help() for verb in VERBS}
    assert_none(verb for verb, text in helps.items() if "usage: belljar" not in text)
    assert_none(verb for verb, text in helps.items() if len(text.split("\n\n")) < 2)


def test_every_reading_verb_speaks_json() -> None:
    for verb in ("ps", "show", "events", "reap", "doctor", "config", "kill-all"):
        assert "--format {table,json}" in parser_of(verb).format_help(), verb


# -- docs --------------------------------------------------------------------------------------------------------------


def test_the_pages_made_from_the_sources_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_name_every_verb_setting_and_error() -> None:
    cli = (ROOT / "docs/reference/cli.md").read_text()
    assert_none(verb for verb in VERBS if f"belljar {verb}" not in cli and verb not in HIDDEN)
    settings = (ROOT / "docs/reference/settings.md").read_text()
    assert_none(
        key
        for _, key, *_ in every_setting(inspect(environ={}, etc=Path("/nowhere")).checked())
        if f"`{key}`" not in settings
    )
    pages = (ROOT / "docs/reference/errors.md").read_text()
    assert_none(error.__name__ for error in ERRORS if f"`{error.__name__}`" not in pages)


def test_links_between_pages_lead_somewhere() -> None:
    assert_none(f"{path}: {link}" for path in DOCS for link in broken_links(path))


def broken_links(path: Path) -> Iterator[str]:
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        page = path.parent / target if target else path
        if "://" not in target and not page.exists():
            yield target
        elif heading and heading not in anchors(page):
            yield f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_commands_in_the_docs_exist() -> None:
    command = re.compile(r"`belljar (?:--\S+ )*([a-z][a-z-]+)")
    assert_none(f"{path}: {verb}" for path in DOCS for verb in command.findall(path.read_text()) if verb not in VERBS)


def test_options_settings_and_modules_in_the_docs_exist() -> None:
    """Decisions and the changelog also speak of what is gone."""
    pages = [path for path in DOCS if path.parent.name != "decisions" and path.name != "CHANGELOG.md"]
    assert_none(f"{path}: {word}" for path in pages for word in unknown_words(path))


def unknown_words(path: Path) -> Iterator[str]:
    """Options of a verb of ours, `section.key`, and dotted names of modules that are named in code, and are not there."""
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if (call := re.match(r"belljar ([a-z][a-z-]+)(.*)", span)) and call[1] in VERBS:
            known, words = set(options_of(parser_of(call[1]))), call[2].partition(" -- ")[0]
            yield from (
                f"{span}: {word}" for word in re.findall(r"(?<=[ \[])--[a-z][a-z-]*", words) if word not in known
            )
        key = re.fullmatch(r"([a-z]+)\.([a-z_]+)", span)
        is_known = not key or key[1] not in SECTIONS or key[2] in (*SUFFIXES, *SECTIONS[key[1]].__dataclass_fields__)
        module = re.fullmatch(r"belljar((?:\.[a-z_]+)+)", span)
        if not is_known or (module and not is_named(module[1].split(".")[1:])):
            yield span


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of the verb and of all its acts."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for act in action.choices.values():
                yield from options_of(act)


def is_named(parts: list[str]) -> bool:
    """Is it a module of ours, or a name in one?"""
    module, name = SOURCE.joinpath(*parts), SOURCE.joinpath(*parts[:-1])
    texts = [path.read_text() for path in (name.with_suffix(".py"), name / "__init__.py") if path.exists()]
    return module.is_dir() or module.with_suffix(".py").exists() or any(parts[-1] in text for text in texts)


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/develop/decisions"
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "index.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("[0-9]*.md"))
