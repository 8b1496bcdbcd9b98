# ruff: noqa: UP031 - for Python 3.5
"""The site's rules, judged: which image a job gets, who may use it, how large a job may be. The one place for all of
it.

policy.py hands it the settings. `batch install openpbs` puts this text before the server's hook, so it is for Python
3.5 and the standard library. Slurm's and HTCondor's forms of it go through the same cases:
tests/unit/batch/policy_cases.py.
"""

import re
from fnmatch import fnmatchcase

MIB = 1 << 20
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
REFERENCE = re.compile(r"docker://[A-Za-z0-9][A-Za-z0-9._:@/-]{0,199}\Z")
NAME_HINT = "A name is letters, digits, dots, dashes and underscores, at most 100 of them."
PULL_HINT = "Name an image of the site, or ask your site for this one (batch.pull, batch.registries)."
_CHECKPOINT = r"(on-preempt|on-limit|every=[1-9][0-9]{0,7}[smhd]?)"
CHECKPOINT = re.compile(r"%s(\+%s)*\Z" % (_CHECKPOINT, _CHECKPOINT))
NEVER, ON_REQUEST = "never", "on-request"
NO_CHECKPOINTS = "jobs are not checkpointed here"
CHECKPOINT_HINT = "It is never, on-preempt, on-limit or every=TIME (every=1h), or several of these with + between."
TOO_SMALL = "%d MiB of memory: a job in a machine needs at least %d MiB, for the guest and for what makes it"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


def chosen(asked: str, queue: str, queue_images: "Mapping[str, str]", default_image: str) -> str:
    """The image a job gets: its own, the queue's, the site's, or "" for none: it runs without a machine."""
    return asked or queue_images.get(queue, default_image)


def misnamed(image: str) -> str:
    """Why this can be no image's name; "" where it can."""
    fits = REFERENCE.match(image) or IMAGE_NAME.match(image)
    return "" if fits else "image %r: not a name of an image" % image[:60]


def unpulled(image: str, pull: str, registries: "Sequence[str]") -> "tuple[str, str]":
    """Why no job may pull this image from its registry, and what would do; empty where one may, and for a plain name."""
    place = image[len("docker://") :] if REFERENCE.match(image) else ""
    if (
        not place
        or pull == "any"
        or (pull == "site-registries" and any(place.startswith(name + "/") for name in registries))
    ):
        return "", ""
    where = "only from %s" % ", ".join(registries) if pull == "site-registries" and registries else "from no registry"
    return "image %s: a job pulls images %s here" % (image, where), PULL_HINT


def offered(allow: "Sequence[Sequence[str]]", user: str, groups: "Collection[str]", queue: str) -> "list[str]":
    """The patterns of those rules, (kind, name, pattern) each, that are for this asker."""
    theirs = {"*": ("",), "user": (user,), "group": groups, "queue": (queue,)}
    return [pattern for kind, name, pattern in allow if name in theirs[kind]]


def forbidden(image: str, patterns: "Sequence[str]", user: str, queue: str) -> "tuple[str, str]":
    """Why an asker who is offered these patterns may not use an image, and what would do; empty where it is allowed."""
    is_own = REFERENCE.match(image)  # a pulled image is the job's user's
    if any(pattern == "*" or (not is_own and fnmatchcase(image, pattern)) for pattern in patterns):
        return "", ""
    where = " in queue %s" % queue if queue else ""
    hint = "Allowed are: %s." % ", ".join(patterns) if patterns else "No image is allowed there."
    return "image %s: not allowed for %s%s" % (image, user, where), hint


def uncheckpointed(asked: str, allowed: str) -> "tuple[str, str]":
    """Why a job may not be checkpointed as it asks for, and what would do; empty where it may. *allowed*: by the site."""
    if asked in ("", NEVER):
        return "", ""
    if not CHECKPOINT.match(asked):
        return "checkpoint %r: not when a job can be checkpointed" % asked[:60], CHECKPOINT_HINT
    if allowed == NEVER:
        return "checkpoint %s: %s" % (asked, NO_CHECKPOINTS), "Leave it out, or ask your site (batch.checkpoint)."
    return "", ""


def excess(sizes: "Mapping[str, int | None]", site: "Mapping[str, int]") -> "Iterator[str]":
    """What is wrong with a job's cpus, memory, disk (bytes; None or 0: not told) and gpus by the site's limits."""
    if sizes.get("gpus") and not site["gpus"]:
        yield "a machine has no GPU: ask for none, or run the job without a machine"
    for name, what, unit in (("cpus", "cpus", 1), ("memory", "MiB of memory", MIB), ("disk", "MiB of disk", MIB)):
        size, most = sizes.get(name) or 0, site["max_" + name]
        if most and size > most:
            yield "%d %s: a job in a machine may have at most %d here" % (-(-size // unit), what, most // unit)
    memory, least = sizes.get("memory") or 0, site["least_memory"]
    if 0 < memory < least:
        yield TOO_SMALL % (memory // MIB, least // MIB)
