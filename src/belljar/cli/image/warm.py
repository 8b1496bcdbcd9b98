"""`belljar image warm`: an image whose machines start where a preparation of the user's own ended."""

from __future__ import annotations

from contextlib import suppress

from belljar.assembly import Runtime
from belljar.cli.machine import request as words
from belljar.cli.parser import Args, Parser, add
from belljar.errors import BadOption, ImageInUse, ImageUnknown
from belljar.guest import Streams
from belljar.guest.stdio import FdSink
from belljar.host.caller import caller
from belljar.image import Image, Recipe
from belljar.image.store.store import check_name
from belljar.image.warm import store_nameless
from belljar.jobs.attend import build_template
from belljar.jobs.starting import ensure_image, make_request
from belljar.model import NetworkMode, Payload, RunPayload, Start
from belljar.records import replace

LONGEST = 3600.0  # seconds a preparation may take where nothing else is said
OPTIONS = """\
--from IMAGE @base | the image to prepare: name or digest
-c --cpus N | virtual processors; its machines have no fewer
-m --memory SIZE | memory; its machines have no less
--in PATH[:DST] * @inputs | file or folder to copy in first; it is kept with the image
-e --env K=V * | set a variable
--cwd PATH | working directory (default: your current path, or the home of --user)
--user NAME|UID[:GID] | the user in the guest (default: you)
--network {none,user} | none (the default), or user: outgoing connections
--allow HOST * | all that it may reach, as in `belljar run`
--secret NAME=SOURCE,host=HOST *
--time TIME | the longest time it may take (1h)
"""
USAGE = "belljar image warm NAME --from IMAGE [options] -- PREPARE ARG..."


def warm(args: Args, runtime: Runtime) -> None:
    """Store the image, prepare its memory once, and give it its name: an image that cannot be prepared is not kept."""
    _read(args)
    _ = runtime.hypervisor.cloning  # raises where machines are always booted cold
    ensure_image(runtime, args.base)
    store = runtime.images
    base = store.resolve(args.base)
    recipe = _recipe(args, base, runtime)
    before = {image.digest for image in store.images() if image.store == store.folder}
    image = store_nameless(store, base, recipe)
    try:
        _prepare(image, recipe, runtime)
        store.tag(image, args.name)
    except BaseException:  # re-raised: an interrupt leaves no image either
        if image.digest not in before:
            with suppress(ImageUnknown, ImageInUse):  # another command may make the same one
                store.remove(image, force=True, nameless=True)
        raise
    print(image.digest)


def _read(args: Args) -> Args:
    """With the options that stand between the name and `--`, which argparse takes for the command's. It takes a `--` away that is
    right behind the name."""
    line = args.command if "--" in args.command else [*args.command, "--"]
    head = line[: line.index("--")] if line[0].startswith("-") else []
    parser = Parser(prog=args.prog, usage=USAGE)
    add(parser, OPTIONS)
    parser.parse_args(head, namespace=args)
    args.command = ["--", *(args.command[len(head) + 1 :] if head else args.command)]
    check_name(args.name)
    if args.base is None:
        raise BadOption("--from is missing", hint="It names the image to prepare.")
    if args.command == ["--"]:
        raise BadOption("nothing prepares it", hint=f"Put `--` before the command: {USAGE}.")
    if args.secret:
        problem = "whoever can use the image can read what its preparation was given"
        raise BadOption(f"--secret: {problem}", hint="Give it to the image's jobs: `belljar run --secret`.")
    for option in ("cpus", "memory", "time"):
        words.above_zero(f"--{option}", getattr(args, option))
    return args


def _recipe(args: Args, base: Image, runtime: Runtime) -> Recipe:
    """What the arguments ask for, in this place."""
    payload = words.unattended(words.payload(args, words.account_of(args.user, base.container), base.container))
    payload = replace(payload, rlimits=(), prepares=True)
    usual = None if args.allow else NetworkMode.NONE
    machine = make_request(
        runtime.settings, RunPayload(payload), cpus=args.cpus, memory=args.memory, allow=tuple(args.allow),
        network=NetworkMode(args.network) if args.network else usual,
    ).machine  # fmt: skip
    return Recipe(
        base.digest, base.called, payload, machine.cpus, machine.memory, args.time or LONGEST, caller().name,
        machine.network, machine.allow,
    )  # fmt: skip


def _prepare(image: Image, recipe: Recipe, runtime: Runtime) -> None:
    """Make the memory that the first machine of this user would make, and show what is said meanwhile."""
    request = make_request(
        runtime.settings, RunPayload(Payload((), caller())), requester="image warm", image=f"sha256:{image.digest}",
        cpus=recipe.cpus, memory=recipe.memory, network=NetworkMode.NONE, start=Start.AUTO,
    )  # fmt: skip
    stderr = FdSink(2)  # standard output has the digest alone
    build_template(runtime, request, exact=False, streams=Streams(None, stderr, stderr))
