"""The site's rules in HTCondor's words: what is refused at submit, which jobs a node takes, and, by HOOK_PREPARE_JOB
(`belljar internal hook htcondor prepare`), what is held before it is started.

condor_starter runs that hook as the job's user with the job's ad on standard input, and merges what it prints into the
ad. HookStatusCode 1 to 299 holds the job with HookStatusMessage; older versions ignore it, and the wrapper says the
same. https://htcondor.readthedocs.io/en/latest/admin-manual/ep-policy-configuration.html (job hooks)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from belljar.batch import Call, Pull, Settings
from belljar.batch.htcondor.ads import LARGEST, parse, string
from belljar.batch.htcondor.dialect import (
    CHECKPOINT,
    DISK,
    IMAGE,
    IMAGES,
    POOL_IMAGES,
    WORKS,
    disk_of,
    image_of,
    memory_of,
)
from belljar.batch.job import policy
from belljar.errors import BelljarError
from belljar.model import MIB

HOLD = 25  # our subcode of the hold
GPU = "((RequestGPUs ?: 0) > 0)"
KIND = "(JobUniverse == 5 && !(WantContainer ?: false) && !(WantDocker ?: false){})"
OTHER_KIND = f"""ifThenElse({GPU}, "belljar: a machine has no GPU: leave out request_gpus, or run the job without a machine",
 "belljar: only a job of the vanilla universe, without a container, runs in a machine")""".replace("\n", "")


def requirements(settings: Settings) -> dict[str, tuple[str, str]]:
    """What is refused at submit, by name: (expression, the sentence as an expression)."""
    unknown = f'"belljar: +{IMAGE}: no node of this pool has this image. There are: "'
    site = policy.site_of(settings)
    least, no_machine = site["least_memory"] // MIB, f"!({wants_machine(settings)})"
    checkpoint, why = f'{CHECKPOINT} =?= "{policy.NEVER}"', policy.NO_CHECKPOINTS
    if settings.checkpoint != policy.NEVER:
        pattern = policy.CHECKPOINT.pattern.replace("\\+", "[+]").replace("\\Z", "$")
        checkpoint = f"(isString({CHECKPOINT}) && regexp({string(f'^({policy.NEVER}$|{pattern})')}, {CHECKPOINT}))"
        why = policy.CHECKPOINT_HINT
    refused = {
        "BelljarImage": (requirement(settings), sentence(settings)),
        "BelljarKnown": (
            f"!isString({IMAGE}) || !isString({POOL_IMAGES}) || stringListMember({IMAGE}, {POOL_IMAGES}){_or_pulled(IMAGE, settings)}",
            f"strcat({unknown}, {POOL_IMAGES})",
        ),
        "BelljarKind": (
            f"({IMAGE} is undefined && {no_machine}) || {KIND.format('' if settings.gpus else f' && !{GPU}')}",
            OTHER_KIND,
        ),
        "BelljarCheckpoint": (f"{CHECKPOINT} is undefined || {checkpoint}", string(f"belljar: +{CHECKPOINT}: {why}")),
        "BelljarMemory": (
            f"{no_machine} || (RequestMemory ?: 0) >= {least}",
            string(f"belljar: a job in a machine needs request_memory = {least} or more (MiB)"),
        ),
    }
    for name, attribute, what, unit in (
        ("cpus", "RequestCpus", "cpus", 1), ("memory", "RequestMemory", "MiB of memory", MIB), ("disk", DISK, "MiB of disk", MIB),
    ):  # fmt: skip
        if most := site[f"max_{name}"]:
            text = string(f"belljar: a job in a machine may have at most {most // unit} {what} here")
            refused[f"BelljarMost{name.title()}"] = (f"{no_machine} || ({attribute} ?: 0) * {unit} <= {most}", text)
    return refused


def requirement_lines(settings: Settings) -> str:
    asked = requirements(settings)
    text = f"SUBMIT_REQUIREMENT_NAMES = $(SUBMIT_REQUIREMENT_NAMES) {' '.join(asked)}\n"
    for name, (expression, reason) in asked.items():
        text += f"SUBMIT_REQUIREMENT_{name} = {expression}\nSUBMIT_REQUIREMENT_{name}_REASON = {reason}\n"
    return text


def wants_machine(settings: Settings) -> str:
    """Does a job get a machine? As an expression of its ad. Other universes, DAGMan's among them, are never started so."""
    vanilla = "JobUniverse == 5"
    if settings.default_image:
        return vanilla
    other = f" || {_of_queue('AcctGroup', settings)}" if settings.queue_images else ""
    return f"{vanilla} && ({IMAGE} isnt undefined{other})"


