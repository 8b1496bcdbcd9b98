"""`belljar image publish`, `sync`, `key`: the images of a site, from one master store to its hosts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from belljar.cli.parser import FORMAT, acts
from belljar.cli.render import show
from belljar.errors import BadOption

if TYPE_CHECKING:
    from belljar.assembly import House

NOTHING_YET = (
    "nothing here has come from these sources yet, so there is nothing to bring up to date. `belljar image sync --dry-run` shows"
    " what they offer, `belljar image sync NAME` brings one image, `belljar image sync --all` every one."
)
SHORT = 12  # digits of a digest that are shown


def publish(args: argparse.Namespace, house: House) -> int:
    """Publish images of this user's store, or of the site's."""
    from belljar.image.progress import shown
    from belljar.image.site import publish as act
    from belljar.image.site.signing import load_signer

    if args.certificate and not args.key:
        raise BadOption("--certificate without --key")
    folder = act.folder_of(args.to)
    signer = load_signer(args.key, args.certificate) if args.key else None
    names = act.images_of(house.images, args.images, args.name)
    change = act.Change(names, tuple(args.unpublish), signer, args.valid, args.prune)
    with shown() as progress:
        made = act.publish(house.images, folder, change, progress)
    for name in names:
        print(f"{name} {made.entries[name].statement.digest}")
    return 0


def sync(args: argparse.Namespace, house: House) -> int:
    """Bring what is named, or what has changed."""
    from belljar.image.site.master import Master
    from belljar.image.site.sync import FAILED
    from belljar.image.site.sync import sync as act

    sources = args.sources or house.settings.image.sources
    if not sources:
        raise BadOption("no source of images is known", hint="Set `image.sources`, or name one with --from.")
    if args.all and args.names:
        raise BadOption("--all together with names")
    if args.forget:
        for source in sources:
            Master(house.images, source).forget()
    rows = act(house.images, args.names, sources, everything=args.all, dry_run=args.dry_run)
    heads = ("NAME", "DIGEST", "STATE", "SOURCE", "WHY")
    table = [
        (one.name, one.digest[:SHORT], one.what, one.source, f"{one.error}: {one.why}" if one.error else one.why)
        for one in rows
    ]
    show(rows, heads, table, as_=args.format)
    if not rows and not (args.names or args.all or args.dry_run):
        print(f"belljar: {NOTHING_YET}", file=sys.stderr)
    return 1 if any(one.what == FAILED for one in rows) else 0


def key(args: argparse.Namespace, house: House) -> int:
    """Print the public part of a key, made now where there is none."""
    from belljar.image.site.signing import load_signer, make_key, public_word

    word = public_word(load_signer(args.file).key.public_key()) if args.file.exists() else make_key(args.file)
    print(f"ed25519:{word}")
    return 0


ACTS = acts(
    f"""
    # publish | put images into a master store, for all hosts of a site
    IMAGE * @images | name or digest; none: the index is only renewed, or changed as below
    --to DIR ! | the master store's folder; made when there is none
    --as NAME @name = | its name there (one image)
    --unpublish NAME * | take a name away there; repeatable
    / --key FILE :path ! | the private key to sign with (`belljar image key`)
    / --unsigned | sign nothing
    --certificate FILE :path | the key's X.509 certificate and those between it and an authority
    --valid TIME =0s | hosts refuse this index when it is older, so renew it in time (default: never)
    --prune | remove files there that no name has used for a week, too
    # sync | bring images of the site's sources up to date here; exit 1 when one fails
    NAME * @names | a name that a source offers; none: those that came from there before
    --from DIR|URL * @sources | instead of `image.sources` in the settings; repeatable
    --all | every name that is offered
    -n --dry-run | only say what is offered, and what would be brought
    --forget | first forget which versions were seen: for a master store made anew
    {FORMAT}
    # key | make a key to sign with, or show the public part of one, as for `image.trust`
    FILE :path | made when there is none""",
    {"publish": publish, "sync": sync, "key": key},
)
