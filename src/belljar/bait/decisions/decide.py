"""Is this host open to jobs, and which job's turn is it: pure, with the reason.

Jobs are served in the order in which they came: one that fits would keep a larger one before it waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from belljar.bait import Order, Settings
from belljar.bait.decisions.note import read, too_long
from belljar.bait.decisions.step import BaitState, Entry, State
from belljar.model import MIB
from belljar.pool import JobState, JobView, NodeView
from belljar.records import dataclass, replace

Judge = Callable[[JobView], str]  # why the site's rules forbid a job what it asks for; "" where they do not


@dataclass(frozen=True)
class Room:
    """What of this host is left for machines, and what there is of it at all."""

    memory: int
    cpus: int
    disk: int
    all_memory: int
    all_cpus: int
    bandwidth: int | None = None  # bytes a second; None: it is not known, or not looked at
    no_image: str = ""  # why no image of the bait's can be used; "" where one can


@dataclass(frozen=True)
class Bait:
    """Whether it takes jobs now."""

    state: BaitState
    why: str = ""

    @property
    def is_open(self) -> bool:
        return self.state is BaitState.OPEN


@dataclass(frozen=True)
class Turn:
    """The job that is served now, or why no job is. *wrong*: jobs that can never be, and why. *first*: the first job in line at an open bait."""

    job: str = ""
    why: str = ""
    wrong: tuple[tuple[str, str], ...] = ()
    first: str = ""
    kept: str = ""  # it is served by these machines, which are there
    ending: tuple[str, ...] = ()  # kept machines that end, for it has no room else


@dataclass(frozen=True)
class Size:
    """What the machines of a job take together."""

    count: int
    cpus: int  # of each
    memory: int  # of each
    job_memory: int  # of each: what the job may use of it

    @property
    def all_cpus(self) -> int:
        return self.count * self.cpus

    @property
    def all_memory(self) -> int:
        return self.count * self.memory


def size_of(job: JobView, settings: Settings) -> Size:
    """Each node of a job has the same share of it, rounded up: whole processors, whole MiB."""
    count = max(job.nodes, 1)
    memory = -(-job.memory // count // MIB) * MIB
    return Size(count, max(-(-job.cpus // count), 1), memory + settings.overhead, memory)


def asked_of(job: JobView) -> str:
    """What its machines follow from, in words."""
    disk = f"{job.disk // MIB} MiB" if job.disk else ""
    asks = (("image", job.image), ("network class", job.network), ("disk", disk))
    more = "".join(f", {name} {value}" for name, value in asks if value)
    features = f", {'&'.join(job.features)}" if job.features else ""
    return f"{job.nodes} nodes, {job.cpus} cpus, {job.memory // MIB} MiB{more}{features}"


def share_of(entry: Entry, job: JobView, settings: Settings) -> Size:
    """What of a job's machines this host makes."""
    size = size_of(job, settings)
    if entry.machines:
        return replace(size, count=len(entry.here(settings.names)))
    is_shared = len(entry.on) == size.count
    return replace(size, count=sum(name in settings.names for name in entry.on)) if is_shared else size


def as_given(
    jobs: Mapping[str, JobView], nodes: Mapping[str, NodeView], entries: Mapping[str, Entry], names: Iterable[str]
) -> Mapping[str, JobView]:
    """The jobs with what these baits have of the features that their constraints name: by those they came here; any other one would put a
    job's node among those of another bait or partition. And with what they were given on their baits: more than they ask for, where a
    node is a job's own, or it asks for a range of nodes with memory for each."""
    ours = {feature for name in names if name in nodes for feature in nodes[name].features}

    def whole(job: JobView) -> JobView:
        job, entry = replace(job, features=tuple(filter(ours.__contains__, job.features))), entries.get(job.id)
        cpus, memory = entry.given if entry is not None and entry.leads else read(job.note).given
        return replace(job, cpus=max(job.cpus, cpus), memory=max(job.memory, memory)) if job.memory > 0 else job

    return {id: whole(job) for id, job in jobs.items()}


