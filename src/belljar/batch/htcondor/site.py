"""What a site needs for HTCondor: one file in config.d, the same on all hosts, and three small scripts it names.

On execute nodes it runs belljar in place of each job, publishes the node's images and whether machines work, and keeps
jobs with machines off a closed node. On access points it refuses at submit, and lets jobs be held. The last setting
counts, so `findings` look at what condor_config_val makes of all files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.batch.htcondor.dialect import CLOSED, CLOSED_REASON, HELD, IMAGES, POOL_IMAGES, SHELL, WORKS, of_this_host
from belljar.batch.htcondor.rules import requirement_lines, requirements, start
from belljar.batch.install.commands import Needs
from belljar.batch.install.files import read
from belljar.batch.install.pieces import HOOK_DEADLINE, PATH_LINES, Change, Finding, Guard, OurFile, Piece, Place, names
from belljar.errors import BadOption, BelljarError

CONFIG, PREPARE, PUBLISH, POOL = "90-belljar.conf", "belljar-prepare", "belljar-publish", "belljar-pool-images"
KEYWORD = "BELLJAR"  # of our hook, and of our cron jobs
PERIOD = 60  # seconds between two looks at the node, and at the pool
OLDEST = (9, 7)  # SYSTEM_PERIODIC_HOLD_NAMES
STARTD, STARTER, SCHEDD = "STARTD", "STARTER", "SCHEDD"
NO = ("false", "f", "no", "0")

HOOK = """#!/bin/sh
# HOOK_PREPARE_JOB, as the job's user. A hook that fails holds the job; this one leaves the decision to the wrapper then.
{path_lines}
told=$(timeout -k 5 {deadline} {belljar} internal hook htcondor prepare) && [ -n "$told" ] && printf '%s\\n' "$told"
exit 0
"""

SESSION = """#!/bin/bash
# condor_ssh_to_job and `condor_submit -i`: a shell in the machine of the job $2. $1: its variables, as bash exports them.
. "$1"
enter=({belljar} exec --wait 1h --inherit-env)
if grep -q '^InteractiveJob = true' "$_CONDOR_JOB_AD"; then
    "${{enter[@]}}" "$2" -- true || exit
    kill -USR1 $_CONDOR_JOB_PIDS
    trap 'kill $_CONDOR_JOB_PIDS' EXIT
fi
[ ! -t 0 ] || enter+=(--tty)
"${{enter[@]}}" "$2" -- sh -c "${{SSH_ORIGINAL_COMMAND:-! command -v bash >/dev/null || exec bash -l; exec sh -l}}"
"""

CRON = """#!/bin/sh
# STARTD_CRON: what this node's slots say about machines.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
node={node}
why=$(readlink {closed}) || case $(stat -c '%u %A' -- "$node") in
    '0 d'???????wt) ;;
    *) why="belljar: $node (paths.node) must be a folder of root's with mode 1777; belljar batch install htcondor makes it" ;;
esac
if [ -n "$why" ]; then
    echo '{works} = False'
    printf '{reason} = "%s"\\n' "$(printf %s "$why" | tr -c ' !#-[]-~' '?')"
else
    echo '{works} = True'
    echo '{reason} = undefined'
fi
images=$(ls {names} 2>/dev/null | grep -E '^[A-Za-z0-9][A-Za-z0-9._-]*$' | tr '\\n' ',')
printf '{images} = "%s"\\n' "${{images%,}}"
echo '- update:true'
"""

POOL_CRON = """#!/bin/sh
# SCHEDD_CRON: the images that nodes of the pool have. $1: condor_status. Where the pool tells none, nothing is said.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
images=$("$1" -constraint 'size({images} ?: "") > 0' -af {images} | tr ',' '\\n' | grep -E '^[A-Za-z0-9][A-Za-z0-9._-]*$' |
    sort -u | tr '\\n' ',')
if [ -n "$images" ]; then printf '{pool} = "%s"\\n' "${{images%,}}"; else echo '{pool} = undefined'; fi
echo '- update:true'
"""

WRAPPER_LINES = "USER_JOB_WRAPPER = {wrapper}\n"
HOOK_LINES = "STARTER_DEFAULT_JOB_HOOK_KEYWORD = {keyword}\n{keyword}_HOOK_PREPARE_JOB = {prepare}\n"

TEMPLATE = """# Jobs in machines of their own. Made by `belljar batch install htcondor`.

