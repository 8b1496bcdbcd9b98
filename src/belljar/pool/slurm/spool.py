"""What slurmd on this host knows of a job, by the file in which it keeps the credentials that it has revoked.

It writes that file when it is told to end a job, before it waits for the job's prolog; when the prolog ends it looks whether the
job's credential is still good. The file begins with a version of Slurm's protocol (from 24.11 on) and a count of jobs; each is written with
its number and the times at which its credential was revoked and at which slurmd first knew it.
https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdSpoolDir
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar.host.files import read_capped
from belljar.pool.terms import Revoked

FILE, LARGEST = "cred_state", 1 << 22
PLACE = re.compile(rb"(?im)^\s*SlurmdSpoolDir\s*=\s*(\S+)")
INCLUDE = re.compile(rb"(?im)^\s*include\s")
USUAL = b"/var/spool/slurmd"
CLOCK = 3600  # seconds that a time may be off, and still be one
MADE = 1  # seconds before its prolog begins, at most, in which slurmd notes that it knows a job
OLD, NUMBERED, WITH_LIMIT = (struct.Struct(form) for form in (">IQQ8x", ">8xI8xQQ8x", ">8xI8xQQ16x"))
FORMS = {0: OLD, 42: OLD, 43: OLD, 44: NUMBERED, 45: WITH_LIMIT}  # by the version: 24.11 is 42, 26.05 is 45


def revoked(number: str, since: float, env: Mapping[str, str]) -> Revoked:
    """Whether slurmd has revoked the credential with which this job began then. *env*: of the job's prolog.

    An earlier one of the same job may still be in the file. When slurmd first knew a job is told by this host's clock, and is just
    before its prolog; when it was revoked is told by slurmctld's.
    """
    with suppress(OSError, ValueError, KeyError, struct.error):
        begin = int(since)
        for job, end, made in _jobs(_read(env)):
            is_time = begin - CLOCK <= end <= begin + CLOCK
            if job == int(number) and is_time and (end >= begin or begin - MADE <= made <= begin + CLOCK):
                return Revoked.YES
        return Revoked.NO
    return Revoked.CANNOT_TELL


def _read(env: Mapping[str, str]) -> bytes:
    """The file; empty before the first credential was revoked, when there is none. Raises OSError, ValueError, KeyError."""
    conf = read_capped(Path(env["SLURM_CONF"]), LARGEST)
    places = PLACE.findall(conf)
    if not places and INCLUDE.search(conf):
        raise ValueError("another file may name the folder")
    place = os.fsdecode(places[-1] if places else USUAL).replace("%n", env["SLURMD_NODENAME"])
    file = Path(place.replace("%h", os.uname().nodename.partition(".")[0])) / FILE
    return read_capped(file, LARGEST) if file.exists() or not file.parent.is_dir() else b""


def _jobs(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, and when it was revoked and made known. Raises KeyError for a version that is not known, and struct.error."""
    if content:
        version = content[0]
        form, at = FORMS[version], 2 if version else 0
        (count,) = struct.unpack_from(">I", content, at)
        for number in range(count):
            yield form.unpack_from(content, at + 4 + number * form.size)
