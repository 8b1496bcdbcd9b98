"""What an installed belljar has beside it: the libraries it needs, in a folder that everybody may read.

Copied once from the environment of the tests, which may lie in a home that only root can enter.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from importlib import metadata
from pathlib import Path

from tests.roots import STATE, alone, folder_for_all


def libraries() -> Path:
    needed = _needed("belljar", {})
    needed.pop("belljar")
    words = " ".join(f"{name}-{one.version}" for name, one in sorted(needed.items()))
    made = folder_for_all(STATE / "libraries") / hashlib.sha256(words.encode()).hexdigest()[:16]
    with alone(made.with_suffix(".lock")):
        if not made.is_dir():
            draft = made.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            for one in needed.values():
                _copy(one, draft)
            draft.rename(made)
    return made


def _needed(name: str, found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """A distribution and all it requires here; extras are not required."""
    if name in found:
        return found
    found[name] = metadata.distribution(name)
    for line in found[name].requires or ():
        word = re.match(r"[A-Za-z0-9._-]+", line)
        if word is not None and "extra ==" not in line and _is_here(word[0]):
            _needed(word[0].lower(), found)
    return found


def _is_here(name: str) -> bool:
    """What another Python or system would require is not."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _copy(one: metadata.Distribution, folder: Path) -> None:
    for file in one.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = folder / file
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)
            target.chmod(0o644)
