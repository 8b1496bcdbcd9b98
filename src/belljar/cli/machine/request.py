"""Turns the arguments of `belljar run` and `belljar exec` into a Request, and refuses wrong ones. Starts nothing."""

from __future__ import annotations

import os
import pwd
import re
from contextlib import suppress

from belljar.cli.parser import Args
from belljar.config import Settings
from belljar.errors import BadOption, InputMissing
from belljar.host.caller import caller, describe, plain_environment, rlimits, umask
from belljar.host.files import read_named
from belljar.jobs.shares import network_of, port_of, shares
from belljar.jobs.starting import environment_of, kind, make_request
from belljar.model import (
    SCRATCH_PLACE,
    Account,
    Container,
    Context,
    OwnWork,
    Payload,
    Probe,
    Request,
    RunPayload,
    Sign,
    StdinKind,
    Transfer,
    Work,
)
from belljar.records import replace

LARGEST_SCRIPT = 8 << 20
LONGEST_SIGN = 200
LONGEST_LABEL = 200
POSITIVE = ("cpus", "memory", "disk", "timeout")
OF_PLACE = ("start", "pin", "topology", "pages", "context")
AS_READ = (*POSITIVE, *OF_PLACE, "image", "scratch", "cache", "name", "grace", "keep")
NAME = r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,199}"


def check_name(name: str | None) -> None:
    if name and not re.fullmatch(NAME, name):
        raise BadOption(f"--name {name!r}: letters, digits and ._:@+- only, at most 200, a letter or digit first")


def build(args: Args, settings: Settings, container: Container | None = None) -> Request:
    """The request these arguments make, of this caller, in this place; or as its *container* image is to be started."""
    check_name(args.name)
    for option in POSITIVE:
        above_zero(f"--{option}", getattr(args, option))
    network, network_name = (None, "") if args.network is None else network_of(args.network)
    folders = shares(args.share)
    _refuse_twice("--share", [item.target for item in folders] + ([] if args.scratch is None else [SCRATCH_PLACE]))
    if args.image is not None and not args.image.strip():
        raise BadOption(f"--image {args.image!r}: the name is missing", hint="`belljar image list` shows the names.")
    return make_request(
        settings, _work(args, account_of(args.user, container), container), **{name: getattr(args, name) for name in AS_READ},
        network=network, network_name=network_name, allow=tuple(args.allow), secrets=tuple(args.secret), shares=folders,
        devices=tuple(args.devices), ports=tuple(map(port_of, args.publish)), labels=dict(map(_label, args.label)),
        collect=tuple(map(_collected, args.collect)), collect_limit=settings.batch.collect_limit,
    )  # fmt: skip


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and re.fullmatch(NAME, name)) or len(value) > LONGEST_LABEL or name == "alias":
        form = "letters, digits and ._:@+- in K, at most 200 characters in V"
        raise BadOption(f"--label {text[:80]}: not of the form K=V: {form}")
    return name, value


def _work(args: Args, account: Account, container: Container | None) -> Work:
    """The guest's own where there is no command, and user data, `--ready`, or an image that is said to know its work."""
    if args.user_data is None and (args.user_data_option or args.user_data_file):
        raise BadOption("--user-data-option and --user-data-file mean nothing without --user-data")
    has_own = args.user_data is not None or args.ready is not None or args.context is Context.NONE
    if args.command not in ([], ["--"]) or not has_own:
        for option, value in (("--cache", args.cache), ("--ready", args.ready)):
            if value is not None:
                raise BadOption(f"{option} with a command: it is for guests that know their own work")
        return RunPayload(payload(args, account, container))
    options = (("--in", args.inputs), ("--out", args.outputs), ("--tty", args.tty), ("--collect", args.collect))
    for option, value in options:
        if value:
            raise BadOption(f"{option} without a command: nobody is in the guest who could do that")
    work = OwnWork(ready=probe("none" if args.ready is None else args.ready))
    if args.context not in (None, Context.AUTO, Context.NONE) and not work.has_agent:
        hint = "With `--ready agent` it has one, which takes `belljar exec` and `belljar cp`."
        why = f"--context {args.context.value} without a command: the guest's own work needs no agent"
        raise BadOption(why, hint=hint)
    return work


