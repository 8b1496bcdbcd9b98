"""Plain English: patterns that tire a reader who is no native speaker. None in messages, help and docs; few in comments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.rules.offenders import assert_none
from tests.rules.test_layers import MODULES

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PATTERNS = {
    "is none / is no X: say `is not a`": r"(?<![Tt]here )\b(is|are|was|were) (none|no (?!longer\b|more\b|other\b|less\b|one\b)[a-z]+)\b(?! of)",
    "free `who`: name the person": r"(^|[.;:] )Who (?![^.?!]*\?)[a-z]+|\b(for|to|by|of|from|with|and|or|as) who (is|has|was|does|wants|needs|may|can|asks|starts|makes|reads|knows|runs)\b",
    "`such a ... is`": r"\b[Ss]uch an? [a-z]+ (is|has|was)\b",
    "told of": r"\btold of\b",
    "in vain": r"\bin vain\b",
    "for want of": r"\bfor want of\b",
    "`Of X, ...` at the beginning": r"(^|[.;:|] )Of (an?|the|each|all|this|that|these|those|what|its|their|every|two|more)\b",
    "as whom": r"\b[Aa]s whom\b",
    "is had": r"\b(is|are|be|was) had\b",
    "hears of": r"\bhears? of\b",
}
MOST_IN_COMMENTS = 40


def found_in(text: str) -> Iterator[str]:
    for what, pattern in PATTERNS.items():
        for match in re.finditer(pattern, text, re.MULTILINE):
            yield f"{what}: {text[max(0, match.start() - 20) : match.end() + 40]!r}"


def prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "x", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def texts(path: Path) -> Iterator[tuple[bool, int, str]]:
    """(is a comment or docstring, line, text) of a module."""
    source = path.read_text()
    tree = ast.parse(source)
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docs.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield id(node) in docs, node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield True, token.start[0], token.string.lstrip("# ")


def test_docs_are_plain() -> None:
    assert_none(f"{path.relative_to(ROOT)}: {one}" for path in PAGES for one in found_in(prose(path)))


def test_messages_and_help_are_plain() -> None:
    assert_none(
        f"{path}:{line}: {one}"
        for path in MODULES
        for is_comment, line, text in texts(path)
        if not is_comment
        for one in found_in(text)
    )


def test_comments_are_mostly_plain() -> None:
    lines = [
        f"{path}:{line}: {one}"
        for path in MODULES
        for is_comment, line, text in texts(path)
        if is_comment
        for one in found_in(text)
    ]
    assert len(lines) <= MOST_IN_COMMENTS, "\n".join(["", *lines])


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable and parameter. What is annotated, as the fields of a class are, is not among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            node.target.ctx = ast.Load()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_variables_say_what_the_thing_is() -> None:
    empty = {"one", "found", "said", "told", "wanted", "it"}
    assert_none(
        f"{path}:{line}: {name}"
        for path in MODULES
        for line, name in bound(ast.parse(path.read_text()))
        if name in empty
    )
