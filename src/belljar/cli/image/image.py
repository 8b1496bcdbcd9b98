"""`belljar image ...`: the images of this user and of the site; the agent for images of other makers."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from belljar.cli.image import site as image_site
from belljar.cli.parser import FORMAT, Verb, acts
from belljar.cli.render import moment
from belljar.cli.render import show as put
from belljar.context import choose
from belljar.errors import BadOption, InputMissing, OutputUnwritable
from belljar.jobs import size
from belljar.machine.planning.contexts import means_of
from belljar.model import Context, Firmware

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.image import Image
    from belljar.image.intake.intake import Judge
    from belljar.machine.workshop.workshop import Item

OWNER = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")
HEADS = ("NAME", "DIGEST", "STATE", "OS", "BOOT", "DISK", "STORED", "CREATED", "SOURCE")
SHORT = 12  # digits of a digest that are shown


def build(args: argparse.Namespace, house: House) -> int:
    from belljar.image.build.debian import DISK_SIZE, Recipe, build

    recipe = Recipe(args.suite, args.name, tuple(args.packages), tuple(args.run), args.disk or DISK_SIZE)
    print(build(house.images, recipe).digest)
    return 0


def import_(args: argparse.Namespace, house: House) -> int:
    from belljar.image.intake.sources import Order, bring
    from belljar.jobs.disks import told_of

    context = Context(args.context)
    order = Order(
        args.source, args.name, args.kernel, args.initrd, args.append, args.firmware, kind=args.kind,
        sha256=args.sha256.lower(), context=context, signer=args.signer,
    )  # fmt: skip
    image = bring(house.images, order, _judge(context, args.name))
    if words := told_of(image):
        print(f"belljar: {words}", file=sys.stderr)
    print(image.digest)
    return 0


def _judge(context: Context, name: str) -> Judge | None:
    """Refuses an image that cannot be contextualized as its importer wants."""
    if context is Context.AUTO:
        return None
    return lambda facts, has_kernel: choose(context, means_of(facts, has_kernel), name)


def list_(args: argparse.Namespace, house: House) -> int:
    images = house.images.images()
    facts = [_facts(house, image) for image in images]
    rows = [_row(image, one["state"]) for image, one in zip(images, facts, strict=True)]
    put(facts, HEADS, rows, as_=args.format)
    return 0


def show(args: argparse.Namespace, house: House) -> int:
    image = house.images.find(args.image)
    facts = _facts(house, image)
    sizes = {name: size(facts[name]) for name in ("virtual_size", "stored")}
    shown = {**facts, **sizes, "created": moment(image.created)}
    more = shown.pop("facts")
    if least := more.get("least_memory"):
        more = {**more, "least_memory": size(least)}
    rows = [(name, _words(value)) for name, value in {**shown, **more}.items() if value not in ("", None, [], ())]
    put(facts, ("WHAT", "VALUE"), rows, as_=args.format)
    return 0


def verify(args: argparse.Namespace, house: House) -> int:
    images = [house.images.find(reference) for reference in args.images] or house.images.images()
    found = [(image, house.images.verify(image)) for image in images]
    values = [{"digest": image.digest, "names": image.names, "wrong": wrong} for image, wrong in found]
    rows = [(_called(image), image.digest[:SHORT], "; ".join(wrong) or "as it was stored") for image, wrong in found]
    put(values, ("NAME", "DIGEST", "STATE"), rows, as_=args.format)
    bad = [image for image, wrong in found if wrong]
    for image in bad:
        what = "is not started any more" if image.store == house.images.folder else "is damaged"
        print(
            f"belljar: image {image.called} {what}. {house.images.remedy(image.disk.parent, image.called)}",
            file=sys.stderr,
        )
    return 1 if bad else 0


def remove(args: argparse.Namespace, house: House) -> int:
    house.images.drop(args.image, force=args.force)
    return 0


def gc(args: argparse.Namespace, house: House) -> int:
    removed = [str(path) for path in house.images.gc(dry_run=args.dry_run)]
    put(removed, ("WOULD BE REMOVED" if args.dry_run else "REMOVED",), [(path,) for path in removed], as_=args.format)
    return 0


def tag(args: argparse.Namespace, house: House) -> int:
    house.images.tag(house.images.resolve(args.image), args.name)
    return 0


def set_(args: argparse.Namespace, house: House) -> int:
    if args.context is None and args.firmware is None:
        raise BadOption("nothing to change", hint="Give --context or --firmware.")
    context = None if args.context is None else Context(args.context)
    firmware = None if args.firmware is None else Firmware(args.firmware)
    image = house.images.resolve(args.image)
    if context not in (None, Context.AUTO):
        choose(context, means_of(image.facts, image.kernel is not None), args.image)
    house.images.amend(image, context=context, firmware=firmware)
    return 0


def extract(args: argparse.Namespace, house: House) -> int:
    """Copy paths of a disk to here."""
    from belljar.jobs import disks

    if not disks.is_archive(args.output):
        names = [os.path.basename(os.path.normpath(path)) for path in args.paths]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            hint = "Extract them one by one, or into an archive."
            raise BadOption(f"two paths would be called {doubled[0]}", hint=hint)
        if not args.output.is_dir():
            raise OutputUnwritable(f"{args.output}: no such folder", hint="Make it, or name an archive: FILE.tar.")
    disks.extract(house, args.disk, args.paths, args.output)
    return 0


def insert(args: argparse.Namespace, house: House) -> int:
    """Make a new image of one, with files of this host."""
    from belljar.image.store.store import check_name
    from belljar.jobs import disks

    check_name(args.name)
    items = [_item(text, _mode(args.mode), _owner(args.owner)) for text in args.items]
    print(disks.insert(house, args.image, items, args.name).digest)
    return 0


def _item(text: str, mode: int | None, owner: tuple[int, int]) -> Item:
    from belljar.machine.workshop.workshop import Item

    source, colon, target = text.rpartition(":")
    if not colon or not source or not target.startswith("/"):
        raise BadOption(f"{text}: not of the form SRC:DST with an absolute DST")
    if not os.path.exists(source):
        raise InputMissing(f"{source}: does not exist", hint="Correct SRC:DST.")
    return Item(os.path.abspath(source), target, mode, owner)


def _mode(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-7]{3,4}", text):
        raise BadOption(f"--mode {text}: not of the form 644 or 0755")
    return int(text, 8)


def _owner(text: str) -> tuple[int, int]:
    found = OWNER.fullmatch(text)
    if not found:
        raise BadOption(f"--owner {text}: not of the form UID or UID:GID, in numbers")
    return int(found[1]), int(found[2] or found[1])


def agent(args: argparse.Namespace, house: House) -> int:
    from belljar.image import agent_unit

    sys.stdout.buffer.write(agent_unit().encode() if args.unit else house.images.interpreter().path.read_bytes())
    return 0


def _row(image: Image, state: str) -> tuple[Any, ...]:
    firmware = f"firmware ({image.facts.get('use_firmware') or 'bios'})"
    how = "kernel" if image.kernel else "disc" if image.is_disc else firmware
    stored = _stored(image)
    return (
        _called(image), image.digest[:SHORT], state, image.os, how, size(image.virtual_size), size(stored), moment(image.created),
        image.source,
    )  # fmt: skip


def _facts(house: House, image: Image) -> dict[str, Any]:
    facts = {name: getattr(image, name) for name in image.__dataclass_fields__}
    state = "corrupt" if house.images.complaint(image) else "ready"
    return {**facts, "created": image.created, "stored": _stored(image), "state": state}


def _stored(image: Image) -> int:
    """Bytes the image takes on the host's disk."""
    return sum(
        path.stat().st_blocks * 512 for path in (image.disk, image.kernel, image.initrd) if path and path.exists()
    )


