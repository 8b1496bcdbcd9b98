"""Who may use which image, and how much: `judge` decides by the settings, here its words become errors. And how large a
guest may be inside a job's limits, so that none of them ever meets QEMU.

`site_of` is the same as data, for what is installed where jobs are submitted. The node judges again by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from belljar.batch import Settings
from belljar.batch.job import judge
from belljar.batch.job.judge import IMAGE_NAME
from belljar.errors import BadSetting, BelljarError, NotPermitted, OverLimit
from belljar.model import MIB, Account
from belljar.records import dataclass

RULE = re.compile(r"(?:\*|(user|group|queue):(\S+)) ([A-Za-z0-9._*?-]+)")  # of batch.allow
# Of batch.registries. A first word without a dot, port or `localhost` would be a part of a name at Docker Hub.
REGISTRY = re.compile(r"(localhost|[A-Za-z0-9-]+(?=[.:])[A-Za-z0-9.-]*)(:[0-9]{1,5})?(/[a-z0-9._-]+)*/?")

# How a job is checkpointed, in its own words or the site's.
_WHEN = r"(on-preempt|on-limit|every=[1-9][0-9]{0,7}[smhd]?)"
CHECKPOINT = re.compile(rf"{_WHEN}(\+{_WHEN})*\Z")
NEVER, ON_REQUEST = "never", "on-request"
NO_CHECKPOINTS = "jobs are not checkpointed here"
CHECKPOINT_HINT = "It is never, on-preempt, on-limit or every=TIME (every=1h), or several of these with + between."

SMALLEST_GUEST = 256 * MIB
STEPS = 32  # a guest's size is cut to one of so many per power of two, for each size has a template of its own
SMALLEST_STEP = 2 * MIB
# Address space that QEMU takes beside the guest's memory: libraries, stacks of threads, the translator's buffer and
# buffers of devices: 341 MiB were measured for 512 MiB and for 1 GiB of guest memory with TCG.
ADDRESS_SPACE = 448 * MIB
# The same of what a limit on a process's data counts (`ulimit -d`; Torque's `-l mem=`), with QEMU's few workers for disks.
DATA_SPACE = 288 * MIB


@dataclass(frozen=True)
class Asker:
    """Who asks, and where."""

    user: str
    groups: Collection[str] = ()
    queue: str = ""

    @classmethod
    def of(cls, account: Account, queue: str = "") -> Asker:
        """This account, with all of its groups."""
        return cls(account.name, {account.group, *(name for _, name in account.groups)}, queue)


def image_for(asked: str, queue: str, settings: Settings) -> str:
    """The image a job gets, "" for none. Raises NotPermitted for what can be no image's name."""
    if asked:
        check_name(asked)
        return asked
    return queue_images(settings).get(queue, settings.default_image)


def check_name(image: str) -> None:
    """Raises NotPermitted unless this can be an image's name."""
    _judged(NotPermitted, judge.check_name, image)


def queue_images(settings: Settings) -> dict[str, str]:
    """`batch.queue_images` as a mapping. Raises BadSetting."""
    pairs = [word.partition("=") for word in settings.queue_images]
    for queue, _, image in pairs:
        if not (queue and IMAGE_NAME.match(image)):
            raise BadSetting(f"batch.queue_images: '{queue}={image}' is not of the form QUEUE=IMAGE")
    return {queue: image for queue, _, image in pairs}


def images_of(settings: Settings) -> list[str]:
    """The images that the settings name. Raises BadSetting."""
    return sorted({settings.default_image, settings.check_image, *queue_images(settings).values()} - {""})


def rules(settings: Settings) -> list[tuple[str, str, str]]:
    """`batch.allow` as (kind, name, pattern); kind "*" for everybody. Raises BadSetting."""
    matches = [(rule, RULE.fullmatch(" ".join(rule.split()))) for rule in settings.allow]
    for rule, match in matches:
        if match is None:
            hint = "WHO is *, user:NAME, group:NAME or queue:NAME; PATTERN is an image's name, with * and ? perhaps."
            raise BadSetting(f"batch.allow: {rule!r} is not of the form `WHO PATTERN`", hint=hint)
    return [(match[1] or "*", match[2] or "", match[3]) for _, match in matches if match]


def registries(settings: Settings) -> list[str]:
    """`batch.registries`, checked. Raises BadSetting."""
    for name in settings.registries:
        if not REGISTRY.fullmatch(name):
            hint = "as in `registry.example.org/physics`, or `localhost:5000`."
            raise BadSetting(f"batch.registries: {name!r} is not of the form HOST[:PORT][/PATH]", hint=hint)
    return [name.rstrip("/") for name in settings.registries]


def check_allowed(image: str, asker: Asker, settings: Settings) -> None:
    """Raises NotPermitted unless some rule gives this image to this asker, and one of a registry may be pulled."""
    _judged(NotPermitted, judge.check_allowed, image, asker.user, asker.groups, asker.queue, _rights(settings))


def may_be_own(asker: Asker, settings: Settings) -> bool:
    """May this asker's image be one of the asker's own? Rules are about the site's images; only `*` means whatever there is."""
    return "*" in judge.offered(rules(settings), asker.user, asker.groups, asker.queue)


