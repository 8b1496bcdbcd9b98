"""Mistakes that no type shows: what a room would refuse only when it comes to use a value. The rooms look, `belljar config
check` and `belljar doctor` ask; a job does not wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields

from belljar import hypervisor, image, network
from belljar.config import DEFAULT_ORIGIN, SECTIONS, Loaded, Settings
from belljar.config.merge import Mistake
from belljar.errors import BadSetting, BelljarError, ImageNotAllowed, ImageUnknown


def all_mistakes(loaded: Loaded) -> tuple[Mistake, ...]:
    """Those of the files and variables, and those of the values that hold."""
    return (*loaded.mistakes, *(_mistake(loaded, *found) for found in _wrong_values(loaded)))


def notes(loaded: Loaded, in_job: Loaded) -> tuple[str, ...]:
    """What is no mistake and still worth a word: what of the user's a batch job is refused for, and what no value says that
    is obeyed only in part."""
    refused = tuple(f"a batch job is refused for it: {one}" for one in in_job.mistakes if one not in loaded.mistakes)
    return (*refused, *network.shortfalls(loaded.settings.network, is_root=os.geteuid() == 0))


def _wrong_values(loaded: Loaded) -> Iterator[tuple[str, str, BadSetting]]:
    settings = loaded.settings
    yield from (("machine", *found) for found in hypervisor.mistakes(settings.machine.hypervisor))
    yield from (("qemu", *found) for found in hypervisor.wrong_values(settings.qemu))
    yield from (("network", *found) for found in network.mistakes(settings.network))
    yield from (("image", *found) for found in image.mistakes(settings.image))

    yield from _wrong_images(settings)


def _wrong_images(settings: Settings) -> Iterator[tuple[str, str, BadSetting]]:
    """Images that are named for jobs, and cannot be one's name, or are neither here nor to be had."""
    from belljar.batch.job.policy import queue_images, rules

    for key, look in (("queue_images", queue_images), ("allow", rules)):
        try:
            look(settings.batch)
        except BadSetting as exc:
            yield "batch", key, exc
    named = [("image", "default", settings.image.default)]
    named += [("batch", key, getattr(settings.batch, key)) for key in ("default_image", "check_image")]
    with suppress(BadSetting):
        named += [("batch", "queue_images", name) for name in queue_images(settings.batch).values()]
    for section, key, name in named:
        if name and (error := _trouble_of(name, section, settings)):
            yield section, key, error


def _trouble_of(name: str, section: str, settings: Settings) -> BadSetting | None:
    """A submit host has no images, and is not asked for those of batch jobs."""
    from belljar.batch.job.policy import check_name
    from belljar.image.store.store import DEFAULT_NAME, Store

    store = Store(settings.paths.store, settings.paths.site_store, settings.image)
    try:
        check_name(name.removeprefix("sha256:"))
        if name != DEFAULT_NAME and not settings.image.sources and (section == "image" or store.images()):
            store.find(name)
    except (ImageNotAllowed, ImageUnknown) as exc:
        return BadSetting(exc.message, hint=exc.hint)
    except (BelljarError, OSError):
        pass  # of an image that is there: the checks of images tell it
    return None


def _mistake(loaded: Loaded, section: str, key: str, error: BadSetting) -> Mistake:
    """An error that names its key itself names it once here. One without a remedy of its own has the setting's help."""
    name = f"{section}.{key}"
    what = error.message.removeprefix(name).removeprefix(":").removeprefix(" =").strip()
    help = next(str(one.metadata["help"]) for one in fields(SECTIONS[section]) if one.name == key)
    remedy = help if error.hint == BadSetting.hint else error.hint
    return Mistake(loaded.origins.get(name, DEFAULT_ORIGIN), name, what, remedy)
