"""`belljar template ...`: booted guests, frozen, of which jobs get clones."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import add_format, as_size
from belljar.errors import TemplateError
from belljar.model import Context, NetworkMode

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.hypervisor import Template

HELP = (
    "Templates are booted guests, frozen: one for each image, from which machines of every size are cloned. Jobs get clones of them. They are made "
    "on the first job of their kind, trusted only while nothing in them has changed, and made again when they are old."
)
SIZES = ("memory", "disk_size")  # facts in bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    add_format(acts.add_parser("list", help="list the templates of this user"))
    one = acts.add_parser("show", help="show what a template was made of")
    _add_keys(one, nargs=1)
    add_format(one)
    verify = acts.add_parser("verify", help="compute every digest again; exit 1 when something is wrong")
    _add_keys(verify, nargs="*", note="; none: all")
    add_format(verify)
    remove = acts.add_parser("remove", help="remove templates; machines that run on them go on")
    _add_keys(remove, nargs="*")
    remove.add_argument("--all", action="store_true", help="remove every template of this user")
    acts.add_parser("expire", help="remove templates past their age (`qemu.template_days`) and unfinished ones")
    build = acts.add_parser("build", help="make the template for a kind of machine now, before its first job")
    build.add_argument("--image", help="the image; default: as `belljar run`")
    build.add_argument("--cpus", type=int, help="virtual processors")
    build.add_argument("--memory", type=as_size, metavar="SIZE", help="memory, as 2G or 512M")
    build.add_argument("--disk", type=as_size, metavar="SIZE", help="size of the disk; default: the image's")
    build.add_argument("--network", choices=[mode.value for mode in NetworkMode], help="what its card is plugged into")
    build.add_argument(
        "--context", choices=[context.value for context in Context], help="how its guest is given the agent"
    )
    build.add_argument(
        "--shares", type=int, default=0, metavar="N", help="how many shared folders its clones can mount"
    )
    build.add_argument(
        "--virtiofs", type=int, default=0, metavar="N", help="how many of `--share virtiofs:...` its clones can mount"
    )
    build.add_argument("--nfs", action="store_true", help="for machines that mount exports (`--share nfs://...`)")
    add_format(build)


def _add_keys(parser: argparse.ArgumentParser, *, nargs: int | str, note: str = "") -> None:
    parser.add_argument("keys", metavar="KEY", nargs=nargs, help=f"a template's key, or the beginning of one{note}")


def run(args: argparse.Namespace, house: House) -> int:
    acts = {"list": show_all, "show": show_one, "verify": verify, "remove": remove, "expire": expire, "build": build}
    return acts[args.act](args, house)


def show_all(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import duration, show, size

    templates = house.hypervisor.templates()
    images = {image.digest: image.names for image in house.images.images()} if templates else {}
    names = {one.key: images.get(one.facts.get("image_digest", ""), ()) for one in templates}
    rows = [
        (
            one.key, ", ".join(names[one.key]) or str(one.facts.get("image_digest"))[:12], one.facts.get("cpus"),
            size(one.facts.get("memory", 0)), one.facts.get("accelerator"), one.facts.get("owner"), size(one.size), duration(time.time() - one.created),
        )
        for one in templates
    ]  # fmt: skip
    heads = ("KEY", "IMAGE", "CPUS", "MEMORY", "ACCELERATOR", "UID", "ON DISK", "AGE")
    show([{**_described(one), "images": names[one.key]} for one in templates], heads, rows, as_=args.format)
    return 0


def show_one(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import as_json, moment, size
    from belljar.jobs.words import plain

    template = _chosen(house, args.keys)[0]
    if args.format == "json":
        print(as_json(_described(template)))
        return 0
    facts = {
        "created": moment(template.created),
        "on disk": size(template.size),
        "folder": template.folder,
        **template.facts,
        **{name: size(template.facts[name]) for name in SIZES if isinstance(template.facts.get(name), int)},
    }
    print(f"template {template.key}")
    for name, value in facts.items():
        print(f"  {name:<12} {plain(' '.join(value) if isinstance(value, list) else str(value))}")
    return 0


def verify(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import show

    found = {one.key: house.hypervisor.verify_template(one) for one in _chosen(house, args.keys, or_all=True)}
    rows = [(key, "; ".join(wrong) or "whole") for key, wrong in found.items()]
    show(found, ("KEY", "STATE"), rows, as_=args.format)
    return 1 if any(found.values()) else 0


def remove(args: argparse.Namespace, house: House) -> int:
    if bool(args.keys) == args.all:
        raise TemplateError("which templates?", hint="Name templates by their keys, or say --all.")
    for template in _chosen(house, args.keys, or_all=args.all):
        house.hypervisor.remove_template(template.key)
        print(template.key)
    return 0


def expire(args: argparse.Namespace, house: House) -> int:
    for key in house.hypervisor.expire_templates(time.time()):
        print(key)
    return 0


def build(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.machine.request import account_of, at_least, image_name
    from belljar.cli.render import as_json, size
    from belljar.jobs.shares import check_number
    from belljar.model import MachineSpec, Share, ShareKind

    defaults = house.settings.machine
    shares = [Share("/", f"/share{number}") for number in range(args.shares)]
    shares += [Share("/", f"/folder{number}", kind=ShareKind.VIRTIOFS) for number in range(args.virtiofs)]
    check_number("--shares and --virtiofs", len(shares))
    if args.nfs:  # no server is asked: it only says what kind of machine
        shares.append(Share("nfs://any:2049/", "/export", kind=ShareKind.NFS))
    spec = MachineSpec(
        image=house.settings.image.default if args.image is None else image_name(args.image),
        cpus=at_least("--cpus", args.cpus, defaults.cpus, 1),
        memory=at_least("--memory", args.memory, defaults.memory, 1),
        disk=args.disk,
        network=NetworkMode(args.network) if args.network else defaults.network,
        shares=tuple(shares),
        context=Context(args.context) if args.context else defaults.context,
    )
    template = house.build_template(spec, account_of(None))
    print(as_json(_described(template)) if args.format == "json" else f"{template.key}  {size(template.size)}")
    return 0


def _chosen(house: House, prefixes: list[str], *, or_all: bool = False) -> list[Template]:
    """The templates whose keys begin so. Raises TemplateError for a prefix that fits none or several."""
    there = house.hypervisor.templates()
    if not prefixes and or_all:
        return there
    chosen = []
    for prefix in prefixes:
        fitting = [one for one in there if one.key.startswith(prefix)]
        if len(fitting) != 1:
            what = "no template of this user's has" if not fitting else f"{len(fitting)} templates of this user's have"
            raise TemplateError(f"{prefix}: {what} a key that begins so")
        chosen += fitting
    return chosen


def _described(template: Template) -> dict[str, Any]:
    return {
        "key": template.key, "folder": str(template.folder), "size": template.size, "created": template.created,
        "facts": dict(template.facts),
    }  # fmt: skip