# -- execute nodes: the starter
{starter}
# -- execute nodes: {works}, {reason} and {images} in every slot's ad
STARTD_CRON_JOBLIST = $(STARTD_CRON_JOBLIST) {keyword}
STARTD_CRON_{keyword}_EXECUTABLE = {publish}
STARTD_CRON_{keyword}_PERIOD = {period}s
START = ($(START)) && ({start})

# -- access points: {pool} in the schedd's ad, for what is refused at submit
SCHEDD_CRON_JOBLIST = $(SCHEDD_CRON_JOBLIST) {keyword}
SCHEDD_CRON_{keyword}_EXECUTABLE = {pool_script}
SCHEDD_CRON_{keyword}_ARGS = $(BIN)/condor_status
SCHEDD_CRON_{keyword}_PERIOD = {period}s

# -- access points: what is refused at submit
{requirements}
# -- access points: a job for which no machine can be started says so in {held}, and is then held with the reason
SYSTEM_PERIODIC_HOLD_NAMES = $(SYSTEM_PERIODIC_HOLD_NAMES) BelljarHold
SYSTEM_PERIODIC_HOLD_BelljarHold = (JobStatus == 2 || JobStatus == 6) && {held} isnt undefined
SYSTEM_PERIODIC_HOLD_BelljarHold_REASON = {held}
"""
NAMES = {
    "works": WORKS, "reason": CLOSED_REASON, "images": IMAGES, "pool": POOL_IMAGES, "held": HELD, "keyword": KEYWORD,
}  # fmt: skip


class HTCondorSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/etc/condor/config.d")
    needs = Needs(
        ("condor_config_val", "condor_status", "condor_version", "condor_reconfig"), ("CONDOR_CONFIG",),
        told_folders={"condor_chirp": ("condor_config_val", "LIBEXEC")},
    )  # fmt: skip

    def pieces(self, place: Place) -> Iterator[Piece]:
        """Option: `wrapper=site`: the site's USER_JOB_WRAPPER calls ours."""
        for name, value in place.options.items():
            if name != "wrapper" or value not in ("site", "belljar"):
                raise BadOption(
                    f"--set {name}={value}: HTCondor has wrapper=site and wrapper=belljar",
                    hint="A prepare hook of your own cannot stand beside belljar's: take it out, or do its work in your wrapper.",
                )
        prepare, publish, pool = (place.wrapper.parent / name for name in (PREPARE, PUBLISH, POOL))
        hook = HOOK.format(belljar=shlex.quote(str(place.belljar)), deadline=HOOK_DEADLINE, path_lines=PATH_LINES)
        session = SESSION.format(belljar=shlex.quote(str(place.belljar)))
        node, images = (shlex.quote(str(path)) for path in (place.node, place.store / "images/names"))
        cron = CRON.format(closed=CLOSED, node=node, names=images, **NAMES)
        starter = "" if calls_ours(place) else WRAPPER_LINES.format(wrapper=place.wrapper)
        starter += HOOK_LINES.format(prepare=prepare, **NAMES)
        config = TEMPLATE.format(
            starter=starter, publish=publish, pool_script=pool, period=PERIOD, start=start(place.settings),
            requirements=requirement_lines(place.settings), **NAMES,
        )  # fmt: skip
        yield from _guards(place)
        yield from _node_folder(place)
        yield OurFile("looks at each job before it is started", prepare, hook.encode(), 0o755)
        yield OurFile("a shell in a job's machine", place.wrapper.parent / SHELL, session.encode(), 0o755)
        yield OurFile("publishes what this node's machines are", publish, cron.encode(), 0o755)
        yield OurFile("knows the images of the pool", pool, POOL_CRON.format(**NAMES).encode(), 0o755)
        yield OurFile("settings of HTCondor", place.folder / CONFIG, config.encode(), 0o644)

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("condor_reconfig",),)

    def findings(self, place: Place) -> Iterator[Finding]:
        daemons = ask(place, "", "DAEMON_LIST") or "STARTD SCHEDD"
        yield _version(place)
        if lists("STARTD")(daemons):
            yield from _of_node(place)
            yield from _seen_by_jobs(place)
        if lists("SCHEDD")(daemons):
            yield from _of_access_point(place)


