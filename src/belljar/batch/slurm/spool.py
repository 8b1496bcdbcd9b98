"""What slurmd on this host knows of a job, by the file in which it keeps the credentials that it has revoked.

It writes that file when it is told to end a job, before it waits for the job's prolog; when the prolog ends it looks whether the
job's credential is still good. Each job is written as its number and three times: revoked, made, expires. So did all releases looked at,
from 2.0 to 25.05. https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdSpoolDir
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from belljar.host.files import read_capped

FILE, LARGEST = "cred_state", 1 << 22
PLACE = re.compile(rb"(?im)^\s*SlurmdSpoolDir\s*=\s*(\S+)")
USUAL = b"/var/spool/slurmd"
CLOCK = 3600  # seconds that a time may lie ahead, and still be one


def has_revoked(number: str, since: float, env: Mapping[str, str]) -> bool:
    """It has revoked this job's credential since then. *env*: of a prolog. False, too, where that cannot be told."""
    with suppress(OSError, ValueError, KeyError, OverflowError):
        places = PLACE.findall(read_capped(Path(env["SLURM_CONF"]), LARGEST))
        place = os.fsdecode(places[-1] if places else USUAL).replace("%n", env["SLURMD_NODENAME"])
        known = read_capped(Path(place.replace("%h", os.uname().nodename.partition(".")[0])) / FILE, LARGEST)
        begin = int(since)
        for found in re.finditer(re.escape(int(number).to_bytes(4, "big")), known):
            if begin <= int.from_bytes(known[found.end() : found.end() + 8], "big") <= begin + CLOCK:
                return True
    return False
