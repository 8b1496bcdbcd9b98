"""What a site needs for HTCondor: one file in config.d, the same on all hosts, and three small scripts it names.

On execute nodes it runs belljar in place of each job, publishes the node's images and whether machines work, and keeps
jobs with machines off a closed node. On access points it refuses at submit, and lets jobs be held. The last setting
counts, so `findings` look at what condor_config_val makes of all files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from belljar.batch.htcondor.dialect import CLOSED, CLOSED_REASON, HELD, IMAGES, POOL_IMAGES, SHELL, WORKS, of_this_host
from belljar.batch.htcondor.rules import requirement_lines, start
from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Change, Clash, OurFile, Piece, Place, names, read
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

HERE = Path(__file__).parent
CONFIG, PREPARE, PUBLISH, POOL = "90-belljar.conf", "belljar-prepare", "belljar-publish", "belljar-pool-images"
KEYWORD = "BELLJAR"  # of our hook, and of our cron jobs
PERIOD = 60  # seconds between two looks at the node, and at the pool
SETTING = re.compile(r"(?m)^(\w+(?<!_PERIOD)) = (.*)$")  # a period is the site's affair
# Whose a setting is, by its name; others are the starter's.
OF_SCHEDD, OF_STARTD = ("SCHEDD_", "SUBMIT_", "SYSTEM_"), re.compile("START$|STARTD_")
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
                hint = "A prepare hook of your own cannot stand beside belljar's: take it out, or do its work in your wrapper."
                raise BadOption(f"--set {name}={value}: HTCondor has wrapper=site and wrapper=belljar", hint=hint)
        words = {
            **NAMES, "closed": CLOSED, "node": shlex.quote(str(place.node)),
            "names": shlex.quote(str(place.store / "images/names")),
        }  # fmt: skip
        for name in (PREPARE, SHELL, PUBLISH, POOL):
            script = place.filled(HERE / f"{name}.sh", **words)
            yield OurFile("what HTCondor's daemons call", place.wrapper.with_name(name), script)
        prepare, publish, pool = (place.wrapper.with_name(name) for name in (PREPARE, PUBLISH, POOL))
        starter = f"STARTER_DEFAULT_JOB_HOOK_KEYWORD = {KEYWORD}\n{KEYWORD}_HOOK_PREPARE_JOB = {prepare}\n"
        if not calls_ours(place):
            starter = f"USER_JOB_WRAPPER = {place.wrapper}\n{starter}"
        config = place.filled(
            HERE / CONFIG, starter=starter, publish=publish, pool_script=pool,
            period=PERIOD, start=start(place.settings), requirements=requirement_lines(place.settings), **NAMES,
        )  # fmt: skip
        yield from _clashes(place)
        # Nothing runs as root before a job, so each user's first job makes its own folder there.
        if node := str(place.node or ""):
            yield Change(
                f"the folder of machines {node}, mode 1777", ("stat", "-c", "%a %u", "--", node),
                lambda printed: printed.split() == ["1777", "0"],
                (("mkdir", "-p", "--", node), ("chmod", "1777", "--", node)),
            )  # fmt: skip
        yield OurFile("settings of HTCondor", place.folder / CONFIG, config)

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("condor_reconfig",),)

    def findings(self, place: Place) -> Iterator[Finding]:
        try:
            yield ok("HTCondor answers", place.output("condor_version").strip().partition("\n")[0])
        except BelljarError as exc:
            yield fail("HTCondor answers", exc.message, "Run this where HTCondor is installed.")
        daemons = re.split(r"[\s,]+", ask(place, "", "DAEMON_LIST") or "STARTD SCHEDD")
        config = (read(place.folder / CONFIG) or b"").decode(errors="replace")
        for name, ours in SETTING.findall(config):
            subsystem = "SCHEDD" if name.startswith(OF_SCHEDD) else "STARTD" if OF_STARTD.match(name) else "STARTER"
            if ("SCHEDD" if subsystem == "SCHEDD" else "STARTD") in daemons:
                yield _holds(place, subsystem, name, ours)
        if "STARTD" in daemons:
            yield from _of_node(place)
        if "SCHEDD" in daemons:
            yield _pool_images(place)


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
        theirs = ask(place, "STARTER", name)
        if theirs not in ("", value):
            where = f"`condor_config_val -subsystem STARTER -verbose {name}` tells where"
            yield Clash(name, f"{theirs} ({where}): belljar's would take its place; {advice}")
    if place.node is None:
        why = "not set: HTCondor gives each job a /tmp and /var/tmp of its own, where nobody else finds its machine"
        remedy = 'write `node = "/var/lib/belljar-node"` below `[paths]` in /etc/belljar/belljar.toml'
        yield Clash("paths.node", f"{why}; {remedy}")


def ask(place: Place, daemon: str, name: str) -> str:
    """The final value as this daemon has it; "" where it is not set, or nobody answers."""
    return place.asked("condor_config_val", *(("-subsystem", daemon) if daemon else ()), name).strip()


def _holds(place: Place, subsystem: str, name: str, ours: str) -> Finding:
    """A setting of our file, without what the site had before, against what the daemon has in the end."""
    value = ask(place, subsystem, name)
    is_there = all(part.strip() in value for part in re.split(r"\$\(\w+\)", ours))
    origin = f"`condor_config_val -subsystem {subsystem} -verbose {name}` tells which file sets it."
    return expect(name, is_there, "" if is_there else f"{value[:200] or 'not set'}: belljar's is {ours[:200]}", origin)


def _of_node(place: Place) -> Iterator[Finding]:
    if calls_ours(place):
        own = ask(place, "STARTER", "USER_JOB_WRAPPER")
        yield expect("USER_JOB_WRAPPER", names(Path(own), str(place.wrapper)), own, f"Let it call {place.wrapper}.")
    for name in ("ENABLE_CHIRP", "ENABLE_CHIRP_DELAYED"):
        is_on = ask(place, "STARTER", name).lower() not in ("false", "f", "no", "0")
        yield expect(name, is_on, "" if is_on else "jobs cannot be held", f"Take {name} out, or set it to true.")


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


SITE = HTCondorSite()
