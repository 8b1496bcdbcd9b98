"""lease.toml becomes `Settings`, and its tables [policy.NAME] `Policy`s: every mistake at once, as `file, key: what, hint`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from belljar.batch import names
from belljar.errors import BadSettings
from belljar.host.service.tables import Value, converted, keys_of, read_file
from belljar.host.toml import Mistake
from belljar.lease import Settings
from belljar.lease.policy import Policy

FILE = Path("/etc/belljar/lease.toml")
TABLE, POLICY = "lease", "policy"


def load(path: Path = FILE) -> tuple[Settings, tuple[Policy, ...]]:
    """Raises BadSettings with every mistake there is."""
    mistakes: list[Mistake] = []
    known = {TABLE: keys_of((Settings,), TABLE), POLICY: keys_of((Policy,), POLICY)}
    tables: dict[str, dict[str, Value]] = {TABLE: {}}
    read_file(path, known, {POLICY}, tables, mistakes)
    table = tables.pop(TABLE)
    settings = Settings(**converted(TABLE, table, known[TABLE], mistakes))
    policies = tuple(
        Policy(full.partition(".")[2], **converted(full, facts, known[POLICY], mistakes))
        for full, facts in tables.items()
    )
    if not mistakes:
        mistakes += [
            Mistake(table[key].origin if key in table else str(path), f"{TABLE}.{key}", what, hint)
            for key, what, hint in _wrongs(settings, policies)
        ]
    if mistakes:
        raise BadSettings(tuple(mistakes), hint="Correct the file, then start the service again.")
    return settings, policies


def _wrongs(settings: Settings, policies: Sequence[Policy]) -> Iterator[tuple[str, str, str]]:
    if settings.system not in names():
        yield "system", f"{settings.system}: no such batch system", f"one of {', '.join(names())}"
    if not settings.address:
        yield "address", "is missing", "name or address of this host, as nodes reach it"
    if not settings.images:
        yield "images", "is missing", 'as in images = ["debian12"]: only images of the site may be leased'
    if not policies:
        yield "images", "there is no policy: nobody may lease anything", 'as in [policy.all] users = ["*"]'
