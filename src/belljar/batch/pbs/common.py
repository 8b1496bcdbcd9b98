"""What OpenPBS and Torque have in common: the line a job's shell reads, times, node files, job ids, commands for nodes.

Both spool a script as `PBS_HOME/mom_priv/jobs/ID.SC` and start the user's login shell with one line on its standard
input: that path. Torque may put `exec ` before it and `qsub -F` arguments after it; OpenPBS puts `cd DIR;` before it
(`-W sandbox=PRIVATE`) and a backslash before each bracket of a subjob's id.
https://github.com/openpbs/openpbs (src/resmom/start_exec.c),
https://github.com/adaptivecomputing/torque (src/resmom/start_exec.c)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.batch.job.terms import Dialect, Staged, Surroundings, one_line
from belljar.errors import BadOption, NotInAJob

if TYPE_CHECKING:
    from belljar.batch.install.pieces import Place

PROGRAMS = ("pbsnodes", "qselect", "qmgr")
QUEUES = (("qmgr", "-c", "print server"), r"(?m)^create queue (\S+)")
ANSWERS = ("qmgr", "-c", "list server")
OURS = "belljar:"  # begins the comment of a node we closed
SCRIPT = re.compile(rb"(?:cd [^\0\n]*;)?(?:exec )?(/[^\0\n;]*/mom_priv/jobs/[^\0\n/]+?\.SC)(?: [^\0\n]*)?\n?")
ESCAPED = re.compile(rb"\\([][])")
JOB_ID = re.compile(r"([0-9]{1,12}(?:\[[0-9]{1,9}\]|-[0-9]{1,9})?)(\.[A-Za-z0-9._-]{1,255})?")
USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,255}\$?")
BATCH = "PBS_BATCH"  # PBS_ENVIRONMENT of a job that is not interactive
FILES = ("PBS_NODEFILE", "PBS_GPUFILE", "PBS_MICFILE")


def spooled(line: bytes) -> bytes | None:
    """The script a login shell is told to run; None if that is not such a line."""
    match = SCRIPT.fullmatch(line)
    return ESCAPED.sub(rb"\1", match[1]) if match else None


def is_interactive(here: Surroundings) -> bool:
    return here.var("PBS_ENVIRONMENT") not in ("", BATCH)


def login_name(shell: bytes) -> bytes:
    """`-bash` for /bin/bash: what makes a shell a login shell."""
    return b"-" + shell.rpartition(b"/")[2]


def job_id(here: Surroundings) -> tuple[str, tuple[str, ...]]:
    """(PBS_JOBID, the same without the server's name). Raises NotInAJob."""
    ident = here.var("PBS_JOBID")
    match = JOB_ID.fullmatch(ident)
    if match is None:
        raise NotInAJob(f"PBS_JOBID is {ident[:60]!r}: this is no job of PBS")
    return ident, (match[1],) if match[2] else ()


def staged(here: Surroundings) -> Staged:
    """The node files, and the job's own temporary folder."""
    return Staged(into=here.paths(*FILES), folders=here.paths("TMPDIR"))


class Pbs(Dialect):
    """The commands around a node. Both systems take the same words, `pbsnodes` and `qselect` but for one option each."""

    name = ""
    select: tuple[str, ...] = ()
    note: str = ""  # the option of pbsnodes that sets a comment
    into_service: str = ""  # the one that takes a node into service

    def alive(self) -> tuple[str, ...]:
        """For all nodes: one command, one line for each job."""
        return self.select

    def living(self, printed: bytes) -> frozenset[str]:
        jobs: set[str] = set()
        for row in printed.decode("utf-8", "replace").splitlines():
            match = JOB_ID.fullmatch(row.strip())
            if match is None:
                raise ValueError(f"qselect printed {row[:60]!r} in the list of jobs")
            jobs |= {match[0], match[1]}
        return frozenset(jobs)

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        text = plain(f"{OURS} {reason.removeprefix(OURS).strip()}")
        return (("pbsnodes", "-o", self.note, text, node),)

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("pbsnodes", self.into_service, self.note, "", node),)

    def why_closed(self, node: str) -> tuple[str, ...]:
        return ("pbsnodes", node)

    def closed_by_us(self, printed: bytes) -> bool:
        text = printed.decode("utf-8", "replace")
        state = re.search(r"^\s*state = (.*)$", text, re.MULTILINE)
        comment = re.search(r"^\s*(?:comment|note) = (.*)$", text, re.MULTILINE)
        is_closed = state is not None and "offline" in re.split(r"[\s,]+", state[1])
        return bool(is_closed and comment and comment[1].startswith(OURS))

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        """As pbs_mom calls its prologue and epilogue: job id, user, group, ..."""
        if len(argv) < 2 or not JOB_ID.fullmatch(argv[0]) or not USER.fullmatch(argv[1]):
            raise NotInAJob(f"{self.name}: the hook's first two arguments are to be a job's id and its user's name")
        return argv[0], argv[1]


def plain(text: str) -> str:
    """One short line of printable ASCII without quotes: qmgr and pbsnodes have no escape for them."""
    return one_line(text, without="\"'\\")


def roles(place: Place, system: str, options: tuple[str, ...], home: str) -> tuple[bool, bool]:
    """(a server, a node). Raises BadOption for options nobody knows, and for a folder that is no home of the system."""
    if unknown := set(place.options) - set(options):
        hint = f"Known are: {', '.join(options) or 'none'}."
        raise BadOption(f"--set {min(unknown)}: no option of {system}", hint=hint)
    is_server, is_node = ((place.folder / part).is_dir() for part in ("server_priv", "mom_priv"))
    if not (is_server or is_node):
        what = f"{place.folder}: neither server_priv nor mom_priv is there"
        raise BadOption(what, hint=f"Give {home} with --folder.")
    return is_server, is_node


def reread(place: Place) -> tuple[tuple[str, ...], ...]:
    """pbs_mom reads its configuration again at HUP. Its lock (number, newline, in Torque NUL) may be a dead one's."""
    try:
        pid = (place.folder / "mom_priv/mom.lock").read_bytes().rstrip(b"\0\n").decode("ascii", "replace")
        is_mom = pid.isdecimal() and Path(f"/proc/{pid}/comm").read_bytes() == b"pbs_mom\n"
    except OSError:
        return ()
    return (("kill", "-HUP", pid),) if is_mom else ()
