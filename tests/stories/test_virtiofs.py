"""Folders by virtiofs in the life of a machine: refused in time, journaled before they are served, mounted in their turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import CommandMissing, GuestRefused, HostError
from belljar.guest import OTHER_SHARE
from belljar.hypervisor import EventKind
from belljar.hypervisor.devices import share_kind, tagged
from belljar.model import Cause, OutcomeClass, Share, Start


def machine(folder: Path, *more: Share, start: Start = Start.COLD) -> dict[str, Any]:
    return {"start": start, "shares": (Share(str(folder), "/data/in", False, "virtiofs"), *more)}


@pytest.mark.parametrize("start", [Start.COLD, Start.AUTO])
def test_a_folder_is_mounted_where_its_turn_is(runtime: Runtime, tmp_path: Path, start: Start) -> None:
    folder = str(tmp_path)
    asked = machine(tmp_path, Share(folder, "/data/in/deep"), Share(folder, "/data"), start=start)
    outcome = runtime.run(runtime.request(machine=asked))
    assert outcome.cause is Cause.FINISHED, outcome.reason
    guest = runtime.guests[-1]
    assert [word for word in guest.done if word.startswith("mount")] == ["mount"] * 3
    assert guest.mounted == ["/data", "/data/in", "/data/in/deep"]
    shares = runtime.hypervisor.domains[-1].spec.shares
    assert [(tag, share_kind(share.kind).name) for tag, share in tagged(shares)] == [
        ("share0", "virtiofs"), ("share1", "9p"), ("share2", "9p"),
    ]  # fmt: skip
    assert runtime.leftovers() == []


def test_it_is_in_the_journal_before_anything_runs(runtime: Runtime, tmp_path: Path) -> None:
    runtime.run(runtime.request(machine=machine(tmp_path)))
    events = [event.get("state") or event.get("what") or event["event"] for event in runtime.journal()]
    assert events.index("virtiofs") < events.index("starting") < events.index("spawned")


def test_a_template_is_made_ready_for_it_and_kept_apart(runtime: Runtime, tmp_path: Path) -> None:
    assert runtime.run(runtime.request(machine=machine(tmp_path, start=Start.AUTO))).start == "clone"
    assert "prepare_for virtiofs" in runtime.guests[0].done
    assert runtime.run(runtime.request(machine={"start": Start.AUTO})).start == "clone"
    assert len(runtime.hypervisor.templates()) == 2


def test_a_host_without_virtiofsd_refuses_before_it_makes_anything(runtime: Runtime, tmp_path: Path) -> None:
    runtime.hypervisor.faults.check.append(
        CommandMissing("virtiofsd: no such program on this host", hint="Install it.")
    )
    outcome = runtime.run(runtime.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass, outcome.hint) == ("CommandMissing", OutcomeClass.NODE, "Install it.")
    assert runtime.hypervisor.domains == [] and runtime.hypervisor.templates() == [] and runtime.leftovers() == []


def test_a_folder_that_cannot_be_served_costs_no_template(runtime: Runtime, tmp_path: Path) -> None:
    runtime.hypervisor.faults.start_clone.append(HostError("--share virtiofs:/data: namespaces: Permission denied"))
    outcome = runtime.run(runtime.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass) == ("HostError", OutcomeClass.NODE)
    assert len(runtime.hypervisor.templates()) == 1 and runtime.leftovers() == []


def test_one_that_ends_while_a_clone_boots_costs_no_template_either(runtime: Runtime, tmp_path: Path) -> None:
    runtime.plan(Script(), Script(boots_in=None))
    runtime.at["after-spawn"] = lambda: runtime.domain().happen(EventKind.SHARE_LOST, "killed")
    outcome = runtime.run(runtime.request(machine=machine(tmp_path, start=Start.AUTO)))
    assert (outcome.error, outcome.klass) == ("ShareLost", OutcomeClass.TRANSIENT)
    assert len(runtime.hypervisor.templates()) == 1 and runtime.leftovers() == []


def test_a_kernel_without_virtiofs_names_the_alternative(runtime: Runtime, tmp_path: Path) -> None:
    runtime.plan(Script(refuses={"mount": GuestRefused("no virtiofs", hint=OTHER_SHARE)}))
    outcome = runtime.run(runtime.request(machine=machine(tmp_path)))
    assert outcome.error == "GuestRefused" and outcome.klass is OutcomeClass.USER
    assert "`SRC` alone" in outcome.hint


def test_a_folder_that_is_missing_is_refused_as_by_9p(runtime: Runtime, tmp_path: Path) -> None:
    outcome = runtime.run(runtime.request(machine=machine(tmp_path / "gone")))
    assert (outcome.error, outcome.klass) == ("UsageError", OutcomeClass.USER)
    assert "does not exist" in outcome.reason and runtime.leftovers() == []
