"""Jobs of our own in Torque, 4 and later. https://github.com/adaptivecomputing/torque (src/cmds)"""

from __future__ import annotations

import re
from html import unescape
from math import ceil

from belljar import pool
from belljar.model import MIB
from belljar.pool import Command, NamedJob, PilotJob
from belljar.pool.pbs.openpbs.pilots import OpenPbsPilots, is_ours, named


class TorquePilots(OpenPbsPilots):
    notice = 2.0

    def _nodes(self, job: PilotJob) -> Command:
        """Memory counts for the whole job; of a job on one node Torque makes a limit of it, which counts what QEMU has of its own."""
        return ("-l", f"nodes={job.nodes}:ppn={job.cpus}", "-l", f"mem={ceil(job.memory / MIB) * job.nodes}mb")

    _each = "-u"  # once on each node, and not for each processor

    def query(self) -> Command:
        return ("qstat", "-f", "-x")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        """A server without jobs has nothing printed at all; one without an answer has qstat fail."""
        text = printed.decode("utf-8", "replace").strip()
        if len(printed) > pool.LARGEST_ANSWER or (text and not (text.startswith("<") and text.endswith("</Data>"))):
            raise ValueError(f"qstat printed {text[:60]!r} where a list of jobs is expected")
        rows = (entry.partition("</Job>")[0] for entry in text.split("<Job>")[1:])
        names = ("Job_Owner", "Job_Id", "Job_Name", "job_state", "comment")
        words = ([_word(row, name) for name in names] for row in rows)
        return tuple(named(*row) for owner, *row in words if is_ours(row[1], owner))


def _word(text: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(match[1]).strip() if match else ""


PILOTS = TorquePilots()
