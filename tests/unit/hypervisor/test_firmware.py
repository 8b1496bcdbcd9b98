"""Which firmware a disk gets that is not booted directly, and what of it is part of a template's key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, LAUNCH, QEMU

from belljar.errors import CommandMissing
from belljar.hypervisor import Accelerator, Boot, Settings
from belljar.hypervisor.qemu import values
from belljar.hypervisor.qemu.cmdline import kernel
from belljar.hypervisor.qemu.driver import QemuHypervisor, uses_uefi
from belljar.model import Firmware

UEFI = replace(COLD, boot=Boot(firmware=Firmware.UEFI))


@pytest.fixture
def hypervisor(tmp_path: Path) -> QemuHypervisor:
    (tmp_path / "OVMF.fd").write_bytes(b"firmware")
    made = QemuHypervisor(Settings(accelerator=Accelerator.TCG, uefi=str(tmp_path / "OVMF.fd")), tmp_path)
    made.__dict__["abilities"] = QEMU
    return made


def test_only_a_disk_that_boots_by_uefi_gets_it() -> None:
    assert uses_uefi(UEFI.boot) and not uses_uefi(Boot()) and not uses_uefi(replace(COLD.boot, firmware=Firmware.UEFI))
    launch = replace(LAUNCH, spec=UEFI, kernel="", initrd="", firmware="/x/OVMF.fd")
    assert kernel(launch)[:2] == ["-bios", "/x/OVMF.fd"]
    assert "-bios" not in kernel(replace(launch, spec=replace(COLD, boot=Boot()), firmware=""))


def test_another_firmware_is_another_template(hypervisor: QemuHypervisor, tmp_path: Path) -> None:
    keys = [hypervisor._key(replace(COLD, boot=Boot())), hypervisor._key(UEFI)]
    (tmp_path / "OVMF.fd").write_bytes(b"a newer firmware")
    keys.append(hypervisor._key(UEFI))
    assert len(set(keys)) == 3
    assert "uefi" not in hypervisor._facts(COLD)


def test_a_clone_is_started_with_the_firmware_of_its_template() -> None:
    launch = replace(LAUNCH, spec=UEFI, kernel="", initrd="", firmware="/x/OVMF.fd")
    assert kernel(launch) == kernel(replace(launch, incoming=17))


def test_a_host_without_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(values, "PLACES", (str(tmp_path / "none"), str(tmp_path / "there")))
    with pytest.raises(CommandMissing) as told:
        values.find_uefi("")
    assert "apt install ovmf" in told.value.hint and "edk2-ovmf" in told.value.hint
    (tmp_path / "there").touch()
    assert values.find_uefi("") == str(tmp_path / "there")
    with pytest.raises(CommandMissing, match="no readable file"):
        values.find_uefi(str(tmp_path / "wrong"))
