"""Folders by virtiofs in the life of a machine: refused in time, journaled before they are served, mounted in their turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import House

from belljar.errors import CommandMissing, NoFileSystem, NoFolderServer
from belljar.hypervisor import EventKind
from belljar.model import Cause, OutcomeClass, Share, ShareKind, Start


def machine(folder: Path, *more: Share, start: Start = Start.COLD) -> dict[str, Any]:
    return {"start": start, "shares": (Share(str(folder), "/data/in", False, ShareKind.VIRTIOFS), *more)}


@pytest.mark.parametrize("start", [Start.COLD, Start.AUTO])
def test_a_folder_is_mounted_where_its_turn_is(house: House, tmp_path: Path, start: Start) -> None:
    folder = str(tmp_path)
    asked = machine(tmp_path, Share(folder, "/data/in/deep"), Share(folder, "/data"), start=start)
    outcome = house.run(house.request(machine=asked))
    assert outcome.cause is Cause.FINISHED, outcome.reason
    guest = house.guests[-1]
    assert [word for word in guest.done if word.startswith("mount")] == ["mount"] * 3
    assert guest.mounted == ["/data", "/data/in", "/data/in/deep"]
    shares = house.hypervisor.domains[-1].spec.shares
    assert [(share.tag, share.kind.value) for share in shares] == [
        ("share0", "virtiofs"), ("share1", "9p"), ("share2", "9p"),
    ]  # fmt: skip
    assert house.leftovers() == []


def test_it_is_in_the_journal_before_anything_runs(house: House, tmp_path: Path) -> None:
    house.run(house.request(machine=machine(tmp_path)))
    events = [event.get("state") or event.get("what") or event["event"] for event in house.journal()]
    assert events.index("virtiofsd") < events.index("starting") < events.index("spawned")


def test_a_template_is_made_ready_for_it_and_kept_apart(house: House, tmp_path: Path) -> None:
    assert house.run(house.request(machine=machine(tmp_path, start=Start.AUTO))).start == "clone"
    assert "prepare_for virtiofs" in house.guests[0].done
    assert house.run(house.request(machine={"start": Start.AUTO})).start == "clone"
    assert len(house.hypervisor.templates()) == 2


def test_a_host_without_virtiofsd_refuses_before_it_makes_anything(house: House, tmp_path: Path) -> None:
    house.hypervisor.faults.check.append(CommandMissing("virtiofsd: no such program on this host", hint="Install it."))
    outcome = house.run(house.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass, outcome.hint) == ("CommandMissing", OutcomeClass.NODE, "Install it.")
    assert house.hypervisor.domains == [] and house.hypervisor.templates() == [] and house.leftovers() == []


def test_a_folder_that_cannot_be_served_costs_no_template(house: House, tmp_path: Path) -> None:
    house.hypervisor.faults.start_clone.append(NoFolderServer("--share virtiofs:/data: namespaces: Permission denied"))
    outcome = house.run(house.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass) == ("NoFolderServer", OutcomeClass.NODE)
    assert len(house.hypervisor.templates()) == 1 and house.leftovers() == []


def test_one_that_ends_while_a_clone_boots_costs_no_template_either(house: House, tmp_path: Path) -> None:
    house.plan(Script(), Script(boots_in=None))
    house.at["after-spawn"] = lambda: house.domain().happen(EventKind.SHARE_LOST, "killed")
    outcome = house.run(house.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass) == ("ShareLost", OutcomeClass.TRANSIENT)
    assert len(house.hypervisor.templates()) == 1 and house.leftovers() == []


def test_a_kernel_without_virtiofs_names_the_alternative(house: House, tmp_path: Path) -> None:
    house.plan(Script(refuses={"mount": NoFileSystem("no virtiofs")}))
    outcome = house.run(house.request(machine=machine(tmp_path)))
    assert outcome.error == "NoFileSystem" and outcome.klass is OutcomeClass.USER
    assert "`SRC` alone" in outcome.hint


def test_a_folder_that_is_missing_is_refused_as_by_9p(house: House, tmp_path: Path) -> None:
    outcome = house.run(house.request(machine=machine(tmp_path / "gone")))
    assert (outcome.error, outcome.klass) == ("UsageError", OutcomeClass.USER)
    assert "does not exist" in outcome.reason and house.leftovers() == []
