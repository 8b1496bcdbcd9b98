"""`belljar image ...`: the images of this user and of the site; the agent for images of other makers."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.machine import request as words
from belljar.cli.parser import Args, Verb, acts, after_dashes
from belljar.cli.render import moment
from belljar.cli.render import show as put
from belljar.context import choose
from belljar.errors import BadOption, ImageInUse, ImageUnknown, InputMissing
from belljar.guest import Streams
from belljar.guest.stdio import FdSink
from belljar.host.caller import caller
from belljar.image import Image, Recipe, agent_unit, is_container, name_of
from belljar.image.progress import shown
from belljar.image.store.store import check_name
from belljar.image.warm import described as warm_facts
from belljar.image.warm import store_nameless
from belljar.jobs import complain, disks, size
from belljar.jobs.attend import build_template
from belljar.jobs.disks import told_of
from belljar.jobs.starting import ensure_image, image_of, make_request
from belljar.machine.planning.contexts import means_of
from belljar.machine.workshop.workshop import Item
from belljar.model import Context, NetworkMode, Payload, RunPayload, Start
from belljar.records import replace

HEADS = ("NAME", "DIGEST", "STATE", "OS", "BOOT", "DISK", "STORED", "CREATED", "SOURCE")
SHORT = 12  # digits of a digest that are shown
SIZES = ("virtual_size", "stored", "least_memory", "memory")
NOTHING_YET = "nothing has come from these sources yet. `belljar image sync --dry-run` shows what they offer"


def build(args: Args, runtime: Runtime) -> None:
    from belljar.image.build.debian import DISK_SIZE, Recipe, build

    recipe = Recipe(args.suite, args.name, tuple(args.packages), tuple(args.run), args.disk or DISK_SIZE)
    print(build(runtime.images, recipe).digest)


def import_(args: Args, runtime: Runtime) -> None:
    from belljar.image.intake.sources import Order, bring

    source = "docker-archive:-" if args.source == "-" else args.source
    if not args.name and (args.source == "-" or not is_container(source)):
        raise BadOption("--name is missing", hint="Only a container image with an address or path needs none.")
    order = Order(
        source, args.name or name_of(source), args.kernel, args.initrd, args.append, args.firmware,
        sha256=args.sha256.lower(), context=args.context, signer=args.signer,
    )  # fmt: skip

    def judge(properties: Mapping[str, Any], has_kernel: bool) -> None:
        choose(args.context, means_of(properties, has_kernel), args.name)

    image = bring(runtime.images, order, None if args.context is Context.AUTO else judge)
    if words := told_of(image):
        complain(words, "")
    print(image.digest)


def list_(args: Args, runtime: Runtime) -> None:
    images = runtime.images.images()
    values = [_described(runtime, image) for image in images]
    put(values, HEADS, list(map(_row, images, values)), as_=args.format)


def show(args: Args, runtime: Runtime) -> None:
    image = runtime.images.find(args.image)
    value = _described(runtime, image)
    about = {**_container(image), **warm_facts(image)}
    shown = {**value, **value["facts"], **about, "created": moment(image.created)}
    del shown["facts"]
    rows = [(name, _cell(name, fact)) for name, fact in shown.items() if fact not in ("", None, [], ())]
    put(value, ("WHAT", "VALUE"), rows, as_=args.format)


def _container(image: Image) -> dict[str, Any]:
    if not (container := image.container):
        return {}
    command = shlex.join([*container.entrypoint, *container.command])
    env = [f"{name}={value}" for name, value in container.env]
    return {"container": "", "command": command, "env": env, "cwd": container.cwd, "user": container.account.name}


def _cell(name: str, fact: Any) -> str:
    if name in SIZES:
        return size(fact)
    return ", ".join(map(str, fact)) if isinstance(fact, (list, tuple)) else str(fact)


def verify(args: Args, runtime: Runtime) -> int:
    images = [runtime.images.find(reference) for reference in args.images] or runtime.images.images()
    verdicts = [(image, runtime.images.verify(image)) for image in images]
    values = [{"digest": image.digest, "names": image.names, "wrong": wrong} for image, wrong in verdicts]
    whole = "as it was stored"
    rows = [(", ".join(image.names), image.digest[:SHORT], "; ".join(wrong) or whole) for image, wrong in verdicts]
    put(values, ("NAME", "DIGEST", "STATE"), rows, as_=args.format)
    for image in (bad := [image for image, wrong in verdicts if wrong]):
        what = "is not started any more" if image.store == runtime.images.folder else "is damaged"
        complain(f"image {image.called} {what}. {runtime.images.remedy(image)}", "")
    return 1 if bad else 0


def remove(args: Args, runtime: Runtime) -> None:
    """With the last name of a warm image its memory goes, too."""
    store, image = runtime.images, image_of(runtime, args.image)
    if image and "warm" in image.facts and image.store == store.folder:
        names = [name for each in store.images() if each.digest == image.digest for name in each.names]
        for template in runtime.hypervisor.templates() if args.force or set(names) <= {args.image} else ():
            if template.facts.get("image_digest") == image.digest:
                runtime.hypervisor.remove_template(template.key)
    store.drop(args.image, force=args.force)


def gc(args: Args, runtime: Runtime) -> None:
    removed = [str(path) for path in runtime.images.gc(dry_run=args.dry_run)]
    put(removed, ("WOULD BE REMOVED" if args.dry_run else "REMOVED",), [(path,) for path in removed], as_=args.format)


def tag(args: Args, runtime: Runtime) -> None:
    runtime.images.tag(runtime.images.resolve(args.image), args.name)


def extract(args: Args, runtime: Runtime) -> None:
    if not disks.is_archive(args.output):
        names = [os.path.basename(os.path.normpath(path)) for path in args.paths]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            hint = "Extract them one by one, or into an archive."
            raise BadOption(f"two paths would be called {doubled[0]}", hint=hint)
        if not args.output.is_dir():
            raise BadOption(f"{args.output}: no such folder", hint="Make it, or name an archive: FILE.tar.")
    disks.extract(runtime, args.disk, args.paths, args.output)


def insert(args: Args, runtime: Runtime) -> None:
    check_name(args.name)
    if args.mode is not None and not re.fullmatch(r"[0-7]{3,4}", args.mode):
        raise BadOption(f"--mode {args.mode}: not of the form 644 or 0755")
    if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", args.owner):
        raise BadOption(f"--owner {args.owner}: not of the form UID or UID:GID, in numbers")
    user, _, group = args.owner.partition(":")
    mode, owner = None if args.mode is None else int(args.mode, 8), (int(user), int(group or user))
    items = []
    for text in args.items:
        source, _, target = text.rpartition(":")
        if not source or not target.startswith("/"):
            raise BadOption(f"{text}: not of the form SRC:DST with an absolute DST")
        if not os.path.exists(source):
            raise InputMissing(f"{source}: does not exist", hint="Correct SRC:DST.")
        items.append(Item(os.path.abspath(source), target, mode, owner))
    print(disks.insert(runtime, args.image, items, args.name).digest)


def agent(args: Args, runtime: Runtime) -> None:
    sys.stdout.buffer.write(agent_unit().encode() if args.unit else runtime.images.interpreter().path.read_bytes())


def _row(image: Image, value: dict[str, Any]) -> tuple[Any, ...]:
    firmware = f"firmware ({image.facts.get('use_firmware') or 'bios'})"
    how = "kernel" if image.kernel else "disc" if image.is_disc else firmware
    how = f"warm ({size(recipe.memory)})" if value["state"] == "ready" and (recipe := image.recipe) else how
    sizes = size(image.virtual_size), size(value["stored"])
    names = ", ".join(image.names)
    return names, image.digest[:SHORT], value["state"], image.os, how, *sizes, moment(image.created), image.source


def _described(runtime: Runtime, image: Image) -> dict[str, Any]:
    """All that is known of it, with the bytes that it takes on the host's disk, and whether it is good."""
    files = [path for path in (image.disk, image.kernel, image.initrd) if path and path.exists()]
    value = {name: getattr(image, name) for name in image.__dataclass_fields__}
    value["stored"] = sum(path.stat().st_blocks * 512 for path in files)
    return value | {"state": "corrupt" if runtime.images.complaint(image) else "ready"}


