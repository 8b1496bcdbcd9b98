"""A request that never became a machine is on record like the others."""

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.hypervisor import FakeHypervisor

from belljar.errors import BootTimeout, ImageUnfit, NoSpace, NotPermitted
from belljar.image import Image
from belljar.machine import Folders
from belljar.machine.cleaning.reaper import Reaper
from belljar.machine.life.claim import claim
from belljar.machine.outside.registry import Machines
from belljar.machine.planning.refusal import checked_image, put_on_record
from belljar.model import MIB, Cause, MachineSpec, OutcomeClass, OwnWork, Request
from belljar.records import replace


def test_an_image_with_nothing_to_start_is_refused_instead_of_waited_for() -> None:
    """Only an image whose import looked for a boot loader, and found none."""
    facts = {"boots_by": "firmware", "firmware": []}
    image = Image("d" * 64, ("plain",), Path("disk"), 64 * MIB, None, None, "", "/some/disk", 0.0, facts=facts)
    images: Any = SimpleNamespace(resolve=lambda reference: image)
    parts: Any = SimpleNamespace(images=images, overlays=SimpleNamespace(size=lambda image, wanted: image.virtual_size))
    request = Request("0123456789ab", MachineSpec("plain", 1, 64 * MIB), OwnWork())
    with pytest.raises(ImageUnfit, match="image plain: nothing to start in its disk"):
        checked_image(request, parts)
    for better in ({**facts, "firmware": ["bios"]}, {"boots_by": "firmware"}):
        images.resolve = lambda reference, better=better: replace(image, facts=better)
        assert checked_image(request, parts).facts == better


def test_what_failed_names_the_machine_in_its_reason_and_its_hint(tmp_path: Path) -> None:
    request = Request("0123456789ab", MachineSpec("plain", 1, 64 * MIB), OwnWork())
    life = claim(request, folders(tmp_path), lambda point: None)
    life.fail(BootTimeout("waited 3 s (`belljar logs ID --journal` shows for what)"))
    for words in (life.outcome.reason, life.outcome.hint):
        assert "`belljar logs 0123456789ab --" in words


def folders(top: Path) -> Folders:
    return Folders(top / "run", top / "scratch", top / "store", top / "logs")


def test_a_host_that_cannot_write_still_gives_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    outcome = put_on_record(NoSpace("full"), "slurm:1", "debian12", folders(tmp_path))
    assert (outcome.klass, outcome.reason, outcome.name) == (OutcomeClass.NODE, "full", "slurm:1")


def test_it_is_found_by_its_batch_id(tmp_path: Path) -> None:
    places = folders(tmp_path)
    outcome = put_on_record(NotPermitted("not that one"), "slurm:4711", "../../x", places)
    machines = Machines(places, Reaper(places, FakeHypervisor(tmp_path / "fake")))
    view = machines.find("slurm:4711")
    assert (view.id, view.state, view.cause, view.image) == (outcome.id, "done", Cause.REFUSED.value, "../../x")
    assert machines.newest("slurm:4711") is not None and view.created >= outcome.started
    assert stat.S_IMODE(view.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in view.folder.iterdir()} == {0o600}
