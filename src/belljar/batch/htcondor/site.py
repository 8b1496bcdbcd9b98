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
from belljar.batch.install.files import filled, names, read
from belljar.batch.install.pieces import HOOK_DEADLINE, Change, Clash, OurFile, Piece, Place
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

HERE = Path(__file__).parent
CONFIG, PREPARE, PUBLISH, POOL = "90-belljar.conf", "belljar-prepare", "belljar-publish", "belljar-pool-images"
KEYWORD = "BELLJAR"  # of our hook, and of our cron jobs
PERIOD = 60  # seconds between two looks at the node, and at the pool
OLDEST = (9, 7)  # SYSTEM_PERIODIC_HOLD_NAMES
STARTD, STARTER, SCHEDD = "STARTD", "STARTER", "SCHEDD"
NO = ("false", "f", "no", "0")

WRAPPER_LINES = "USER_JOB_WRAPPER = {wrapper}\n"
HOOK_LINES = "STARTER_DEFAULT_JOB_HOOK_KEYWORD = {keyword}\n{keyword}_HOOK_PREPARE_JOB = {prepare}\n"
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
        words = {
            **NAMES, "belljar": shlex.quote(str(place.belljar)), "deadline": HOOK_DEADLINE, "closed": CLOSED,
            "node": shlex.quote(str(place.node)), "names": shlex.quote(str(place.store / "images/names")),
        }  # fmt: skip
        for name in (PREPARE, SHELL, PUBLISH, POOL):
            script = filled(HERE / f"{name}.sh", **words)
            yield OurFile("what HTCondor's daemons call", place.wrapper.with_name(name), script)
        prepare, publish, pool = (place.wrapper.with_name(name) for name in (PREPARE, PUBLISH, POOL))
        starter = "" if calls_ours(place) else WRAPPER_LINES.format(wrapper=place.wrapper)
        config = filled(
            HERE / CONFIG, starter=starter + HOOK_LINES.format(prepare=prepare, **NAMES), publish=publish, pool_script=pool,
            period=PERIOD, start=start(place.settings), requirements=requirement_lines(place.settings), **NAMES,
        )  # fmt: skip
        yield from _clashes(place)
        if (
            place.node is not None
        ):  # nothing runs as root before a job, so each user's first job makes its own folder there
            node = str(place.node)
            yield Change(
                f"the folder of machines {node}, mode 1777", ("stat", "-c", "%a %u", "--", node),
                lambda printed: printed.split() == [b"1777", b"0"],
                (("mkdir", "-p", "--", node), ("chmod", "1777", "--", node)),
            )  # fmt: skip
        yield OurFile("settings of HTCondor", place.folder / CONFIG, config)

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


def _clashes(place: Place) -> Iterator[Clash]:
    """What ours would override without a word, and what no job could do without."""
    ours = {"STARTER_DEFAULT_JOB_HOOK_KEYWORD": KEYWORD, "STARTER_JOB_HOOK_KEYWORD": KEYWORD}
    if not calls_ours(place):
        ours["USER_JOB_WRAPPER"] = str(place.wrapper)
    for name, value in ours.items():
        advice = "take it out, and do what its prepare hook does in a wrapper of your own (`--set wrapper=site`)"
        if name == "USER_JOB_WRAPPER":
            advice = f"let it call {place.wrapper} and install with `--set wrapper=site`, or take it out"
        theirs, where = _set_by_site(place, name)
        if theirs not in ("", value):
            yield Clash(name, f"{theirs} ({where}): belljar's would take its place; {advice}")
    if place.node is None:
        yield Clash(
            "paths.node",
            "not set: HTCondor gives each job a /tmp and /var/tmp of its own, where nobody else finds its machine; write"
            ' `node = "/var/lib/belljar-node"` below `[paths]` in /etc/belljar/belljar.toml',
        )


def _set_by_site(place: Place, name: str) -> tuple[str, str]:
    """(the value, the file and line that set it last), our own file apart; empty where no other sets it."""
    setting = re.compile(rf"\s*(?:STARTER\.)?{name}\s*=\s*(\S.*?)\s*", re.IGNORECASE)
    last = "", ""
    with suppress(BelljarError, OSError):  # whether HTCondor answers at all is a finding
        for file in place.output("condor_config_val", "-config").split():
            is_theirs = file.startswith("/") and file != str(place.folder / CONFIG)
            text = (read(Path(file)) or b"").decode(errors="replace") if is_theirs else ""
            for number, line in enumerate(text.splitlines(), 1):
                if match := setting.fullmatch(line):
                    last = match[1], f"{file}, line {number}"
    return last


def ask(place: Place, daemon: str, name: str) -> str:
    """The final value as this daemon has it; "" where it is not set, or nobody answers."""
    with suppress(BelljarError):
        return place.output("condor_config_val", *(("-subsystem", daemon) if daemon else ()), name).strip()
    return ""


def _version(place: Place) -> Finding:
    what = "HTCondor answers"
    try:
        printed = place.output("condor_version")
    except BelljarError as exc:
        return fail(what, exc.message, "Run this where HTCondor is installed.")
    match = re.search(r"CondorVersion: ([0-9]+)\.([0-9]+)", printed)
    if not match:
        return fail(what, printed[:80], "See what `condor_version` says.")
    is_new = (int(match[1]), int(match[2])) >= OLDEST
    return expect(what, is_new, f"version {match[1]}.{match[2]}", "Needs 9.7 or later.")


def _value(place: Place, daemon: str, name: str, is_good: Callable[[str], bool], wanted: str) -> Finding:
    """One setting as it holds in the end."""
    value = ask(place, daemon, name)
    if is_good(value):
        return ok(name, value if len(value) < 100 else "as it should be")
    origin = f"`condor_config_val -subsystem {daemon} -verbose {name}` tells which file sets it."
    return fail(name, f"{value[:200] or 'not set'}: {wanted}", origin)


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
        images = place.output("condor_status", "-schedd", "-constraint", of_this_host(), "-af", POOL_IMAGES).strip()
    except BelljarError as exc:
        return fail(what, exc.message, "See what `condor_status -schedd` says.")
    is_known = images not in ("", "undefined")
    remedy = "condor_restart -fast -daemon schedd; running jobs go on. Then a minute must pass."
    return expect(what, is_known, images if is_known else "not yet", remedy)


def lists(name: str) -> Callable[[str], bool]:
    return lambda value: name.lower() in re.split(r"[\s,]+", value.lower())


def _seen_by_jobs(place: Place) -> Iterator[Finding]:
    """What lies below a folder that each job gets as its own is not there for jobs, nor are their machines for others."""
    hidden = [one for one in re.split(r"[\s,\"]+", ask(place, STARTER, "MOUNT_UNDER_SCRATCH")) if one.startswith("/")]
    for what, path in (("paths.node", place.node), ("the image store", place.store), ("the launcher", place.wrapper)):
        below = [one for one in hidden if path is not None and path.is_relative_to(one)]
        if below:
            detail = f"{path}: each job has a {below[0]} of its own (MOUNT_UNDER_SCRATCH)"
            yield fail(f"{what} is outside of jobs' own folders", detail, "Move it, to /var/lib for instance.")


SITE = HTCondorSite()
