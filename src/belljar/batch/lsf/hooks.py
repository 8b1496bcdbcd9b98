"""`belljar internal hook lsf esub`: what esub.vm does at submit. `bsub -a "vm(image=NAME)"` asks for a machine.

What was asked for is in $LSB_SUB_PARM_FILE; changes go to $LSB_SUB_MODIFY_FILE and $LSB_SUB_MODIFY_ENVFILE; the exit
code $LSB_SUB_ABORT_VALUE refuses the job, with stderr shown to the user.
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=controls-configuration-enable-job-submission-execution
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from belljar.batch import Call, Settings
from belljar.batch.job.policy import Asker, check_allowed, check_limits, image_for
from belljar.batch.job.terms import whole
from belljar.batch.lsf.dialect import DISK, IMAGE, MEMORY, WALL, memory_of
from belljar.errors import BadOption, BelljarError
from belljar.model import GIB, KIB, MIB

PROFILE = "vm"  # of lsb.applications, and what follows `-a`
ABORT = 97  # LSB_SUB_ABORT_VALUE where it is not set
LARGEST = 4 << 20
WORDS = ("image", "disk")
LINE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)\Z", re.DOTALL)
SIZE = re.compile(r"([0-9]{1,12})([KMGT]?)B?\Z", re.IGNORECASE)


Changes = tuple[dict[str, str], dict[str, str]]  # of the options of bsub, and of the job's variables


def run(call: Call) -> int:
    """The esub itself: in the user's environment, on the host of bsub."""
    env = call.env
    try:
        with open(env["LSB_SUB_PARM_FILE"], "rb") as file:
            asked = parameters(file.read(LARGEST))
        changes = esub(call.words, asked, env, call.asker(), call.settings())
        for name, values in zip(("LSB_SUB_MODIFY_FILE", "LSB_SUB_MODIFY_ENVFILE"), changes, strict=True):
            if values:  # names and numbers that were checked: nothing in them needs a quote
                with open(env[name], "a", encoding="ascii") as file:
                    file.writelines(f'{key}="{value}"\n' for key, value in values.items())
    except BelljarError as exc:
        print(f"belljar: {exc.message}\nhint: {exc.hint}", file=sys.stderr)
        abort = env.get("LSB_SUB_ABORT_VALUE", "")
        return int(abort) if abort.isdecimal() and len(abort) < 4 else ABORT
    except (KeyError, OSError):
        pass  # lsrun and its like have no such file: there is nothing to look at
    return 0


def esub(
    words: Sequence[str], asked: Mapping[str, str], env: Mapping[str, str], asker: Asker, settings: Settings
) -> Changes:
    """What to change for a submission. Raises NotPermitted, OverLimit, BadOption with the sentence for the user."""
    wishes = wants(words, asked.get("LSB_SUB_ADDITIONAL", ""))
    asker = Asker(asker.user, asker.groups, asked.get("LSB_SUB_QUEUE", ""))
    image = image_for(wishes.get("image", ""), asker.queue, settings)
    if not image:
        if wishes:
            raise BadOption("-a vm: which image?", hint='Write bsub -a "vm(image=NAME)".')
        # A job that is submitted from within another one has that one's words in its environment.
        return {}, {name: "" for name in (IMAGE, MEMORY, DISK, WALL) if env.get(name)}
    disk = _size(wishes["disk"]) if "disk" in wishes else None
    memory = (whole(asked.get("LSB_SUB_RLIMIT_RSS", "")) or 0) * KIB
    cpus = whole(asked.get("LSB_SUB_NUM_PROCESSORS", "")) or None
    check_allowed(image, asker, settings)
    check_limits(cpus, memory or memory_of(asked.get("LSB_SUB_RES_REQ", ""), "MB"), disk, settings)
    variables = {
        IMAGE: wishes.get("image", ""), MEMORY: str(memory or ""), DISK: str(disk or ""),
        WALL: str(whole(asked.get("LSB_SUB_RLIMIT_RUN", "")) or ""),
    }  # fmt: skip
    options = {} if asked.get("LSB_SUB3_APP") or not wishes else {"LSB_SUB3_APP": PROFILE}
    return options, {name: value for name, value in variables.items() if value or env.get(name)}


def wants(words: Sequence[str], additional: str) -> dict[str, str]:
    """`image=NAME,disk=20G` from the words of the esub, or else from what stands behind -a. Raises BadOption."""
    text = ",".join(words)
    if not text:
        match = re.search(rf"(?:^|\s){PROFILE}(?:\(([^)]*)\))?(?=\s|$)", additional)
        if not match:
            return {}
        text = match[1] or ""
    wishes = {"": ""}  # never empty: something is asked for
    for word in filter(None, re.split(r"[,\s]+", text)):
        name, equals, value = word.partition("=")
        if not equals or name not in WORDS or not value:
            hint = 'Write bsub -a "vm(image=NAME,disk=20G)".'
            raise BadOption(f"-a vm({text[:60]!r}): {word[:40]!r} means nothing", hint=hint)
        wishes[name] = value
    return wishes


def parameters(data: bytes) -> dict[str, str]:
    """`NAME=value` or `NAME="value"` on a line each. Lines of another form belong to a command of several lines."""
    values: dict[str, str] = {}
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        match = LINE.match(line)
        if match:
            value = match[2]
            if len(value) >= 2 and value[0] == value[-1] == '"':
                value = re.sub(r"\\(.)", r"\1", value[1:-1])
            values.setdefault(match[1], "" if value == "SUB_RESET" else value)
    return values


def _size(text: str) -> int:
    match = SIZE.match(text)
    if not match:
        raise BadOption(f"-a vm(disk={text[:40]!r}): not a size such as 20G", hint="Without a letter it is in MB.")
    return int(match[1]) * {"K": KIB, "G": GIB, "T": 1 << 40}.get(match[2].upper(), MIB)
