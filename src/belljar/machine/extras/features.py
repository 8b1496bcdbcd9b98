"""Machine and job features (HSF-TN-2016-02): what a payload may know of its machine and its limits, as small files in
the guest.

$MACHINEFEATURES and $JOBFEATURES name a folder each, with one file for each key: the value alone, without a newline.
The note counts the host's processors as the machine's; a pilot in a guest can only use the guest's, so, as in Vac,
these are told. What is not known has no file. Times are whole seconds, rounded to the safe side.
"""

from __future__ import annotations

from belljar.model import Payload, PlainFile, Request
from belljar.records import replace

MACHINE, JOB = b"/etc/machinefeatures", b"/etc/jobfeatures"
VARIABLES = ((b"MACHINEFEATURES", MACHINE), (b"JOBFEATURES", JOB))
LONGEST_ID = 200


def features(machine: dict[str, str], job: dict[str, str]) -> tuple[PlainFile, ...]:
    """The files, root's own and readable by all."""
    pairs = [(MACHINE, *pair) for pair in sorted(machine.items())] + [(JOB, *pair) for pair in sorted(job.items())]
    return tuple(
        PlainFile(b"%b/%b" % (folder, key.encode()), value.encode(), 0o644, is_users=False)
        for folder, key, value in pairs
    )


def values(
    request: Request, now: float, hs06_per_cpu: float = 0.0, deadline: float | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Machine and job features. *now*: when the payload's time began; *hs06_per_cpu*: 0 tells nothing; *deadline*: if
    moved."""
    cpus = request.machine.cpus
    machine = {"total_cpu": str(cpus)}
    job = {
        "allocated_cpu": str(cpus), "grace_secs_job": str(max(int(request.grace), 0)), "job_id": job_id(request),
        "jobstart_secs": str(int(now)), "max_rss_bytes": str(request.machine.memory),
    }  # fmt: skip
    room = request.machine.disk if request.machine.scratch is None else request.machine.scratch
    if room is not None:
        job["scratch_limit_bytes"] = str(room)
    if hs06_per_cpu > 0:
        machine["hs06"] = job["hs06_job"] = str(round(float(hs06_per_cpu * cpus), 3))
    wall = time_left(request, now, deadline)
    if wall is not None:
        end = str(int(now) + wall)
        machine["shutdowntime"] = job["shutdowntime_job"] = end
        job["wall_limit_secs"], job["cpu_limit_secs"] = str(wall), str(wall * cpus)
    return machine, job


def before_2016(machine: dict[str, str], job: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The same with the names that features had before the note, as Vac still tells them: images of virtual machines live long.
    Memory was counted in 10^6 bytes, and there was one job slot in a machine."""
    cpus = machine["total_cpu"]
    older = {f"{key}_lrms": job[key] for key in ("cpu_limit_secs", "wall_limit_secs") if key in job}
    older |= {"mem_limit_MB": str(int(job["max_rss_bytes"]) // 10**6), "allocated_CPU": cpus, "cpufactor_lrms": "1.0"}
    return {**machine, "phys_cores": cpus, "log_cores": cpus, "jobslots": "1"}, {**job, **older}


def with_features(payload: Payload, files: tuple[PlainFile, ...], outputs_url: str = "") -> Payload:
    """The payload with these files and variables, which replace its own. *outputs_url*: it may PUT files there."""
    variables = (*VARIABLES, *([(b"JOBOUTPUTS", outputs_url.encode())] if outputs_url else ()))
    ours = dict(variables)
    env = tuple(pair for pair in payload.env if pair[0] not in ours)
    return replace(payload, files=payload.files + files, env=env + variables)


def time_left(request: Request, now: float, deadline: float | None = None) -> int | None:
    """Whole seconds until the first of the request's limits ends the payload; None where there is no limit."""
    limits = [] if request.timeout is None else [request.timeout]
    if deadline is not None:
        limits = [deadline - now]
    if request.wall_limit is not None:
        limits.append(request.created + request.wall_limit - now)
    return max(int(min(limits)), 0) if limits else None


def job_id(request: Request) -> str:
    """The batch system's id of the job, else the machine's: plain ASCII without blanks, as the note asks."""
    _, colon, number = request.requester.partition(":")
    if not (colon and number):
        return request.id
    return "".join(char if "!" <= char <= "~" else "?" for char in number)[:LONGEST_ID]
