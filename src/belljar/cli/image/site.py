"""`belljar image publish`, `sync`, `key`: the images of a site, from one repository to its hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from belljar.assembly import House
from belljar.cli.parser import FORMAT, Args, acts
from belljar.cli.render import show
from belljar.errors import BadOption

NOTHING_YET = (
    "nothing has come from these sources yet. `belljar image sync --dry-run` shows what they offer, `belljar image sync NAME`"
    " brings one image, `belljar image sync --all` every one."
)
SHORT = 12  # digits of a digest that are shown


def publish(args: Args, house: House) -> int:
    """Make a repository, or change one."""
    from belljar.image.progress import shown
    from belljar.image.site import publish as act

    if args.init:
        print(act.init(Path(args.to), args.key[0]))
        return 0
    if not any((args.images, args.unpublish, args.delegate, args.rotate, args.refresh)):
        raise BadOption("nothing to publish", hint="Name an image; --refresh renews what expires.")
    if args.name and len(args.images) != 1:
        raise BadOption("--as gives one image its name", hint="Publish images with other names one by one.")
    images = {args.name or image.called: image for image in map(house.images.resolve, args.images)}
    with shown() as progress, act.opened(args.to, act.load_keys(args.key)) as repository:
        if args.delegate:
            role, names, *keys = [*map(str, args.delegate), ""]
            repository.delegate(role, names, list(filter(None, keys)), args.threshold)
        for name in args.unpublish:
            repository.remove(name)
        for name, image in images.items():
            repository.put(house.images, name, image, progress)
        if args.rotate:
            repository.rotate(args.rotate, args.key[0])
    for name, image in images.items():
        print(f"{name} {image.digest}")
    print(*(f"belljar: {note}\n" for note in repository.notes), sep="", end="", file=sys.stderr)
    return 0


def sync(args: Args, house: House) -> int:
    """Bring what is named, or what has changed."""
    from belljar.image.site import sync as act

    sources = args.sources or house.settings.image.sources
    if not sources:
        raise BadOption("no source of images is known", hint="Set `image.sources`, or name one with --from.")
    if args.all and args.names:
        raise BadOption("--all together with names")
    rows = act.sync(house.images, args.names, sources, everything=args.all, dry_run=args.dry_run)
    reasons = [f"{row.error}: {row.why}" if row.error else row.why for row in rows]
    table = [(row.name, row.digest[:SHORT], row.what, row.source, why) for row, why in zip(rows, reasons, strict=True)]
    show(rows, ("NAME", "DIGEST", "STATE", "SOURCE", "WHY"), table, as_=args.format)
    if not rows and not (args.names or args.all or args.dry_run):
        print(f"belljar: {NOTHING_YET}", file=sys.stderr)
    return 1 if any(row.what == act.FAILED for row in rows) else 0


def key(args: Args, house: House) -> int:
    """Print the public part of a key, made now where there is none."""
    from belljar.image.site.publish import make_key, public_word

    print(public_word(make_key(args.file)))
    return 0


ACTS = acts(
    f"""
    # publish | put images into a repository, for all hosts of a site
    IMAGE * @images | name or digest
    --to DIR#sha256=DIGEST ! @to | the repository, as in `image.sources`; with --init a new folder
    --key FILE|DIR * ! | a private key to sign with, or a folder of them; repeatable
    --init | make a repository, and its keys in the folder of --key; prints the line for `image.sources`
    --as NAME @name = | the image's name there (one image)
    --unpublish NAME * | revoke a name: nodes take it away; repeatable
    --refresh | only renew what expires: for a timer, once a day
    --delegate WORD + | ROLE NAMES KEY...: let these public keys publish these names, as in 'alice-*|a'; ROLE alone: no more
    --threshold N =1 | so many of the keys of --delegate have to sign (1)
    --rotate {{root,targets,online}} | replace a key by a new one, made in the folder of --key
    # sync | bring images of the site's sources up to date here; exit 1 when one fails
    NAME * @names | a name that a source offers; none: those that came from there before
    --from ADDRESS#sha256=DIGEST * @sources | instead of `image.sources` in the settings; repeatable
    --all | every name that is offered
    -n --dry-run | only say what is offered, and what would be brought
    {FORMAT}
    # key | make a key to sign with, or show the public part of one, as for `publish --delegate`
    FILE | made when there is none""",
    {"publish": publish, "sync": sync, "key": key},
)
