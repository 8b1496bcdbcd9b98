"""The one file that guests get: all the modules and nothing else, the same for the same sources."""

from __future__ import annotations

import ast
import builtins
import shutil
import subprocess
import symtable
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.agent import bundle

FOLDER = Path(bundle.FOLDER)
OUTSIDE = {"__init__.py", "bundle.py", "belljar_hold.py"}  # what is no part of the agent


def tree_of(part: str) -> ast.Module:
    return ast.parse((FOLDER / part).read_bytes())


def names_made(tree: ast.Module) -> Iterator[str]:
    """At the top of a module, imports left out."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            yield from names - {"TYPE_CHECKING"}


def own_imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("belljar"):
            yield node


def test_every_module_is_in_it_once() -> None:
    assert sorted(bundle.PARTS) == sorted(
        {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if path.name not in OUTSIDE}
    )


def test_a_name_means_one_thing_in_all_modules() -> None:
    count = Counter(name for part in bundle.PARTS for name in names_made(tree_of(part)))
    assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize("part", bundle.PARTS)
def test_a_module_imports_names_as_they_are_of_modules_before_it(part: str) -> None:
    before = {
        f"belljar.agent.{name.removesuffix('.py').replace('/', '.')}"
        for name in bundle.PARTS[: bundle.PARTS.index(part)]
    }
    tree = tree_of(part)
    for_types = {
        id(node)
        for one in tree.body
        if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
        for node in one.body
    }
    for node in own_imports(tree):
        assert all(one.asname is None for one in node.names), f"{part}:{node.lineno}"
        assert node.module in before or id(node) in for_types, f"{part}:{node.lineno}: {node.module}"


def test_nobody_is_imported_by_whom_he_imports_not_even_for_a_type() -> None:
    known = {"bundle.py", *bundle.PARTS}
    names = {f"belljar.agent.{part.removesuffix('.py').replace('/', '.')}": part for part in known}
    asked = {part: {names[str(node.module)] for node in own_imports(tree_of(part))} for part in known}
    order: list[str] = []
    while free := sorted(part for part in known - {*order} if asked[part] <= {*order}):
        order += free
    assert sorted(known - {*order}) == []
    for part in bundle.PARTS:
        tests = [
            ast.unparse(one.args[1])
            for one in ast.walk(tree_of(part))
            if isinstance(one, ast.Call) and ast.unparse(one.func) == "isinstance"
        ]
        assert tests == [], part


def test_it_imports_nothing_of_ours_and_each_module_of_the_library_once() -> None:
    tree = ast.parse(bundle.source())
    assert list(own_imports(tree)) == []
    said = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert said and len(said) == len(set(said))
    assert "import _signal as signal" in said and "import signal" not in said


def test_every_name_it_uses_is_there() -> None:
    text = bundle.source().decode()
    top = symtable.symtable(text, "agent.py", "exec")
    made = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    made |= set(dir(builtins)) | {"__name__"}
    scopes, unknown = [top], set[str]()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        unknown |= {one.get_name() for one in scope.get_symbols() if one.is_global() and one.is_referenced()} - made
    assert unknown == set()


def test_all_that_the_modules_make_is_in_it() -> None:
    made = Counter(names_made(ast.parse(bundle.source())))
    assert made == Counter(name for part in bundle.PARTS for name in names_made(tree_of(part)))


def test_it_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", "x"], input=bundle.source(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, b"belljar-agent: usage: agent.pyc\n")


def test_the_same_sources_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, key = bundle.source(), bundle.key()
    shutil.copytree(FOLDER, tmp_path / "agent")
    monkeypatch.setattr(bundle, "FOLDER", f"{tmp_path}/agent/")
    assert (bundle.source(), bundle.key()) == (text, key)


def test_another_python_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bundle.key()
    monkeypatch.setattr(sys, "version", "3.99.0")
    assert bundle.key() != key


def test_an_installed_tree_keeps_the_key_and_reads_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bundle.key()
    shutil.copytree(FOLDER, tmp_path / "agent")
    monkeypatch.setattr(bundle, "FOLDER", f"{tmp_path}/agent/")
    bundle.stamp()
    (tmp_path / "agent/wire.py").unlink()
    assert bundle.key() == key


@pytest.mark.parametrize("part", bundle.PARTS)
def test_a_change_of_any_module_changes_the_file_and_its_key(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, key = bundle.source(), bundle.key()
    shutil.copytree(FOLDER, tmp_path / "agent")
    with open(tmp_path / "agent" / part, "a") as file:
        file.write("ANOTHER = 1\n")
    monkeypatch.setattr(bundle, "FOLDER", f"{tmp_path}/agent/")
    assert bundle.source() != text and bundle.key() != key


MODULE = '''\
"""What it is for."""

import os

from belljar.agent.wire import (
    MIB,
    Words,
)

# Why one.
ONE = 1


def two() -> "Agent":
    import fcntl

    from typing import Any
'''
BODY = MODULE[MODULE.index("# Why one") :]


def test_only_the_imports_above_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text(MODULE)
    monkeypatch.setattr(bundle, "PARTS", (f"{tmp_path}/one.py",))
    made = bundle.source().decode()
    head, _, rest = made.removeprefix(bundle.HEAD).partition("\n\n\n# -- ")
    assert head == "\nimport os"
    assert rest.partition("\n")[2].split("\n", 1)[1].lstrip() == BODY
