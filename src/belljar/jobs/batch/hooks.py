"""What batch systems call besides the wrapper: `belljar internal prolog|epilog SYSTEM` as root around each job of this
node, and `hook SYSTEM NAME`, a program of one system only.

On several systems a prolog or epilog that fails takes the node or the queue out of service. So both always exit 0, and
errors go to the system's log. Only the dialect reads what the job set in their environment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from belljar import batch
from belljar.batch import Call, Settings
from belljar.errors import BelljarError, CommandFailed, HostError
from belljar.host.commands import SEARCH_PATH
from belljar.host.files import append_line, is_missing
from belljar.host.privileges import user_of
from belljar.jobs import Runtime, plain
from belljar.jobs.users import asked_as
from belljar.model import dumps

if TYPE_CHECKING:
    from belljar.batch.job.terms import Dialect
    from belljar.batch.node import Report

USER_TIMEOUT = 10.0  # seconds for the child that works as the job's user
KILLED = "--killed"  # after the user's name: the job was killed, and what keeps its machine with it


def run(act: str, system: str, words: list[str], runtime: Runtime) -> int:
    """Exit 0, always."""
    env, log = dict(os.environ), partial(_log, f"belljar internal {act} {system}", runtime.verbose)
    os.umask(0o022)
    try:
        os.environ.clear()
        os.environ["PATH"] = SEARCH_PATH
        dialect = batch.load(system).dialect
        try:
            runtime.settings  # noqa: B018 - read here: a mistake in them is logged once, and the work is done all the same
        except BelljarError as exc:
            log(exc.message)
            runtime.is_lenient = True
        if act == "prolog":
            prolog(dialect, env, tuple(words), runtime)
        else:
            for line in epilog(dialect, env, tuple(words), runtime):
                log(line)
    except BelljarError as exc:
        log(f"{exc.message} ({exc.hint})")
    except Exception as exc:  # a hook that fails closes the node
        log(f"{type(exc).__name__}: {exc}")
    return 0


def _log(hook: str, verbose: bool, text: str) -> None:
    """One line in the system's log; on stderr, which may be the job's own output file, only with -v."""
    import syslog

    line = plain(f"{hook}: {text}")[:500]
    with suppress(OSError):
        syslog.openlog("belljar", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_WARNING, line)
    if verbose:
        print(line, file=sys.stderr)


# -- before the job ------------------------------------------------------------------------------------------------------


def prolog(dialect: Dialect, env: dict[str, str], words: tuple[str, ...], runtime: Runtime) -> None:
    """The user's own folder below `paths.node`, where that is set; and the devices that the job was given, where the site has any."""
    node = runtime.settings.paths.node
    if node is None and not runtime.devices:
        return
    id, name = dialect.epilog(env, words)
    user = user_of(name)
    if node is not None and user.uid != 0:
        from belljar.jobs.node import make_folder

        make_folder(runtime, user)
    if runtime.devices and (given := dialect.devices(env)):
        from belljar.jobs.devices import bindings, of_job

        addresses = of_job(given, runtime, batch.load(dialect.name).title)
        bindings(runtime).bind(addresses, (user.uid, user.gid), f"{dialect.name}:{id}", runtime.devices)


# -- after the job -------------------------------------------------------------------------------------------------------


def epilog(dialect: Dialect, env: dict[str, str], words: tuple[str, ...], runtime: Runtime) -> Iterator[str]:
    """End what still lives of the job, as its user; count what that user's records say of the node. Yields what the log is told."""
    from belljar.batch import node
    from belljar.batch.job.terms import one_line
    from belljar.jobs import devices

    id, name = dialect.epilog(env, words)
    job, is_killed = f"{dialect.name}:{id}", KILLED in words
    what = f"end the machines of {job}"
    report = asked_as(runtime, user_of(name), lambda own: finish(own, job, is_killed), timeout=USER_TIMEOUT, what=what)
    try:
        devices.bindings(runtime).release(job=job)
    except BelljarError as exc:  # the reaper tries again
        yield f"{job}: {exc.message}"
    raw = report if isinstance(report, dict) else {}
    ended = raw.get("ended")
    for line in ended[:20] if isinstance(ended, list) else []:
        yield f"{job}: {one_line(str(line))}"
    if (newest := node.report_of(raw, job)) is not None:
        name = node.name_of(batch.load(dialect.name).node_variable, env, os.uname().nodename)
        yield from account(dialect, name, newest, runtime)


