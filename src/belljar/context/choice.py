"""Which way a guest is contextualized: what the asker wants, what the image's importer wants, what the image can."""

from __future__ import annotations

from belljar.context import Chosen, Means
from belljar.errors import ContextImpossible
from belljar.model import Context

# What `auto` tries, in this order, and why each is taken.
PREFERENCE = (
    (Context.RAMDISK, "its kernel is started directly"),
    (Context.NONE, "it starts the agent itself"),
    (Context.CLOUD_INIT, "it has cloud-init"),
    (Context.INJECT, "it has systemd"),
    (Context.SSH, "it has an ssh server"),
)


def choose(wanted: Context, means: Means, name: str) -> Chosen:
    """The context for a guest of the image *name*. Raises ContextImpossible, with what is missing, when one was asked for
    that the image cannot do."""
    if wanted is not Context.AUTO:
        return _insisted(wanted, means, name, "asked for")
    if means.own is not Context.AUTO:
        return _insisted(means.own, means, name, "the image was imported so")
    for context, why in PREFERENCE:
        if not lacks(context, means) and (context is not Context.NONE or means.agent):
            return Chosen(context, why)
    return Chosen(Context.NONE, "nothing else is known to work: the image has to start the agent itself")


def lacks(context: Context, means: Means) -> list[str]:
    """What an image is missing for this context; empty: nothing."""
    wants = {
        Context.RAMDISK: (("kernel that belljar can start directly", means.ramdisk),),
        Context.CLOUD_INIT: (
            ("cloud-init", means.cloud_init), ("systemd", means.init == "systemd"),
        ),
        Context.INJECT: (("systemd", means.init == "systemd"),),
        Context.SSH: (("ssh server", means.sshd),),
    }  # fmt: skip
    return [what for what, has in wants.get(context, ()) if not has]


def _insisted(context: Context, means: Means, name: str, why: str) -> Chosen:
    missing = lacks(context, means)
    if context is not Context.RAMDISK and not means.is_known:
        missing = []  # what was not found, or not looked for, may still be there
    if missing:
        raise ContextImpossible(
            f"image {name}: --context {context.value} is not possible ({why}): no {' and no '.join(missing)} was found in it"
        )
    return Chosen(context, why)
