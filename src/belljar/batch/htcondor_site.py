"""What a site needs for HTCondor: one file in config.d, the same on all hosts, and two small scripts it names.

On execute nodes it has the starter run belljar in place of each job, publishes which images a node has and whether its
machines work, and keeps jobs with machines off a node that is closed. On access points it refuses at submit what can be
refused there, and gives jobs a way to be held.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.client import Needs
from belljar.batch.htcondor import CLOSED, HELD, IMAGE
from belljar.batch.htcondor_ads import string
from belljar.batch.policy import queue_images, rules
from belljar.batch.siting import Finding, OurFile, Piece, Place
from belljar.errors import BelljarError

CONFIG, PREPARE, PUBLISH = "90-belljar.conf", "belljar-prepare", "belljar-publish"
HOOK_DEADLINE = 60  # seconds
PERIOD = 60  # seconds between two looks at the node
OLDEST = (9, 0)
PLAIN = re.compile(r"[A-Za-z0-9._*?-]+")

HOOK = """#!/bin/sh
# HOOK_PREPARE_JOB, as the job's user. A hook that fails holds the job; this one leaves the decision to the wrapper then.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
told=$(timeout -k 5 {deadline} {belljar} batch hook htcondor prepare) && [ -n "$told" ] && printf '%s\\n' "$told"
exit 0
"""

CRON = """#!/bin/sh
# STARTD_CRON: what this node's slots say about machines.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if why=$(readlink {closed}); then
    echo 'HasVm = False'
    printf 'VmOfflineReason = "%s"\\n' "$(printf %s "$why" | tr -c ' !#-[]-~' '?')"
else
    echo 'HasVm = True'
    echo 'VmOfflineReason = undefined'
fi
images=$(ls {names} 2>/dev/null | grep -E '^[A-Za-z0-9][A-Za-z0-9._-]*$' | tr '\\n' ',')
printf 'VmImages = "%s"\\n' "${{images%,}}"
echo '- update:true'
"""

TEMPLATE = """# Jobs in machines of their own. Made by `belljar batch install htcondor`.

# -- execute nodes: the starter
USER_JOB_WRAPPER = {wrapper}
STARTER_DEFAULT_JOB_HOOK_KEYWORD = BELLJAR
BELLJAR_HOOK_PREPARE_JOB = {prepare}

# -- execute nodes: HasVm, VmOfflineReason and VmImages in every slot's ad
STARTD_CRON_JOBLIST = $(STARTD_CRON_JOBLIST) BELLJAR
STARTD_CRON_BELLJAR_EXECUTABLE = {publish}
STARTD_CRON_BELLJAR_PERIOD = {period}s
START = ($(START)) && ({start})

# -- access points: what is refused at submit
SUBMIT_REQUIREMENT_NAMES = $(SUBMIT_REQUIREMENT_NAMES) BelljarImage
SUBMIT_REQUIREMENT_BelljarImage = {requirement}
SUBMIT_REQUIREMENT_BelljarImage_REASON = {sentence}

# -- access points: a job whose machine cannot be had says so in {held}, and is then held with the reason
JOB_TRANSFORM_NAMES = $(JOB_TRANSFORM_NAMES) BelljarHold
JOB_TRANSFORM_BelljarHold @=end
   COPY OnExitHold BelljarOnExitHold
   COPY OnExitHoldReason BelljarOnExitHoldReason
   SET OnExitHold ({held} isnt undefined) || (BelljarOnExitHold ?: false)
   SET OnExitHoldReason {held} ?: (BelljarOnExitHoldReason ?: "The job attribute OnExitHold evaluated to true")
