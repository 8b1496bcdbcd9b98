"""The job_submit plugin of Slurm, in Lua: the site's settings as a table, then code that is the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from belljar.batch.install.pieces import Place
from belljar.batch.job import judge, policy
from belljar.errors import BadOption

MARK = "-- Made by `belljar batch install slurm`"


def plugin(place: Place) -> bytes:
    """The plugin's text. Raises BadSetting, BadOption for what cannot be said in it."""
    settings = place.settings
    features = _features(place)
    site = policy.site_of(settings)
    table = {
        "wrapper": quoted(_wrapper(place)),
        "names": quoted(str(place.store / "images/names")),
        "features": _table(features.items()),
        "baits": _table((name, name) for name in place.options.get("bait", "").split()),
        "disk_is_scratch": "true" if settings.scratch else "false",
        "default_image": quoted(site["default_image"]),
        "queue_images": _table(site["queue_images"].items()),
        "allow": _rules(site["allow"]),
        **{name: str(size) for name, size in site.items() if isinstance(size, int)},
    }
    lines = "".join(f"   {key} = {value},\n" for key, value in table.items())
    code = Path(__file__).with_name("submit.lua").read_text()
    return f"{MARK} from the settings [batch]. Changes here are lost.\nlocal site = {{\n{lines}}}\n\n{code}".encode()


def _wrapper(place: Place) -> str:
    """Raises BadOption for a path the kernel would not take in a `#!` line."""
    path = str(place.wrapper)
    if re.search(r"\s", path) or len(path) > 80:
        raise BadOption(f"{path}: a `#!` line takes no path with blanks and none longer than 80 characters")
    return path


def _features(place: Place) -> dict[str, str]:
    images = {}
    for word in place.options.get("feature", "").split():
        feature, _, image = word.partition("=")
        if not (re.fullmatch(r"[\w.-]+", feature) and judge.IMAGE_NAME.match(image)):
            hint = "Say --set 'feature=el9=alma9 el8=alma8'."
            raise BadOption(f"feature {word!r}: not of the form FEATURE=IMAGE", hint=hint)
        images[feature] = image
    return images


def _rules(rules: Iterable[tuple[str, str, str]]) -> str:
    rows = (
        f"{{ kind = {quoted(kind)}, name = {quoted(name)},"
        f" pattern = {quoted(pattern_of(glob))}, shown = {quoted(glob)} }}"
        for kind, name, glob in rules
    )
    return "{ " + ", ".join(rows) + " }"


def pattern_of(glob: str) -> str:
    """A pattern of image names as one of Lua, anchored."""
    return "^" + policy.in_words(glob, lambda char: f"%{char}" if char in ".-" else char) + "$"


def _table(pairs: Iterable[tuple[str, str]]) -> str:
    return "{ " + ", ".join(f"[{quoted(key)}] = {quoted(value)}" for key, value in pairs) + " }"


def quoted(text: str) -> str:
    """A string of Lua's, whatever the text holds."""
    parts = (
        c if c.isascii() and (c.isalnum() or c in "/._- *?:,") else "".join(f"\\{b:03d}" for b in c.encode())
        for c in text
    )
    return '"' + "".join(parts) + '"'
