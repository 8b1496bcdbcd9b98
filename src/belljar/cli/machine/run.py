"""`belljar run`: a command or a script in its own fresh virtual machine. This is the way every job takes."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from belljar.assembly import Runtime
from belljar.cli.parser import Args, acts
from belljar.errors import OUR_FAILURE, BadOption
from belljar.host.descriptors import CLOSED
from belljar.host.files import write_all
from belljar.host.processes import die_by
from belljar.jobs import complain, tell_troubles
from belljar.model import Cause, Outcome, OwnWork, Request, RunPayload, dumps


def run(args: Args, runtime: Runtime) -> int:
    """Keep the machine to its end, or have it kept."""
    from belljar.jobs.attend import attend
    from belljar.jobs.starting import ensure_image, finish_the_dead, widen_limits

    order = ordered(args, runtime) if args.restore is None else restored(args)
    if args.detach:
        return detach(order, args, runtime)
    report = None if args.report is None else open_report(args.report)
    widen_limits()
    finish_the_dead(runtime)
    ensure_image(runtime, order.machine.image)
    announce = (lambda: tell_ports(order, runtime)) if order.machine.ports else None
    outcome = attend(runtime, _with_user_data(order, args, runtime), claimed=announce)
    if report is not None:
        write_report(report, args.report, outcome)
    tell_troubles(outcome)
    if isinstance(order.work, OwnWork) and outcome.cause is Cause.FINISHED:
        complain(f"{outcome.id}: {outcome.reason}", "")  # it has no other way to say how it went
    return leave(outcome)


def ordered(args: Args, runtime: Runtime) -> Request:
    from belljar.cli.machine import request
    from belljar.jobs.starting import brought_image

    image = brought_image(runtime, args.image)
    if image and (recipe := image.recipe):  # a warm image's machines are of its size, or larger
        args.cpus = recipe.cpus if args.cpus is None else args.cpus
        args.memory = recipe.memory if args.memory is None else args.memory
    return request.build(args, runtime.settings, image.container if image else None)


def restored(args: Args) -> Request:
    from belljar.jobs.starting import restored_request

    for option, value in (("a command", args.command), ("--image", args.image)):
        if value:
            raise BadOption(f"--restore with {option}: the machine goes on with what it was doing, in its own image")
    return restored_request(args.restore, args.name)


def detach(order: Request, args: Args, runtime: Runtime) -> int:
    """Have the machine kept by a process of its own, and say which it is."""
    from belljar.machine.outside import detached

    for option, is_given in (("--tty", args.tty), ("--report", args.report is not None)):
        if is_given:
            raise BadOption(f"{option} with --detach: nobody is there for it", hint="`belljar wait ID` tells the end.")
    order = _with_user_data(order, args, runtime)
    reads = isinstance(order.work, RunPayload) and not args.no_input
    stdin = 0 if reads and stat.S_ISREG(os.fstat(0).st_mode) else None
    id = detached.Keeper(config_file=runtime.config_file, stdin=stdin).take(order)
    try:
        print(id, flush=True)
        is_told = 1 not in CLOSED
    except OSError:  # told once more when this process ends, with its exit code
        is_told = False
    tell_ports(order, runtime)
    if not is_told:
        complain(f"{id}: the machine lives, and standard output did not take its ID", f"`belljar stop {id}` ends it.")
    return 0


def tell_ports(order: Request, runtime: Runtime) -> None:
    """Say on stderr which free ports were chosen."""
    if any(not port.host for port in order.machine.ports):
        from belljar.machine.life.control import published

        made = zip(order.machine.ports, published(runtime.folders.machine(order.id)), strict=False)
        for port in (place for asked, place in made if not asked.host):
            complain(f"{port.place} is port {port.guest} of the machine", "")


def _with_user_data(order: Request, args: Args, runtime: Runtime) -> Request:
    if args.user_data is None:
        return order
    from belljar.jobs.starting import with_user_data

    return with_user_data(order, args.user_data, args.user_data_option, args.user_data_file, runtime)


def leave(outcome: Outcome) -> int:
    """Turn the outcome into this process's own end; one line on stderr for what the payload did not do by itself."""
    if outcome.exit_code is not None and outcome.signal is None and not outcome.error:
        return outcome.exit_code
    if outcome.cause is Cause.CHECKPOINTED:
        complain(f"{outcome.id}: {outcome.reason}", "`belljar run --restore DIR` goes on from there.")
        return os.EX_TEMPFAIL
    is_its_own = outcome.cause is Cause.FINISHED and not outcome.error
    if not is_its_own and outcome.cause is not Cause.CANCELLED:  # whoever cancelled it knows
        complain(f"{outcome.id}: {outcome.reason}", outcome.hint if not outcome.payload_ran or outcome.error else "")
    if outcome.signal is not None:
        die_by(outcome.signal)
    return outcome.exit_code or OUR_FAILURE  # a payload that ended well in a machine that did not is not a success


