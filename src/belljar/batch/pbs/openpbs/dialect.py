"""OpenPBS (20 and later): what it says to a batch job, and how it is answered.

The execjob_launch event of belljar_node.py has pbs_mom start the wrapper in place of the job's shell or program, if the job
is to have a machine:

    wrap-openpbs --facts={"image":"debian12",...} -- PROGRAM ARGV0 ARG...

Without an operator's rights only hooks can requeue, delay and hold a job: the wrapper leaves a note, which that hook reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from belljar.batch import Settings
from belljar.batch.job import verdict
from belljar.batch.job.terms import Command, Ending, Job, Surroundings, Verdict
from belljar.batch.pbs import common
from belljar.errors import OUR_FAILURE, NotInAJob
from belljar.model import Outcome

KILL_DELAY = 10.0  # a queue's kill_delay where the site set none: seconds between TERM and KILL
LEAST_GRACE = 1.0


class OpenPbs(common.Pbs):
    """The dialect."""

    name = "openpbs"
    select = ("qselect", "-T", "-s", "ERSTU")
    note = "-C"
    into_service = "-r"

    def read(self, here: Surroundings) -> Job:
        ident, aliases = common.job_id(here)
        attributes = _facts(here)
        program, *argv = here.argv
        line = here.stdin() if attributes.get("script") is True and not common.is_interactive(here) else None
        command = Command(program, tuple(argv) or (common.login_name(program),), line)
        wall = _number(attributes, "wall")
        return Job(
            system=self.name, id=ident, aliases=aliases, name=here.var("PBS_JOBNAME"),
            queue=_text(attributes, "queue") or here.var("PBS_QUEUE"), image=_text(attributes, "image"), native=command, inside=command,
            script=(common.spooled(line) or b"") if line is not None else b"", cpus=_number(attributes, "cpus"), memory=_number(attributes, "memory"),
            disk=_number(attributes, "disk"), wall=float(wall) if wall else None,
            started_before=max((_number(attributes, "runs") or 1) - 1, 0), lingers=True, keeps_output=True,
            grace=max(float(_number(attributes, "grace") or KILL_DELAY) - 2, LEAST_GRACE), staged=common.staged(here),
            answer=_text(attributes, "note").encode("utf-8", "surrogateescape"),
        )  # fmt: skip

    def again(self, job: Job, verdict_: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """By a note for the execjob_epilogue hook, which fails a job that had begun with `-r n`."""
        if not job.answer:
            return self.failed
        delay = verdict.delay(tries, settings) if verdict_ is Verdict.REQUEUE else 0.0
        # PBS loses a subjob that is to wait for a time, so this process keeps it for as long (the hook knows it, too).
        is_subjob = "[" in job.id
        why = common.plain(verdict.why(outcome, tries, verdict_, settings))
        later, begun = 0 if is_subjob else int(delay), verdict.has_begun(outcome)
        text = {"verdict": verdict_.value, "why": why, "delay": later, "begun": begun}
        note = json.dumps(text, separators=(",", ":")).encode()
        return Ending(
            OUR_FAILURE, files=((job.answer, note),), delay=delay if is_subjob else 0.0, otherwise=self.failed
        )

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        """UUIDs of GPUs or of their slices, as PBS's hook for control groups has them; a number is a user's own, by `qsub -V`."""
        names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith(("GPU-", "MIG-"))]
        return {"gpu": names} if names else {}


DIALECT = OpenPbs()


def _facts(here: Surroundings) -> dict[str, Any]:
    """What the hook wrote down of the job. Raises NotInAJob."""
    try:
        attributes = json.loads(here.options.get("facts", ""))
    except (ValueError, RecursionError):
        attributes = None
    if not isinstance(attributes, dict) or not here.argv:
        hint = "`belljar batch check openpbs` tells whether the hooks are in place."
        raise NotInAJob("no `--facts=` of the launch hook and no command: pbs_mom did not start this", hint=hint)
    return attributes


def _text(attributes: dict[str, Any], name: str) -> str:
    value = attributes.get(name)
    return value if isinstance(value, str) else ""


def _number(attributes: dict[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60 else None
