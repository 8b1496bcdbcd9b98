"""A way to contextualize, as the planner prepares it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.image import FakeStore, fake_image

from belljar.context import Means
from belljar.errors import UsageError
from belljar.hypervisor import Accelerator, Boot, DomainSpec
from belljar.image import BootFiles, Image
from belljar.machine.planning import GuestContext, contexts
from belljar.machine.planning.boot_plan import has_usual_way
from belljar.machine.planning.contexts import decide, means_of
from belljar.model import (
    GIB,
    Account,
    Context,
    MachineSpec,
    NetworkMode,
    Outcome,
    OwnWork,
    Payload,
    Request,
    RunPayload,
)

PAYLOAD = Payload((b"true",), Account("alice", 1000, 1000, "alice"))
STOCK = {
    "agent_in_initrd": True, "init": "/sbin/init", "init_system": "systemd", "cloud_init": True,
}  # fmt: skip


def image(**facts: Any) -> Image:
    return replace(fake_image("stock"), facts={**STOCK, **facts})


def firmware_image(**facts: Any) -> Image:
    return replace(image(**facts), kernel=None, initrd=None)


def request(context: Context = Context.AUTO, disk: int | None = None) -> Request:
    return Request("0123456789ab", MachineSpec("stock", 1, GIB, disk=disk, context=context), RunPayload(PAYLOAD))


async def no_machine(*_: Any, **__: Any) -> Outcome:
    raise AssertionError("nothing is done in a machine here")


def decided(wanted: Request, found: Image, store: FakeStore | None = None) -> GuestContext:
    parts: Any = SimpleNamespace(images=store or FakeStore())
    return asyncio.run(decide(wanted, found, parts, no_machine))


class DirectStore(FakeStore):
    """Its images are started directly, with their own init where the context wants that."""

    def boot_files(self, image: Image, context: Context = Context.AUTO) -> BootFiles:
        init = "" if context in (Context.AUTO, Context.RAMDISK) else "/sbin/init"
        return replace(super().boot_files(image, context), init=init)


@pytest.mark.parametrize(
    ("context", "network", "waits"),
    [
        (Context.CLOUD_INIT, NetworkMode.NONE, False),
        (Context.INJECT, NetworkMode.NONE, False),
        (Context.INJECT, NetworkMode.ISOLATED, False),  # belljar gives the address
        (Context.INJECT, NetworkMode.USER, True),  # it is answered at once
        (Context.CLOUD_INIT, NetworkMode.BRIDGE, True),  # the site's server may answer
    ],
)
def test_an_own_init_does_not_wait_for_a_network_that_will_not_come(
    context: Context, network: NetworkMode, waits: bool
) -> None:
    asked = request(context)
    asked = replace(asked, machine=replace(asked.machine, network=network, network_name="blue"))
    way = decided(asked, image(), DirectStore())
    assert ("systemd.mask=systemd-networkd-wait-online.service" not in way.files.append) is waits


def test_an_own_systemd_is_as_patient_as_belljar_and_another_init_is_told_nothing() -> None:
    def words(context: Context, **facts: Any) -> str:
        return decided(request(context), image(**facts), DirectStore()).files.append

    assert "systemd.default_device_timeout_sec=3600" in words(Context.INJECT)
    assert "systemd." not in words(Context.RAMDISK)
    assert "systemd.default" not in words(Context.NONE, init_system="other")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, made when it is asked for."""

    async def get(image: Image, *_: Any) -> tuple[Image, str]:
        return replace(image, disk=Path("/layer.qcow2")), "d" * 64

    monkeypatch.setattr(contexts, "layer_of", get)


@pytest.mark.parametrize(
    ("facts", "means"),
    [
        (STOCK, Means(True, "systemd", True)),
        ({}, Means(is_known=False)),
        ({"agent_in_initrd": True, "cloud_init": False}, Means(ramdisk=True)),
        ({"context": "none", "agent": True, "cloud_init": False}, Means(agent=True, own=Context.NONE)),
        ({"context": "ssh", "cloud_init": False}, Means()),  # of another version of belljar, or somebody's hand
    ],
)
def test_facts_of_an_image_are_means(facts: dict[str, Any], means: Means) -> None:
    assert means_of(facts, fake_image("x").kernel is not None) == means


