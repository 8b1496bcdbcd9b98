"""`belljar template ...`: booted guests, frozen, of which jobs get clones; and `belljar cache ...`: the disks that machines of this
user find again (`belljar run --cache`)."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, Verb, acts
from belljar.cli.render import as_json, duration, show
from belljar.errors import TemplateError
from belljar.jobs import size
from belljar.machine.extras import caches
from belljar.model import Context, NetworkMode

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.hypervisor import Template
    from belljar.machine.extras.caches import Cache


def show_all(args: argparse.Namespace, house: House) -> int:
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


def verify(args: argparse.Namespace, house: House) -> int:
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


def build(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.machine.request import above_zero, image_name
    from belljar.errors import ImpossibleSize
    from belljar.host.caller import caller
    from belljar.jobs.attend import build_template
    from belljar.jobs.shares import check_number
    from belljar.jobs.starting import make_request
    from belljar.model import Payload, RunPayload, Share, ShareKind

    shares = [Share("/", f"/share{number}") for number in range(args.shares)]
    shares += [Share("/", f"/folder{number}", kind=ShareKind.VIRTIOFS) for number in range(args.virtiofs)]
    check_number("--shares and --virtiofs", len(shares))
    for option, value in (("--cpus", args.cpus), ("--memory", args.memory)):
        above_zero(option, value, ImpossibleSize)
    request = make_request(
        house.settings, RunPayload(Payload((), caller())), requester="template build",
        image=None if args.image is None else image_name(args.image), cpus=args.cpus, memory=args.memory, disk=args.disk,
        network=NetworkMode(args.network) if args.network else None, shares=tuple(shares),
        context=Context(args.context) if args.context else None,
    )  # fmt: skip
    template = build_template(house, request, exact=args.exact)
    print(as_json(_described(template)) if args.format == "json" else f"{template.key}  {size(template.size)}")
    return 0


def _chosen(house: House, prefixes: list[str], *, or_all: bool = False) -> list[Template]:
    """The templates whose keys begin so. Raises TemplateError for a prefix that fits none or several."""
    there = house.hypervisor.templates()
    if not prefixes and or_all:
        return there
    chosen = []
    for prefix in prefixes:
        fitting = [one for one in there if prefix and one.key.startswith(prefix)]
        if len(fitting) != 1:
            what = "no template of this user's has" if not fitting else f"{len(fitting)} templates of this user's have"
            raise TemplateError(f"{prefix!r}: {what} a key that begins so")
        chosen += fitting
    return chosen


def _described(template: Template) -> dict[str, Any]:
    return {
        "key": template.key, "folder": str(template.folder), "size": template.size, "created": template.created,
        "facts": dict(template.facts),
    }  # fmt: skip


# -- caches --------------------------------------------------------------------------------------------------------------


def list_caches(args: argparse.Namespace, house: House) -> int:
    return _show_caches(caches.caches_of(house.folders), args.format)


def remove_caches(args: argparse.Namespace, house: House) -> int:
    return _show_caches(list(caches.remove(house.folders)), args.format, is_gone=True)


def _show_caches(caches: list[Cache], form: str, *, is_gone: bool = False) -> int:
    values, rows = [], []
    for cache in caches:
        facts = None if is_gone else cache.path.stat()
        state, length = ("removed", 0) if facts is None else (cache.state(), facts.st_size)
        stored = 0 if facts is None else facts.st_blocks * 512
        values.append(
            {"number": cache.number, "state": state, "size": length, "stored": stored, "path": str(cache.path)}
        )
        rows.append((cache.number, state, size(length), size(stored), cache.path))
    show(values, ("NUMBER", "STATE", "SIZE", "STORED", "FILE"), rows, as_=form)
    return 0


KEY = "KEY * @keys | a template's key, or the beginning of one"
NETWORKS, CONTEXTS = (",".join(one.value for one in kind) for kind in (NetworkMode, Context))
TEMPLATES = f"""
# list | list the templates of this user; with --format json all that each was made of
{FORMAT}
# verify | see whether each is as it was made; exit 1 when something is wrong
{KEY}; none: all
{FORMAT}
# remove | remove templates; machines that run on them go on
{KEY}
--all | remove every template of this user
# build | make the template for a kind of machine now, before its first job
--image IMAGE | the image; default: as `belljar run`
--cpus N | virtual processors
--memory SIZE | memory, as 2G or 512M
--disk SIZE | size of the disk; default: the image's
--network {{{NETWORKS}}} | what its card is plugged into
--context {{{CONTEXTS}}} | how its guest is given the agent
--shares N =0 | how many shared folders its clones can mount
--virtiofs N =0 | how many of `--share virtiofs:...` its clones can mount
--exact | one of exactly this size (default: the one that machines of every size are cloned from)
{FORMAT}"""
CACHES = f"""
# list | list the caches
{FORMAT}
# remove | remove every cache that no machine has
{FORMAT}"""
OF_TEMPLATES = {"list": show_all, "verify": verify, "remove": remove, "build": build}
VERBS = {
    "template": Verb(
        "Templates are booted guests, frozen: one for each image, from which machines of every size are cloned. They are made on the "
        "first job of their kind, trusted only while nothing in them has changed, and made again when they are old.",
        acts=acts(TEMPLATES, OF_TEMPLATES),
    ),
    "cache": Verb(
        "List and remove cache disks: `belljar run --cache SIZE` gives a machine one that no other machine has, and that"
        " keeps what is on it when the guest powers itself off.",
        acts=acts(CACHES, {"list": list_caches, "remove": remove_caches}),
    ),
}
