"""Who may use KVM: tried with files that stand in for the device, by a real process of an ordinary user."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from belljar.findings import ok
from belljar.jobs.site import doctor as kvm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    """A device that only root can open, and a processor with VT-x."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    device, cpuinfo = tmp_path / "kvm", tmp_path / "cpuinfo"
    device.touch(0o600)
    cpuinfo.write_text("processor : 0\nflags : fpu vmx sse\n")
    return device, cpuinfo


@needs_root
def test_a_host_that_has_kvm_and_users_who_have_not_is_told_with_a_remedy(host: tuple[Path, Path]) -> None:
    right = kvm.of_users(*host)
    assert not right.is_good and "mode 0600" in right.text and "nobody cannot open it" in right.text
    assert 'MODE="0666"' in right.remedy and "usermod" in right.remedy


@needs_root
def test_a_device_for_everybody_is_good(host: tuple[Path, Path]) -> None:
    host[0].chmod(0o666)
    assert kvm.of_users(*host) == ok("/dev/kvm", f"{host[0]} can be opened by everybody")


@needs_root
@pytest.mark.parametrize(
    ("members", "mode", "is_lost"),
    [(["ann", "belljar"], 0o660, False), (["belljar"], 0o660, True), (["ann"], 0o600, True)],
)
def test_a_group_that_has_users_is_the_sites_choice(
    host: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, members: list[str], mode: int, is_lost: bool
) -> None:
    host[0].chmod(mode)
    monkeypatch.setattr(kvm.grp, "getgrgid", lambda gid: grp.struct_group(("kvm", "x", gid, members)))
    right = kvm.of_users(*host)
    assert right.is_good is not is_lost and "group kvm" in right.text
    assert ("only ann can open it" in right.text) is not is_lost


def test_a_processor_without_virtualization_has_nothing_to_lose(host: tuple[Path, Path]) -> None:
    host[1].write_text("flags : fpu sse\n")
    assert kvm.of_users(*host).is_good


def test_a_device_that_is_missing_though_the_processor_could(host: tuple[Path, Path]) -> None:
    host[0].unlink()
    right = kvm.of_users(*host)
    assert not right.is_good and "No such file" in right.text and "kvm_intel" in right.remedy