def finish(runtime: Runtime, job: str, is_killed: bool = False) -> dict[str, Any]:
    """In the child, as the user: end the job's machines and tell about the newest of them."""
    node = runtime.settings.paths.node
    try:
        if node is not None:
            is_missing(node / "batch")  # raises where the way there is not right
    except HostError as exc:  # its jobs leave no records, so that is counted for each that ends
        id, now = os.urandom(6).hex(), time.time()
        return {"machine": id, "started": now, "class": "node", "error": "HostError", "reason": exc.message}
    if not (runtime.folders.run.is_dir() or runtime.folders.logs.is_dir()):
        return {}
    from belljar.journal import JOB_KILLED, JOURNAL
    from belljar.machine.outside.registry import jobs_of

    views = [view for view in runtime.machines.list() if job in jobs_of(view)]
    for view in views if is_killed else ():
        append_line(view.folder / JOURNAL, dumps({"time": time.time(), "event": JOB_KILLED}))
    words = {True: "ended", False: "does not go away"}
    ended = {"ended": [f"machine {view.id} {words[runtime.reaper.end(view)]}" for view in views]}
    newest = runtime.machines.newest(job)
    if newest is None:
        return ended
    outcome = newest.outcome or {}
    end = {name: str(outcome.get(name, ""))[:400] for name in ("class", "error", "reason")}
    return {"machine": newest.id, "started": newest.created, **end, **ended}


def account(dialect: Dialect, node_name: str, report: Report, runtime: Runtime) -> Iterator[str]:
    """Count it; close the node where it was one fault too many. Yields what the log is told."""
    from belljar.batch.node import count
    from belljar.jobs.node import OUR_WORD, Known

    node = Known(runtime, dialect, node_name)
    with node.memory.locked():
        now, is_to_be_closed = count(node.memory.read(), report, runtime.settings.batch.node_faults)
        node.memory.write(now)
    if is_to_be_closed:
        node.close(f"{OUR_WORD}: {now.faults} node faults in a row: {report.reason}")
        yield f"{report.job}: node {node_name} closed: {report.reason}"


# -- hooks of a system's own ---------------------------------------------------------------------------------------------


def own(system: str, words: list[str], runtime: Runtime) -> int:
    """A program of one system only, mostly run as a job's user: the user's mistakes in the settings are the wrapper's
    to report."""
    from belljar.batch.job.policy import Asker
    from belljar.host.caller import caller
    from belljar.jobs.node import client_of

    name, *rest = words or [""]
    call = Call(
        name, tuple(rest), os.environ, lambda: go_by_the_site(runtime), lambda: Asker.of(caller()),
        client=lambda: client_of(runtime, system), images=lambda: _known_images(runtime),
    )  # fmt: skip
    return batch.load(system).hook(name)(call)


def go_by_the_site(runtime: Runtime) -> Settings:
    """The settings of batch jobs; a user's own mistakes in them are left out."""
    try:
        runtime.settings  # noqa: B018 - to see whether they can be read
    except BelljarError:
        runtime.is_lenient = all(mistake.is_users for mistake in runtime.inspect().mistakes)
    return runtime.settings.batch


def ask(system: str, runtime: Runtime) -> int:
    """How many running jobs the system knows, asked as any job's user would. Raises CommandFailed."""
    from belljar.batch.node import ask
    from belljar.jobs.node import runner

    answer = ask(batch.load(system).dialect, runner(runtime, system))
    if answer.living is None:
        raise CommandFailed(answer.trouble)
    return len(answer.living)


def _known_images(runtime: Runtime) -> list[str] | None:
    """The names of the site's images; None where its store cannot be seen from here (a submit host)."""
    paths = runtime.settings.paths
    try:
        return os.listdir((paths.site_store or paths.store) / "images/names")
    except OSError:
        return None
