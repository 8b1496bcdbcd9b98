"""`belljar device list` and `check`, and the way from a batch system's names to addresses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import sysfs
from tests.unit.jobs.paper_node import Node, make_node, paper_system

from belljar import batch
from belljar.assembly import Runtime
from belljar.batch.job.terms import Job, Surroundings
from belljar.cli import main
from belljar.errors import HostError
from belljar.findings import Finding, Grade
from belljar.host.devices.binding import Bindings
from belljar.host.devices.pci import REQUIRED, DeviceClass
from belljar.host.locks import try_lock
from belljar.jobs import devices, reap, wrap
from belljar.jobs.batch import hooks
from belljar.jobs.devices import findings, of_job, rows
from belljar.model import dumps
from belljar.records import replace

GPUS = DeviceClass("gpu", ("vendor=10de class=03*",))
IB = DeviceClass("ib", ("vendor=15b3 kind=virtual",))
CARD = DeviceClass("card", ("class=0200",))
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
MINE = (os.geteuid(), os.getegid())


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("BELLJAR_PATHS_RUN", str(tmp_path / "run"))
    (tmp_path / "belljar.toml").touch()
    (tmp_path / "devices.toml").write_text('[class.gpu]\nmatch = ["vendor=10de class=03*"]\n')
    return Runtime(str(tmp_path / "belljar.toml"))


def test_the_list_tells_who_has_what(runtime: Runtime, tmp_path: Path) -> None:
    root = sysfs.make(tmp_path / "host", sysfs.DGX)
    kernel = sysfs.Kernel(root, {})
    folder = runtime.folders.devices
    Bindings(folder, root, kernel.write).bind(["0000:43:00.0"], MINE, "slurm:7", (GPUS,))
    lock = try_lock(folder / "0000:1b:00.0.lock")
    assert lock is not None
    with lock:
        os.pwrite(lock.descriptor, b"0123456789ab", 0)
        found = [*rows(runtime, every=False, root=root)]
    assert [str(row["address"])[5:7] for row in found] == list(BUSES)
    first, second, *_, last = found
    assert (first["class"], first["id"], first["group"], first["node"], first["held_by"]) == (
        "gpu",
        "10de:2330",
        "20",
        0,
        "0123456789ab",
    )
    assert (second["driver"], second["held_by"]) == ("vfio-pci", "slurm:7")
    assert (last["driver"], last["node"], last["held_by"]) == ("nvidia", 1, "")
    assert len([*rows(runtime, every=True, root=root)]) == len(sysfs.DGX)


def graded(found: list[Finding]) -> dict[str, tuple[Grade, str]]:
    return {finding.name: (finding.grade, finding.text) for finding in found}


def test_the_check_says_what_is_in_the_way_of_each(tmp_path: Path) -> None:
    root = sysfs.make(tmp_path, sysfs.WORKSTATION)
    found = graded(list(findings((GPUS, CARD, IB), root)))
    assert found["IOMMU"] == (Grade.OK, "")
    assert found["0000:01:00.0"][0] is Grade.FAIL and "0000:01:00.1, which the host uses" in found["0000:01:00.0"][1]
    assert found["0000:02:00.0"] == (Grade.FAIL, "group 12, r8169: it cannot be reset between jobs")
    assert found["0000:03:00.0"] == (Grade.WARN, "e1000e has it, and not vfio-pci")
    assert found["class ib"] == (Grade.FAIL, "0 devices") and found["class gpu"] == (Grade.OK, "1 devices")
    sysfs.Kernel(root, {}).drive("0000:03:00.0", "vfio-pci")
    assert graded(list(findings((CARD,), root)))["0000:03:00.0"] == (Grade.OK, "group 13, vfio-pci")


def test_a_host_without_iommu_module_or_classes_is_told(tmp_path: Path) -> None:
    root = sysfs.make(tmp_path, sysfs.WORKSTATION, has_iommu=False)
    (root / "dev/vfio/vfio").unlink()
    found = list(findings((), root))
    assert graded(found)["IOMMU"][0] is Grade.FAIL and graded(found)["vfio-pci"][0] is Grade.FAIL
    assert graded(found)["devices.toml"][0] is Grade.WARN
    assert all(finding.remedy for finding in found if finding.grade is not Grade.OK)


def test_ids_that_are_not_as_many_as_the_devices_are_a_mistake(tmp_path: Path) -> None:
    root = sysfs.make(tmp_path, sysfs.DGX)
    few = DeviceClass("gpu", GPUS.match, ids=("a", "b"))
    assert graded(list(findings((few,), root)))["class gpu"] == (Grade.FAIL, "8 devices, 2 ids")


def site_of(*classes: DeviceClass) -> Any:
    """A runtime of which nothing but the site's classes of devices is asked."""
    return SimpleNamespace(devices=classes)


