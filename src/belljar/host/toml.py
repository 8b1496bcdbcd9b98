"""Settings files in TOML: read whole with every mistake in its place. What the keys mean is for those who read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from belljar.errors import HostError
from belljar.hints import Any
from belljar.host.files import check_settled, read_capped
from belljar.host.quick_imports import quickly
from belljar.records import dataclass

LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Mistake:
    """`origin, key: what (hint)`. Not a Finding: it says file, line and key, and stops the program that reads the file."""

    origin: str  # file with line, or variable
    key: str  # "section.key", or "" where the whole file is meant
    what: str
    hint: str = ""
    is_users: bool = False  # it stands in a place that is the user's own, not the site's

    def __str__(self) -> str:
        place = f"{self.origin}, {self.key}" if self.key else self.origin
        return f"{place}: {self.what}{f' ({self.hint})' if self.hint else ''}"


def read(path: Path, mistakes: list[Mistake], *, is_sites: bool = False) -> tuple[str, dict[str, Any]]:
    """A file's text and content. One that cannot be read or parsed is one mistake and gives nothing. *is_sites*: nor does one
    that others may write."""
    quickly("tomllib")
    import tomllib

    try:
        if is_sites:
            check_settled(path)
        text = read_capped(path, LARGEST_FILE).decode()
        return text, tomllib.loads(text)
    except FileNotFoundError:
        what = "a link that leads nowhere" if path.is_symlink() else "no such file"
        hint = "correct the path that was given, or take the link away"
    except OSError as exc:
        what, hint = f"cannot be read: {exc.strerror}", "correct its owner and mode"
    except HostError as exc:
        what, hint = exc.message.removeprefix(f"{path}: "), "settings are a small file that others cannot write"
    except UnicodeDecodeError as exc:
        what, hint = f"not UTF-8 at byte {exc.start}", "save it as UTF-8"
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        what, hint = f"not TOML: {exc}", "text wants quotes; sections are [in brackets]"
    mistakes.append(Mistake(str(path), "", what, hint))
    return "", {}


def meant(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not known."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def place(path: Path, text: str, section: str, key: str = "") -> str:
    """`file:line` where the section, or the key in it, is written plainly; else the file alone.

    tomllib tells no lines, and for a person's settings file a look at the line's beginning finds nearly all of them.
    """
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            current = bare.strip("[]").partition("]")[0].replace('"', "").replace("'", "").strip()
            if not key and f"{current}.".startswith(f"{section}."):
                return f"{path}:{number}"
        name = bare.partition("=")[0].strip().strip("\"'")
        if key and ((current == section and name == key) or (current == "" and name == f"{section}.{key}")):
            return f"{path}:{number}"
    return str(path)