def calls_ours(place: Place) -> bool:
    """Does a wrapper of the site's own call ours?"""
    return place.options.get("wrapper") == "site"


def _guards(place: Place) -> Iterator[Guard]:
    """What ours would override without a word, and what no job could do without."""
    if not calls_ours(place):
        advice = f"let it call {place.wrapper} and install with `--set wrapper=site`, or take it out"
        yield Guard("USER_JOB_WRAPPER", lambda: _clash(place, "USER_JOB_WRAPPER", str(place.wrapper), advice))
    for name in ("STARTER_DEFAULT_JOB_HOOK_KEYWORD", "STARTER_JOB_HOOK_KEYWORD"):
        advice = "take it out, and do what its prepare hook does in a wrapper of your own (`--set wrapper=site`)"
        yield Guard(name, lambda name=name, advice=advice: _clash(place, name, KEYWORD, advice))  # type: ignore[misc]
    if place.node is None:
        text = (
            "not set: HTCondor gives each job a /tmp and /var/tmp of its own, where nobody else finds its machine; write"
            ' `node = "/var/lib/belljar-node"` below `[paths]` in /etc/belljar/belljar.toml'
        )
        yield Guard("paths.node", lambda: text)


def _clash(place: Place, name: str, ours: str, advice: str) -> str:
    """A setting of the site's that ours would replace, or replaces already; "" where there is none."""
    value, where = _final(place, name)
    if where.startswith(str(place.folder / CONFIG)) or value in ("", ours):
        value, where = _replaced(place, name, ours)
    return f"{value} ({where}): belljar's would take its place; {advice}" if value else ""


def _final(place: Place, name: str) -> tuple[str, str]:
    """(the value, the file and line that say it last); empty where it is not set."""
    try:
        lines = place.said("condor_config_val", "-verbose", name).splitlines()
    except BelljarError:
        return "", ""  # whether HTCondor answers at all is a finding
    value = lines[0].partition("=")[2].strip() if lines else ""
    return value, next((line.partition("at:")[2].strip() for line in lines if line.strip().startswith("# at:")), "")


def _replaced(place: Place, name: str, ours: str) -> tuple[str, str]:
    """The same of a file that is read before ours."""
    setting = re.compile(rf"\s*(?:STARTER\.)?{name}\s*=\s*(\S.*?)\s*", re.IGNORECASE)
    with suppress(BelljarError, OSError):
        for file in place.said("condor_config_val", "-config").split():
            is_other = file.startswith("/") and file != str(place.folder / CONFIG)
            lines = (read(Path(file)) or b"").decode(errors="replace").splitlines() if is_other else []
            for number, line in enumerate(lines, 1):
                if (words := setting.fullmatch(line)) and words[1] != ours:
                    return words[1], f"{file}, line {number}"
    return "", ""


def _node_folder(place: Place) -> Iterator[Change]:
    """Nothing runs as root before a job, so each user's first job makes its own folder there."""
    if place.node is not None:
        node = str(place.node)
        yield Change(
            f"the folder of machines {node}, mode 1777", ("stat", "-c", "%a %u", "--", node), lambda said: said.split() == [b"1777", b"0"],
            (("mkdir", "-p", "--", node), ("chmod", "1777", "--", node)), (("rmdir", "--ignore-fail-on-non-empty", "--", node),), answers=("stat", "/"),
        )  # fmt: skip


def ask(place: Place, daemon: str, name: str) -> str:
    """The final value as this daemon has it; "" where it is not set, or nobody answers."""
    with suppress(BelljarError):
        return place.said("condor_config_val", *(("-subsystem", daemon) if daemon else ()), name).strip()
    return ""


def _version(place: Place) -> Finding:
    what = "HTCondor answers"
    try:
        said = place.said("condor_version")
    except BelljarError as exc:
        return Finding(what, False, exc.message, "Run this where HTCondor is installed.")
    match = re.search(r"CondorVersion: ([0-9]+)\.([0-9]+)", said)
    if not match:
        return Finding(what, False, said[:80], "See what `condor_version` says.")
    is_new = (int(match[1]), int(match[2])) >= OLDEST
    return Finding(what, is_new, f"version {match[1]}.{match[2]}", "Needs 9.7 or later.")


