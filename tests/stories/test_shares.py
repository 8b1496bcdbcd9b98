"""Exports of file servers in the life of a machine: looked for before it starts, mounted before its payload does."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import House

from belljar.errors import ExportRefused, MountFailed, NoNfs, ShareNotFlushed
from belljar.model import Cause, FileServer, NetworkMode, OutcomeClass, Share, ShareKind, Start
from belljar.network import nfs


@pytest.fixture
def port() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def machine(port: int, *more: Share, network: NetworkMode = NetworkMode.USER) -> dict[str, Any]:
    export = Share(f"nfs://127.0.0.1:{port}/data", "/data/in", False, ShareKind.NFS)
    return {"start": Start.COLD, "network": network, "shares": (export, *more)}


def test_an_export_is_mounted_where_its_turn_is(house: House, port: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    outcome = house.run(house.request(machine=machine(port, Share(folder, "/data/in/deep"), Share(folder, "/data"))))
    assert outcome.cause is Cause.FINISHED, outcome.reason
    (guest,) = house.guests
    assert [word for word in guest.done if word.startswith("mount")] == ["mount", "mount_nfs", "mount"]
    assert guest.servers == [FileServer("10.0.2.2", port, "/data")] and "end_payload" in guest.done


def test_a_template_is_made_ready_for_it_and_kept_apart(house: House, port: int) -> None:
    words = machine(port) | {"start": Start.AUTO}
    assert house.run(house.request(machine=words)).start == "clone"
    assert "prepare_for nfs" in house.guests[0].done
    assert house.run(house.request(machine={"network": NetworkMode.USER, "start": Start.AUTO})).start == "clone"
    assert len(house.hypervisor.templates()) == 2


def test_a_server_that_is_silent_costs_a_try_and_no_machine(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    outcome = house.run(house.request(machine=machine(port)))
    assert (outcome.klass, outcome.error) == (OutcomeClass.TRANSIENT, "ServerSilent")
    assert f"127.0.0.1:{port}" in outcome.reason and house.guests == [] and house.leftovers() == []
    assert outcome.ended - outcome.started < nfs.PATIENCE


@pytest.mark.parametrize("requester", ["cli", "slurm:7"])
def test_an_export_without_a_network_is_refused_in_the_askers_words(house: House, port: int, requester: str) -> None:
    asked = machine(port, network=NetworkMode.NONE)
    outcome = house.run(house.request(machine=asked, requester=requester))
    assert outcome.klass is OutcomeClass.USER and outcome.error == "ShareMissing"
    words = ("--share", "--network user") if requester == "cli" else ("batch.shares", "machine.network")
    assert words[0] in outcome.reason and words[1] in outcome.hint


@pytest.mark.parametrize(
    ("error", "klass"),
    [
        (NoNfs("no"), OutcomeClass.USER),
        (ExportRefused("no"), OutcomeClass.USER),
        (MountFailed("no"), OutcomeClass.TRANSIENT),
    ],
    ids=["no nfs", "refused", "silent"],
)
def test_a_payload_never_starts_without_its_mount(house: House, port: int, error: Any, klass: OutcomeClass) -> None:
    house.plan(Script(refuses={"mount_nfs": error}))
    outcome = house.run(house.request(machine=machine(port)))
    assert (outcome.klass, outcome.error, outcome.payload_ran) == (klass, type(error).__name__, False)
    assert house.guests[0].payloads == [] and house.leftovers() == []


def test_a_payload_that_ended_well_with_its_files_lost_did_not_end_well(house: House, port: int) -> None:
    house.plan(Script(refuses={"end_payload": ShareNotFlushed("/data: no space")}))
    outcome = house.run(house.request(machine=machine(port)))
    assert (outcome.klass, outcome.error, outcome.exit_code) == (OutcomeClass.TRANSIENT, "ShareNotFlushed", 0)
    assert "no space" in outcome.reason and house.leftovers() == []


@pytest.mark.parametrize(
    ("kind", "mounts", "error"),
    [
        (ShareKind.NINEP, ["virtiofs"], "NoNineP"), (ShareKind.VIRTIOFS, ["9p"], "NoVirtiofs"),
        (ShareKind.NINEP, ["9p"], ""), (ShareKind.NINEP, None, ""),
    ],
)  # fmt: skip
def test_what_the_images_kernel_cannot_mount_is_refused_before_any_boot(
    house: House, tmp_path: Path, kind: ShareKind, mounts: list[str] | None, error: str
) -> None:
    image = house.images.known["debian12"]
    facts = image.facts if mounts is None else {**image.facts, "mounts": mounts}
    house.images.known["debian12"] = replace(image, facts=facts)
    outcome = house.run(house.request(machine={"shares": (Share(str(tmp_path), "/data", True, kind),)}))
    assert outcome.error == error, outcome.reason
    assert (house.guests == []) is bool(error)
    if error:
        assert outcome.klass is OutcomeClass.USER and str(tmp_path) in outcome.reason and "debian12" in outcome.reason