# -- the images of a site, from one repository to its hosts ---------------------------------------------------------------


def publish(args: Args, runtime: Runtime) -> None:
    from belljar.image.site import publish as act

    if args.init:
        print(act.init(Path(args.to), args.key[0]))
        return
    if not any((args.images, args.unpublish, args.delegate, args.rotate, args.refresh)):
        raise BadOption("nothing to publish", hint="Name an image; --refresh renews what expires.")
    if args.name and len(args.images) != 1:
        raise BadOption("--as gives one image its name", hint="Publish images with other names one by one.")
    images = {args.name or image.called: image for image in map(runtime.images.resolve, args.images)}
    with shown() as progress, act.opened(args.to, act.load_keys(args.key)) as repository:
        if args.delegate:
            role, names, *keys = [*map(str, args.delegate), ""]
            repository.delegate(role, names, list(filter(None, keys)), args.threshold)
        for name in args.unpublish:
            repository.remove(name)
        for name, image in images.items():
            repository.put(runtime.images, name, image, progress)
        if args.rotate:
            repository.rotate(args.rotate, args.key[0])
    for name, image in images.items():
        print(f"{name} {image.digest}")
    for note in repository.notes:
        complain(note, "")


def sync(args: Args, runtime: Runtime) -> int:
    from belljar.image.container import follow
    from belljar.image.site import sync as act

    sources = args.sources or runtime.settings.image.sources
    followed = {} if args.sources else follow.names(runtime.images)
    if not sources and not followed:
        raise BadOption("no source of images is known", hint="Set `image.sources`, or name one with --from.")
    if args.all and args.names:
        raise BadOption("--all together with names")
    rows = follow.sync(runtime.images, followed, args.names, dry_run=args.dry_run)
    names = [name for name in args.names if name not in followed]
    if names or (sources and not args.names):
        rows += act.sync(runtime.images, names, sources, everything=args.all, dry_run=args.dry_run)
    table = [
        (row.name, row.digest[:SHORT], row.what, row.source, f"{row.error}: {row.why}" if row.error else row.why)
        for row in rows
    ]
    put(rows, ("NAME", "DIGEST", "STATE", "SOURCE", "WHY"), table, as_=args.format)
    if not rows and not (args.names or args.all or args.dry_run):
        complain(NOTHING_YET, "`belljar image sync NAME` brings one image, `belljar image sync --all` every one.")
    return 1 if any(row.what == act.FAILED for row in rows) else 0


