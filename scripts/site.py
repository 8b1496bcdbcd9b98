"""What mkdocs calls while it builds the site: a door for each page that mkdocs.yml does not name, and llms.txt, the list of pages
with one line each."""

import re
from pathlib import Path

HEAD = "# belljar\n\n> Every batch job runs in its own fresh virtual machine: it is made for the job, runs it, and is gone.\n"
DOORS = {"jobs": 1, "batch": 2, "monitor": 2, "operate": 3, "develop": 4}  # folder -> place in `nav`
REFERENCE = 5
pages: dict[str, tuple[str, str]] = {}  # path in docs/ -> title, first sentence


def on_config(config) -> None:  # type: ignore[no-untyped-def]
    docs = Path(config["docs_dir"])
    named = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    for path in sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md")):
        if path not in named and "/decisions/" not in path:
            (section,) = config["nav"][DOORS.get(path.partition("/")[0], REFERENCE)].values()
            section.append(path)


def on_page_markdown(markdown: str, page, config, files) -> None:  # type: ignore[no-untyped-def]
    pages[page.file.src_uri] = (title_of(markdown), first_sentence(markdown))


def on_post_build(config) -> None:  # type: ignore[no-untyped-def]
    (Path(config["site_dir"]) / "llms.txt").write_text(overview(pages))


def overview(pages: dict[str, tuple[str, str]]) -> str:
    """One line a page, by folder."""
    lines, folder = [HEAD], ""
    for path, (title, sentence) in pages.items():
        section = path.partition("/")[0] if "/" in path else "start"
        if section != folder:
            lines.append(f"\n## {section}\n")
            folder = section
        lines.append(f"- [{title}]({path.removesuffix('.md')}.html): {sentence}")
    return "\n".join(lines) + "\n"


def title_of(markdown: str) -> str:
    match = re.search(r"^# (.*)$", markdown, re.MULTILINE)
    return match[1] if match else ""


def first_sentence(markdown: str) -> str:
    """Of the first paragraph that is prose, without its links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", markdown, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip() and paragraph.lstrip()[0] not in "#|!-<":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:?]) (?=[A-Z])", plain)[0]
    return ""
