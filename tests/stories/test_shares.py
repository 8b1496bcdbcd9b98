"""Shared folders in the life of a machine: mounted before its payload starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import GuestRefused
from belljar.model import Cause, OutcomeClass, Share


def test_an_outer_folder_is_mounted_before_what_lies_in_it(runtime: Runtime, tmp_path: Path) -> None:
    targets = ("/data/in/deep", "/data", "/data/in")
    outcome = runtime.run(
        runtime.request(machine={"shares": tuple(Share(str(tmp_path), target) for target in targets)})
    )
    assert outcome.cause is Cause.FINISHED, outcome.reason
    assert runtime.guests[-1].mounted == ["/data", "/data/in", "/data/in/deep"]


def test_a_payload_never_starts_without_its_mount(runtime: Runtime, tmp_path: Path) -> None:
    runtime.plan(Script(refuses={"mount": GuestRefused("no")}))
    outcome = runtime.run(runtime.request(machine={"shares": (Share(str(tmp_path), "/data"),)}))
    assert (outcome.klass, outcome.error, outcome.payload_ran) == (OutcomeClass.USER, "GuestRefused", False)
    assert runtime.guests[0].payloads == [] and runtime.leftovers() == []


@pytest.mark.parametrize(
    ("kind", "mounts", "error"),
    [
        ("9p", ["virtiofs"], "GuestRefused"), ("virtiofs", ["9p"], "GuestRefused"),
        ("9p", ["9p"], ""), ("9p", None, ""),
    ],
)  # fmt: skip
def test_what_the_images_kernel_cannot_mount_is_refused_before_any_boot(
    runtime: Runtime, tmp_path: Path, kind: str, mounts: list[str] | None, error: str
) -> None:
    image = runtime.images.known["debian12"]
    facts = image.facts if mounts is None else {**image.facts, "mounts": mounts}
    runtime.images.known["debian12"] = replace(image, facts=facts)
    outcome = runtime.run(runtime.request(machine={"shares": (Share(str(tmp_path), "/data", True, kind),)}))
    assert outcome.error == error, outcome.reason
    assert (runtime.guests == []) is bool(error)
    if error:
        assert outcome.klass is OutcomeClass.USER and str(tmp_path) in outcome.reason and "debian12" in outcome.reason
