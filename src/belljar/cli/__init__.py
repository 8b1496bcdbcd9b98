"""The `belljar` command: finds the verb, imports only its module, turns errors into one line, a hint and an exit code.

Each module of this package lists its verbs in a table `VERBS`. Belljar's own failures, wrong options included, exit
with 125."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from belljar import __version__
from belljar.errors import BadOption, BelljarError, about, in_words
from belljar.hints import TYPE_CHECKING, NoReturn, cast
from belljar.host import descriptors
from belljar.host.quick_imports import quickly
from belljar.jobs import complain
from belljar.records import dataclass

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from belljar.cli.parser import Verb


@dataclass(frozen=True)
class Entry:
    """A verb: its module below belljar.cli, and one line for `belljar --help`, in a group there; without one it is hidden."""

    module: str
    group: str
    help: str


RUNNING, MACHINES, IMAGES, BATCH, VACUUM = "Run", "Machines", "Images", "Batch systems", "Factories"
SIGHT, HOST = "Monitoring", "This host"
VERBS = {
    "run": Entry("machine.run", RUNNING, "run a command or a script in its own fresh virtual machine"),
    "exec": Entry("machine.inside", RUNNING, "run a second command in a running machine"),
    "cp": Entry("machine.inside", RUNNING, "copy files into or out of a running machine"),
    "ssh": Entry("machine.inside", RUNNING, "open a login shell in a running machine; no ssh server is needed in it"),
    "fork": Entry("machine.inside", RUNNING, "start machines that go on where a running one stands"),
    "port": Entry("machine.inside", RUNNING, "publish a port of a running machine on this host"),
    "ps": Entry("machine.show", MACHINES, "list machines"),
    "show": Entry("machine.show", MACHINES, "show what was asked of a machine, how it ended, seconds per phase"),
    "logs": Entry("machine.show", MACHINES, "show a machine's journal (what belljar did), console, output"),
    "events": Entry("machine.show", MACHINES, "show what happens to machines, also as it happens"),
    "console": Entry("machine.inside", MACHINES, "connect to a running machine's serial console"),
    "wait": Entry("machine.ending", MACHINES, "wait until machines have ended; exit with the job's exit code"),
    "stop": Entry("machine.ending", MACHINES, "end machines: SIGTERM, a grace period, then by force"),
    "extend": Entry("machine.ending", MACHINES, "move a machine's deadline to a later time"),
    "checkpoint": Entry("machine.ending", MACHINES, "write a machine to a folder, to go on from there"),
    "kill": Entry("machine.ending", MACHINES, "end machines at once"),
    "kill-all": Entry("host.reap", MACHINES, "end every machine on this host, even when nothing else works"),
    "reap": Entry("host.reap", MACHINES, "clean up after belljar processes that were killed"),
    "image": Entry("image.image", IMAGES, "build, import, list, verify, publish and remove images"),
    "template": Entry(
        "image.template", IMAGES, "list and build templates: booted guests, from which jobs start quickly"
    ),
    "cache": Entry("image.template", IMAGES, "list and remove cache disks, which later machines find again"),
    "batch": Entry("batch.batch", BATCH, "install belljar in a batch system, check it, remove it; test this node"),
    "bait": Entry("bait.bait", BATCH, "worker nodes on demand: make a machine for each job, which joins the cluster"),
    "node": Entry("bait.bait", BATCH, "start and end machines as cloud nodes of Slurm"),
    "lease": Entry("lease.lease", BATCH, "machines for a limited time, on nodes of a batch system; also by EC2's API"),
    "pilot": Entry("lease.lease", "", "hold a node for a lease, as a job of the batch system"),
    "vacuum": Entry("vacuum.vacuum", VACUUM, "let this host start experiments' machines by itself, by target shares"),
    "accounting": Entry("vacuum.accounting", VACUUM, "write usage records of ended machines, for APEL and others"),
    "top": Entry("monitor.top", SIGHT, "watch machines live and end, on a terminal"),
    "report": Entry("monitor.monitor", SIGHT, "add up the machines that ended: by user, image, cause, node or day"),
    "monitor": Entry(
        "monitor.monitor", SIGHT, "a page, metrics, traces and site information for those who watch many hosts"
    ),
    "doctor": Entry("host.doctor", HOST, "check this host, and say what is missing and how to get it"),
    "device": Entry("host.device", HOST, "list, check, bind and release devices that machines can have"),
    "soak": Entry("soak.soak", HOST, "run job after job in fresh machines: starts, failures, and does anything grow?"),
    "config": Entry("host.doctor", HOST, "show or check the settings"),
    "completion": Entry("host.completion", HOST, "print a completion script for bash, zsh or fish"),
    "internal": Entry("batch.internal", "", "what batch systems and programs call"),
}
HIDDEN = frozenset(verb for verb, entry in VERBS.items() if not entry.group)
OUR_FAILURE = 125


@dataclass(frozen=True)
class CommandLine:
    verb: str  # "" where there is none; "--help" and "--version" come alone
    rest: list[str]
    config_file: str | None = None
    verbose: bool = False


# A job may set `=x`, a variable without a name: Python reads it and can neither remove it nor hand it on.
os.environ._data.pop(b"", None)  # type: ignore[attr-defined]
assert descriptors  # covered before a file is opened
gc.set_threshold(100_000)  # what is imported stays: to look through it again and again is a tenth of a start


def entry(commands: str | None = None) -> NoReturn:
    """The console script. It ends the process at once, without Python's clean-up. *commands*: the launcher's list of
    commands."""
    _make_streams_robust()
    if "_ARGCOMPLETE" in os.environ:
        from belljar.cli.host.completion import offer

        offer()
    try:
        code = main(sys.argv[1:], commands)
        sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
    except (KeyboardInterrupt, BrokenPipeError) as exc:
        from belljar.host.processes import die_by

        die_by(2 if isinstance(exc, KeyboardInterrupt) else 13)
    except OSError as exc:
        os.write(2, f"belljar: standard output: {exc.strerror}\n".encode())
        code = OUR_FAILURE
    os._exit(code)


def main(arguments: Sequence[str], commands: str | None = None) -> int:
    """Carry out one command line; its exit code. Raises KeyboardInterrupt, and BrokenPipeError for our own output."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments  # behind it are a payload's
    return reported(lambda: _carry_out(split(arguments), commands), detail="-v" in ours or "--verbose" in ours)