def check_limits(cpus: int | None, memory: int | None, disk: int | None, settings: Settings, gpus: int = 0) -> None:
    """Raises OverLimit for more than the site gives, for GPUs where it gives none, and for less memory than a machine needs."""
    sizes = {"cpus": cpus, "memory": memory, "disk": disk, "gpus": gpus}
    _judged(OverLimit, judge.check_sizes, sizes, _limits(settings))


def checkpoint_of(asked: str | None, settings: Settings) -> str:
    """When this job is checkpointed: its own words or the site's, "" for never. Raises NotPermitted, BadSetting."""
    if asked is None:
        return ""
    known = settings.checkpoint
    if not (CHECKPOINT.match(known) or known in (NEVER, ON_REQUEST)):
        hint = f"Or on-request. {CHECKPOINT_HINT}"
        raise BadSetting(f"batch.checkpoint: {known[:60]!r} is not when jobs are checkpointed", hint=hint)
    if asked not in ("", NEVER):
        if not CHECKPOINT.match(asked):
            raise NotPermitted(f"checkpoint {asked[:60]!r}: not when a job can be checkpointed", hint=CHECKPOINT_HINT)
        if known == NEVER:
            hint = "Leave it out, or ask your site (batch.checkpoint)."
            raise NotPermitted(f"checkpoint {asked}: {NO_CHECKPOINTS}", hint=hint)
    words = asked or known
    if words in (NEVER, ON_REQUEST):
        return ""
    if not settings.checkpoint_folder.startswith("/"):
        hint = "Name a folder that every node sees, of mode 1777; or set batch.checkpoint to never."
        raise BadSetting(f"batch.checkpoint_folder: {settings.checkpoint_folder!r} is not an absolute path", hint=hint)
    return words


def site_of(settings: Settings) -> dict[str, Any]:
    """All of it as plain data, by the names that `judge` has for it. Raises BadSetting."""
    if settings.default_image:
        check_name(settings.default_image)
    images = {"default_image": settings.default_image, "queue_images": queue_images(settings)}
    return {**images, **_rights(settings), **_limits(settings), "checkpoint": settings.checkpoint}


def in_words(pattern: str, escape: Callable[[str], str]) -> str:
    """A pattern of image names as a regular expression of another language, which writes a character so."""
    return "".join({"*": ".*", "?": "."}.get(char) or escape(char) for char in pattern)


def _judged(error: type[BelljarError], check: Callable[..., None], *args: object) -> None:
    """Its refusal as this error."""
    try:
        check(*args)
    except judge.Refused as exc:
        why, hint = exc.args
        raise error(why, hint=hint) from None


def _rights(settings: Settings) -> dict[str, Any]:
    allow = [list(rule) for rule in rules(settings)]
    return {"allow": allow, "pull": settings.pull.value, "registries": registries(settings)}


def _limits(settings: Settings) -> dict[str, int]:
    most = {"max_cpus": settings.max_cpus, "max_memory": settings.max_memory, "max_disk": settings.max_disk}
    return {**most, "least_memory": smallest_limit(settings), "gpus": int(settings.gpus)}


def guest_memory(limit: int | None, address_space: int, settings: Settings, default: int, *, data: int = -1) -> int:
    """Bytes of memory for the guest, by the job's limits (None or -1: none). Raises OverLimit if nothing useful is
    left."""
    bounds = [] if limit is None else [(limit - overhead(limit, settings), limit, smallest_limit(settings))]
    for most, part in ((address_space, ADDRESS_SPACE), (data, DATA_SPACE)):
        bounds += [(most - part, most, SMALLEST_GUEST + part)] if most >= 0 else []
    size, got, needed = min(bounds, default=(default, 0, 0))
    if bounds and (size < SMALLEST_GUEST or got < needed):
        hint = "Ask for more memory, or run the job without a machine."
        raise OverLimit(judge.TOO_SMALL % (got // MIB, needed // MIB), hint=hint)
    return rounded(min(size, default) if limit is None else size) if bounds else size


def smallest_limit(settings: Settings) -> int:
    """The least memory limit of a job with which it gets a machine: whole MiB. Raises BadSetting."""
    if settings.overhead_percent >= 100:
        raise BadSetting(f"batch.overhead_percent = {settings.overhead_percent:g}: nothing is left for the guest")
    share = SMALLEST_GUEST * 100 / (100 - settings.overhead_percent)
    limit = -(-max(SMALLEST_GUEST + settings.overhead, int(share)) // MIB) * MIB
    return limit if limit - overhead(limit, settings) >= SMALLEST_GUEST else limit + MIB


def overhead(limit: int, settings: Settings) -> int:
    """What QEMU and belljar may use of a limit."""
    return max(settings.overhead, int(limit * settings.overhead_percent / 100))


def rounded(size: int) -> int:
    """*size* cut down to one of STEPS sizes per power of two (at most 3 % less), in whole large pages."""
    step = max(SMALLEST_STEP, (1 << (size.bit_length() - 1)) // STEPS)
    return size // step * step
