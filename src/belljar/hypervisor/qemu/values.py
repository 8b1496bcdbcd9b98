"""What is wrong with the values of `[qemu]` beyond their types: programs, files and users that are not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from belljar.errors import BadSetting, BelljarError, CommandMissing
from belljar.host.commands import run
from belljar.hypervisor import Settings, account
from belljar.hypervisor.devices import share_kind, share_names
from belljar.hypervisor.libvirt.connection import read_driver
from belljar.hypervisor.qemu import abilities
from belljar.hypervisor.qemu.abilities import QUESTION_TIMEOUT

BY_ITSELF = ("", "auto")


def wrong_values(settings: Settings, driver: str) -> Iterator[tuple[str, str, BadSetting]]:
    """(section, key, what is wrong) of each value that names something this host does not have."""

    def check_shares(_: str) -> None:
        for name in share_names():
            share_kind(name).check(settings)

    looks: list[tuple[str, str, str, Callable[[str], object]]] = [
        ("machine", "hypervisor", "" if driver == "qemu" else driver, read_driver),
        ("qemu", "binary", settings.binary, lambda name: abilities.name_of(abilities.find(name))),
        ("qemu", "cpu", settings.cpu, lambda _: _check_cpu(settings)),
        ("qemu", "uefi", settings.uefi, find_uefi),
        ("qemu", "virtiofsd", settings.virtiofsd, check_shares),
        ("qemu", "user", settings.user, account),
    ]
    for section, key, value, look in looks:
        try:
            if value not in BY_ITSELF:
                look(value)
        except BadSetting as exc:
            yield section, key, exc
        except BelljarError as exc:
            yield section, key, BadSetting(exc.message)  # its hint is for a reader who does not look at the settings


def _check_cpu(settings: Settings) -> None:
    """Does QEMU know this model, and each of its features? A QEMU that aborts judged this host's KVM: it is asked without."""
    words = ["-m", "16", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio"]
    for accelerators in ("kvm:tcg", "tcg"):
        call = [abilities.find(settings.binary), "-cpu", settings.cpu, "-M", f"q35,accel={accelerators}", *words]
        answer = run(call, stdin=b"quit\n", timeout=QUESTION_TIMEOUT, check=False)
        if answer.code >= 0:
            break
    if answer.code:
        complaint = answer.err.decode(errors="replace").strip().rpartition("\n")[2].rpartition("86_64: ")[2]
        hint = 'Set it to "auto", or to what `qemu-system-x86_64 -cpu help` lists.'
        raise BadSetting(f"{settings.cpu!r}: {complaint or 'no message'}", hint=hint)


# -- the firmware for disks that are booted by one: OVMF, a file of another package than QEMU's -----------------------

# A file with code and variables in one is taken before one with the code alone; either keeps the variables of a machine in
# its memory, so nothing of them outlives it. Secure boot is never on.

PLACES = (  # of Debian and Ubuntu, of Fedora and EL
    "/usr/share/ovmf/OVMF.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/OVMF/OVMF_CODE.fd",
)


def find_uefi(setting: str) -> str:
    """The file to give QEMU as its firmware. Raises CommandMissing."""
    for place in [setting] if setting else PLACES:
        if os.access(place, os.R_OK):
            return place
    if setting:
        raise CommandMissing(f"{setting}: no readable file", hint="Correct `qemu.uefi` in the settings.")
    hint = "Install it (`apt install ovmf`, `dnf install edk2-ovmf`), or set `qemu.uefi` to its file."
    raise CommandMissing("OVMF, the firmware for images that boot by UEFI, is not on this host", hint=hint)