def key(args: Args, runtime: Runtime) -> None:
    from belljar.image.site.publish import make_key, public_word

    print(public_word(make_key(args.file)))


# -- warm images: a preparation of the user's own, and machines that start where it ended ---------------------------------


LONGEST = 3600.0  # seconds a preparation may take where nothing else is said


def warm(args: Args, runtime: Runtime) -> None:
    """Store the image, prepare its memory once, and give it its name: an image that cannot be prepared is not kept."""
    check_name(args.name)
    if not after_dashes(args):
        raise BadOption(
            "nothing prepares it", hint=f"Put `--` before the command: {args.prog} NAME --from IMAGE -- CMD."
        )
    for option in ("cpus", "memory", "time"):
        words.above_zero(f"--{option}", getattr(args, option))
    _ = runtime.hypervisor.cloning  # raises where machines are always booted cold
    ensure_image(runtime, args.base)
    store, base = runtime.images, runtime.images.resolve(args.base)
    recipe = _recipe(args, base, runtime)
    image = store_nameless(store, base, recipe)
    try:
        _prepare(image, recipe, runtime)
        store.tag(image, args.name)
    except BaseException:  # re-raised: an interrupt leaves no image either
        with suppress(ImageUnknown, ImageInUse):  # another command may make the same one
            store.remove(image, force=True, nameless=True)
        raise
    print(image.digest)


def _recipe(args: Args, base: Image, runtime: Runtime) -> Recipe:
    """What the arguments ask for, in this place."""
    payload = words.unattended(words.payload(args, words.account_of(args.user, base.container), base.container))
    usual = None if args.allow else NetworkMode.NONE
    machine = make_request(
        runtime.settings, RunPayload(payload), cpus=args.cpus, memory=args.memory, allow=tuple(args.allow),
        network=NetworkMode(args.network) if args.network else usual,
    ).machine  # fmt: skip
    return Recipe(
        base.digest, base.called, replace(payload, rlimits=(), prepares=True), machine.cpus, machine.memory,
        args.time or LONGEST, caller().name, machine.network, machine.allow,
    )  # fmt: skip


def _prepare(image: Image, recipe: Recipe, runtime: Runtime) -> None:
    """Make the memory that the first machine of this user would make, and show what is said meanwhile."""
    request = make_request(
        runtime.settings, RunPayload(Payload((), caller())), requester="image warm", image=f"sha256:{image.digest}",
        cpus=recipe.cpus, memory=recipe.memory, network=NetworkMode.NONE, start=Start.AUTO,
    )  # fmt: skip
    stderr = FdSink(2)  # standard output has the digest alone
    build_template(runtime, request, exact=False, streams=Streams(None, stderr, stderr))


