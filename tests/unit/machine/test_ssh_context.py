"""The ssh context as the planner prepares it: keys, card, ramdisk, and what is remembered of templates."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.machine.test_contexts import image, no_machine, request

from belljar.errors import ContextImpossible
from belljar.guest import SshKeys
from belljar.guest.ssh_link import fresh_keys
from belljar.host.guard.egress import Egress
from belljar.hypervisor import Accelerator, Boot, DomainSpec
from belljar.image import SSH_WORD, BootFiles, Image
from belljar.image.fake import FakeStore
from belljar.machine.parts import SshHouse
from belljar.machine.planning.contexts import decide
from belljar.machine.planning.guest_context import GuestContext
from belljar.machine.planning.ssh import SshContext, card_of_clone
from belljar.model import Context, NetworkMode
from belljar.network import Link, plan


class Direct(FakeStore):
    """Starts kernels with a ramdisk of belljar's, which hands over to the image's init."""

    def boot_files(self, image: Image, context: Context = Context.AUTO) -> BootFiles:
        return replace(super().boot_files(image, context), init="/sbin/init")


def decided(folder: Path, found: Any, keys: Callable[[str], SshKeys] = fresh_keys) -> GuestContext:
    house = SshHouse(lambda domain, keys, tell, is_draft: None, keys)  # type: ignore[arg-type,return-value]
    parts: Any = SimpleNamespace(images=Direct(), ssh=lambda: house)
    return asyncio.run(decide(request(Context.SSH), found, parts, no_machine))


def way_of(folder: Path, found: Any) -> SshContext:
    way = decided(folder, found).ssh
    assert way is not None
    return way


def spec(folder: Path) -> DomainSpec:
    return DomainSpec(
        "0123456789ab", 1, 1 << 30, "d" * 64, Boot(Path("/kernel"), folder / "ramdisk", "", "e" * 64), folder / "disk", 1 << 30,
        Accelerator.TCG, folder, seed=folder / "seed",
    )  # fmt: skip


def test_each_boot_has_keys_of_its_own(tmp_path: Path) -> None:
    one, two = way_of(tmp_path, image()).keys, way_of(tmp_path, image()).keys
    assert one.public != two.public and one.host_public != two.host_public
    assert one.host_private != two.host_private and one.private != two.private


def test_the_ways_digest_says_nothing_of_the_machines_own_keys(tmp_path: Path) -> None:
    assert decided(tmp_path, image()).digest == decided(tmp_path, image()).digest


@pytest.mark.parametrize("has_cloud_init", [True, False])
def test_keys_are_drawn_for_a_boot_and_not_for_a_clone(tmp_path: Path, has_cloud_init: bool) -> None:
    drawn: list[str] = []
    way = decided(tmp_path, image(cloud_init=has_cloud_init), lambda user: drawn.append(user) or fresh_keys(user))
    assert way.digest and way.ssh is not None and drawn == []
    assert way.ssh.keys is way.ssh.keys and drawn == ["root"]


def test_a_template_of_another_agent_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = decided(tmp_path, image()).digest
    monkeypatch.setattr("belljar.agent.bundle.digest", lambda: b"another")
    assert decided(tmp_path, image()).digest != before


def test_a_cold_start_after_a_template_has_a_disc_of_its_own(tmp_path: Path) -> None:
    for way in (decided(tmp_path, image()), decided(tmp_path, image())):
        way.make_seed(spec(tmp_path))
        assert way.ssh is not None and way.ssh.keys.public.encode() in (tmp_path / "seed").read_bytes()


def test_an_image_without_cloud_init_gets_its_keys_with_the_ramdisk(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"base")
    way = decided(tmp_path, image(cloud_init=False))
    way = replace(way, files=replace(way.files, initrd=base))
    assert way.seed is None and way.files.append.split()[-1] == SSH_WORD
    assert way.ramdisk(tmp_path) == tmp_path / "ramdisk"
    way.make_seed(spec(tmp_path))
    made = (tmp_path / "ramdisk").read_bytes()
    assert way.ssh is not None
    keys = way.ssh.keys
    assert made.startswith(b"base") and keys.public.encode() in made and keys.host_public.encode() in made


def test_a_user_who_is_not_root_is_only_for_cloud_init(tmp_path: Path) -> None:
    assert way_of(tmp_path, image(ssh_user="debian")).keys.user == "debian"
    with pytest.raises(ContextImpossible, match="takes belljar's key"):
        way_of(tmp_path, image(ssh_user="debian", cloud_init=False))
    with pytest.raises(ContextImpossible, match="not possible"):
        way_of(tmp_path, image(ssh_user="root; reboot"))


def test_a_machine_without_a_network_has_a_card_nothing_gets_out_of(tmp_path: Path) -> None:
    none = Link(NetworkMode.NONE)
    nic = way_of(tmp_path, image()).card(none)
    assert nic.is_shut and nic.forward == 22 and nic.egress is not None and nic.egress.deny
    clones = card_of_clone(nic, none)
    assert clones.is_shut and not clones.forward and clones.egress is None and clones.mac == nic.mac


def test_a_machine_with_a_user_network_keeps_its_egress_and_only_its_first_boot_is_entered(tmp_path: Path) -> None:
    link = plan(NetworkMode.USER, "0123456789ab")
    nic = way_of(tmp_path, image()).card(link)
    assert not nic.is_shut and nic.forward == 22 and nic.egress is not None and nic.egress.allow
    guarded = replace(link, egress=Egress(deny=nic.egress.allow))
    assert way_of(tmp_path, image()).card(guarded).egress == guarded.egress
    assert card_of_clone(nic, guarded) == replace(nic, forward=0, egress=guarded.egress)


@pytest.mark.parametrize("link", [Link(NetworkMode.BRIDGE, "52:00"), Link(NetworkMode.ISOLATED, "52:00")])
def test_other_networks_are_refused(tmp_path: Path, link: Link) -> None:
    with pytest.raises(ContextImpossible, match="user network"):
        way_of(tmp_path, image()).card(link)
