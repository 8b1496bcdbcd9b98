"""Warm images: a base's disk with a recipe, which each host carries out once for the memory of its machines.

The recipe is a fact of the image, as JSON in one text, so it travels like any other fact. The digest is over disk, input files and
recipe: the same recipe on the same base is the same image. No memory is stored here; machine/planning/template.py makes it.
"""

from __future__ import annotations

import json
import os
import shlex
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from belljar.errors import BadOption, ImageCorrupt, InputMissing
from belljar.host import commands
from belljar.host.files import no_space_as_error
from belljar.image import Image, Recipe
from belljar.image.intake import intake
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.model import NetworkMode, Transfer, dumps, to_json
from belljar.reading import from_json
from belljar.records import replace

COPYING = 4 * 3600.0
OF_THE_BASE = ("published", "signer", "made_from")  # facts that are not the warm image's


def store_nameless(store: Store, base: Image, recipe: Recipe) -> Image:
    """A warm image that has no name yet, so that `gc` removes it if nobody gives it one. `outside` of the recipe's inputs: paths on
    this host, whose content is kept with it. Raises BadOption, InputMissing, NoSpace."""
    if base.recipe is not None:
        hint = f"Do all of it in one image, from {base.recipe.base_name}: `belljar image show` has the recipe."
        raise BadOption(f"image {base.called} is warm already", hint=hint)
    with store.hold(base, "warm"), intake.draft(store, "warm") as folder, no_space_as_error(folder):
        intake.borrow(store, base, (manifest.DISK, manifest.KERNEL, manifest.INITRD), folder)
        inputs = _pack(recipe.payload.inputs, folder / manifest.INPUTS)
        recipe = replace(recipe, payload=replace(recipe.payload, inputs=inputs))
        properties: dict[str, Any] = {key: fact for key, fact in base.facts.items() if key not in OF_THE_BASE}
        properties["warm"] = dumps(to_json(recipe)).decode()
        what = manifest.Facts(f"warm {base.called}", base.append, time.time(), base.os, base.virtual_size, properties)
        return store.publish(folder, what, None)


def _pack(inputs: Sequence[Transfer], archive: Path) -> tuple[Transfer, ...]:
    """The inputs with their content in the archive, each under a number. The same files make the same archive."""
    if not inputs:
        return ()
    kept = []
    with tarfile.open(archive, "w") as tar:
        for number, item in enumerate(inputs):
            kept.append(replace(item, outside=f"{number}/{os.path.basename(item.outside)}"))
            try:
                tar.add(item.outside, kept[-1].outside)
            except OSError as exc:
                raise InputMissing(f"--in {exc.filename or item.outside}: {exc.strerror}") from exc
    return tuple(kept)


def recipe_of(image: Image) -> Recipe:
    """The recipe of a warm image. Raises ImageCorrupt."""
    try:
        return read(str(image.facts["warm"]))
    except ValueError as exc:
        raise ImageCorrupt(f"image {image.called}: its recipe cannot be read: {exc}") from exc


def read(text: str) -> Recipe:
    """The recipe that a fact has. Raises ValueError."""
    recipe = from_json(Recipe, json.loads(text), {"cpus": 1, "memory": 1, "timeout": 0})
    if recipe.network not in (NetworkMode.NONE, NetworkMode.USER):
        raise ValueError(f"network: {recipe.network.value!r}: not none or user")
    return recipe


@contextmanager
def unpacked(image: Image) -> Iterator[Path]:
    """A folder with the inputs of its recipe, for a while. Raises CommandFailed, NoSpace."""
    with TemporaryDirectory(prefix="belljar-warm-") as folder, no_space_as_error(Path(folder)):
        if (recipe := image.recipe) and recipe.payload.inputs:
            archive = str(image.disk.parent / manifest.INPUTS)
            commands.run(["tar", "-x", "--no-same-owner", "-f", archive, "-C", folder], timeout=COPYING, bound=True)
        yield Path(folder)


def described(image: Image) -> Mapping[str, Any]:
    """Its recipe, for people."""
    recipe = image.recipe
    if recipe is None:
        return {}
    payload, script = recipe.payload, recipe.payload.script
    return {
        "warm": "", "base": f"{recipe.base_name} {recipe.base}", "prepare": shlex.join(map(os.fsdecode, payload.argv)),
        "script": f"sha256:{sha256(script).hexdigest()}" if script else "",
        "env": [os.fsdecode(name + b"=" + value) for name, value in payload.env],
        "inputs": [f"{item.outside.partition('/')[2]}:{item.inside}" for item in payload.inputs],
        "cwd": os.fsdecode(payload.cwd or payload.account.home), "user": payload.account.name,
        "cpus": recipe.cpus, "memory": recipe.memory, "network": recipe.network.value, "reaches only": recipe.allow,
        "by": recipe.by,
    }  # fmt: skip
