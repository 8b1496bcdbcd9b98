# ruff: noqa: UP031 - for Python 3.5
"""The site's rules, judged: which image a job gets, who may use it, how large a job may be. The one place for all of
it.

policy.py hands it the settings as plain data, *site*. `batch install openpbs` puts this text before the server's hook, so it is for
Python 3.5 and the standard library. Slurm's and HTCondor's forms of it go through the same cases:
tests/unit/batch/policy_cases.py.
"""

import re
from fnmatch import fnmatchcase

MIB = 1 << 20
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
REFERENCE = re.compile(r"docker://[A-Za-z0-9][A-Za-z0-9._:@/-]{0,199}\Z")
NAME_HINT = "A name is letters, digits, dots, dashes and underscores, at most 100 of them."
PULL_HINT = "Name an image of the site, or ask your site for this one (batch.pull, batch.registries)."
SIZE_HINT = "Ask for another size, or ask your site."
TOO_SMALL = "%d MiB of memory: a job in a machine needs at least %d MiB, for the guest and for what makes it"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any


class Refused(Exception):
    """The job gets no machine: why, and what would do."""


def chosen(asked: str, queue: str, site: "Mapping[str, Any]") -> str:
    """The image a job gets: its own, the queue's, the site's, or "" for none: it runs without a machine."""
    return str(asked or site["queue_images"].get(queue, site["default_image"]))


def check_name(image: str) -> None:
    """Raises Refused unless this can be an image's name."""
    if not (REFERENCE.match(image) or IMAGE_NAME.match(image)):
        raise Refused("image %r: not a name of an image" % image[:60], NAME_HINT)


def offered(allow: "Sequence[Sequence[str]]", user: str, groups: "Collection[str]", queue: str) -> "list[str]":
    """The patterns of those rules, (kind, name, pattern) each, that are for this asker."""
    theirs = {"*": ("",), "user": (user,), "group": groups, "queue": (queue,)}
    return [pattern for kind, name, pattern in allow if name in theirs[kind]]


def check_allowed(image: str, user: str, groups: "Collection[str]", queue: str, site: "Mapping[str, Any]") -> None:
    """Raises Refused unless some rule gives this image to this asker, and one of a registry may be pulled."""
    is_pulled, pull = REFERENCE.match(image), site["pull"]  # a pulled one is the job's user's
    registries = site["registries"] if pull == "site-registries" else []
    if is_pulled and pull != "any" and not image.startswith(tuple("docker://%s/" % name for name in registries)):
        where = "only from %s" % ", ".join(registries) if registries else "from no registry"
        raise Refused("image %s: a job pulls images %s here" % (image, where), PULL_HINT)
    patterns = offered(site["allow"], user, groups, queue)
    if not any(pattern == "*" or (not is_pulled and fnmatchcase(image, pattern)) for pattern in patterns):
        where = " in queue %s" % queue if queue else ""
        hint = "Allowed are: %s." % ", ".join(patterns) if patterns else "No image is allowed there."
        raise Refused("image %s: not allowed for %s%s" % (image, user, where), hint)


def check_sizes(sizes: "Mapping[str, int | None]", site: "Mapping[str, Any]") -> None:
    """Raises Refused for cpus, memory, disk (bytes; None or 0: not told) and gpus that the site does not give."""
    if sizes.get("gpus") and not site["gpus"]:
        raise Refused("a machine has no GPU: ask for none, or run the job without a machine", SIZE_HINT)
    for name, what, unit in (("cpus", "cpus", 1), ("memory", "MiB of memory", MIB), ("disk", "MiB of disk", MIB)):
        size, most = sizes.get(name) or 0, site["max_" + name]
        if most and size > most:
            words = (-(-size // unit), what, most // unit)
            raise Refused("%d %s: a job in a machine may have at most %d here" % words, SIZE_HINT)
    memory, least = sizes.get("memory") or 0, site["least_memory"]
    if 0 < memory < least:
        raise Refused(TOO_SMALL % (memory // MIB, least // MIB), SIZE_HINT)
