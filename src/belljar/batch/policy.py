"""Which image a job gets, and whether the site lets it: pure rules over the settings, the same at submit and on the node."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from belljar.batch import Settings
from belljar.errors import BadSetting, ImageNotAllowed, OverLimit
from belljar.model import MIB

IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WHO = ("user", "group", "queue")


@dataclass(frozen=True)
class Asker:
    """Who asks, and where."""

    user: str
    groups: Collection[str] = ()
    queue: str = ""


def image_for(asked: str, queue: str, settings: Settings) -> str:
    """The image a job gets: its own, the queue's, the site's, or "" for none: it runs without a machine.
    Raises ImageNotAllowed for what can be no image's name."""
    if asked:
        check_name(asked)
        return asked
    return queue_images(settings).get(queue, settings.default_image)


def check_name(image: str) -> None:
    """Raises ImageNotAllowed unless this can be an image's name."""
    if not IMAGE_NAME.fullmatch(image):
        raise ImageNotAllowed(
            f"image {image[:60]!r}: not a name of an image",
            hint="A name is letters, digits, dots, dashes and underscores, at most 100 of them.",
        )


def queue_images(settings: Settings) -> dict[str, str]:
    """`batch.queue_images` as a mapping. Raises BadSetting."""
    found = {}
    for word in settings.queue_images:
        queue, equals, image = word.partition("=")
        if not (queue and equals and IMAGE_NAME.fullmatch(image)):
            raise BadSetting(f"batch.queue_images: {word!r} is not of the form QUEUE=IMAGE")
        found[queue] = image
    return found


def rules(settings: Settings) -> list[tuple[str, str, str]]:
    """`batch.allow` as (kind, name, pattern); kind "*" for everybody. Raises BadSetting."""
    found = []
    for rule in settings.allow:
        words = rule.split()
        kind, _, name = words[0].partition(":") if words else ("", "", "")
        if len(words) != 2 or not (words[0] == "*" or (kind in WHO and name)):
            raise BadSetting(
                f"batch.allow: {rule!r} is not of the form `WHO PATTERN`",
                hint="WHO is *, user:NAME, group:NAME or queue:NAME; PATTERN is an image's name, * and ? stand for others.",
            )
        found.append((kind, name, words[1]))
    return found


def check_allowed(image: str, asker: Asker, settings: Settings) -> None:
    """Raises ImageNotAllowed unless some rule gives this image to this asker."""
    allowed = _patterns(asker, settings)
    if any(fnmatchcase(image, pattern) for pattern in allowed):
        return
    where = f" in queue {asker.queue}" if asker.queue else ""
    offered = f"Allowed are: {', '.join(allowed)}." if allowed else "No image is allowed there."
    raise ImageNotAllowed(f"image {image}: not allowed for {asker.user}{where}", hint=offered)


def may_be_own(asker: Asker, settings: Settings) -> bool:
    """May this asker's image be one of the asker's own? Rules are about the site's images; only `*` means whatever there is."""
    return "*" in _patterns(asker, settings)


def _patterns(asker: Asker, settings: Settings) -> list[str]:
    """Of the rules that are for this asker."""
    found = []
    for kind, name, pattern in rules(settings):
        is_theirs = (
            kind == "*"
            or (kind == "user" and name == asker.user)
            or (kind == "group" and name in asker.groups)
            or (kind == "queue" and name == asker.queue)
        )
        if is_theirs:
            found.append(pattern)
    return found


def check_limits(cpus: int | None, memory: int | None, disk: int | None, settings: Settings) -> None:
    """Raises OverLimit for more than the site gives."""
    for what, asked, most, unit in (
        ("cpus", cpus, settings.max_cpus, 1),
        ("MiB of memory", memory, settings.max_memory, MIB),
        ("MiB of disk", disk, settings.max_disk, MIB),
    ):
        if asked is not None and most and asked > most:
            raise OverLimit(
                f"{-(-asked // unit)} {what}: a job in a machine may have at most {most // unit} here",
                hint="Ask for less, or ask your site.",
            )