def _value(place: Place, daemon: str, name: str, is_good: Callable[[str], bool], wanted: str) -> Finding:
    """One setting as it holds in the end."""
    value = ask(place, daemon, name)
    if is_good(value):
        return Finding(name, True, value if len(value) < 100 else "as it should be")
    origin = f"`condor_config_val -subsystem {daemon} -verbose {name}` tells which file sets it."
    return Finding(name, False, f"{value[:200] or 'not set'}: {wanted}", origin)


def _of_node(place: Place) -> Iterator[Finding]:
    wrapper, prepare = str(place.wrapper), str(place.wrapper.parent / PREPARE)
    if calls_ours(place):
        yield _value(place, STARTER, "USER_JOB_WRAPPER", lambda own: names(Path(own), wrapper), f"must call {wrapper}")
    else:
        yield _value(place, STARTER, "USER_JOB_WRAPPER", wrapper.__eq__, f"must be {wrapper}")
    keyword = "STARTER_JOB_HOOK_KEYWORD"
    yield _value(place, STARTER, keyword, lambda one: one in ("", KEYWORD), f"must be {KEYWORD}, or not set")
    yield _value(place, STARTER, "STARTER_DEFAULT_JOB_HOOK_KEYWORD", KEYWORD.__eq__, f"must be {KEYWORD}")
    yield _value(place, STARTER, f"{KEYWORD}_HOOK_PREPARE_JOB", prepare.__eq__, f"must be {prepare}")
    yield _value(place, STARTD, "STARTD_CRON_JOBLIST", lists(KEYWORD), f"must list {KEYWORD}")
    yield _value(place, STARTD, "START", lambda one: start(place.settings) in one, "must have belljar's condition")
    for name in ("ENABLE_CHIRP", "ENABLE_CHIRP_DELAYED"):
        yield _value(place, STARTER, name, lambda one: one.lower() not in NO, "jobs cannot be held")


def _of_access_point(place: Place) -> Iterator[Finding]:
    for name, (expression, _) in requirements(place.settings).items():
        yield _value(place, SCHEDD, "SUBMIT_REQUIREMENT_NAMES", lists(name), f"must list {name}")
        yield _value(place, SCHEDD, f"SUBMIT_REQUIREMENT_{name}", expression.__eq__, "is not belljar's")
    yield _value(place, SCHEDD, "SYSTEM_PERIODIC_HOLD_NAMES", lists("BelljarHold"), "must list BelljarHold")
    yield _value(place, SCHEDD, "SCHEDD_CRON_JOBLIST", lists(KEYWORD), f"must list {KEYWORD}")
    allowed = "CHIRP_DELAYED_UPDATE_PREFIX"
    yield _value(place, SCHEDD, allowed, lambda one: not one or "*" in one, "must allow Chirp*: jobs cannot be held")
    yield _pool_images(place)


def _pool_images(place: Place) -> Finding:
    """The schedd reads its list of cron jobs when it starts, and not again."""
    what = "the schedd knows the images of the pool"
    try:
        images = place.said("condor_status", "-schedd", "-constraint", of_this_host(), "-af", POOL_IMAGES).strip()
    except BelljarError as exc:
        return Finding(what, False, exc.message, "See what `condor_status -schedd` says.")
    is_known = images not in ("", "undefined")
    remedy = "condor_restart -fast -daemon schedd; running jobs go on. Then a minute must pass."
    return Finding(what, is_known, images if is_known else "not yet", remedy)


def lists(name: str) -> Callable[[str], bool]:
    return lambda value: name.lower() in re.split(r"[\s,]+", value.lower())


def _seen_by_jobs(place: Place) -> Iterator[Finding]:
    """What lies below a folder that each job gets as its own is not there for jobs, nor are their machines for others."""
    hidden = [one for one in re.split(r"[\s,\"]+", ask(place, STARTER, "MOUNT_UNDER_SCRATCH")) if one.startswith("/")]
    for what, path in (("paths.node", place.node), ("the image store", place.store), ("the launcher", place.wrapper)):
        below = [one for one in hidden if path is not None and path.is_relative_to(one)]
        if below:
            detail = f"{path}: each job has a {below[0]} of its own (MOUNT_UNDER_SCRATCH)"
            yield Finding(
                f"{what} is outside of jobs' own folders", False, detail, "Move it, to /var/lib for instance."
            )


SITE = HTCondorSite()
