"""Grid Engine's job submission verifier: puts `-l vm_image=`, `-l vm_disk=` and the job's limits on memory and time
into its environment, and refuses what the site does not allow.

jsv(1): START; PARAM and ENV lines; BEGIN, which is answered by RESULT. A newline in a user's value arrives as a new
line, so a job could speak for the server: what comes twice, or in the wrong place, makes the job be refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import BinaryIO

from belljar.batch import Call, Settings
from belljar.batch.gridengine.dialect import CHECKPOINT, DISK, IMAGE, MEMORY, RERUN, WALL, memory, reserved, seconds
from belljar.batch.job.judge import REFERENCE
from belljar.batch.job.policy import Asker, check_allowed, check_limits, check_name, checkpoint_of, guest_memory
from belljar.errors import BadSetting, BelljarError, NotPermitted, printable
from belljar.host.caller import describe
from belljar.host.privileges import user_of
from belljar.model import GIB

ASKED, ASKED_DISK, FLAG = "vm_image", "vm_disk", "vm"  # complexes; the flag keeps a job on hosts that have machines
# 8.1.9 kills the prolog of a qrsh or qlogin and then closes the queue, whatever the prolog is: this complex, TRUE
# everywhere but in our queues, keeps such jobs out of them.
SHELL, OF_A_SHELL = "vm_interactive", "QRSH_PORT"
RESERVED = ("mem_free", "virtual_free", "h_rss")  # what a job reserves of memory: the first one asked for counts
GPUS = ("gpu", "gpus", "ngpus")  # as sites name the complex
LONGEST_LINE = 1 << 20
MOST_LINES = 100_000  # of one job
ENDLESS = 9_999_999  # Grid Engine's word for "as many slots as there are"


class Verifier:
    """A conversation with one server, line by line."""

    def __init__(
        self, settings: Settings, *, groups: Callable[[str], Collection[str]] = lambda user: (),
        images: Callable[[], Collection[str] | None] = lambda: None, per_slot: Collection[str] = (),
    ) -> None:  # fmt: skip
        """*images*: the names there are, None if unknown here; *per_slot*: complexes that count for each slot."""
        self._settings, self._groups, self._images, self._per_slot = settings, groups, images, frozenset(per_slot)
        self._job: dict[str, dict[str, str]] | None = None  # what the server says of it, by the first word of a line
        self._is_broken = False  # somebody else spoke in between

    def hear(self, line: str) -> list[str] | None:
        """The answers to one line; None when the conversation is over."""
        word, _, rest = line.partition(" ")
        if word == "QUIT":
            return None
        if self._job is None:
            if word != "START":
                return []
            self._job, self._is_broken = {"PARAM": {}, "ENV": {}}, False
            return ["SEND ENV", "STARTED"]
        if word == "BEGIN":
            job, self._job = self._job, None
            return self._judge(job["PARAM"], job["ENV"])
        name, blank, value = rest.partition(" ")
        if word == "ENV" and blank:
            name, _, value = value.partition(" ")
        values = self._job.get(word)
        if values is None or not name or name in values or len(values) > MOST_LINES:
            self._is_broken = True
        else:
            values[name] = value
        return []

    def _judge(self, params: dict[str, str], env: dict[str, str]) -> list[str]:
        refused = "RESULT STATE REJECT belljar:"
        if self._is_broken:
            return [f"{refused} a resource or variable of this job holds a line break. Take it out."]
        try:
            changes = self.changes(params, env)
        except BadSetting as exc:
            # The site's mistake: its jobs are not to be refused for it. Each node judges again.
            return [f"LOG WARNING belljar: {printable(exc.message)[:1000]}", "RESULT STATE ACCEPT"]
        except BelljarError as exc:
            return [f"{refused} {printable(f'{exc.message}. {exc.hint}')[:1000]}"]
        return [*changes, "RESULT STATE CORRECT"] if changes else ["RESULT STATE ACCEPT"]

    def changes(self, params: dict[str, str], env: dict[str, str]) -> list[str]:
        """The commands that change the job, if any. Raises UsageError with what its user is to read."""
        hard, soft = resources(params.get("l_hard", "")), resources(params.get("l_soft", ""))
        image = hard.get(ASKED) or soft.get(ASKED) or env.get(IMAGE, "")
        if OF_A_SHELL in env:  # qsh, qrsh and qlogin: never in a machine, and only in queues without our prolog
            if image:
                hint = "Submit with qsub; `belljar exec` reaches into it."
                raise NotPermitted("qsh, qrsh and qlogin have no machine", hint=hint)
            return _changed("l_hard", hard, {**hard, SHELL: "1"})
        if not image and not self._settings.default_image and not self._settings.queue_images:
            return []
        checkpoint_of(env.get(CHECKPOINT, ""), self._settings)
        # A memory that counts for each slot has a star.
        name = next((name for name in RESERVED if memory(hard.get(name, ""))), "")
        words = {
            MEMORY: name and hard[name] + ("*" if name in self._per_slot else ""),
            WALL: hard["h_rt"] if seconds(hard.get("h_rt", "")) is not None else "",
            DISK: hard.get(ASKED_DISK, ""), RERUN: "y" if params.get("r") == "y" else "", IMAGE: image,
        }  # fmt: skip
        if image:
            self._check(image, params, hard, words[MEMORY])
        kept = {name: value for name, value in hard.items() if name not in (ASKED, ASKED_DISK)}
        others = {name: value for name, value in soft.items() if name != ASKED}
        return [
            *(f"ENV {'MOD' if name in env else 'ADD'} {name} {word}" for name, word in words.items() if word),
            *_changed("l_hard", hard, {**kept, FLAG: "1"} if image else kept),
            *_changed("l_soft", soft, others),
        ]

    def _check(self, image: str, params: dict[str, str], hard: dict[str, str], asked_memory: str) -> None:
        check_name(image)
        user, queue = params.get("USER", ""), params.get("q_hard", "").partition("@")[0]
        groups = {params.get("GROUP", ""), *self._groups(user)} - {""}
        check_allowed(image, Asker(user, groups, queue if "," not in queue else ""), self._settings)
        known = self._images()
        if known is not None and image not in known and not REFERENCE.match(image):
            names = ", ".join(sorted(known)[:20]) or "none"
            raise NotPermitted(f"image {image}: there is none of this name", hint=f"There are: {names}.")
        slots, limit = _slots(params), memory(hard.get("h_vmem", ""))
        space = -1 if limit is None else limit * slots
        most = min((size for size in (space, reserved(asked_memory, slots) or 0) if size > 0), default=None)
        gpus = sum(hard.get(name, "0") != "0" for name in GPUS)
        check_limits(slots, most, memory(hard.get(ASKED_DISK, "")), self._settings, gpus)
        guest_memory(most, space, self._settings, GIB)


def resources(text: str) -> dict[str, str]:
    """`a=1,b,c=x`: what a job asks for, in order. A name alone stands for TRUE, as `-l name` does."""
    pairs = (word.partition("=") for word in text.split(",") if word)
    return {name: value if equals else "TRUE" for name, equals, value in pairs}


def _changed(param: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    pairs = ",".join(f"{name}={value}" for name, value in after.items())
    return [] if before == after else [f"PARAM {param} {pairs}"]


def _slots(params: dict[str, str]) -> int:
    """The most a job may get, or the least where it takes whatever is there."""
    least, most = (params.get(name, "") for name in ("pe_min", "pe_max"))
    words = [int(word) for word in (most, least) if word.isdecimal() and len(word) < 9 and int(word) < ENDLESS]
    return max(words[0], 1) if words else 1


def run(call: Call) -> int:
    """Speak with the server until it says QUIT or hangs up. `--per-slot=NAMES`: complexes that count for each slot."""
    words = [name for word in call.words for name in word.removeprefix("--per-slot=").split(",") if name]
    verifier = Verifier(call.settings(), groups=groups_of, images=call.images, per_slot=words)
    converse(verifier, sys.stdin.buffer, sys.stdout.buffer)
    return 0


def converse(verifier: Verifier, reader: BinaryIO, writer: BinaryIO) -> None:
    """Until QUIT or the end of *reader*. A line that is too long is cut: it makes its job be refused."""
    while raw := reader.readline(LONGEST_LINE):
        answers = verifier.hear(raw.removesuffix(b"\n").decode("utf-8", "surrogateescape"))
        if answers is None:
            return
        writer.write("".join(f"{answer}\n" for answer in answers).encode("utf-8", "surrogateescape"))
        writer.flush()


def groups_of(user: str) -> Collection[str]:
    """The groups a user is in, by name; none for a user this host does not know."""
    try:
        known = user_of(user).with_groups()
    except BelljarError:
        return ()
    return Asker.of(describe(known.uid, known.gid, known.groups)).groups
