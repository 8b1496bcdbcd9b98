"""What a site needs for Grid Engine: three scripts, five complexes, a verifier, and attributes of queues.

The server is told all but the scripts, so one admin host installs for all; belljar must lie at the same path on each
node.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from belljar import __version__
from belljar.batch import Settings
from belljar.batch.gridengine.dialect import NOTICE
from belljar.batch.gridengine.hooks import ALLOWED, value, with_complexes
from belljar.batch.gridengine.jsv import ASKED, ASKED_DISK, FLAG, RESERVED, SHELL
from belljar.batch.install.commands import Needs
from belljar.batch.install.files import filled
from belljar.batch.install.pieces import HOOK_DEADLINE, Advice, Change, Clash, OurFile, Piece, Place
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

HOOK, METHOD, VERIFIER = "belljar-hook", "belljar-method", "belljar-jsv"
LIBRARY = Path(__file__).resolve().parents[2]
IN_USE = (
    f"Nothing was taken out. Take {ASKED} and {ASKED_DISK} out of `complex_values` of your queues and hosts, then uninstall again:"
    f" `qconf -dattr queue complex_values {ASKED}=IMAGE QUEUE`, `qconf -dattr exechost ... HOST`."
)
QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _common(variables: Mapping[str, str]) -> Path | None:
    root = variables.get("SGE_ROOT", "")
    return Path(root, variables.get("SGE_CELL", "default"), "common") if root else None


def _cell(folder: Path) -> dict[str, str]:
    return {"SGE_ROOT": str(folder.parent.parent), "SGE_CELL": folder.parent.name}


class GridEngineSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/var/lib/gridengine/default/common")
    needs = Needs(
        ("qconf", "qstat", "qalter", "qmod"),
        ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT"), home=_common, told_by=_cell,
        queues=(("qconf", "-sql"), r"(?m)^(\S+)$"), answers=("qconf", "-sconf", "global"),
    )  # fmt: skip

    def pieces(self, place: Place) -> Iterator[Piece]:
        """Option `queue`: names with commas between. Raises BadOption."""
        queues = queues_of(place)
        yield from _scripts(place)
        ours, path = (str(place.belljar), "internal", "hook", "gridengine"), str(place.wrapper.with_name(VERIFIER))
        yield Change(
            "complexes: what users ask with", ("qconf", "-sc"), partial(_has_complexes, {FLAG, SHELL, NOTICE}),
            do=((*ours, "complexes", "add"),), undo=((*ours, "complexes", "remove"),),
        )  # fmt: skip
        yield _complex_value("all hosts take interactive jobs", "exechost", "global", SHELL, "TRUE", ("TRUE",))
        yield Change(
            "verifier of the server", ("qconf", "-sconf", "global"), lambda shown: _has_verifier(shown, path),
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

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return ()  # the server hears of every change, and tells the hosts

    def findings(self, place: Place) -> Iterator[Finding]:
        host, what = os.uname().nodename, "the server answers"
        try:
            version = place.output("qconf", "-help").splitlines()[0]
            conf, admins, submitters = (
                place.output("qconf", *one) for one in (("-sconf", "global"), ("-sh",), ("-ss",))
            )
            managers, states = place.output("qconf", "-sm").split(), place.output("qstat", "-f")
        except BelljarError as exc:
            yield fail(what, exc.message, "Start sge_qmaster; set SGE_ROOT and SGE_CELL.")
            return
        yield ok(what, version)
        without = "jobs here cannot count their failures: they are held after the second"
        yield _is_listed(host, submitters, "a submit host", without, "-as")
        yield _is_listed(host, admins, "an admin host", "this node cannot be closed by belljar", "-ah")
        remedy = "`qconf -am root`; without it no node can be closed."
        yield expect("root is a manager", "root" in managers, "", remedy)
        yield from _params(value(conf, "qmaster_params"), value(conf, "execd_params"))
        for queue in queues_of(place):
            yield _state(states, queue)


def queues_of(place: Place) -> list[str]:
    """The queues named by the option. Raises BadOption for what can be no queue's name."""
    names = [name.strip() for name in place.options.get("queue", "").split(",") if name.strip()]
    for name in names:
        if not QUEUE_NAME.fullmatch(name):
            raise BadOption(f"queue {name}: no name of a queue", hint="`qconf -sql` lists them.")
    return names


def _scripts(place: Place) -> Iterator[OurFile]:
    root, cell = place.folder.parent.parent, place.folder.parent.name
    words = {
        "root": shlex.quote(str(root)), "cell": shlex.quote(cell), "deadline": HOOK_DEADLINE,
        "belljar": shlex.quote(str(place.belljar)), "version": __version__, "per_slot": ",".join(_per_slot(place)),
        "fingerprint": fingerprint(LIBRARY, place.settings),
    }  # fmt: skip
    for name in (HOOK, METHOD, VERIFIER):
        text = filled(Path(__file__).with_name(f"{name}.sh"), **words)
        yield OurFile("what the queues and the server call", place.wrapper.with_name(name), text)


