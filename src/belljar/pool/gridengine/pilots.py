"""Jobs of our own in Grid Engine. 8.1.9 and later. https://manpages.debian.org/bookworm/gridengine-client/qsub.1.en.html"""

from __future__ import annotations

import re
import shlex

from belljar import pool
from belljar.batch.gridengine.dialect import seconds
from belljar.batch.job.terms import one_line
from belljar.model import MIB
from belljar.pool import Command, JobId, NamedJob, PilotJob
from belljar.pool.gridengine.nodes import POOL

NOTIFY = 60.0  # a queue's `notify` where the site set none: seconds between USR2 and KILL


class GridEnginePilots(pool.Pilots):
    quantum = 1
    notice = NOTIFY
    limits = ("qconf", "-sq", "*")

    def submit(self, job: PilotJob, script: str) -> Command:
        """Memory counts for each slot; it does not limit address space (h_vmem), of which QEMU takes more than it uses. More than one
        slot needs a parallel environment, which gives as many of them on each node."""
        size, slots = -(-job.memory // job.cpus // MIB), job.nodes * job.cpus
        if slots > 1 and not job.environment:
            raise ValueError("Grid Engine gives several processors by a parallel environment: set `lease.environment`")
        where = f",hostname=!({'|'.join(job.shunned)})" if job.shunned else ""
        owner = re.sub(r"[^A-Za-z0-9._:/-]+", "_", one_line(job.owner)).strip("_")
        options = (
            "-N", job.name, "-l", f"h_rt={-(-int(job.seconds) // 1)},mem_free={size}M{where}",
            *(("-pe", job.environment, str(slots)) if job.environment else ()),
            "-notify", "-r", "n", "-j", "y", "-o", job.output, "-S", "/bin/sh", "-ac", f"owner={owner}",
            *(("-q", job.queue) if job.queue else ()), *(("-P", job.account) if job.account else ()),
        )  # fmt: skip
        return ("qsub", "-terse", *options, script)

    def script(self, job: PilotJob) -> bytes:
        """The job's script, and its first pilot, are on its first node. Grid Engine tells all of them of the end (`-notify`): `qrsh` is not
        to heed it, for what it has started would be killed at once. Each pilot is given its number, for nobody else does that here."""
        pilot = shlex.join(job.command)
        if job.nodes == 1:
            return f"#!/bin/sh\nexec {pilot} --rank 0\n".encode()
        lines = (
            "#!/bin/sh", "trap : TERM USR2", f"{pilot} --rank 0 </dev/null &", "rank=0", "while read -r host slots rest; do",
            f"""  [ $rank = 0 ] || (trap '' TERM USR2; exec qrsh -inherit "$host" {pilot} --rank "$rank" </dev/null) &""",
            "  rank=$((rank + 1))", 'done <"$PE_HOSTFILE"', "until wait; do :; done", "",
        )  # fmt: skip
        return "\n".join(lines).encode()

    def submitted(self, printed: bytes) -> JobId:
        return pool.id_printed(printed.partition(b".")[0], "[0-9]{1,18}")

    def extend(self, job: JobId, seconds: float) -> Command:
        raise ValueError("Grid Engine does not change the limit of a running job")

    def longest(self, printed: bytes, queue: str) -> float | None:
        """A job that names no queue may start in any: the longest counts. What a host of a queue has of its own does not."""
        text = printed[: pool.LARGEST_ANSWER].decode("utf-8", "replace").replace("\\\n", " ")
        limits = re.findall(r"(?ms)^qname +(\S+)$.*?^h_rt +(\S+)", text)
        names = queue.split(",") if queue else [name for name, _ in limits]
        return pool.longest_of([seconds(limit.partition(",")[0]) for name, limit in limits if name in names])

    def query(self) -> Command:
        return ("qstat", "-u", pool.account(), "-r", "-xml")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        return tuple(
            NamedJob(job.name, job.id, job.state, job.reason)
            for job in POOL.jobs(printed, "").values()
            if pool.PILOT_NAME.fullmatch(job.name) and job.owner == pool.account()
        )


PILOTS = GridEnginePilots()
