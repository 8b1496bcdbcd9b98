"""What a site needs for `sbatch --container`: oci.conf, the command it asks about containers, one bundle per image."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from belljar.batch import policy
from belljar.batch.siting import OurFile, Piece, Place
from belljar.batch.slurm_oci import ANNOTATION
from belljar.errors import BadOption

REDIRECTS = ("lua", "oci", "both")
BUNDLES = "bundles"
DEADLINE = 20  # seconds for taking away what a job left in slurmstepd's folder; slurmstepd waits

# Without CreateEnvFile, which leaves a file that the next run of the job on this node fails for, and without JSON,
# whose quotes slurm.conf's language ends at. Of the patterns only %b: all of 22.05 and later have it.
CONF = """# Made by `belljar batch install slurm`: what a job with --container is started through.
RunTimeRun="exec {wrapper} --oci=%b"
RunTimeQuery="exec {helper} query %b"
RunTimeKill="exec {helper} kill %b"
RunTimeDelete="exec {helper} delete %b"
"""

# As root, after the step and after slurmstepd has tried to remove its folder. What the job left there (a core file) kept
# it from that, and would be in the way of the job's next run on this node.
HELPER = """#!/bin/sh
# What slurmstepd asks about a container: there is none, the job has ended with its first process. Always 0.
PATH=/usr/bin:/bin
export PATH
echo '{{"status":"stopped"}}'
case "$1:$2" in
delete:/*/oci-job*) timeout -k 5 {deadline} rm -rf -- "${{2%/}}" </dev/null >/dev/null 2>&1 ;;
esac
exit 0
"""

# A slurmstepd that was killed, or whose node lost its power, leaves its folder, and each further launch of that job on
# this node fails with "File exists": it would be tried there every two minutes, without end.
BEFORE = """case "$SLURM_JOB_ID" in
'' | 0* | *[!0-9]*) ;;
*) timeout -k 5 {deadline} rm -rf -- {spool}/"oci-job$(printf %05d "$SLURM_JOB_ID")-batch" </dev/null >/dev/null 2>&1 ;;
esac
"""
SPOOL = "/var/spool/slurmd"  # https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdSpoolDir
IN_SPOOL = {"%n": '"$SLURMD_NODENAME"', "%h": '"$(hostname -s)"'}


def redirect(place: Place) -> str:
    """Option `redirect`: how a job comes to a machine. Raises BadOption."""
    chosen = place.options.get("redirect", "lua")
    if chosen not in REDIRECTS:
        raise BadOption(f"redirect {chosen!r}: not known", hint=f"One of {', '.join(REDIRECTS)}.")
    return chosen


def bundles(place: Place) -> Path:
    return place.folder / BUNDLES


def before_the_job(spool: str) -> str:
    """Lines of Prolog, in shell; *spool* as slurm.conf has it, "" for the default."""
    parts = re.split(r"(%.)", spool or SPOOL)
    return BEFORE.format(deadline=DEADLINE, spool="".join(IN_SPOOL.get(part) or shlex.quote(part) for part in parts))


def pieces(place: Place) -> Iterator[Piece]:
    """Options: `bundle`, names of images for which there is to be a bundle besides those of the store."""
    helper = place.wrapper.with_name("oci-slurm")
    for path in (place.wrapper, helper):
        if not re.fullmatch(r"[\w./+@-]+", str(path)):
            raise BadOption(f"{path}: oci.conf takes no path with blanks, quotes or percent signs")
    conf = CONF.format(wrapper=place.wrapper, helper=shlex.quote(str(helper)))
    yield OurFile("what slurmstepd asks about containers", helper, HELPER.format(deadline=DEADLINE).encode(), 0o755)
    yield OurFile("container steps are started by belljar", place.folder / "oci.conf", conf.encode())
    for image in images(place):
        folder = bundles(place) / image
        config = {"ociVersion": "1.0.0", "root": {"path": str(folder)}, "annotations": {ANNOTATION: image}}
        text = f"{json.dumps(config, indent=2)}\n".encode()
        yield OurFile(f"bundle of image {image}", folder / "config.json", text, folders=2)


def images(place: Place) -> list[str]:
    """The store's, as far as it can be seen from here, and those that are named."""
    named = {*place.options.get("bundle", "").split(), place.settings.default_image}
    named |= set(policy.queue_images(place.settings).values())
    named.discard("")
    for image in named:
        policy.check_name(image)
    try:
        found = os.listdir(place.store / "images/names")
    except OSError:
        found = []
    return sorted(named | {name for name in found if policy.IMAGE_NAME.fullmatch(name)})
