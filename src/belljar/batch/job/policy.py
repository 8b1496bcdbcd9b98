"""Who may use which image, and how much, by the site's settings: `judge` decides, here its words become errors.

`site_of` is the same as data, for what is installed where jobs are submitted: Slurm's Lua, OpenPBS's hook, HTCondor's
expressions. The node judges again by the very same rules.
"""

from __future__ import annotations

import string
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from belljar.batch import Settings
from belljar.batch.job import judge
from belljar.batch.job.judge import IMAGE_NAME
from belljar.batch.job.sizes import smallest_limit
from belljar.errors import BadSetting, ImageNotAllowed, OverLimit

WHO = ("user", "group", "queue")
LETTERS = f"{string.ascii_letters}{string.digits}._-"  # of an image's name


@dataclass(frozen=True)
class Asker:
    """Who asks, and where."""

    user: str
    groups: Collection[str] = ()
    queue: str = ""


def image_for(asked: str, queue: str, settings: Settings) -> str:
    """The image a job gets, "" for none. Raises ImageNotAllowed for what can be no image's name."""
    if asked:
        check_name(asked)
        return asked
    return judge.chosen("", queue, queue_images(settings), settings.default_image)


def check_name(image: str) -> None:
    """Raises ImageNotAllowed unless this can be an image's name."""
    if wrong := judge.misnamed(image):
        raise ImageNotAllowed(wrong, hint=judge.NAME_HINT)


def queue_images(settings: Settings) -> dict[str, str]:
    """`batch.queue_images` as a mapping. Raises BadSetting."""
    found = {}
    for word in settings.queue_images:
        queue, equals, image = word.partition("=")
        if not (queue and equals and IMAGE_NAME.match(image)):
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
    wrong, hint = judge.forbidden(image, _offered(asker, settings), asker.user, asker.queue)
    if wrong:
        raise ImageNotAllowed(wrong, hint=hint)


def may_be_own(asker: Asker, settings: Settings) -> bool:
    """May this asker's image be one of the asker's own? Rules are about the site's images; only `*` means whatever there is."""
    return "*" in _offered(asker, settings)


def check_limits(cpus: int | None, memory: int | None, disk: int | None, settings: Settings) -> None:
    """Raises OverLimit for more than the site gives, and for less memory than a machine needs."""
    wrong = next(judge.excess({"cpus": cpus, "memory": memory, "disk": disk}, _limits(settings)), "")
    if wrong:
        raise OverLimit(wrong, hint="Ask for another size, or ask your site.")


def site_of(settings: Settings) -> dict[str, Any]:
    """All of it as plain data, by the names that `judge` has for it. Raises BadSetting."""
    if settings.default_image:
        check_name(settings.default_image)
    return {
        "default_image": settings.default_image, "queue_images": queue_images(settings),
        "allow": [list(rule) for rule in rules(settings)], **_limits(settings),
    }  # fmt: skip


def letters_of(pattern: str) -> list[str] | None:
    """A pattern piece by piece: "*", or the letters that may stand in this place, in the order of LETTERS. For languages
    that write patterns otherwise. None where no image's name fits it."""
    found, at = [], 0
    while at < len(pattern):
        start, at = at, at + 1
        if pattern[start] == "[":
            end = pattern.find("]", at + 1 + pattern.startswith("!", at))
            at = end + 1 if end > 0 else at
        word = pattern[start:at]
        letters = "*" if word == "*" else "".join(one for one in LETTERS if fnmatchcase(one, word))
        if not letters:
            return None
        found.append(letters)
    return found


def _offered(asker: Asker, settings: Settings) -> list[str]:
    return judge.offered(rules(settings), asker.user, asker.groups, asker.queue)


def _limits(settings: Settings) -> dict[str, int]:
    most = {"max_cpus": settings.max_cpus, "max_memory": settings.max_memory, "max_disk": settings.max_disk}
    return {**most, "least_memory": smallest_limit(settings)}
