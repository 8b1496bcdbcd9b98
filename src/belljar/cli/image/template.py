"""`belljar template ...`: booted guests, frozen, of which jobs get clones; and `belljar cache ...`: the disks that machines of this
user find again (`belljar run --cache`)."""

from __future__ import annotations

import time
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.machine.request import above_zero
from belljar.cli.parser import FORMAT, Args, Verb, acts
from belljar.cli.render import as_json, duration, show
from belljar.errors import TemplateError
from belljar.host.caller import caller
from belljar.hypervisor import Template
from belljar.jobs import size
from belljar.jobs.attend import build_template
from belljar.jobs.shares import check_number
from belljar.jobs.starting import make_request
from belljar.machine.extras import caches
from belljar.model import Context, NetworkMode, Payload, RunPayload, Share, ShareKind


def show_all(args: Args, runtime: Runtime) -> None:
    templates = runtime.hypervisor.templates()
    names = {image.digest: image.names for image in runtime.images.images()} if templates else {}
    values, rows = [], []
    for template in templates:
        facts, digest = template.facts, str(template.facts.get("image_digest", ""))
        values.append(_described(template) | {"images": names.get(digest, ())})
        kind = facts.get("cpus"), size(facts.get("memory", 0)), facts.get("accelerator"), facts.get("owner")
        image, age = ", ".join(names.get(digest, ())) or digest[:12], duration(time.time() - template.created)
        rows.append((template.key, image, *kind, size(template.size), age))
    heads = ("KEY", "IMAGE", "CPUS", "MEMORY", "ACCELERATOR", "UID", "ON DISK", "AGE")
    show(values, heads, rows, as_=args.format)


def verify(args: Args, runtime: Runtime) -> int:
    chosen = _chosen(runtime, args.keys) if args.keys else runtime.hypervisor.templates()
    verdicts = {template.key: runtime.hypervisor.verify_template(template) for template in chosen}
    rows = [(key, "; ".join(wrong) or "whole") for key, wrong in verdicts.items()]
    show(verdicts, ("KEY", "STATE"), rows, as_=args.format)
    return 1 if any(verdicts.values()) else 0


def remove(args: Args, runtime: Runtime) -> None:
    if bool(args.keys) == args.all:
        raise TemplateError("which templates?", hint="Name templates by their keys, or say --all.")
    for template in runtime.hypervisor.templates() if args.all else _chosen(runtime, args.keys):
        runtime.hypervisor.remove_template(template.key)
        print(template.key)


def build(args: Args, runtime: Runtime) -> None:
    shares = [Share("/", f"/share{number}") for number in range(args.shares)]
    shares += [Share("/", f"/folder{number}", kind=ShareKind.VIRTIOFS) for number in range(args.virtiofs)]
    check_number("--shares and --virtiofs", len(shares))
    for option, value in (("--cpus", args.cpus), ("--memory", args.memory)):
        above_zero(option, value)
    request = make_request(
        runtime.settings, RunPayload(Payload((), caller())), requester="template build",
        image=args.image, cpus=args.cpus, memory=args.memory, disk=args.disk,
        network=NetworkMode(args.network) if args.network else None, shares=tuple(shares),
        context=Context(args.context) if args.context else None,
    )  # fmt: skip
    template = build_template(runtime, request, exact=args.exact)
    print(as_json(_described(template)) if args.format == "json" else f"{template.key}  {size(template.size)}")


def _chosen(runtime: Runtime, prefixes: list[str]) -> list[Template]:
    """The templates whose keys begin so. Raises TemplateError for a prefix that fits none or several."""
    chosen = []
    for prefix in prefixes:
        fitting = [item for item in runtime.hypervisor.templates() if prefix and item.key.startswith(prefix)]
        if len(fitting) != 1:
            what = "no template of this user's has" if not fitting else f"{len(fitting)} templates of this user's have"
            raise TemplateError(f"{prefix!r}: {what} a key that begins so")
        chosen += fitting
    return chosen


def _described(template: Template) -> dict[str, Any]:
    return {
        "key": template.key, "folder": template.folder, "size": template.size, "created": template.created, "facts": template.facts,
    }  # fmt: skip


# -- caches --------------------------------------------------------------------------------------------------------------


def list_caches(args: Args, runtime: Runtime) -> None:
    values, rows = [], []
    for cache in caches.caches_of(runtime.folders):
        status, state = cache.path.stat(), cache.state()
        length, stored = status.st_size, status.st_blocks * 512
        values.append({"number": cache.number, "state": state, "size": length, "stored": stored, "path": cache.path})
        rows.append((cache.number, state, size(length), size(stored), cache.path))
    show(values, ("NUMBER", "STATE", "SIZE", "STORED", "FILE"), rows, as_=args.format)


def remove_caches(args: Args, runtime: Runtime) -> None:
    removed = list(caches.remove(runtime.folders))
    values = [{"number": cache.number, "path": cache.path} for cache in removed]
    show(values, ("REMOVED", "FILE"), [(cache.number, cache.path) for cache in removed], as_=args.format)


KEY = "KEY * @keys | a template's key, or the beginning of one"
NETWORKS, CONTEXTS = (",".join(member.value for member in kind) for kind in (NetworkMode, Context))
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
VERBS = {
    "template": Verb(
        "Templates are booted guests, frozen: one for each image, from which machines of every size are cloned. They are made on the "
        "first job of their kind, trusted only while nothing in them has changed, and made again when they are old.",
        acts=acts(TEMPLATES, {"list": show_all, "verify": verify, "remove": remove, "build": build}),
    ),
    "cache": Verb(
        "List and remove cache disks: `belljar run --cache SIZE` gives a machine one that no other machine has, and that"
        " keeps what is on it when the guest powers itself off.",
        acts=acts(CACHES, {"list": list_caches, "remove": remove_caches}),
    ),
}