def _of_queue(group: str, settings: Settings) -> str:
    """Is this accounting group one with an image of its own?"""
    return f'stringListMember({group} ?: "", {string(",".join(policy.queue_images(settings)))})'


def requirement(settings: Settings) -> str:
    """What an access point can judge: user and accounting group. A rule for a Unix group is one for everybody here."""
    name = f'isString({IMAGE}) && regexp("^[A-Za-z0-9]", {IMAGE}) && !regexp("[^A-Za-z0-9._-]", {IMAGE}) && size({IMAGE}) <= 100'
    clauses, own = [], []
    for kind, who, pattern in policy.rules(settings):
        # Without backslashes: an ad's string would take them away.
        regex = policy.in_words(pattern, lambda char: "[.]" if char == "." else char)
        matches = f"regexp({string(f'^{regex}$')}, {IMAGE})"
        owner = {"user": f"Owner =?= {string(who)} && ", "queue": f"AcctGroup =?= {string(who)} && "}.get(kind, "")
        clauses.append(f"({owner}{matches})")
        own += [f"({owner}true)"] if pattern == "*" else []
    pulled = _or_pulled(IMAGE, settings, f" && ({' || '.join(own)})") if own else ""
    return f"{IMAGE} is undefined || ({name} && ({' || '.join(clauses) or 'false'})){pulled}"


def _or_pulled(image: str, settings: Settings, more: str = "") -> str:
    """Or is this an image that a job may pull? Nothing where none may."""
    if settings.pull is Pull.NEVER:
        return ""
    names = "|".join(name.replace(".", "[.]") for name in policy.registries(settings))
    place = f"({names})/" if settings.pull is Pull.SITE_REGISTRIES else "[A-Za-z0-9]"
    words = string(f"^docker://{place}"), string("[^A-Za-z0-9._:@/-]")
    tests = f"regexp({words[0]}, {image}) && !regexp({words[1]}, {image}) && size({image}) <= 209"
    return f" || (isString({image}) && {tests}{more})"


def start(settings: Settings) -> str:
    """Which jobs this node takes: those with a machine only while machines work here, and if it has their image."""
    pulled = _or_pulled(f"TARGET.{IMAGE}", settings)
    asked = f"(MY.{WORKS} =?= True && (stringListMember(TARGET.{IMAGE}, MY.{IMAGES}){pulled}))"
    if settings.default_image:
        return f"ifThenElse(TARGET.{IMAGE} =?= undefined, MY.{WORKS} =?= True, {asked})"
    of_queue = f"(MY.{WORKS} =?= True || !{_of_queue('TARGET.AcctGroup', settings)})"
    other = of_queue if settings.queue_images else "True"
    return f"ifThenElse(TARGET.{IMAGE} =?= undefined, {other}, {asked})"


def sentence(settings: Settings) -> str:
    patterns = ", ".join(sorted({pattern for _, _, pattern in policy.rules(settings)})) or "none"
    words = f"+{IMAGE} must be the name of an image in quotation marks, one you may use. Allowed, for some or all"
    return string(f"belljar: {words}: {patterns}")


def run(call: Call) -> int:
    """Reads the ad, prints what is to be added to it. Exits 0 whatever is found: another code is a hold without words."""
    asker = call.asker()
    os.write(1, prepare(sys.stdin.buffer.read(LARGEST), asker.user, asker.groups, call.settings()))
    return 0


def prepare(data: bytes, user: str, groups: Collection[str], settings: Settings) -> bytes:
    """What to print for a job's ad: nothing, or why it is to be held. A job without an image is not looked at."""
    ad = parse(data)
    queue, memory = ad.text("AcctGroup"), memory_of(ad, "RequestMemory")
    try:
        if image := policy.image_for(image_of(ad), queue, settings):
            policy.checkpoint_of(ad.text(CHECKPOINT), settings)
            policy.check_allowed(image, policy.Asker(user, groups, queue), settings)
            policy.check_limits(ad.number("RequestCpus"), memory, disk_of(ad), settings, ad.number("RequestGPUs") or 0)
    except BelljarError as exc:
        reason = string(f"belljar: {exc.message}. {exc.hint}")
        return f"HookStatusCode = {HOLD}\nHookStatusMessage = {reason}\n".encode()
    return b""
