"""A cluster document, TOML beside folders of scripts, becomes a `Cluster`: every mistake at once, as `file, key: what, hint`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from belljar.errors import BadSetting, HostError
from belljar.host.files import read_capped
from belljar.host.toml import Mistake, meant
from belljar.lease.broker import LARGEST_CLUSTER, WORD, Cluster, Data, Role
from belljar.model import dumps
from belljar.records import replace
from belljar.service.tables import OPTION, Wrong, blame, keys_of, read_values

CLUSTER, ROLE, MOST = "cluster", "role", 1000


def load(path: Path) -> Cluster:
    """Raises BadSetting with every mistake there is."""
    mistakes: list[Mistake] = []
    known = {CLUSTER: keys_of((Cluster,), CLUSTER), ROLE: keys_of((Role,), ROLE)}
    tables, values = read_values([path], known, {ROLE}, mistakes)
    cluster = Cluster(**values.pop(CLUSTER))
    for table, options in values.items():
        role = Role(table.partition(".")[2], **options)
        try:
            role = replace(role, files=_files(path.parent / role.scripts) if role.scripts else ())
        except (OSError, HostError) as exc:
            what = f"{role.scripts}: {exc.strerror if isinstance(exc, OSError) else exc.message}"
            mistakes.append(Mistake(str(path), f"{table}.scripts", what, "a folder beside the document"))
        cluster = replace(cluster, roles=(*cluster.roles, role))
    if all(mistake.key for mistake in mistakes):  # the file could be read
        blame(path, tables, wrongs(cluster), mistakes)
    if mistakes:
        raise BadSetting.of(tuple(mistakes), hint="Correct the document: docs/operate/lease/clusters.md has its keys.")
    return cluster


def wrongs(cluster: Cluster) -> Iterator[tuple[str, Wrong]]:
    """(table, what is wrong in it) where each value has its type: in a document, or in what an owner's program sends."""
    if (size := len(dumps(cluster))) > LARGEST_CLUSTER:
        what = f"with its scripts it has {size} bytes; {LARGEST_CLUSTER} are the most"
        yield CLUSTER, ("name", what, "put what is large into the image")
    if (count := sum(role.count for role in cluster.roles)) > MOST:
        yield CLUSTER, ("name", f"{count} machines; {MOST} are the most", "ask for fewer, or for two clusters")
    names = [role.name for role in cluster.roles]
    provided = {name for role in cluster.roles for name in role.provides} | {name for name, _ in cluster.data}
    if not re.fullmatch(WORD.pattern, cluster.name):
        yield CLUSTER, ("name", f"{cluster.name[:60]!r} {WORD.otherwise}", WORD.as_in)
    if not names or len(set(names)) < len(names):
        yield CLUSTER, ("name", "no roles, or two of one name", "a table [role.NAME] for each kind of machine")
    for role in cluster.roles:
        for wrong in _of_role(role, names, provided):
            yield f"{ROLE}.{role.name}", wrong
    if circle := _circle(cluster):
        hint = "one of them has to begin without the others: take a name out of `after` or `needs`"
        yield f"{ROLE}.{circle[0]}", ("after", f"waits for itself: {' -> '.join(circle)}", hint)


def _of_role(role: Role, names: list[str], provided: set[str]) -> Iterator[Wrong]:
    if not re.fullmatch(WORD.pattern, role.name):
        yield "image", f"a role's name {role.name[:60]!r} {WORD.otherwise}", WORD.as_in
    if not role.image:
        yield "image", "is missing", "name of an image that may be leased"
    if not 1 <= role.count <= MOST:
        yield "count", f"{role.count} machines", f"1 to {MOST}"
    for key, known in (("requires", names), ("after", names), ("needs", provided)):
        for word in set(getattr(role, key)) - set(known):
            what = "is provided by none" if key == "needs" else "is not a role"
            yield key, f"{word[:60]!r} {what}", meant(word, known)
    for word in role.provides:
        if not OPTION.fullmatch(word) or len(word) > 64:
            yield "provides", f"{word[:60]!r} cannot be a name", "small letters, digits and _, as in munge_key"


def _circle(cluster: Cluster) -> list[str]:
    """Roles that wait for each other's scripts for ever; []: none."""
    waits = {
        role.name: {*role.after, *(other.name for other in cluster.roles if {*other.provides} & {*role.needs})}
        for role in cluster.roles
    }
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as exc:
        return [str(name) for name in exc.args[1][::-1]]
    return []


def _files(top: Path) -> Data:
    """What is in a role's folder, but for what is hidden and editors' copies. Raises OSError, HostError."""
    next(top.iterdir(), None)  # it has to be there
    files = [(str(file.relative_to(top)), file) for file in sorted(top.rglob("*")) if file.is_file()]
    plain = ((name, file) for name, file in files if not name.endswith("~") and "/." not in f"/{name}")
    return tuple((name, read_capped(file, LARGEST_CLUSTER)) for name, file in plain)