def fingerprint(library: Path, settings: Settings) -> str:
    """16 hexadecimal digits for all that the verifier reads when the server starts it: it keeps that until its file changes."""
    found = hashlib.sha256(repr(settings).encode())
    for path in sorted(library.rglob("*.py")):
        text = path.read_bytes()
        found.update(f"\n{path.relative_to(library)} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]


def _per_slot(place: Place) -> list[str]:
    """Which of the memory complexes this site counts for each slot (consumable YES), in the order of the list."""
    try:
        shown = place.output("qconf", "-sc")
    except BelljarError:
        return []
    rows = (line.split() for line in shown.splitlines() if not line.startswith("#"))
    return [row[0] for row in rows if len(row) == 8 and row[0] in RESERVED and row[5].upper() == "YES"]


def _has_complexes(names: set[str], shown: bytes) -> bool:
    """False as well where one of ours is the site's own, for `complexes add` to say so."""
    text = shown.decode(errors="replace")
    try:
        with_complexes(text)
    except BelljarError:
        return False
    return names <= {line.split()[0] for line in text.splitlines() if line.strip()}


def _has_verifier(shown: bytes, path: str) -> bool:
    text = shown.decode(errors="replace")
    return value(text, "jsv_url") == path and ALLOWED in value(text, "jsv_allowed_mod").split(",")


def attributes(place: Place) -> dict[str, str]:
    """A queue's attributes as belljar wants them."""
    hook, method = place.wrapper.with_name(HOOK), place.wrapper.with_name(METHOD)
    job = "$job_id $ja_task_id $job_owner"
    return {
        "starter_method": str(place.wrapper),
        "prolog": f"root@{hook} prolog {job}",
        "epilog": f"root@{hook} epilog {job}",
        **{f"{name}_method": f"{method} {name} $job_pid" for name in ("suspend", "resume", "terminate")},
    }


def _queue(place: Place, queue: str) -> Iterator[Piece]:
    """The attributes of one queue. What a site has set itself stays: then somebody has to make the one call the other."""
    try:
        shown = place.output("qconf", "-sq", queue)
    except BelljarError as exc:
        yield Clash(f"queue {queue}", f"{exc.message}; `qconf -sql` lists the queues")
        return
    for name, wanted in attributes(place).items():
        there = value(shown, name)
        if there.lower() not in ("", "none", wanted.lower()):
            text = f"queue {queue} has {name} {there}. Let that call, or be, what belljar needs: {wanted}"
            yield Advice(f"{name} of queue {queue}", text)
            continue
        yield Change(
            f"{name} of queue {queue}", ("qconf", "-sq", queue), _is_value(name, wanted),
            do=(("qconf", "-mattr", "queue", name, wanted, queue),),
            undo=(("qconf", "-mattr", "queue", name, "NONE", queue),),
        )  # fmt: skip
    yield _complex_value(f"queue {queue} has machines", "queue", queue, FLAG, "TRUE", ("TRUE", "1"))
    any_value = ("FALSE", "0", "TRUE", "1")
    yield _complex_value(f"queue {queue} takes no interactive jobs", "queue", queue, SHELL, "FALSE", any_value)


def _is_value(name: str, wanted: str) -> Callable[[bytes], bool]:
    return lambda shown: value(shown.decode(errors="replace"), name) == wanted


def _complex_value(purpose: str, kind: str, whose: str, name: str, wanted: str, accepted: tuple[str, ...]) -> Change:
    """One of the complex values of a host or queue; *accepted*: as good as what is wanted."""

    def is_there(shown: bytes) -> bool:
        values = re.split(r"[\s,]+", value(shown.decode(errors="replace"), "complex_values"))
        return any(f"{name}={one}" in values for one in accepted)

    mark = f"{name}={wanted}" if kind == "queue" else name
    return Change(
        purpose, ("qconf", "-sq" if kind == "queue" else "-se", whose), is_there,
        do=(("qconf", "-mattr", kind, "complex_values", f"{name}={wanted}", whose),),
        undo=(("qconf", "-dattr", kind, "complex_values", mark, whose),),
    )  # fmt: skip


def _is_listed(host: str, shown: str, what: str, without: str, option: str) -> Finding:
    names = {line.strip().partition(".")[0].lower() for line in shown.splitlines()}
    is_there = host.partition(".")[0].lower() in names
    return expect(f"this host is {what}", is_there, "" if is_there else without, f"`qconf {option} {host}`")


def _params(params: str, of_hosts: str) -> Iterator[Finding]:
    """What of qmaster_params and execd_params changes the meaning of an ending."""
    words = [word for word in re.split(r"[,\s]+", params) if not word.lower().endswith(("=false", "=0"))]
    on = {word.partition("=")[0].upper() for word in words}
    for name, means in (
        ("FORBID_RESCHEDULE", "a job for which no machine could be started ends with exit code 99"),
        ("FORBID_APPERROR", "a job that is to be held ends with exit code 100"),
    ):
        is_set = name in on
        yield expect(f"{name} is not set", not is_set, means if is_set else "", f"Take {name} out of qmaster_params.")
    is_off = re.search(r"(?i)ENABLE_ADDGRP_KILL=(false|0)", of_hosts) is not None
    yield expect("ENABLE_ADDGRP_KILL", not is_off, "", "What leaves its process group outlives its job: switch it on.")


def _state(states: str, queue: str) -> Finding:
    """A queue instance in error takes no jobs."""
    rows = (line.split() for line in states.splitlines() if line.startswith(f"{queue}@"))
    bad = [f"{row[0]} {row[5]}" for row in rows if len(row) > 5 and set(row[5]) & set("Ecou")]
    remedy = "`qstat -explain E`, then `qmod -cq QUEUE@HOST`."
    return expect(f"queue {queue} takes jobs", not bad, ", ".join(bad), remedy)


SITE = GridEngineSite()
