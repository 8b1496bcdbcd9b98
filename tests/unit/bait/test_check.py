"""What `belljar bait check` says of a site where something is missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.bait import Settings, check
from belljar.errors import CommandFailed
from belljar.findings import fail
from belljar.model import Share
from belljar.pool import Member, load
from belljar.pool.slurm.nodes import head

POOL = load("slurm")
RECORDINGS = Path(__file__).parents[2] / "recordings/slurm"
CONFIG, PARTITION, NODES = ((RECORDINGS / name).read_text() for name in ("config.txt", "partition.txt", "nodes.txt"))


def slurm(config: str = CONFIG, partition: str = PARTITION) -> Callable[..., str]:
    def ask(*argv: str) -> str:
        if argv == ("scontrol", "show", "config"):
            return config
        if "partition" in argv:
            if not partition:
                raise CommandFailed("scontrol: exit 1")
            return partition
        assert argv == POOL.query_nodes()
        return NODES

    return ask


def wrong(ask: Callable[..., str], conf: str = "SlurmctldHost=head(10.0.0.1)", *hosts: str) -> dict[str, str]:
    found = list(POOL.needs(ask, conf, ("bait1",), "belljar", "belljar", hosts))
    assert all(finding.remedy for finding in found if not finding.is_good)
    return {finding.name: finding.text for finding in found if finding.text}


@pytest.fixture
def prolog(tmp_path: Path) -> Path:
    script = tmp_path / "prolog"
    script.write_text("exec belljar bait arrive $SLURM_JOB_ID\n")
    return script


def test_a_slurm_that_has_everything_is_good(prolog: Path) -> None:
    assert wrong(slurm(said(Prolog=str(prolog)))) == {}


def test_a_system_without_a_key_is_asked_for_none(tmp_path: Path) -> None:
    settings = Settings(system="gridengine", images=("worker",), conf=tmp_path / "bootstrap", key=Path())
    found = list(check.needs(settings, load("gridengine"), lambda name: "no such image", has_addresses=True))
    assert [one.name for one in found] == ["image worker", "addresses of machines", "max_cpus", "conf", "gridengine"]
    assert found[0].remedy.endswith("--packages gridengine-exec") and "No such file" in found[3].text


def said(**values: str) -> str:
    """The recording, with other values of some keys."""
    lines = [line for line in CONFIG.splitlines() if line.split(" ")[0].partition("[")[0] not in values]
    return "\n".join([*lines, *(f"{key:<23} = {value}" for key, value in values.items())])


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("MaxNodeCount", "3", "3: no node can join 3"),
        ("Prolog", "(null)", "slurm.conf names none: jobs would run on the bait itself"),
        ("Prolog", "/nowhere/prolog", "/nowhere/prolog: No such file or directory"),
    ],
)  # fmt: skip
def test_a_setting_of_slurms_that_is_missing_is_named(prolog: Path, key: str, value: str, what: str) -> None:
    assert wrong(slurm(said(**{"Prolog": str(prolog), key: value}))) == {key: what}


def test_a_prolog_that_calls_nothing_of_ours_and_a_bait_that_slurm_does_not_know_are_named(prolog: Path) -> None:
    prolog.write_text("exit 0\n")
    found = wrong(slurm(said(Prolog=str(prolog))))
    assert found == {"Prolog": f"{prolog} has no `belljar bait arrive`: jobs would run on the bait itself"}
    other = list(POOL.needs(slurm(), "", ("wn7",), "belljar", "belljar", ()))
    assert (
        fail(
            "bait wn7",
            "slurmctld knows no such node",
            "In slurm.conf: NodeName=wn7 CPUs=... RealMemory=... Feature=bait",
        )
        in other
    )


@pytest.mark.parametrize(
    ("partition", "what"),
    [
        ("", "slurmctld knows no such partition"),
        (PARTITION.replace("EXCLUSIVE", "NO"), "OverSubscribe is not EXCLUSIVE: another job could come onto a job's node"),
    ],
)  # fmt: skip
def test_a_partition_that_machines_cannot_join_is_named(prolog: Path, partition: str, what: str) -> None:
    conf = "SlurmctldHost=head(10.0.0.1)\nNodeSet=belljar Feature=belljar\nNodeSet=other Feature=gpu\n"
    assert wrong(slurm(said(Prolog=str(prolog)), partition), conf) == {"partition belljar": what}


@pytest.mark.parametrize(
    ("conf", "hosts", "what"),
    [
        ("SlurmctldHost=head(10.0.0.1)", (), ""), ("SlurmctldHost=head", ("10.0.0.1 head",), ""), ("ControlMachine = far", (), ""),
        ("SlurmctldHost=here", (), "here is 127.0.1.1: a machine would look in itself"),
        ("SlurmctldHost=lost", (), "lost: this host knows no address of it"), ("ClusterName=x", (), "slurm.conf names none"),
    ],
)  # fmt: skip
def test_a_machine_has_to_find_slurmctld(
    monkeypatch: pytest.MonkeyPatch, conf: str, hosts: tuple[str, ...], what: str
) -> None:
    known = {"far": "10.9.9.9", "here": "127.0.1.1", "10.0.0.1": "10.0.0.1"}

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError("unknown")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert head(conf, hosts).text == what


@pytest.mark.parametrize(
    ("conf", "hosts", "lines"),
    [
        ("SlurmctldHost=far", "", "10.9.9.9 far"), ("SlurmctldHost=far\nSlurmctldHost=here2", "", "10.9.9.9 far\n10.0.0.2 here2"),
        ("SlurmctldHost=far(10.0.0.1)", "", ""), ("SlurmctldHost=far", "10.0.0.7 far f", "10.0.0.7 far f"),
        ("SlurmctldHost=lost", "10.0.0.1 ntp", "10.0.0.1 ntp"), ("SlurmctldHost=here", "", ""),
    ],
)  # fmt: skip
def test_a_machine_is_handed_the_address_that_the_host_resolved(
    monkeypatch: pytest.MonkeyPatch, conf: str, hosts: str, lines: str
) -> None:
    known = {"far": "10.9.9.9", "here2": "10.0.0.2", "10.0.0.1": "10.0.0.1", "here": "127.0.1.1"}

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError("unknown")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    member = Member("vm1x", 1, 600 << 20, ("belljar",), (), hosts)
    env = dict(POOL.joining(member, Path("/etc/slurm/slurm.conf"), f"{conf}\n".encode()).env)
    assert env[b"HOSTS"].decode().strip() == lines


def test_what_the_host_lacks_is_named_and_a_slurm_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("belljar.host.commands.SEARCH_PATH", str(tmp_path))
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=head(10.0.0.1)\n include more.conf\n")
    (tmp_path / "key").write_bytes(b"short")
    settings = Settings(
        name="bait1", images=("worker",), networks=(("open", "nobridge0"),), max_cpus=9999, conf=tmp_path / "slurm.conf", key=tmp_path / "key"
    )  # fmt: skip
    share = Share(str(tmp_path / "no"), "/home")
    image = "{}: no such image".format
    found = list(check.needs(settings, POOL, image, (share,), has_addresses=False))
    assert {one.name: one.text for one in found if one.text} == {
        f"share {tmp_path}/no": "this host has no such folder", "max_cpus": f"9999: this host has {os.cpu_count()}",
        "image worker": "worker: no such image", "bridge nobridge0": "this host has none",
        "addresses of machines": "none are set, and machines ask nobody for one",
        "key": f"{tmp_path}/key: shorter than 32 bytes", "slurm.conf": "it includes other files, which machines do not get",
        "slurm": "scontrol: no such program on this host",
    }  # fmt: skip
