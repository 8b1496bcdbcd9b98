"""Cluster documents: what one becomes, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.errors import BadSetting
from belljar.lease.broker import LARGEST_CLUSTER, LARGEST_DATA, Cluster, Role
from belljar.lease.broker.document import load, wrongs
from belljar.records import fields

ROOT = Path(__file__).parents[4]

GOOD = """
[cluster]
name = "pi"
time = "2h"
network = "private"

[cluster.data]
motd = "welcome"

[role.head]
image = "slurm"
scripts = "head"
requires = ["worker"]
provides = ["munge_key"]

[role.worker]
image = "slurm"
count = 2
needs = ["munge_key", "motd"]
after = ["head"]
"""


def document(folder: Path, text: str) -> Path:
    (folder / "head/1-ipandhost").mkdir(parents=True, exist_ok=True)
    (folder / "head/1-ipandhost/worker").write_bytes(b"#!/bin/sh\n")
    (folder / "head/.hidden").write_bytes(b"")
    (folder / "cluster.toml").write_text(text)
    return folder / "cluster.toml"


def test_a_document_becomes_roles_machines_and_scripts(tmp_path: Path) -> None:
    cluster = load(document(tmp_path, GOOD))
    assert [name for _, name in cluster.seats] == ["head", "worker1", "worker2"]
    assert (cluster.time, cluster.limit, cluster.data) == (7200.0, 900.0, (("motd", "welcome"),))
    assert cluster.roles[0].files == (("1-ipandhost/worker", b"#!/bin/sh\n"),)
    assert not list(wrongs(cluster))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('name = "pi"', 'name = "Pi 2"', ":3, cluster.name: 'Pi 2' cannot be a name (small letters"),
        ('name = "pi"\n', "", "cluster.name: '' cannot be a name"),
        ('time = "2h"', 'time = "soon"', ":4, cluster.time: "),
        ("count = 2", "count = 0", ":18, role.worker.count: "),
        ("count = 2", "cuont = 2", ":18, role.worker.cuont: no such key (did you mean count?)"),
        ("count = 2", "count = 2000", ":18, role.worker.count: 2000 machines (1 to 1000)"),
        ("[role.worker]", "[role.worker2]", "role.worker2.image: a role's name 'worker2' cannot be a name"),
        ('requires = ["worker"]', 'requires = ["wroker"]', "role.head.requires: 'wroker' is not a role (did you mean worker?)"),
        ('after = ["head"]', 'after = ["master"]', ":20, role.worker.after: 'master' is not a role"),
        ('"munge_key", "motd"', '"munge_kye"', "role.worker.needs: 'munge_kye' is provided by none (did you mean munge_key?)"),
        ('provides = ["munge_key"]', 'provides = ["munge key"]', "role.head.provides: 'munge key' cannot be a name"),
        ('requires = ["worker"]', 'after = ["worker"]', "waits for itself: "),
        ('scripts = "head"', 'scripts = "haed"', "role.head.scripts: haed: No such file or directory (a folder beside the document)"),
        ('image = "slurm"\nscripts', "scripts", "role.head.image: is missing (name of an image that may be leased)"),
        ('motd = "welcome"', 'motd = "' + 100_000 * "x" + '"', "bytes; 98304 are the most (put what is large into the image)"),
        ("[cluster.data]", "[cluster.date]", "cluster.date: no such key (did you mean data?)"),
        ("[role.head]", "[role]", "role.image: is a table (write [role.NAME] on a line of its own)"),
        (GOOD, "", "cluster.name: '' cannot be a name"),
        (GOOD, "[cluster", "cluster.toml: not TOML: "),
    ],
)  # fmt: skip
def test_a_wrong_document_names_file_key_value_and_remedy(tmp_path: Path, before: str, after: str, says: str) -> None:
    path = document(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(BadSetting) as caught:
        load(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_the_example_is_right_and_the_page_names_every_key() -> None:
    cluster = load(ROOT / "examples/clusters/slurm/cluster.toml")
    assert [name for _, name in cluster.seats] == ["head", "worker1", "worker2"]
    page = (ROOT / "docs/operate/lease/clusters.md").read_text()
    for one in (*fields(Cluster), *fields(Role)):
        assert "help" not in one.metadata or f"`{one.name}`" in page, one.name
    assert f"{LARGEST_CLUSTER >> 10} KiB" in page and f"{LARGEST_DATA >> 10} KiB" in page


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadSetting) as caught:
        load(document(tmp_path, GOOD.replace('name = "pi"', 'name = "7"').replace("count = 2", 'count = "two"')))
    assert "cluster.name" in str(caught.value) and "role.worker.count" in str(caught.value)


def test_a_document_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="no such file"):
        load(tmp_path / "none.toml")