def test_a_kernel_that_its_importer_gave_with_a_ramdisk_is_no_way_for_ours() -> None:
    assert not means_of(image(agent_in_initrd=False).facts, True).ramdisk
    assert not means_of(firmware_image().facts, False).ramdisk


@pytest.mark.parametrize(
    ("wanted", "found", "usual"),
    [
        (Context.AUTO, image(), True),
        (Context.RAMDISK, image(), True),
        (Context.CLOUD_INIT, image(), False),
        (Context.AUTO, image(context="cloud-init"), False),
        (Context.AUTO, firmware_image(), False),
        (Context.AUTO, image(agent_in_initrd=False), False),
    ],
)
def test_the_usual_way_is_known_without_a_question(wanted: Context, found: Image, usual: bool) -> None:
    assert has_usual_way(request(wanted), found) is usual


def test_cloud_init_gets_a_disc_that_grows_with_the_disk() -> None:
    same = decided(request(Context.CLOUD_INIT), image())
    larger = decided(request(Context.CLOUD_INIT, disk=16 * GIB), image())
    assert same.seed is not None and larger.seed is not None
    assert same.seed.digest == decided(request(Context.CLOUD_INIT), image()).seed.digest  # type: ignore[union-attr]
    assert same.digest != larger.digest != same.files.digest


@pytest.mark.usefixtures("layer")
def test_a_disk_that_boots_by_firmware_gets_the_agent_in_a_layer() -> None:
    way = decided(request(Context.INJECT), firmware_image())
    assert (way.image.disk, way.layer, way.seed) == (Path("/layer.qcow2"), "d" * 64, None)
    assert way.digest != way.files.digest  # another layer is another template


def test_a_way_the_image_cannot_go_is_refused() -> None:
    with pytest.raises(UsageError, match="no cloud-init"):
        decided(request(Context.CLOUD_INIT), image(cloud_init=False))


def spec(folder: Path) -> DomainSpec:
    return DomainSpec(
        "0123456789ab", 1, GIB, "", Boot(), folder, GIB, Accelerator.TCG, folder, seed=folder / "seed.iso"
    )


@pytest.mark.usefixtures("layer")
def test_the_disc_is_made_once_and_only_where_there_is_to_be_one(tmp_path: Path) -> None:
    way = decided(request(Context.CLOUD_INIT), image())
    way.make_seed(spec(tmp_path))
    made = (tmp_path / "seed.iso").stat()
    way.make_seed(spec(tmp_path))
    assert (tmp_path / "seed.iso").stat().st_mtime_ns == made.st_mtime_ns
    decided(request(Context.INJECT), image()).make_seed(spec(tmp_path / "none"))


def test_user_data_of_its_own_make_a_machine_nobody_elses_template() -> None:
    told = replace(request(Context.CLOUD_INIT), work=RunPayload(PAYLOAD, b"#cloud-config\n"))
    way = decided(told, image())
    assert way.private and way.seed is not None
    assert way.digest != decided(request(Context.CLOUD_INIT), image()).digest
    assert decided(request(Context.CLOUD_INIT), image()).private == ""


def test_a_guest_that_knows_its_own_work_runs_its_own_init_whatever_else_it_could() -> None:
    way = decided(replace(request(), work=OwnWork(b"x")), image())
    assert (way.chosen.context, way.seed is not None, bool(way.private)) == (Context.NONE, True, True)
    assert not has_usual_way(replace(request(), work=OwnWork()), image())
    assert decided(replace(request(), work=OwnWork()), image()).seed is None


def test_no_command_runs_in_a_disc() -> None:
    with pytest.raises(UsageError, match="disc"):
        decided(request(), firmware_image(boots_by="disc"))
