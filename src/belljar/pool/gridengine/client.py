"""Grid Engine's jobs from the outside: qstat, read strictly, and the commands that hold, move and release one. 8.1.9 and later.

A job's image is its request `-l vm_image=NAME`, its memory `-l h_vmem=SIZE` for each slot. A job that has ended is not listed.
What a bait holds has an operator's hold, which is not its user's to take away.
https://manpages.debian.org/bookworm/gridengine-client/qstat.1.en.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from belljar.batch.gridengine.dialect import memory
from belljar.batch.job.terms import one_line, whole
from belljar.pool.terms import LARGEST_ANSWER, Client, Command, JobId, JobState, JobView

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,199}")
TASK = re.compile(r"[0-9]{1,9}")
NOTICE = "belljar"  # a word of the job's context
MOST = 500  # jobs of one command


class GridEngineClient(Client):
    """The client's side. *bait*: QUEUE@HOST whose prolog takes jobs back itself, by ending with 99."""

    moves_whole_arrays = True  # by `qalter -q`

    def __init__(self, bait: str = "") -> None:
        self.bait = bait

    def query(self, mark: str) -> Command:
        """What users wrote comes escaped, as XML has it: no mark is needed."""
        return ("qstat", "-u", "*", "-r", "-g", "d", "-xml")

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        if len(printed) > LARGEST_ANSWER or b"<job_info" not in printed[:4096]:
            raise ValueError("qstat printed no list of jobs")
        text = printed.decode("utf-8", "replace")
        if not text.rstrip().endswith("</job_info>"):
            raise ValueError("qstat printed a list of jobs that was cut off")
        entries = (entry.partition("</job_list>")[0] for entry in text.split("<job_list")[1:])
        return {job.id: job for entry in entries for job in _jobs(entry, self.bait)}

    def take_back(self, job: JobView) -> tuple[Command, ...]:
        """Held first: one that is rescheduled starts again at once."""
        is_elsewhere = job.state is JobState.RUNNING and job.on != (self.bait,)
        reschedule = (("qmod", "-rj", job.id),) if is_elsewhere else ()
        return (*(() if _is_held(job) else self._hold(job.id)), *reschedule)

    def arrive(self, jobs: Sequence[JobView]) -> tuple[Command, ...]:
        return self._hold(*(job.id for job in jobs))

    def _hold(self, *jobs: JobId) -> tuple[Command, ...]:
        return tuple(("qhold", "-h", "o", *jobs[at : at + MOST]) for at in range(0, len(jobs), MOST))

    def is_back(self, job: JobView) -> bool:
        return job.state is not JobState.RUNNING or _is_held(job)

    def release(self, job: JobId) -> Command:
        return ("qrls", "-h", "o", job)

    def cancel(self, job: JobId) -> Command:
        return ("qdel", job)

    def force_end(self, job: JobId) -> Command:
        return ("qdel", "-f", job)

    def note(self, job: JobView, text: str) -> Command:
        """A word of its context, which has no blanks and commas: `qstat -j` shows it. An array has one for all its tasks."""
        words = re.sub(r"[^A-Za-z0-9._:/-]+", "_", one_line(text)).strip("_") or "refused"
        return ("qalter", "-ac", f"{NOTICE}={words}", job.number or job.id)


def _jobs(entry: str, bait: str) -> list[JobView]:
    """A job, or each task of an array that is listed by itself; tasks that wait together are one entry, `1-3:1`. One on the bait is on
    QUEUE@HOST, any other on HOST."""
    number, letters = _one(entry, "JB_job_number"), _one(entry, "state")
    if whole(number) is None:
        raise ValueError("qstat printed a job without a number")
    asked = dict(re.findall(r'<hard_request name="([a-z_]+)"[^>]*>([^<]*)</hard_request>', entry))
    slots = whole(_one(entry, "slots")) or 1
    instance = _one(entry, "queue_name")
    queue, _, host = instance.partition("@")
    on = instance if instance == bait else host
    tasks = [task for task in _one(entry, "tasks").split(",") if TASK.fullmatch(task)] or [""]
    size = memory(asked.get("h_vmem", "")) or 0
    image = asked.get("vm_image", "")
    return [
        JobView(
            id=f"{number}.{task}" if task else number, state=_state(letters), owner=_name(_one(entry, "JB_owner")),
            queue=_name(queue or _one(entry, "hard_req_queue").partition("@")[0]), image=image if NAME.fullmatch(image) else "",
            cpus=slots, memory=size * slots, on=(on,) if NAME.fullmatch(on) else (),
            array=(number, task) if task else ("", ""), number=number, name=_one(entry, "full_job_name"), starts=1 if "R" in letters else 0, reason=one_line(letters),
        )
        for task in tasks
    ]  # fmt: skip


def _is_held(job: JobView) -> bool:
    """Its state's letters are its reason; one that runs may be held, too."""
    return "h" in job.reason


def _one(entry: str, name: str) -> str:
    match = re.search(rf"<{name}(?: [^>]*)?>([^<]*)</{name}>", entry)
    return match[1].strip() if match else ""


def _name(text: str) -> str:
    return text if NAME.fullmatch(text) else ""


def _state(letters: str) -> JobState:
    """https://manpages.debian.org/bookworm/gridengine-client/qstat.1.en.html: d(eletion), E(rror), h(old), r(unning),
    R(estarted), s(uspended), S(uspended), t(ransfering), T(hreshold), q(ueued), w(aiting)."""
    if not re.fullmatch(r"[dEhrRsStTqw]{1,8}", letters):
        return JobState.UNKNOWN
    if "d" in letters:
        return JobState.ENDING
    if set("rst") & set(letters) or letters in ("S", "T"):
        return JobState.RUNNING
    return JobState.HELD if set("hE") & set(letters) else JobState.WAITING


CLIENT = GridEngineClient()
