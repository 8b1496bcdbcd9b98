"""What a site needs for Grid Engine: three scripts, five complexes, a verifier, and attributes of queues.

The server is told all but the scripts, so one admin host installs for all; belljar must lie at the same path on each
node.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from belljar import __version__
from belljar.batch import Settings
from belljar.batch.gridengine.dialect import NOTICE
from belljar.batch.gridengine.hooks import ALLOWED, value, with_complexes
from belljar.batch.gridengine.jsv import ASKED, ASKED_DISK, FLAG, RESERVED, SHELL
from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Advice, Change, Clash, OurFile, Piece, Place, SiteOfSystem
from belljar.batch.job.terms import NODE_NAME
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

HOOK, METHOD, VERIFIER = "belljar-hook", "belljar-method", "belljar-jsv"
IN_USE = (
    f"Nothing was taken out. Take {ASKED} and {ASKED_DISK} out of `complex_values` of your queues and hosts, then uninstall again:"
    f" `qconf -dattr queue complex_values {ASKED}=IMAGE QUEUE`, `qconf -dattr exechost ... HOST`."
)


def _common(variables: Mapping[str, str]) -> Path | None:
    root = variables.get("SGE_ROOT", "")
    return Path(root, variables.get("SGE_CELL", "default"), "common") if root else None


class GridEngineSite(SiteOfSystem):
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/var/lib/gridengine/default/common")
    needs = Needs(
        ("qconf", "qstat", "qalter", "qmod"),
        ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT"), home=_common,
        told_by=lambda folder: {"SGE_ROOT": str(folder.parent.parent), "SGE_CELL": folder.parent.name},
        queues=(("qconf", "-sql"), r"(?m)^(\S+)$"), answers=("qconf", "-sconf", "global"),
    )  # fmt: skip

    def pieces(self, place: Place) -> Iterator[Piece]:
        """Option `queue`: names with commas between. Raises BadOption."""
        queues = [name.strip() for name in place.options.get("queue", "").split(",") if name.strip()]
        if wrong := [name for name in queues if not NODE_NAME.fullmatch(name)]:
            raise BadOption(f"queue {wrong[0]}: no name of a queue", hint="`qconf -sql` lists them.")
        words = {
            "version": __version__, "per_slot": ",".join(_per_slot(place)), "fingerprint": fingerprint(place.settings),
            "root": shlex.quote(str(place.folder.parent.parent)), "cell": shlex.quote(place.folder.parent.name),
        }  # fmt: skip
        for name in (HOOK, METHOD, VERIFIER):
            text = place.filled(Path(__file__).with_name(f"{name}.sh"), **words)
            yield OurFile("what the queues and the server call", place.wrapper.with_name(name), text)
        ours, path = (str(place.belljar), "internal", "hook", "gridengine"), str(place.wrapper.with_name(VERIFIER))
        yield Change(
            "complexes: what users ask with", ("qconf", "-sc"), partial(_has_complexes, {FLAG, SHELL, NOTICE}),
            do=((*ours, "complexes", "add"),), undo=((*ours, "complexes", "remove"),),
        )  # fmt: skip
        yield _complex_value("all hosts take interactive jobs", "exechost", "global", f"{SHELL}=TRUE")
        yield Change(
            "verifier of the server", ("qconf", "-sconf", "global"),
            lambda shown: value(shown, "jsv_url") == path and ALLOWED in value(shown, "jsv_allowed_mod").split(","),
            do=((*ours, "verifier", "set", path),), undo=((*ours, "verifier", "unset", path),),
        )  # fmt: skip
        for queue in queues:
            yield from _queue(place, queue)
        if not queues:
            yield Advice("queues whose jobs may have machines", "Say which: --queue all.q, once for each.")
        # Last here is first out: Grid Engine refuses that while the site's queues or hosts offer one, and jobs with it
        # would run there without the hooks.
        yield Change(
            "complexes: the image and the disk", ("qconf", "-sc"), partial(_has_complexes, {ASKED, ASKED_DISK}),
            do=((*ours, "complexes", "add"),), undo=((*ours, "complexes", "remove", ASKED, ASKED_DISK),), undo_hint=IN_USE,
        )  # fmt: skip

    def findings(self, place: Place) -> Iterator[Finding]:
        host = os.uname().nodename
        try:
            version = place.output("qconf", "-help").splitlines()[0]
            submitters, admins, managers = (place.output("qconf", option) for option in ("-ss", "-sh", "-sm"))
        except BelljarError as exc:
            yield fail("the server answers", exc.message, "Start sge_qmaster; set SGE_ROOT and SGE_CELL.")
            return
        yield ok("the server answers", version)
        for what, name, shown, without, option in (
            ("this host is a submit host", host, submitters, "jobs here cannot count their failures", "-as"),
            ("this host is an admin host", host, admins, "this node cannot be closed by belljar", "-ah"),
            ("root is a manager", "root", managers, "no node can be closed by belljar", "-am"),
        ):
            names = {line.strip().partition(".")[0].lower() for line in shown.splitlines()}
            is_there = name.partition(".")[0].lower() in names
            yield expect(what, is_there, "" if is_there else without, f"`qconf {option} {name}`")


def fingerprint(settings: Settings) -> str:
    """For what the verifier reads when the server starts it: the server keeps it running until its file changes."""
    return hashlib.sha256(f"{__version__} {settings!r}".encode()).hexdigest()[:16]


def _per_slot(place: Place) -> list[str]:
    """Which of the memory complexes this site counts for each slot (consumable YES), in the order of the list."""
    rows = (line.split() for line in place.asked("qconf", "-sc").splitlines() if not line.startswith("#"))
    return [row[0] for row in rows if len(row) == 8 and row[0] in RESERVED and row[5].upper() == "YES"]


def _has_complexes(names: set[str], shown: str) -> bool:
    """False as well where one of ours is the site's own, for `complexes add` to say so."""
    try:
        with_complexes(shown)
    except BelljarError:
        return False
    return names <= {line.split()[0] for line in shown.splitlines() if line.strip()}


