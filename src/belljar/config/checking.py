"""Mistakes that no type shows: what a room would refuse only when it comes to use a value. `belljar config check` and
`belljar doctor` ask; no job waits."""

from __future__ import annotations

import os
from collections.abc import Iterator

from belljar import image, network
from belljar.batch.job.policy import queue_images, registries, rules
from belljar.config import DEFAULT_ORIGIN, SECTIONS, Loaded
from belljar.errors import BadSetting
from belljar.host.toml import Mistake
from belljar.hypervisor.qemu.values import wrong_values
from belljar.records import fields


def all_mistakes(loaded: Loaded) -> tuple[Mistake, ...]:
    """Those of the files and variables, and those of the values that hold."""
    return (*loaded.mistakes, *(_mistake(loaded, *wrong) for wrong in _wrong_values(loaded)))


def notes(loaded: Loaded, in_job: Loaded) -> tuple[str, ...]:
    """What is not a mistake but worth knowing: user settings that batch jobs are refused for, and settings obeyed only in
    part."""
    refused = tuple(
        f"a batch job is refused for it: {mistake}" for mistake in in_job.mistakes if mistake not in loaded.mistakes
    )
    return (*refused, *network.shortfalls(loaded.settings.network, is_root=os.geteuid() == 0))


def _wrong_values(loaded: Loaded) -> Iterator[tuple[str, str, BadSetting]]:
    settings = loaded.settings
    yield from wrong_values(settings.qemu, settings.machine.hypervisor)
    yield from (("network", *wrong) for wrong in network.mistakes(settings.network))
    yield from (("image", *wrong) for wrong in image.mistakes(settings.image))
    # Which images jobs may have and get. Whether these are here `belljar batch check` looks, on each node.
    for key, look in (("queue_images", queue_images), ("allow", rules), ("registries", registries)):
        try:
            look(settings.batch)
        except BadSetting as exc:
            yield "batch", key, exc


def _mistake(loaded: Loaded, section: str, key: str, error: BadSetting) -> Mistake:
    """An error that names its key itself names it once here. One without a remedy of its own has the setting's help."""
    name = f"{section}.{key}"
    what = error.message.removeprefix(name).removeprefix(":").removeprefix(" =").strip()
    help = next(str(field.metadata["help"]) for field in fields(SECTIONS[section]) if field.name == key)
    remedy = help if error.hint == BadSetting.hint else error.hint
    return Mistake(loaded.origins.get(name, DEFAULT_ORIGIN), name, what, remedy)
