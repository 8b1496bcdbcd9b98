"""The documents as a whole: how long they are, and the site that `make docs` makes of them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.rules.offenders import assert_none

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 55_000
LOADING = {"script": ("src",), "link": ("href",), "img": ("src",), "iframe": ("src",), "object": ("data",), "source": ("src",)}  # fmt: skip
OUTSIDE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """The addresses that a browser fetches by itself when it shows a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "next", "prev"):  # only read by search engines
            return
        self.addresses += [values[name] or "" for name in LOADING.get(tag, ()) if name in values]


def outside(file: Path) -> Iterator[str]:
    text = file.read_text()
    addresses = Loaded(text).addresses if file.suffix in (".html", ".svg") else []
    if file.suffix in (".css", ".svg"):
        addresses += re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", text)
    yield from filter(OUTSIDE.match, addresses)


def test_the_documents_are_not_too_long() -> None:
    """Words as `wc -w` counts them."""
    words = {page.relative_to(ROOT): len(page.read_text().split()) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > len(PAGES)
    assert_none(f"{path.relative_to(site)}: {address}" for path in files for address in outside(path))


def test_what_loads_from_another_host_is_noticed(tmp_path: Path) -> None:
    page, sheet = tmp_path / "a.html", tmp_path / "a.css"
    page.write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org">read</a><img src="a.svg">'
    )
    sheet.write_text("@import '//fonts.example/a.css'; a { background: url(b.png) }")
    assert list(outside(page)) == ["https://cdn.example/x.js"]
    assert list(outside(sheet)) == ["//fonts.example/a.css"]


def test_the_search_needs_no_server(site: Path) -> None:
    assert (site / "search/search_index.js").stat().st_size > 100_000
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()


def test_llms_txt_names_every_page_with_a_line(site: Path) -> None:
    lines = re.findall(r"^- \[(.+)\]\((.+)\.html\): (.+)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(path for _, path, _ in lines) == sorted(
        str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES
    )


def test_a_picture_has_a_title_words_as_words_and_colours_for_a_dark_page() -> None:
    pictures = {path.name: path.read_text() for path in (ROOT / "docs/assets").glob("*.svg")}
    assert len(pictures) >= 4
    assert_none(
        f"{name}: no {part}"
        for name, text in pictures.items()
        for part in ("<title>", "<text", "prefers-color-scheme: dark", 'role="img"')
        if part not in text
    )