DISK = "IMAGE|ID @disk | an image, or an ended machine of `belljar run --keep`"
IMAGE = "IMAGE | name, digest or the digest's first digits"
CONTEXT = "how belljar's agent gets into the guest (default: as the image can)"
ACTS = f"""
# build | build a Debian image with mmdebstrap
{{debian}} @system | what to build
--suite {{bullseye,bookworm,trixie}} =bookworm | Debian's release (bookworm)
--name NAME = | the image's name (debian11, debian12, debian13)
--packages PACKAGE + = | Debian packages to add
--run CMD * | a shell command to run as root in the new system; repeatable
--disk SIZE | the disk's size; it takes no space until written to (8G)
# import | import a disk (qcow2 or raw, packed or not), a boot disc (ISO) such as CernVM's, or a container image
FILE|URL|CONTAINER @source | a path, or an address (file, http or https); or docker://HOST/NAME[:TAG|@sha256:DIGEST], oci:DIR[:TAG],
| oci-archive:FILE, docker-archive:FILE, - (`docker save` on standard input), sif:FILE, dir:PATH
--name NAME = | the image's name
--sha256 DIGEST = | digest that the file must have, before it is unpacked
--signer x509:FOLDER:DN = | require a signature, as CernVM images have: by an authority in FOLDER, with a name that
| fits the pattern DN
--kernel FILE | boot this kernel (default: the disk's own, if there is one)
--initrd FILE | its ramdisk (default: belljar makes one)
--append WORDS | the kernel's command line
--firmware {{auto,bios,uefi,none}} =auto | auto: boot the disk's kernel directly, else its boot loader; bios, uefi: its boot loader;
| none: never its boot loader
--context {{Context}} =auto | {CONTEXT}
# warm | make a warm image: a command prepares a guest, and jobs start where it ended, with what it has loaded
$ belljar image warm NAME --from IMAGE [options] -- CMD ARG...
NAME | the new image's name
-- CMD
--from IMAGE ! @base | the image to prepare: name or digest
-c --cpus N | virtual processors; its machines have no fewer
-m --memory SIZE | memory; its machines have no less
--in PATH[:DST] * @inputs | file or folder to copy in first; it is kept with the image
-e --env K=V * | set a variable
--cwd PATH | working directory (default: your current path, or the home of --user)
--user NAME|UID[:GID] | the user in the guest (default: you)
--network {{none,user}} | none (the default), or user: outgoing connections
--allow HOST * | all that it may reach, as in `belljar run`
--time TIME | the longest time it may take (1h)
# list +format | list the images
# show +format | show all that is known about an image
{IMAGE}
# verify +format | read images completely and compare their digests; exits 1 if one is damaged, which no machine starts from then on
IMAGE * @images | name or digest (default: all images)
# remove | remove a name; with its last name the image is removed, too
{IMAGE}
--force | all its names at once; also if a template needs it
# gc +format | remove images without a name, unfinished ones, old downloads, and what is above `image.cache_limit`
-n --dry-run | only show what would be done
# tag | give an image one more name
{IMAGE}
NAME | its new name
# extract | copy files and folders out of an image, or out of a machine's kept disk
{DISK}
PATH + @paths | a path in it
-o --output DIR|FILE =. | a folder (default: .), or an archive: FILE.tar, FILE.tar.gz
# insert | make a new image from another one, with files and folders added
IMAGE | name or digest of the image, which does not change
SRC:DST + @items | a path here, and an absolute path in the image; a folder there ends in /
--name NAME ! | the new image's name
--mode OCTAL | mode of the files (default: as on this host)
--owner UID[:GID] =0:0 | owner of the files, in numbers (default: 0:0)
# agent | print belljar's guest agent, for an image that belljar cannot boot directly
/ --tar ! | a tar archive to unpack in /usr/lib/belljar
/ --unit | a systemd unit that starts it
# publish | put images into a repository, from which all hosts of a site get them
IMAGE * @images | name or digest
--to DIR#sha256=DIGEST ! @to | the repository, as in the setting `image.sources`; with --init a new folder
--key FILE|DIR * ! | a private key, or a folder of them; repeatable
--init | make a repository, and keys in the folder of --key; print the line for `image.sources`
--as NAME @name = | the image's name in the repository (for one image)
--unpublish NAME * | withdraw a name: all hosts remove it; repeatable
--refresh | only renew signatures that expire: once a day, by a timer
--delegate WORD + | ROLE NAMES KEY...: these public keys may publish these names, such as 'alice-*|a'; ROLE alone: no longer
--threshold N =1 | how many of the keys of --delegate have to sign (default: 1)
--rotate {{root,targets,online}} | replace this key by a new one, made in the folder of --key
# sync +format | get new versions of images from the site's repositories, and of tags at registries; exits 1 if one fails
NAME * @names | names (default: those that this host already has from there)
--from ADDRESS#sha256=DIGEST * @sources | a repository, instead of those in `image.sources`; repeatable
--all | every image of the repositories
-n --dry-run | only show what would be done
# key | print the public part of a signing key, for `publish --delegate`; the key is made if there is none
FILE | the private key"""
WHAT = "Disk images, from which machines boot. They never change."
VERBS = {"image": Verb(WHAT, acts=acts(ACTS, globals()))}
