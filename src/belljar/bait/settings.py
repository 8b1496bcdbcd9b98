"""bait.toml becomes `Settings`: every mistake at once, as `file, key: what, hint`. One table, [bait]."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from belljar.bait import NEVER, Settings
from belljar.bait.machines.keeper import feature_of
from belljar.errors import BadSetting
from belljar.host.guard.egress import rule
from belljar.host.toml import Mistake
from belljar.pool import Pool
from belljar.pool import load as load_pool
from belljar.records import replace
from belljar.service.tables import blame, keys_of, read_values

FILE = Path("/etc/belljar/bait.toml")
TABLE = "bait"


def load(path: Path = FILE) -> Settings:
    """Raises BadSetting with every mistake there is."""
    mistakes: list[Mistake] = []
    tables, values = read_values([path], {TABLE: keys_of((Settings,), TABLE)}, (), mistakes)
    settings = Settings(**values[TABLE])
    settings = replace(settings, name=settings.name or os.uname().nodename.partition(".")[0])
    others = load_pool(settings.system).defaults
    settings = replace(settings, **{key: value for key, value in others.items() if key not in tables[TABLE]})
    if all(mistake.key for mistake in mistakes):  # the file could be read
        blame(path, tables, ((TABLE, wrong) for wrong in _wrongs(settings)), mistakes)
    if mistakes:
        raise BadSetting.of(tuple(mistakes), hint="Correct the file, then start the bait again.")
    return settings


def pool_of(settings: Settings) -> Pool:
    """The batch system, for this bait. Raises ValueError: key, what is wrong with it, hint."""
    feature = feature_of(settings.name)
    return load_pool(settings.system).of_bait(settings.name, settings.queue, feature, settings.nodes)


def _wrongs(settings: Settings) -> Iterator[tuple[str, str, str]]:
    try:
        pool_of(settings)
    except ValueError as exc:
        key, what, hint = exc.args
        yield key, what, hint
    if settings.cache != NEVER and settings.system != "slurm":
        yield "cache", f"{settings.system}: a machine serves one job", f'cache = "{NEVER}"'
    if not settings.images:
        yield "images", "is missing", 'as in images = ["worker"]: only images of the site may become nodes'
    if settings.placement and not any("{host}" in word for word in settings.reach):
        yield "reach", "{host} is in no word of it", 'as in reach = ["ssh", "{host}", "belljar"]'
    for text in settings.services:
        try:
            rule(text)
        except ValueError as exc:
            yield "services", str(exc), 'as in services = ["192.0.2.1:6817/tcp"]'
    for name in settings.closed:
        if name not in dict(settings.networks):
            known = ", ".join(dict(settings.networks)) or "none"
            yield "closed", f"{name[:60]!r} is not one of `networks`", f"one of {known}"
    if not settings.networks:
        yield "networks", "is missing", 'as in networks = { open = "br0" }: a node is reached by the batch system'