def probe(text: str) -> Probe:
    if not re.fullmatch("none|agent|file:/.*|line:.+", text, re.DOTALL):
        raise BadOption(f"--ready {text}: not one of none, agent, file:/PATH, line:TEXT")
    word, _, of = text.partition(":")
    if len(of) > LONGEST_SIGN or not of.isprintable():
        raise BadOption(f"--ready {word}: at most {LONGEST_SIGN} printable characters")
    return Probe(Sign(word), of)


def payload(args: Args, account: Account, container: Container | None = None) -> Payload:
    """What is to run: a command of the guest after `--`, or a script of ours; without either a container image's own. A verb may lack
    options."""
    given = vars(args).get
    argv, script = command(args.command, container, with_entrypoint=given("entrypoint", False))
    stdin, stdout, stderr = map(kind, (0, 1, 2))
    if given("tty") and not os.isatty(0):
        raise BadOption("--tty: standard input is not a terminal", hint="Leave --tty out where no person sits.")
    outputs = tuple(map(_output, given("outputs", ())))
    _refuse_twice("--out", [os.path.realpath(item.outside) for item in outputs])
    return Payload(
        argv=argv, script=script, account=account, cwd=working_directory(args.cwd, account, container), env=environment(args, account, container),
        umask=umask(), rlimits=rlimits(), terminal=given("tty", False), stdin=StdinKind.NULL if given("no_input") else stdin, stdout=stdout,
        stderr=stderr, inputs=tuple(map(_input, given("inputs", ()))), outputs=outputs,
    )  # fmt: skip


def unattended(payload: Payload) -> Payload:
    """Nobody is there: it reads nothing, and what it writes is kept."""
    return replace(payload, stdin=StdinKind.NULL, stdout=StdinKind.STREAM, stderr=StdinKind.STREAM)


def command(
    words: list[str], container: Container | None = None, *, with_entrypoint: bool = False
) -> tuple[tuple[bytes, ...], bytes | None]:
    """(argv, script bytes or None). *with_entrypoint*: a container image's entrypoint comes first, as with `docker run`; without, the
    words are the command, as with `apptainer exec`."""
    has_words, is_script = bool(words) and words != ["--"], words[:1] not in ([], ["--"])
    if with_entrypoint and (is_script or not (container and container.entrypoint)):
        hint = "`belljar image show` has what a container image starts."
        raise BadOption("--entrypoint: with a script, or an image that has none", hint=hint)
    if container and (with_entrypoint or not has_words):
        argv = (*container.entrypoint, *(words[1:] if has_words else container.command))
        if argv:
            return tuple(map(os.fsencode, argv)), None
    if not has_words:
        raise BadOption("nothing to run", hint="Give a script file, or `--` and a command of the guest.")
    if words[0] == "--":
        return tuple(os.fsencode(word) for word in words[1:]), None
    if words[0].startswith("-") and not os.path.exists(words[0]):
        hint = "See `belljar run --help`; put `--` before a command that begins with a dash."
        raise BadOption(f"{words[0]}: no such option", hint=hint)
    name = os.path.basename(words[0])
    return tuple(os.fsencode(word) for word in (name, *words[1:])), read_script(words[0])


def read_script(path: str) -> bytes:
    """The script's bytes. Raises InputMissing with what to do about it."""
    try:
        script = read_named(path, LARGEST_SCRIPT)
    except OSError as exc:
        from shutil import which

        hint = "Give a readable file, or put `--` before a command that exists in the guest."
        if "/" not in path and which(path) is not None:
            hint = f"To run the guest's own {path}, write: belljar run -- {path} ..."
        raise InputMissing(f"{path}: {exc.strerror}", hint=hint) from exc
    if len(script) > LARGEST_SCRIPT:
        hint = "Copy it in with `--in` and name it after `--`."
        raise InputMissing(f"{path}: larger than {LARGEST_SCRIPT >> 20} MiB", hint=hint)
    return script


