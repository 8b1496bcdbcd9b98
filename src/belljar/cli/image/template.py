"""`belljar template ...`: booted guests, frozen, of which jobs get clones; and `belljar cache ...`: the disks that machines of this
user find again (`belljar run --cache`)."""

from __future__ import annotations

import time
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.machine.request import above_zero
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import as_json, duration, show
from belljar.errors import TemplateError
from belljar.host.caller import caller
from belljar.hypervisor import Template
from belljar.hypervisor.devices import share_kind, share_names
from belljar.jobs import size
from belljar.jobs.attend import build_template
from belljar.jobs.shares import check_number
from belljar.jobs.starting import make_request
from belljar.machine.extras import caches
from belljar.model import Payload, RunPayload, Share


def list_(args: Args, runtime: Runtime) -> None:
    templates = runtime.hypervisor.templates()
    names = {image.digest: image.names for image in runtime.images.images()} if templates else {}
    values, rows = [], []
    for template in templates:
        fact, digest = template.facts.get, str(template.facts.get("image_digest", ""))
        values.append(_described(template) | {"images": names.get(digest, ())})
        kind = fact("cpus"), size(fact("memory", 0)), fact("accelerator"), fact("owner")
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
    shares += [Share("/", f"/{kind}{number}", kind=kind) for kind in KINDS for number in range(getattr(args, kind))]
    check_number("all shares", len(shares))
    for option, value in (("--cpus", args.cpus), ("--memory", args.memory)):
        above_zero(option, value)
    request = make_request(
        runtime.settings, RunPayload(Payload((), caller())), requester="template build",
        image=args.image, cpus=args.cpus, memory=args.memory, disk=args.disk,
        network=args.network, shares=tuple(shares), context=args.context,
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
    removed = [{"number": cache.number, "path": cache.path} for cache in caches.remove(runtime.folders)]
    show(removed, ("REMOVED", "FILE"), as_=args.format)


KEY = "KEY * @keys | a template's key, or the beginning of one"
KINDS = [name for name in share_names() if not share_kind(name).is_usual]
KIND_OPTIONS = "\n".join(f"--{kind} N =0 | how many `--share {kind}:...` its machines can have" for kind in KINDS)
TEMPLATES = f"""
# list +format | list your templates; JSON has everything that each was made from
# verify +format | check that templates are unchanged; exits 1 if one is not
{KEY} (default: all)
# remove | remove templates; running machines are not affected
{KEY}
--all | remove all your templates
# build +format | make the template for a kind of machine now, before its first job
--image IMAGE | the image (default: as with `belljar run`)
--cpus N | virtual processors
--memory SIZE | memory, such as 2G or 512M
--disk SIZE | size of the disk (default: the image's)
--network {{NetworkMode}} | the network of its machines
--context {{Context}} | how belljar's agent gets into the guest
--shares N =0 | how many shared folders its machines can have
{KIND_OPTIONS}
--exact | only for machines of exactly this size, which start quicker
"""
CACHES = """
# list +format | list cache disks
# remove +format | remove the cache disks that no machine uses
"""
VERBS = {
    "template": Verb(
        "A template is a guest that was booted once and frozen. Jobs start from copies of it. The first job of an "
        "image makes its template; one that was changed or is out of date is made again.",
        acts=acts(TEMPLATES, globals()),
    ),
    "cache": Verb(
        "Cache disks of `belljar run --cache SIZE`. A machine's cache disk is its own while it runs; when its guest has"
        " unmounted it, a later machine gets the disk with its content.",
        acts=acts(CACHES, {"list": list_caches, "remove": remove_caches}),
    ),
}