def bait_now(
    order: Order, room: Room, faults: int, failed: float, settings: Settings, now: float, *, starting: bool = False
) -> Bait:
    """The administrator's word stands before the host's. After too many *faults* in a row, of which the last one was when it *failed*, one
    job at a time is let in to try."""
    if not order.is_open:
        return Bait(BaitState.CLOSED_ADMIN, order.why or "closed by an administrator")
    if room.no_image:
        return Bait(BaitState.CLOSED_STORE, room.no_image)
    if faults >= settings.faults and (starting or now < failed + settings.retry):
        return Bait(BaitState.CLOSED_FAULTS, f"{faults} starts failed in a row")
    memory, disk = ("memory", room.memory, settings.min_memory), ("disk", room.disk, settings.min_disk)
    bandwidth = ("bandwidth", room.bandwidth, settings.min_bandwidth)
    for (what, free, least), per, unit in ((memory, MIB, "MiB"), (disk, MIB, "MiB"), (bandwidth, 1000, "kB/s")):
        if free is not None and free < least:
            why = f"{free // per} {unit} of {what} free, {least // per} {unit} are the least"
            return Bait(BaitState.CLOSED_RESOURCES, why)
    if room.cpus < 1:
        return Bait(BaitState.CLOSED_RESOURCES, "no processor is free")
    return Bait(BaitState.OPEN)


def impossible(job: JobView, size: Size, room: Room, settings: Settings) -> str:
    """Why this host could never serve it; "" where it could. *size*: of its machines here."""
    if job.unmovable:
        return job.unmovable
    if job.image and job.image not in settings.images:
        return f"image {job.image}: not among the images that may become nodes here ({', '.join(settings.images)})"
    if job.network and job.network not in dict(settings.networks):
        return f"network class {job.network}: there is {', '.join(dict(settings.networks)) or 'none'} here"
    if size.all_cpus > room.all_cpus:
        return f"{size.all_cpus} processors: this host gives {room.all_cpus} to machines"
    if job.memory <= 0:
        return "it has no memory limit: a machine's size follows from it (--mem, or DefMemPerCPU)"
    if size.all_memory > room.all_memory:
        return f"{size.all_memory // MIB} MiB of memory: this host has {room.all_memory // MIB} MiB"
    if (disk := size.count * job.disk) > room.disk:  # grows as it is used; what is not there is not promised
        return f"{disk // MIB} MiB of disk: {room.disk // MIB} MiB are free here"
    return ""


def choose(
    entries: Iterable[Entry], jobs: Mapping[str, JobView], bait: Bait, room: Room, settings: Settings, judge: Judge
) -> Turn:
    """For the jobs that are held here, the one to make machines for now: all of its machines, or none."""
    waiting = [entry for entry in entries if entry.state is State.STOPPED and entry.job in jobs]
    waiting.sort(key=lambda entry: (entry.since, entry.job))
    sizes = {entry.job: share_of(entry, jobs[entry.job], settings) for entry in waiting}
    wrong = tuple(
        (entry.job, why) for entry in waiting
        if (why := too_long(entry.on) or impossible(jobs[entry.job], sizes[entry.job], room, settings) or judge(jobs[entry.job]))
    )  # fmt: skip
    possible = [entry for entry in waiting if entry.job not in dict(wrong)]
    if not possible or not bait.is_open:
        return Turn(why=bait.why if possible else "", wrong=wrong)
    first = possible[0].job
    size = sizes[first]
    cpus, memory = (size.all_cpus, room.cpus, 1, "processors"), (size.all_memory, room.memory, MIB, "MiB of memory")
    for needed, free, unit, what in (cpus, memory):
        if needed > free:
            why = f"{first} waits for {needed // unit} {what}, {free // unit} are free"
            return Turn(why=why, wrong=wrong, first=first)
    return Turn(first, wrong=wrong, first=first)


# -- arrays of a system that can say only for all waiting tasks together where they may run: they come to one bait, and move one by one --


def newcomers(entries: Mapping[str, Entry], jobs: Mapping[str, JobView]) -> tuple[JobView, ...]:
    """Tasks that wait, of arrays that are here: one would start on the node that was made for another."""
    here = {jobs[id].array[0] for id in entries if id in jobs} - {""}
    waiting = (job for job in jobs.values() if job.state is JobState.WAITING and job.id not in entries)
    return tuple(job for job in waiting if job.array[0] in here)


def must_wait(job: JobView, jobs: Mapping[str, JobView], released: Container[str]) -> bool:
    """Another task of its array was released and has not started. *released*: arrays of which one was since these jobs were seen."""
    array = job.array[0]
    others = (other for other in jobs.values() if other.array[0] == array and other.id != job.id)
    return bool(array) and (array in released or any(other.state is JobState.WAITING for other in others))