def open_report(path: str) -> int:
    """The file of `--report`, emptied and proved writable before anything is started. Raises BadOption."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise BadOption(f"--report {path}: {exc.strerror}", hint="Give a file that can be written to.") from exc


def write_report(descriptor: int, path: str, outcome: Outcome) -> None:
    """Where the file cannot be written any more, say so; the payload's end stays as it is."""
    try:
        write_all(descriptor, dumps(outcome) + b"\n")
        os.close(descriptor)
    except OSError as exc:
        with suppress(OSError):  # a pipe cannot be cut
            os.ftruncate(descriptor, 0)  # half a report is not a report
        complain(f"--report {path}: {exc.strerror}", f"See `belljar show {outcome.id} --format json`.")


ROWS = """
# run | Run a command, or a script, in its own fresh virtual machine. The exit code or signal is the job's own. 125: belljar itself
| failed; 126: not executable; 127: not found.
$ belljar run [options] -- CMD ARG...
$ belljar run [options] SCRIPT ARG...
$ belljar run [options] --user-data FILE|URL
$ belljar run [options] --ready SIGN
[the machine]
--image NAME | an image's name or digest; an http(s) address or absolute path, imported first, and again after a
| change; a container image (docker://HOST/NAME, oci:DIR, docker-archive:FILE, sif:FILE, dir:PATH)
-c --cpus N | virtual processors
-m --memory SIZE | memory, such as 512M or 4G
--disk SIZE | size of its disk, not less than the image's
--scratch SIZE | an empty disk of this size at /scratch; $TMPDIR points to it
--cache SIZE | a disk labelled belljar-cache, which a later machine gets again (only without a command)
--network NETWORK | none; user: outgoing connections through the host; bridge[:NAME]: a card on a bridge of the host;
| isolated:GROUP: a private network of your machines of that group
--publish [[ADDR:]HOST:]GUEST * | carry connections from port HOST of this host (0: a free one; default ADDR: 127.0.0.1) to
| port GUEST of the machine
--allow HOST * | all that it may reach: NAME, *.NAME, ADDRESS[/PREFIX], each with or without :PORT; or none
--secret NAME=SOURCE,host=HOST * | $NAME is a placeholder in the guest; what it sends to HOST by HTTPS has the value, of SOURCE:
| env:VAR or file:PATH
--device pci:ADDRESS|CLASS:COUNT * @devices | a PCI device of the host for itself, or so many of a class (`belljar device list`)
--share [KIND:]SRC[:DST][:ro|rw] * | a folder of the host (default: read-only, same path); kinds: docs/jobs/data.md
--start {Start} | clone: a copy of a booted guest; cold: boot; auto: clone if possible
--pin {Pin} | cpus: each virtual processor on one of the host's, or nothing starts; auto: where a batch job
| has its own
--topology {Topology} | host: the guest sees sockets, siblings and NUMA nodes, and boots cold; auto: on several
| NUMA nodes
--pages {Pages} | memory in large pages, and a cold boot: thp, by the kernel; 2M or 1G, reserved by the site
--context {Context} | how belljar's agent gets into the guest (default: as the image can)
-d --detach | print the machine's ID and return; it goes on, and reads standard input only from a file
| (`belljar logs --stdout`)
--label K=V * | a note of yours, kept with the machine's records
--restore DIR | go on with the machine that `belljar checkpoint` wrote to this folder
--name NAME = | a name, which can be used as an ID
[the job]
--in PATH[:DST] * @inputs | file or folder to copy in first
--out PATH[:DST] * @outputs | file or folder to copy out at the end, also after a failure
--entrypoint | put the container image's entrypoint before the command
-e --env K=V * | set a variable; K alone passes on yours
--inherit-env | pass on your whole environment
--cwd PATH | working directory, made if missing (default: your current path, or the home of --user; a container image's own)
--user NAME|UID[:GID] | the job's user in the guest (default: you; a container image's own)
-n --no-input | read no input: for shell loops that read from standard input
-t --tty | give the job a terminal
[without a command: images that start their own work (docs/operate/pilots.md)]
--ready SIGN | when the guest is ready: agent, belljar's agent answers; file:/PATH, that file exists; line:TEXT, its
| console shows this text; none, at once (default)
--user-data FILE|URL | user data, at most 1 MiB; its ##user_data_...## patterns are filled in
--user-data-option K=V * | the value of ##user_data_option_K##
--user-data-file K=PATH * | a file whose content is ##user_data_option_K## and ##user_data_file_K##
[limits and records]
--timeout TIME | send the job SIGTERM after this time, such as 90s or 2h
--grace TIME | time between SIGTERM and the machine's end
--collect PATH * | file or folder of the guest to keep with its records (`belljar logs ID --collected`)
--report FILE | write how it ended to this file, as JSON
--keep | keep the machine's disk, for inspection
CMD ... @command
"""
VERBS = acts(ROWS, globals())