def reported(act: Callable[[], int], *, detail: bool = False) -> int:
    """The exit code of an act; an error is reported on stderr, with *detail* also where it was raised."""
    try:
        return act()
    except Exception as exc:  # a defect is reported in one line too; -v adds the traceback
        problem, code = exc, OUR_FAILURE
    if isinstance(problem, BelljarError):
        message, hint, code = problem.message, problem.hint, problem.exit_code
    elif isinstance(problem, MemoryError):
        message = "no more memory for this process"
        hint = "See its limits (`ulimit -a`) and `belljar doctor`: a machine wants its own memory and half a GiB."
    elif isinstance(problem, OSError):
        if isinstance(problem, BrokenPipeError) and is_reader_gone(1, 2):  # else it was some socket of a machine
            raise problem
        message = in_words(problem)
        hint = "`belljar doctor` checks this host."
    else:
        message = f"a defect of belljar: {type(problem).__name__}: {problem}"
        hint = "Please report it, with what the same command says with -v."
    if detail:
        import traceback

        traceback.print_exception(problem)
    complain(message, hint)
    return code


def _carry_out(line: CommandLine, commands: str | None) -> int:
    if line.verb == "--version":
        print(f"belljar {__version__}")
        return 0
    if line.verb in ("--help", ""):
        print(overview(), file=sys.stdout if line.verb else sys.stderr)
        return 0 if line.verb else OUR_FAILURE
    args, runtime = parser_of(line.verb).parse_args(line.rest), None
    if verb_of(line.verb).needs_runtime:
        from belljar.assembly import Runtime

        config_file = args.config_file or line.config_file
        runtime = Runtime(config_file, verbose=line.verbose or args.verbose, commands=commands)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as belljar itself left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return with_hints(lambda: args.carry_out(args, runtime), args)


def with_hints(act: Callable[[], int], args: Namespace) -> int:
    """The act's exit code; hints of errors name the verb and the machine that are meant."""
    try:
        return act()
    except BelljarError as exc:
        hint = exc.hint.replace("belljar VERB", args.prog)
        exc.hint = about(hint, getattr(args, "machine", None) or "ID")
        if exc.hint != about(exc.hint, ""):
            exc.hint += " `belljar ps -a` lists each ID."
        raise


def split(arguments: Sequence[str]) -> CommandLine:
    """Find the verb and the global options before it. Raises BadOption."""
    config_file, verbose = None, False
    words = list(arguments)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-h", "--help", "--version"):
            return CommandLine("--version" if word == "--version" else "--help", [])
        if word in ("-v", "--verbose"):
            verbose = True
        elif word == "--config" and words:
            config_file = words.pop(0)
        elif word.startswith("--config="):
            config_file = word.removeprefix("--config=")
        else:
            raise BadOption(f"{word}: no such option before a verb", hint="See `belljar --help`.")
    if not words:
        return CommandLine("", [])
    verb, *rest = words
    if verb == "help":
        return CommandLine(rest[0], ["--help"]) if rest else CommandLine("--help", [])
    if verb not in VERBS:
        from belljar.cli.parser import meant

        hint = meant(verb, VERBS.keys() - HIDDEN, "belljar ").strip()
        raise BadOption(f"{verb}: no such verb", hint=hint or "See `belljar --help`.")
    return CommandLine(verb, rest, config_file, verbose)


def parser_of(name: str) -> ArgumentParser:
    """The parser of one verb, global options included."""
    verb = verb_of(name)
    from belljar.cli.parser import Parser

    parser = Parser(prog=f"belljar {name}", description=verb.help, usage=verb.usage or None)
    parser.take(verb)
    return parser


def verb_of(name: str) -> Verb:
    """What this verb does and takes; of all verbs only its module is imported."""
    quickly("argparse")
    return cast("Verb", import_module(f"belljar.cli.{VERBS[name].module}").VERBS[name])


def overview() -> str:
    lines = []
    for group in dict.fromkeys(entry.group for entry in VERBS.values() if entry.group):
        lines += ["", f"{group}:"]
        lines += [f"  {verb:<11} {entry.help}" for verb, entry in VERBS.items() if entry.group == group]
    with open(os.path.dirname(__file__) + "/overview.txt") as file:
        return file.read().rstrip().format("\n".join(lines))


def is_reader_gone(*descriptors: int) -> bool:
    import select

    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


def _make_streams_robust() -> None:
    """Printing never fails for an encoding or a closed descriptor: file names and output of guests are any bytes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        else:
            stream.reconfigure(errors="backslashreplace")