def test_a_jobs_numbers_are_addresses_in_their_order(tmp_path: Path) -> None:
    root = sysfs.make(tmp_path, sysfs.DGX)
    assert of_job({"gpu": ["0", "7"]}, site_of(GPUS), "Slurm", root) == ("0000:1b:00.0", "0000:df:00.0")
    named = DeviceClass("gpu", GPUS.match, ids=tuple(f"GPU-{bus}" for bus in BUSES))
    assert of_job({"gpu": ["GPU-9d"], "licence": ["3"]}, site_of(named), "HTCondor", root) == ("0000:9d:00.0",)


@pytest.mark.parametrize("name", ["8", "-1", "", "GPU-1b", "00"])
def test_what_the_list_does_not_know_is_a_fault_of_the_node(tmp_path: Path, name: str) -> None:
    root = sysfs.make(tmp_path, sysfs.DGX)
    with pytest.raises(HostError, match=r"which devices\.toml does not know"):
        of_job({"gpu": [name]}, site_of(GPUS), "Slurm", root)


def test_a_gpu_on_a_node_without_a_list_is_one_too(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"Slurm gave the job a GPU, and devices\.toml has no class gpu"):
        of_job({"gpu": ["0"]}, site_of(), "Slurm", tmp_path)


def test_the_verbs_print_it(runtime: Runtime, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = ["--config", str(tmp_path / "belljar.toml")]
    assert main([*config, "device", "list", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    main([*config, "device", "check", "--format", "json"])
    assert "IOMMU" in [finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert main([*config, "device", "release"]) == 125
    assert main([*config, "device", "bind", "0000:ff:00.0", "--user", "root"]) == 125


# -- around a job --------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = make_node()
    monkeypatch.setattr(batch, "load", lambda name: paper_system(made))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return made


@pytest.mark.skipif(os.geteuid() != 0, reason="hooks run as root")
def test_a_jobs_devices_are_bound_by_its_prolog_and_given_back_by_its_epilog(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = sysfs.make(tmp_path / "host", sysfs.DGX)
    kernel = sysfs.Kernel(root, {})
    monkeypatch.setattr(devices, "ROOT", root)
    monkeypatch.setattr(devices, "bindings", lambda runtime: Bindings(tmp_path / "devices", root, kernel.write))
    real = of_job
    monkeypatch.setattr(devices, "of_job", lambda given, runtime, title: real(given, runtime, title, root))
    monkeypatch.setenv("BELLJAR_PATHS_RUN", str(tmp_path))
    node.config.with_name("devices.toml").write_text('[class.gpu]\nmatch = ["vendor=10de class=03*"]\n')
    node.dialect.given = {"gpu": ["1"]}
    try:
        assert hooks.run("prolog", "slurm", ["7", "nobody"], node.runtime) == 0
        (held,) = Bindings(tmp_path / "devices", root).all()
        assert (held.address, held.job) == ("0000:43:00.0", "slurm:7")
        assert sysfs.driver_of(root, "0000:43:00.0") == "vfio-pci"
        assert (root / "dev/vfio/21").stat().st_uid == 65534
        assert hooks.run("epilog", "slurm", ["8", "nobody"], node.runtime) == 0
        assert sysfs.driver_of(root, "0000:43:00.0") == "vfio-pci", "another job's epilog"
        assert hooks.run("epilog", "slurm", ["7", "nobody"], node.runtime) == 0
        assert sysfs.driver_of(root, "0000:43:00.0") == "nvidia" and [*Bindings(tmp_path / "devices", root).all()] == []
    finally:
        node.close()


def test_reset_is_required_unless_the_site_says_otherwise() -> None:
    assert GPUS.reset is REQUIRED


class Watched:
    """A host whose bindings the reaper sees."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.folder = sysfs.make(folder / "host", sysfs.DGX), folder / "devices"
        self.kernel = sysfs.Kernel(self.root, {})
        self.bindings = Bindings(self.folder, self.root, self.kernel.write)
        monkeypatch.setattr(devices, "bindings", lambda runtime: self.bindings)


@pytest.mark.skipif(os.geteuid() != 0, reason="the node's reaper is root")
def test_the_reaper_gives_back_what_a_job_had_that_its_system_does_not_know(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Watched(tmp_path, monkeypatch)
    host.bindings.bind(["0000:43:00.0"], MINE, "slurm:7", (GPUS,))
    host.bindings.bind(["0000:52:00.0"], MINE, "slurm:8", (GPUS,))
    host.bindings.bind(["0000:61:00.0"], MINE, "", (GPUS,))
    node.dialect.said = b"8"
    node.configure("gone_after = 0")
    try:
        for _ in range(2):
            found, trouble = reap.reap(node.runtime, ["slurm"], dry=False)
        assert [(row.what, row.error) for row in found] == [("device given back", "")] and trouble == []
    finally:
        node.close()
    assert [it.address for it in host.bindings.all()] == ["0000:52:00.0", "0000:61:00.0"]


@pytest.mark.parametrize("dry", [True, False])
def test_the_reaper_gives_back_what_somebody_was_killed_over(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dry: bool
) -> None:
    host = Watched(tmp_path, monkeypatch)
    host.bindings.bind(["0000:43:00.0"], MINE, "", (GPUS,))
    (held,) = host.bindings.all()
    (host.folder / f"{held.address}.json").write_bytes(dumps(replace(held, is_whole=False)))
    found, bound, trouble = reap.look(runtime, dry=dry)
    assert bound == {} and trouble == []
    assert [row.what for row in found] == ["device half bound" if dry else "device given back"]
    assert (sysfs.driver_of(host.root, held.address) == "nvidia") is not dry


# -- the machine of a job ------------------------------------------------------------------------------------------------


def job_of_slurm(**more: str) -> tuple[Surroundings, Job]:
    env = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1", **more}
    here = Surroundings(
        (b"/spool/job",), tuple((name.encode(), value.encode()) for name, value in env.items()), b"/", os.geteuid(), os.getegid(),
        (), {}, lambda: b"", lambda path: b"#!/bin/sh\n",
    )  # fmt: skip
    return here, batch.load("slurm").dialect.read(here)


def test_a_jobs_machine_asks_for_what_the_job_was_given(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = sysfs.make(tmp_path / "host", sysfs.DGX)
    monkeypatch.setattr(devices, "of_job", lambda given, runtime, title: of_job(given, runtime, title, root))
    request = wrap.make_request(*job_of_slurm(SLURM_JOB_GPUS="0,1"), "debian12", runtime)
    assert request.machine.devices == ("pci:0000:1b:00.0", "pci:0000:43:00.0")
    assert wrap.make_request(*job_of_slurm(), "debian12", runtime).machine.devices == ()


def test_a_mistake_in_the_sites_list_is_the_nodes_fault(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text("[class.gpu]\nmatch = 7\n")
    with pytest.raises(HostError, match=r"class\.gpu\.match"):
        wrap.make_request(*job_of_slurm(SLURM_JOB_GPUS="0"), "debian12", runtime)
