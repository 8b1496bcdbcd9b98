"""The UEFI firmware for disks that are booted by one: OVMF, a file of another package than QEMU's.

A file with code and variables in one is taken before one with the code alone; either keeps the variables of a machine in
its memory, so nothing of them outlives it. Secure boot is never on.
"""

from __future__ import annotations

import os

from belljar.errors import CommandMissing

# Debian and Ubuntu; Fedora and EL; SUSE; Arch.
PLACES = (
    "/usr/share/ovmf/OVMF.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/OVMF/OVMF_CODE.fd",
    "/usr/share/qemu/ovmf-x86_64.bin",
    "/usr/share/edk2/x64/OVMF.4m.fd",
)


def find_uefi(setting: str) -> str:
    """The file to give QEMU as its firmware. Raises CommandMissing."""
    if setting:
        if not os.access(setting, os.R_OK):
            raise CommandMissing(f"{setting}: no readable file", hint="Correct `qemu.uefi` in the settings.")
        return setting
    for place in PLACES:
        if os.access(place, os.R_OK):
            return place
    raise CommandMissing(
        "OVMF, the firmware for images that boot by UEFI, is not on this host",
        hint="Install it (`apt install ovmf`, `dnf install edk2-ovmf`), or set `qemu.uefi` to its file.",
    )
