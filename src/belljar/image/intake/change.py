"""Change what the importer of a stored image said of it: its context, firmware, and the user for ssh. Its files stay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from belljar.errors import BadOption, ImageUnfit, NotPermitted
from belljar.image import Image
from belljar.image.store import manifest
from belljar.model import Context, Firmware

if TYPE_CHECKING:
    from belljar.image.store.store import Store

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