def _is_value(name: str, expected: str, shown: str) -> bool:
    return value(shown, name) == expected


def _queue(place: Place, queue: str) -> Iterator[Piece]:
    """The attributes of one queue. What a site has set itself stays: then somebody has to make the one call the other."""
    try:
        shown = place.output("qconf", "-sq", queue)
    except BelljarError as exc:
        yield Clash(f"queue {queue}", f"{exc.message}; `qconf -sql` lists the queues")
        return
    hook, method, job = place.wrapper.with_name(HOOK), place.wrapper.with_name(METHOD), "$job_id $ja_task_id $job_owner"
    attributes = {
        "starter_method": str(place.wrapper), "prolog": f"root@{hook} prolog {job}", "epilog": f"root@{hook} epilog {job}",
        **{f"{name}_method": f"{method} {name} $job_pid" for name in ("suspend", "resume", "terminate")},
    }  # fmt: skip
    for name, expected in attributes.items():
        present = value(shown, name)
        if present.lower() not in ("", "none", expected.lower()):
            text = f"queue {queue} has {name} {present}. Let that call, or be, what belljar needs: {expected}"
            yield Advice(f"{name} of queue {queue}", text)
            continue
        yield Change(
            f"{name} of queue {queue}", ("qconf", "-sq", queue), partial(_is_value, name, expected),
            do=(("qconf", "-mattr", "queue", name, expected, queue),),
            undo=(("qconf", "-mattr", "queue", name, "NONE", queue),),
        )  # fmt: skip
    yield _complex_value(f"queue {queue} has machines", "queue", queue, f"{FLAG}=TRUE", ("1",))
    purpose = f"queue {queue} takes no interactive jobs"
    yield _complex_value(purpose, "queue", queue, f"{SHELL}=FALSE", ("0", "TRUE", "1"))


def _complex_value(purpose: str, kind: str, whose: str, pair: str, as_good: tuple[str, ...] = ()) -> Change:
    """One of the complex values of a host or queue; *as_good*: other values that may stand there."""
    name = pair.partition("=")[0]
    fine = {pair, *(f"{name}={other}" for other in as_good)}
    return Change(
        purpose, ("qconf", "-sq" if kind == "queue" else "-se", whose),
        lambda shown: not fine.isdisjoint(re.split(r"[\s,]+", value(shown, "complex_values"))),
        do=(("qconf", "-mattr", kind, "complex_values", pair, whose),),
        undo=(("qconf", "-dattr", kind, "complex_values", pair if kind == "queue" else name, whose),),
    )  # fmt: skip


SITE = GridEngineSite()
