"""Change an image that is stored: bring the bytes of a damaged one again from where it came (the same bytes, or nothing changes),
or change what its importer said of it (context, firmware, user of ssh; its files stay).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from belljar.errors import BadOption, ImageCorrupt, ImageMismatch, ImageUnfit, ImageUnknown, NotPermitted
from belljar.image import Image
from belljar.image.intake import intake
from belljar.image.store import manifest
from belljar.model import Context, Firmware

if TYPE_CHECKING:
    from belljar.image.store.store import Store

BUILT = "build debian "  # what the source of a build begins with


def repair(store: Store, reference: str, surveyor: intake.Surveyor | None = None) -> tuple[Image, bool]:
    """The image, every byte of it compared, and whether any was wrong. Raises NotPermitted for an image of the site's;
    ImageCorrupt where it cannot be had again; ImageMismatch where other bytes come by now. Then nothing has changed."""
    image = store.find(reference)
    if image.store != store.folder:
        raise NotPermitted(
            f"image {image.called} is not yours to repair", hint=store.remedy(image.disk.parent, reference)
        )
    wrong = store.verify(image)
    if not wrong:
        return store.resolve(reference), False
    if "published" in image.facts:
        _from_a_source(store, image)
    elif why := _is_lost(image):
        raise _lost(image, f"{'; '.join(wrong)}; {why}")
    else:
        _imported(store, image, surveyor)
    return store.resolve(reference), True


def _is_lost(image: Image) -> str:
    """Why it cannot be imported again as it was; "" where it can."""
    if not image.source.startswith(("file:", "http:", "https:")):
        return f"it came by `{image.source}`, which never makes the same bytes twice"
    if image.kernel is not None and not image.facts.get("agent_in_initrd"):
        return "its kernel and ramdisk were given beside the disk"
    return "" if image.names else "it has no name"


def _from_a_source(store: Store, image: Image) -> None:
    from belljar.image.site.sync import pull

    try:
        pull(store, image.digest)
    except ImageUnknown as exc:
        raise _lost(image, f"no source in `image.sources` offers its digest {image.digest} any more") from exc


def _imported(store: Store, image: Image, surveyor: intake.Surveyor | None) -> None:
    """Import the disk again, as it was imported."""
    from belljar.image.intake.sources import Order, bring

    facts, ordered = image.facts, manifest.digests(image.disk.parent)
    order = Order(
        image.source, image.called, sha256=str(facts.get("source_sha256", "")), firmware=str(facts.get("use_firmware", "auto")),
        context=Context(facts.get("context", Context.AUTO.value)), is_disc=image.is_disc, ordered=ordered,
    )  # fmt: skip
    try:
        bring(store, order, surveyor)
    except ImageMismatch as exc:
        raise ImageMismatch(
            f"{image.source} is not what it was when it was imported: {exc.message}", hint=_by_hand(image)
        ) from exc
    kept: dict[str, Any] = {name: facts[name] for name in ("ssh_user", "signer") if name in facts}
    manifest.set_facts(image.disk.parent, kept, mode=store.file_mode)


def _lost(image: Image, why: str) -> ImageCorrupt:
    return ImageCorrupt(f"image {image.called} cannot be repaired: {why}", hint=_by_hand(image))


def _by_hand(image: Image) -> str:
    """How its name gets another image, made anew."""
    name = image.names[0] if image.names else "NAME"
    if "published" in image.facts:
        words = f"belljar image sync {name}"
    elif image.source.startswith(BUILT):
        words = f"belljar image build debian --suite {image.source.removeprefix(BUILT)} --name {name}"
    else:
        words = f"belljar image import {image.source} --name {name}"
    return f"`{words}` gives the name to a new image; `belljar image remove {image.digest[:12]} --force` takes this one away."


USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
ROOT = "root"


def amend(
    store: Store,
    image: Image,
    *,
    context: Context | None = None,
    firmware: Firmware | None = None,
    ssh_user: str | None = None,
) -> Image:
    """The image as it is from now on; None leaves a thing as it is. Machines that run are not touched, templates of the old
    way are not used any more. Raises BadOption, ImageUnfit, NotPermitted."""
    if image.store != store.folder:
        raise NotPermitted(f"image {image.digest:.12} lies in {image.store} and can only be changed by its owner")
    changes: dict[str, Any] = {}
    if context is not None:
        changes["context"] = None if context is Context.AUTO else context.value
    if firmware is not None:
        _check(image, firmware)
        changes["use_firmware"] = firmware.value
    if ssh_user is not None:
        if not USER.fullmatch(ssh_user):
            raise BadOption(
                f"--ssh-user {ssh_user!r} is not a valid user name",
                hint="Small letters, digits, - and _, at most 32; root is the default.",
            )
        changes["ssh_user"] = None if ssh_user == ROOT else ssh_user
    manifest.set_facts(image.disk.parent, changes, mode=store.file_mode)
    return manifest.read(image.disk.parent, image.names)


def _check(image: Image, firmware: Firmware) -> None:
    if image.kernel is not None:
        raise ImageUnfit(
            "the image is booted directly, by a kernel that was taken out of it",
            hint=f"Remove it, and import its disk again with `--firmware {firmware.value}`.",
        )
    if firmware.value not in image.facts.get("firmware", ()):
        raise ImageUnfit(f"the image's disk has no boot loader for {firmware.value}")
