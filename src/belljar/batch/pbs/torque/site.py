"""What a Torque site needs: `$job_starter` and a prologue on each node, one exit code on the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Advice, Change, Clash, OurFile, OurLines, Piece, Place
from belljar.batch.pbs.common import ANSWERS, PROGRAMS, QUEUES, reread, roles
from belljar.batch.pbs.torque.dialect import AGAIN_STATUS, RECORD
from belljar.errors import BadOption
from belljar.findings import Finding, expect

OPTIONS = ("queue", "hooks")
REQUEUE = "automatic_requeue_exit_code"


class TorqueSite:
    """`folder`, Torque's home, tells whether this host is the server (server_priv), a node (mom_priv) or both."""

    default_folder = Path("/var/spool/torque")
    needs = Needs((*PROGRAMS, "qalter", "qhold", "qstat"), ("PBS_DEFAULT",), queues=QUEUES, answers=ANSWERS)

    def pieces(self, place: Place) -> list[Piece]:
        """`--set hooks=own`: prologue and epilogue are put beside the wrapper, for the site's own ones to call."""
        if place.options.get("hooks", "ours") not in ("ours", "own"):
            raise BadOption("--set hooks: ours or own")
        is_server, is_node = roles(place, "torque", OPTIONS, "Torque's home")
        is_own = place.options.get("hooks") == "own"
        folder = place.wrapper.parent if is_own else place.folder / "mom_priv"
        scripts = [Path(__file__).with_name(f"{name}.sh") for name in ("prologue", "epilogue") if is_own or is_node]
        hooks = [OurFile(file.stem, folder / file.stem, place.filled(file, record=RECORD)) for file in scripts]
        return [*hooks, *([_server(place)] if is_server else ()), *(_node(place, is_own) if is_node else ())]

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return reread(place)

    def findings(self, place: Place) -> Iterator[Finding]:
        if (place.folder / "server_priv").is_dir():
            delay, what = _attribute(place, "kill_delay"), "kill_delay leaves a job time to end"
            seconds = int(delay) if delay.isdecimal() else 2
            remedy = "qmgr -c 'set server kill_delay = 15', and `batch.grace = 13` in belljar's settings."
            yield expect(what, seconds >= 5, f"{seconds} s between TERM and KILL", remedy)


def _server(place: Place) -> Piece:
    """A clash where the site uses the one requeue code there is for something of its own."""
    present, directive = _attribute(place, REQUEUE), f"set server {REQUEUE} = {AGAIN_STATUS}"
    if present not in ("", str(AGAIN_STATUS)):
        return Clash(
            REQUEUE, f"{present}: the site has a use for it, and Torque has only one. Unset it (`qmgr -c 'unset server {REQUEUE}'`),"
            " or run without requeue: leave the server alone and install on the nodes only",
        )  # fmt: skip
    return Change(
        "a job for which no machine could be started is queued again", ("qmgr", "-c", "print server"),
        lambda printed: directive in printed.splitlines(), (("qmgr", "-c", directive),),
        (("qmgr", "-c", f"unset server {REQUEUE}"),),
    )  # fmt: skip


def _attribute(place: Place, name: str) -> str:
    """A server attribute, a list's parts with commas; "" where it is not set or the server cannot be asked."""
    out = place.asked("qmgr", "-c", "print server")
    return ",".join(value.strip() for value in re.findall(rf"^set server {name} \+?= (.*)$", out, re.MULTILINE))


def _node(place: Place, is_own: bool) -> Iterator[Piece]:
    mom = place.folder / "mom_priv"
    if is_own:
        yield Advice(
            "prologue and epilogue",
            f"Let your own {mom}/prologue and epilogue call {place.wrapper.parent}/prologue and epilogue with all"
            ' their arguments ("$@"), and with their environment.',
        )
    yield OurLines(
        "every job is started by belljar's wrapper", mom / "config", (f"$job_starter {place.wrapper}",),
        clashes=(r"\$job_starter\b", r"\$job_starter_run_privileged\b"),
    )  # fmt: skip


SITE = TorqueSite()