def account_of(user: str | None, container: Container | None = None) -> Account:
    """The payload's user: the caller, or a container image's own, or NAME, UID or UID:GID."""
    if user is None:
        return container.account if container else caller()
    numbers = re.fullmatch(r"(\d{1,10})(?::(\d{1,10}))?", user)
    with suppress(KeyError, ValueError, OverflowError):
        entry = pwd.getpwuid(int(numbers[1])) if numbers else pwd.getpwnam(user)
        if not numbers or numbers[2] is None:
            return describe(entry.pw_uid, entry.pw_gid, None)
    if numbers is None:
        raise BadOption(f"--user {user}: no such user here", hint="Give a user's name, or numbers: UID or UID:GID.")
    return describe(int(numbers[1]), int(numbers[2] or numbers[1]), ())


def environment(args: Args, account: Account, container: Container | None = None) -> tuple[tuple[bytes, bytes], ...]:
    """The payload's variables: a small fixed set or the caller's, then a container image's, then single ones; the last one counts."""
    given = vars(args).get
    env = dict(os.environb) if given("inherit_env") else plain_environment(account)
    if given("tty") and (term := os.environb.get(b"TERM")):
        env[b"TERM"] = term
    env |= environment_of(container)
    if given("scratch") is not None:
        env[b"TMPDIR"] = os.fsencode(SCRATCH_PLACE)
    for word in args.env:
        name, equals, value = os.fsencode(word).partition(b"=")
        if not name:
            raise BadOption(f"--env {word}: not of the form K=V or K")
        if equals:
            env[name] = value
        elif name in os.environb:
            env[name] = os.environb[name]
    return tuple(env.items())


def working_directory(path: str | None, account: Account, container: Container | None = None) -> bytes | None:
    """The path the payload starts in: where none is named, a container image's or the caller's own; None, its home, for somebody
    else."""
    if path is not None:
        if not path.startswith("/"):
            raise BadOption(f"--cwd {path}: not an absolute path")
        return os.fsencode(path)
    if container:
        return os.fsencode(container.cwd)
    if account.uid != os.geteuid():
        return None  # the caller's folder may be one that the other user cannot enter
    try:
        return os.getcwdb()
    except FileNotFoundError:
        raise BadOption("the current folder was removed", hint="Go to another one, or name one with --cwd.") from None


def _input(text: str) -> Transfer:
    outside, inside = _pair("--in", text)
    if not os.path.lexists(outside):
        raise InputMissing(f"--in {outside}: does not exist")
    if not os.access(outside, os.R_OK) and not os.path.islink(outside):
        raise InputMissing(f"--in {outside}: cannot be read")
    name = os.path.basename(os.path.abspath(outside))
    if inside.endswith("/") and not os.path.isdir(outside):
        inside += name  # into that folder, as cp has it
    return Transfer(os.path.abspath(outside), inside or name)


def _output(text: str) -> Transfer:
    inside, outside = _pair("--out", text)
    name = os.path.basename(inside.rstrip("/"))
    target = outside or name
    folder = outside if outside.endswith("/") else os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise BadOption(f"--out {text}: the folder {folder} does not exist here", hint=f"mkdir {folder}")
    if not os.access(folder, os.W_OK):
        raise BadOption(f"--out {text}: the folder {folder} cannot be written to")
    return Transfer(os.path.abspath(target), inside)


def _collected(path: str) -> str:
    if not path.startswith("/") or os.path.normpath(path) == "/":
        raise BadOption(f"--collect {path}: not an absolute path of a file or folder below /")
    return os.path.normpath(path)


def _pair(option: str, text: str) -> tuple[str, str]:
    """PATH[:DST]. The last colon divides, unless the whole text names something that exists."""
    if option == "--in" and os.path.lexists(text):
        return text, ""
    first, colon, second = text.rpartition(":")
    if not colon:
        first, second = text, ""
    if not first or (colon and not second):
        raise BadOption(f"{option} {text}: not of the form PATH[:DST]")
    return first, second


def _refuse_twice(option: str, places: list[str]) -> None:
    for place in places:
        if places.count(place) > 1:
            raise BadOption(f"{option}: two of them at {place}", hint="Give one of them another DST.")


def above_zero(option: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise BadOption(f"{option} {value:g}: must be more than nothing", hint=f"Give {option} a larger value.")
