"""Torque (6): what it says to a batch job, and how it is answered.

pbs_mom starts every job and every task of its task manager through `$job_starter` of its configuration:

    wrap-torque SHELL                         a script; its path is one line on standard input (the default build)
    wrap-torque SHELL /…/jobs/ID.SC           the same, built with --enable-shell-use-argv
    wrap-torque SHELL [-c COMMAND]            an interactive job; standard input is its terminal
    wrap-torque PROGRAM ARG...                a task (pbsdsh, mpiexec), looked for in PATH

The shell's argv[0] does not reach the starter (start_exec.c, mom_jobstarter_execute_job). It is made again: a login shell's,
unless `$source_login_batch` or `$source_login_interactive` says no.

A job asks for its image by a variable: `qsub -v VM_IMAGE=NAME`. What it asks for with -l does not reach it; the prologue
(site.py) writes that beside the job's node file, without resources of a site's own, which pbs_mom does not see.
"""

from __future__ import annotations

import os
import re
import time

from belljar.batch import Settings
from belljar.batch.job import verdict
from belljar.batch.job.terms import Command, Ending, Job, Surroundings, Verdict, whole
from belljar.batch.pbs import common
from belljar.batch.pbs.sizes import seconds, size
from belljar.errors import NotInAJob
from belljar.model import Outcome
from belljar.records import replace

ENV = b"/usr/bin/env"
RECORD = ".belljar"  # beside PBS_NODEFILE
KILL_DELAY = 2.0  # the server's kill_delay where the site set none: seconds between TERM and KILL
LEAST_GRACE = 1.0
# Death by this signal is exit status 319 to Torque (256 + 63), which no exit code of a payload can be. The server's
# automatic_requeue_exit_code is set to it: a job that ends so is queued again.
AGAIN_SIGNAL = 63
AGAIN_STATUS = 256 + AGAIN_SIGNAL
# https://github.com/adaptivecomputing/torque (src/resmom/parse_config.c, setbool)
NO = ("0", "no", "false", "off")


class Torque(common.Pbs):
    """The dialect."""

    name = "torque"
    select = ("qselect", "-s", "ERT")
    note = "-N"
    into_service = "-c"

    def read(self, here: Surroundings) -> Job:
        ident, aliases = common.job_id(here)
        if not here.argv:
            raise NotInAJob("no shell and no command: pbs_mom did not start this")
        asked, queue = _record(here)
        # All but the job's own shell or program was started by the task manager (pbsdsh, mpiexec).
        is_first = here.var("PBS_TASKNUM") in ("", "1") and here.var("PBS_NODENUM") in ("", "0")
        command, script = _shell(here) if is_first else (_task(here), b"")
        nodes = whole(here.var("PBS_NUM_NODES")) or 1
        cpus = whole(here.var("PBS_NUM_PPN"))
        return Job(
            system=self.name, id=ident, aliases=aliases, name=here.var("PBS_JOBNAME"), queue=queue or here.var("PBS_QUEUE"),
            image=here.var("VM_IMAGE"), native=command, inside=command, script=script, cpus=cpus,
            memory=_memory(asked, nodes, cpus or 1), disk=size(here.var("VM_DISK") or asked.get("file", "")),
            wall=seconds(here.var("PBS_WALLTIME")) or seconds(asked.get("walltime", "")) or None, lingers=True,
            reruns=False,  # unless the server says so
            grace=max(KILL_DELAY - 2, LEAST_GRACE), staged=common.staged(here),
        )  # fmt: skip

    def again(self, job: Job, verdict_: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """By the owner's commands and a death that the server takes for `again`; else it fails."""
        if verdict_ is Verdict.HOLD:
            command: tuple[str, ...] = ("qhold", "-h", "u", job.id)
        else:
            then = time.localtime(outcome.ended + max(verdict.delay(tries, settings), 1))
            command = ("qalter", "-a", time.strftime("%Y%m%d%H%M.%S", then), job.id)
        return Ending(exit_code=None, signal=AGAIN_SIGNAL, commands=(command,), otherwise=self.failed)

    def count(self, job: Job) -> tuple[str, ...]:
        return ("qstat", "-f", job.id)

    def counted(self, job: Job, printed: bytes) -> Job:
        """Starts before this one: Torque counts no others. It tells as well whether a job that had begun may begin again. A line break in
        a variable begins a line, too: so nobody's words make it fewer starts, or let a job begin again."""
        reruns = set(re.findall(rb"^\s*Rerunable = (\S+)\s*$", printed, re.MULTILINE))
        starts = map(int, re.findall(rb"^\s*start_count = ([0-9]{1,6})\s*$", printed, re.MULTILINE))
        return replace(job, reruns=reruns == {b"True"}, failed_starts=max(max(starts, default=1) - 1, 0))


DIALECT = Torque()


def _shell(here: Surroundings) -> tuple[Command, bytes]:
    """(the job's shell as pbs_mom would have started it, the script it runs)."""
    shell, *words = here.argv
    interactive = common.is_interactive(here)
    name = common.login_name(shell) if _is_login(here, interactive) else shell.rpartition(b"/")[2]
    argv = (name, *words)
    if interactive:
        return Command(shell, argv), b""
    named = next((match for word in words if (match := common.SCRIPT.fullmatch(word))), None)
    if named:
        return Command(shell, argv), named[1]
    line = here.stdin()
    return Command(shell, argv, line), common.spooled(line) or b""


def _task(here: Surroundings) -> Command:
    """A task's program, where execvp finds it: `env` looks in the same PATH, and becomes it."""
    program = here.argv[0]
    if b"/" in program or b"=" in program or program.startswith(b"-"):
        return Command(program, here.argv)
    return Command(ENV, (b"env", *here.argv))


def _is_login(here: Surroundings, interactive: bool) -> bool:
    """What pbs_mom's configuration says of login shells; where it cannot be read, what it does by itself."""
    key = b"$source_login_interactive" if interactive else b"$source_login_batch"
    home = here.var("PBS_NODEFILE").partition("/aux/")[0]
    text = here.peek(os.fsencode(home and f"{home}/mom_priv/config"))
    values = [words[1] for words in map(bytes.split, text.splitlines()) if len(words) > 1 and words[0] == key]
    return not values or values[-1].decode("ascii", "replace").lower() not in NO


def _record(here: Surroundings) -> tuple[dict[str, str], str]:
    """(what the job asked for with -l, its queue), as the prologue wrote them down; nothing where it did not."""
    path = here.var("PBS_NODEFILE")
    text = here.peek(os.fsencode(path + RECORD)) if path.startswith("/") else b""
    asked, _, queue = text.decode("utf-8", "replace").partition("\n")
    pairs = (word.partition("=") for word in asked.split(","))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}, queue.strip()


def _memory(asked: dict[str, str], nodes: int, cpus: int) -> int | None:
    """For the job on this node: `mem` is for all nodes together, `pmem` for each process."""
    whole_job, process = size(asked.get("mem", "")), size(asked.get("pmem", ""))
    return min((part for part in (whole_job and whole_job // nodes, process and process * cpus) if part), default=None)
