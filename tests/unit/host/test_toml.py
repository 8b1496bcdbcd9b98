"""Settings files: what is wrong with one, and where."""

from pathlib import Path

import pytest

from belljar.host.toml import LARGEST_FILE, Mistake, meant, place, read

LINES = '[a]\nx = 1\n[b."c-d"]\nx = 2\n  y= 3\n["b".e]\n'


@pytest.mark.parametrize(
    ("section", "key", "line"),
    [
        ("a", "", ":1"),
        ("a", "x", ":2"),
        ("b.c-d", "x", ":4"),
        ("b.c-d", "y", ":5"),
        ("b", "", ":3"),
        ("b.e", "", ":6"),
        ("c", "x", ""),
    ],
)
def test_a_mistake_has_its_line(section: str, key: str, line: str) -> None:
    assert place(Path("/f"), LINES, section, key) == f"/f{line}"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[a", "not TOML"), (b"a = \xff", "not UTF-8 at byte 4"), (b"a = " + b"[" * 5000, "not TOML"),
        (b"#" * (LARGEST_FILE + 1), "larger than 1048576 bytes"), (None, "no such file"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_mistake(tmp_path: Path, data: bytes | None, what: str) -> None:
    path, mistakes = tmp_path / "f.toml", list[Mistake]()
    if data is not None:
        path.write_bytes(data)
    assert read(path, mistakes) == ("", {})
    (mistake,) = mistakes
    assert what in str(mistake) and str(mistake).startswith(f"{path}: ") and mistake.hint


def test_an_unknown_word_gets_the_nearest_known_one() -> None:
    assert meant("shares", ["share", "image"]) == "did you mean share?"
    assert meant("zzz", ["share", "image"]) == "there are share, image"
