"""Machine and job features: what a payload may know of its machine and its limits, as small files in the guest.

The keys are those of HSF-TN-2016-02 (Machine/Job Features). $MACHINEFEATURES and $JOBFEATURES name a folder each, in which
every key is one file: the value alone, without a newline at its end. That note reads "machine" as the host of a virtual
machine, and asks for the processors that may be given to jobs on it. A pilot in a guest can give away the guest's and no
others, and starts as many jobs as it reads there: so that number, as Vac has it, is the guest's own. What is not known has no
file. Times are whole seconds, rounded to the safe side.
"""

from __future__ import annotations

from belljar.model import Payload, PlainFile, Request
from belljar.records import replace

MACHINE, JOB = b"/etc/machinefeatures", b"/etc/jobfeatures"
VARIABLES = ((b"MACHINEFEATURES", MACHINE), (b"JOBFEATURES", JOB))
LONGEST_ID = 200

Pairs = tuple[tuple[bytes, bytes], ...]


def features(
    request: Request, now: float, hs06_per_cpu: float = 0.0, deadline: float | None = None
) -> tuple[tuple[PlainFile, ...], Pairs]:
    """The files, root's own and readable by all, and the variables that name their folders."""
    machine, job = values(request, now, hs06_per_cpu, deadline)
    return (*_files(MACHINE, machine), *_files(JOB, job)), VARIABLES


def values(
    request: Request, now: float, hs06_per_cpu: float = 0.0, deadline: float | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Machine features and job features by their keys. *now* is the moment from which the payload's time counts; 0 for
    *hs06_per_cpu* tells nothing about speed. *deadline*: where an order moved it to, in place of the time limit."""
    cpus = request.machine.cpus
    machine = {"total_cpu": str(cpus)}
    job = {
        "allocated_cpu": str(cpus),
        "grace_secs_job": str(max(int(request.grace), 0)),
        "job_id": job_id(request),
        "jobstart_secs": str(int(now)),
        "max_rss_bytes": str(request.machine.memory),
    }
    room = request.machine.disk if request.machine.scratch is None else request.machine.scratch
    if room is not None:
        job["scratch_limit_bytes"] = str(room)
    if hs06_per_cpu > 0:
        machine["hs06"] = job["hs06_job"] = hs06(hs06_per_cpu * cpus)
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


def with_features(
    request: Request,
    payload: Payload,
    now: float,
    hs06_per_cpu: float,
    outputs_url: str = "",
    deadline: float | None = None,
) -> Payload:
    """The payload with these files and variables. A variable of its own by one of these names is replaced. *outputs_url*:
    where it may PUT files that are kept."""
    files, variables = features(request, now, hs06_per_cpu, deadline)
    if outputs_url:
        variables += ((b"JOBOUTPUTS", outputs_url.encode()),)
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
    """The id the job has for whoever asked for it: the batch system's own, else the machine's. No blanks, as the note
    asks, and nothing that is not plain ASCII."""
    _, colon, number = request.requester.partition(":")
    if not (colon and number):
        return request.id
    return "".join(char if "!" <= char <= "~" else "?" for char in number)[:LONGEST_ID]


def hs06(value: float) -> str:
    return str(round(float(value), 3))


def _files(folder: bytes, values: dict[str, str]) -> tuple[PlainFile, ...]:
    return tuple(
        PlainFile(folder + b"/" + key.encode(), value.encode(), 0o644, is_users=False)
        for key, value in sorted(values.items())
    )