@end
"""


class HTCondorSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/etc/condor/config.d")
    needs = Needs(("condor_config_val", "condor_status", "condor_version", "condor_reconfig"), ("CONDOR_CONFIG",))

    def pieces(self, place: Place) -> list[Piece]:
        prepare, publish = (place.wrapper.parent / name for name in (PREPARE, PUBLISH))
        hook = HOOK.format(belljar=shlex.quote(str(place.belljar)), deadline=HOOK_DEADLINE)
        cron = CRON.format(closed=CLOSED, names=shlex.quote(str(place.store / "images/names")))
        config = TEMPLATE.format(
            wrapper=place.wrapper, prepare=prepare, publish=publish, period=PERIOD, start=start(place.settings), held=HELD,
            requirement=requirement(place.settings), sentence=sentence(place.settings),
        )  # fmt: skip
        return [
            OurFile("looks at each job before it is started", prepare, hook.encode(), 0o755),
            OurFile("publishes what this node's machines are", publish, cron.encode(), 0o755),
            OurFile("settings of HTCondor", place.folder / CONFIG, config.encode(), 0o644),
        ]

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("condor_reconfig",),)

    def findings(self, place: Place) -> list[Finding]:
        found = [self._version(place)]
        found += [
            self._value(
                place, "USER_JOB_WRAPPER", str(place.wrapper), "Another file sets it later: give it to belljar."
            ),
            self._listed(place),
            self._sandbox(place),
        ]
        return found

    def _version(self, place: Place) -> Finding:
        what = "HTCondor answers"
        try:
            said = place.run(("condor_version",)).decode(errors="replace")
        except BelljarError as exc:
            return Finding(what, False, exc.message, "Run this where HTCondor is installed.")
        match = re.search(r"CondorVersion: ([0-9]+)\.([0-9]+)", said)
        if not match:
            return Finding(what, False, said[:80], "See what `condor_version` says.")
        version = int(match[1]), int(match[2])
        return Finding(
            what,
            version >= OLDEST,
            f"version {match[1]}.{match[2]}",
            "" if version >= OLDEST else "Needs 9.0 or later.",
        )

    def _ask(self, place: Place, name: str) -> str:
        return place.run(("condor_config_val", name)).decode(errors="replace").strip()

    def _value(self, place: Place, name: str, expected: str, remedy: str) -> Finding:
        try:
            value = self._ask(place, name)
        except BelljarError as exc:
            return Finding(name, False, exc.message, "Is the folder one that LOCAL_CONFIG_DIR names?")
        return Finding(name, value == expected, value, "" if value == expected else remedy)

    def _listed(self, place: Place) -> Finding:
        """Another hook keyword of the site's would leave ours out."""
        what = "STARTER_JOB_HOOK_KEYWORD"
        try:
            value = self._ask(place, what)
        except BelljarError:
            return Finding(what, True, "not set")
        good = value in ("", "BELLJAR")
        return Finding(what, good, value, "" if good else f"Let that hook call {PREPARE} too: it goes before ours.")

    def _sandbox(self, place: Place) -> Finding:
        """A sandbox that lies on a share need not be copied, and nothing of it is lost when the node is."""
        what = "job directories are shared with machines"
        try:
            folder = self._ask(place, "EXECUTE")
        except BelljarError as exc:
            return Finding(what, False, exc.message, "See what `condor_config_val EXECUTE` says.")
        shared = [shared_here(text) for text in place.settings.shares]
        good = any(folder == source or folder.startswith(source + "/") for source in shared)
        limit = place.settings.stage_limit >> 20
        return Finding(
            what,
            True,
            folder if good else f"{folder}: copied in and out, up to {limit} MiB; add {folder}:rw to batch.shares",
        )


def shared_here(share: str) -> str:
    """The host's name for a share: its source, or where an export is mounted, for it is a share of the job's folder only
    where the host has it at the same place."""
    parts = share.split(":")
    if share.startswith("nfs://"):
        return (parts[-2] if parts[-1] in ("ro", "rw") else parts[-1]).rstrip("/")
    return parts[1 if parts[0] == "virtiofs" and len(parts) > 1 else 0].rstrip("/")


def requirement(settings: Settings) -> str:
    """What an access point can know of the rules: who asks, for which accounting group. Unix groups and sets in brackets
    are the node's affair: where a rule has one, every well-formed name passes here."""
    name = f'regexp("^[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}$", {IMAGE})'
    clauses = []
    for kind, who, pattern in rules(settings):
        if kind == "group" or (kind, pattern) == ("*", "*") or not PLAIN.fullmatch(pattern):
            return f"{IMAGE} is undefined || {name}"
        matches = f"regexp({string('^' + plain_regex(pattern) + '$')}, {IMAGE})"
        owner = {"user": f"Owner == {string(who)} && ", "queue": f"AcctGroup =?= {string(who)} && "}.get(kind, "")
        clauses.append(f"({owner}{matches})")
    return f"{IMAGE} is undefined || ({name} && ({' || '.join(clauses) or 'false'}))"


def start(settings: Settings) -> str:
    """Which jobs this node takes: those with a machine only while machines work here, and if it has their image."""
    asked = f"(MY.HasVm =?= True && stringListMember(TARGET.{IMAGE}, MY.VmImages))"
    if settings.default_image:
        return f"ifThenElse(TARGET.{IMAGE} =?= undefined, MY.HasVm =?= True, {asked})"
    queues = ",".join(queue_images(settings))
    other = f'(MY.HasVm =?= True || !stringListMember(TARGET.AcctGroup ?: "", {string(queues)}))' if queues else "True"
    return f"ifThenElse(TARGET.{IMAGE} =?= undefined, {other}, {asked})"


def plain_regex(pattern: str) -> str:
    """A pattern of file names as a regular expression without backslashes: an ad's string would take them away."""
    return "".join({"*": ".*", "?": ".", ".": "[.]"}.get(char, char) for char in pattern)


def sentence(settings: Settings) -> str:
    patterns = sorted({pattern for _, _, pattern in rules(settings)})
    return string(
        f"belljar: +{IMAGE} names an image you may not use here, or no image at all. Allowed, for some or all: "
        + (", ".join(patterns) or "none")
    )


SITE = HTCondorSite()
