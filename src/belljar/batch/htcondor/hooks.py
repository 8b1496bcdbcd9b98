"""`belljar internal hook htcondor prepare`: HOOK_PREPARE_JOB. Looks at a job's ad before anything of it is started.

condor_starter runs the hook as the job's user with the ad on standard input, and merges what it prints into the ad.
HookStatusCode 1 to 299 puts the job on hold with HookStatusMessage as the reason; older versions take no notice of it,
and there the wrapper ends the job with the same sentence.
https://htcondor.readthedocs.io/en/latest/admin-manual/ep-policy-configuration.html (job hooks)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from belljar.batch import Settings
from belljar.batch.htcondor.ads import LARGEST, Ad, parse, string
from belljar.batch.htcondor.dialect import disk_of, image_of, size_of
from belljar.batch.job.policy import Asker, check_allowed, check_limits, image_for
from belljar.batch.system import Call
from belljar.errors import BelljarError
from belljar.model import MIB

HOLD = 25  # our subcode of the hold


def run(call: Call) -> int:
    """Reads the ad, prints what is to be added to it. Exits 0 whatever is found: another code is a hold without words."""
    asker = call.asker()
    os.write(1, prepare(sys.stdin.buffer.read(LARGEST), asker.user, asker.groups, call.settings()))
    return 0


def prepare(data: bytes, user: str, groups: Collection[str], settings: Settings) -> bytes:
    """What to print for a job's ad: nothing, or why it is to be held."""
    ad = parse(data)
    try:
        check(ad, user, groups, settings)
    except BelljarError as exc:
        sentence = string(f"belljar: {exc.message}. {exc.hint}")
        return f"HookStatusCode = {HOLD}\nHookStatusMessage = {sentence}\n".encode()
    return b""


def check(ad: Ad, user: str, groups: Collection[str], settings: Settings) -> None:
    """Raises ImageNotAllowed, OverLimit. A job without an image is not looked at."""
    queue = ad.text("AcctGroup")
    image = image_for(image_of(ad), queue, settings)
    if image:
        check_allowed(image, Asker(user, groups, queue), settings)
        memory = size_of(Ad({}), "", ad, "RequestMemory", MIB)
        check_limits(ad.number("RequestCpus"), memory, disk_of(ad), settings)