def _called(image: Image) -> str:
    return ", ".join(image.names)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


DISK = "IMAGE|ID @disk | an image, or a machine that has ended and was run with --keep"
IMAGE = "IMAGE | name, digest or the digest's first digits"
CONTEXT = "{" + ",".join(one.value for one in Context) + "}"
CONTEXT_HELP = "how its guests are contextualized, where a job does not say (auto: the first way that it can)"
OWN = f"""
# build | build a Debian image with mmdebstrap
{{debian}} @system | what to build
--suite {{bullseye,bookworm,trixie}} =bookworm | Debian's release (bookworm)
--name NAME = | the image's name (debian11, debian12, debian13)
--packages PACKAGE + = | Debian packages to add
--run CMD * | a shell command to run as root in the new system; repeatable
--disk SIZE | the disk's size; it takes no space until written to (8G)
# import | take in a disk from a file or an address: qcow2 or raw, packed or not
FILE|URL @source | a path, or an address: file, http, https
--name NAME ! | the image's name
--kind {{disk,iso}} =disk | iso: a disc that the BIOS boots, such as a CernVM's; its guests know their own work
--sha256 DIGEST = | of the file as it comes; anything else is refused
--signer x509:FOLDER:DN = | only if it carries a signature, as CernVM images do, by one whose certificate an authority in FOLDER
| vouches for and whose whole name fits the pattern DN
--kernel FILE :path | boot this kernel; else one is looked for in the disk
--initrd FILE :path | its ramdisk; else belljar makes one
--append WORDS | the kernel's command line
--firmware {{auto,bios,uefi,none}} =auto | auto: a kernel out of the disk, else firmware; bios, uefi: the disk's own boot loader;
| none: never firmware
--context {CONTEXT} =auto | {CONTEXT_HELP}
# list | list the images
{FORMAT}
# show | show all that is known of one image
{IMAGE}
{FORMAT}
# verify | read images whole and compare their digests; exit 1 when one is wrong, which is not started then
IMAGE * @images | name or digest; none: every image
{FORMAT}
# remove | take a name away, and the image with its last name
{IMAGE}
--force | all its names at once; also one that is corrupt, or that a template needs
# gc | remove what nobody can use: nameless images, broken drafts, old downloads; and what `image.cache_limit` wants gone
-n --dry-run | only say what would be removed
{FORMAT}
# tag | give an image one more name
{IMAGE}
NAME | its new name
# set | change how an image is started and contextualized
{IMAGE}
--firmware {{bios,uefi}} | of a disk that is not booted directly
--context {CONTEXT} | {CONTEXT_HELP}
# extract | copy files and folders out of an image, or out of a kept machine
{DISK}
PATH + @paths | a path in it
-o --output DIR|FILE.tar[.gz] :path =. | the folder they are copied into, as your own files; or an archive, with owners and
| modes (default: .)
# insert | make a new image of one, with files and folders put in
IMAGE | name or digest; it stays as it is
SRC:DST + @items | a path here and its absolute path in the image; a folder's / takes it in
--name NAME ! | the new image's name
--mode OCTAL | of what is put in (default: as it is here)
--owner UID[:GID] =0:0 | of what is put in, in numbers (0:0)
# agent | print the guest agent, to install it in an image that belljar cannot boot directly
/ --tar ! | the agent with its interpreter: a tar archive to unpack at /usr/lib/belljar
/ --unit | a systemd unit that starts it"""
FUNCTIONS = {
    "build": build, "import": import_, "list": list_, "show": show, "verify": verify, "remove": remove,
    "gc": gc, "tag": tag, "set": set_, "extract": extract, "insert": insert, "agent": agent,
}  # fmt: skip
ACTS = {**acts(OWN, FUNCTIONS), **image_site.ACTS}
VERBS = {"image": Verb("Build, import, list, show, verify, name and remove images.", acts=ACTS)}
