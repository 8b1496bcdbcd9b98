"""What is wrong with the values of `[qemu]` beyond their types: programs, files, users and processors that are not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from belljar.errors import BadSetting, BelljarError, CommandMissing
from belljar.host.commands import run
from belljar.hypervisor import Settings
from belljar.hypervisor.qemu import abilities
from belljar.hypervisor.qemu.virtiofs import virtiofsd

QUESTION_TIMEOUT = 30.0
BY_ITSELF = ("", "auto")


def wrong_values(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each."""
    looks: list[tuple[str, str, Callable[[str], object]]] = [
        ("binary", settings.binary, _check_binary),
        ("uefi", settings.uefi, find_uefi),
        ("virtiofsd", settings.virtiofsd, virtiofsd.find),
        ("user", settings.user, _check_user),
        ("cpu", settings.cpu, lambda model: _check_cpu(model, settings.binary)),
    ]
    for key, value, look in looks:
        if value in BY_ITSELF:
            continue
        try:
            look(value)
        except BadSetting as exc:
            yield key, exc
        except BelljarError as exc:
            yield key, BadSetting(exc.message)  # its hint is for who does not look at the settings


def _check_binary(binary: str) -> None:
    """Is it a QEMU for this processor? Anything may have been named."""
    path = abilities.find(binary)
    line = run([path, "--version"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace").partition("\n")[0]
    if abilities.read_version(line) is None:
        raise BadSetting(
            f"{binary}: is no QEMU: it calls itself {line[:60]!r}", hint="Name a qemu-system-x86_64 or qemu-kvm."
        )


def _check_user(name: str) -> None:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        raise BadSetting(f"{name!r}: no such user on this host", hint='Create the user, or set it to "auto".') from None


def _check_cpu(model: str, binary: str) -> None:
    try:
        path = abilities.find(binary)
        listing = run([path, "-cpu", "help"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace")
    except BelljarError:
        return  # told of the binary
    known = read_models(listing)
    if known and (name := model.partition(",")[0]) not in known:
        raise BadSetting(f"{name!r}: no processor that {path} has", hint=f"`{path} -cpu help` lists them.")


def read_models(listing: str) -> set[str]:
    """Read `qemu-system-x86_64 -cpu help`: lines of models begin with x86, or, since QEMU 9, with two spaces."""
    models, _, _ = listing.partition("Recognized")
    lines = (line.split() for line in models.splitlines())
    return {words[1] if words[0] == "x86" else words[0] for words in lines if words and not words[-1].endswith(":")}


# Debian and Ubuntu; Fedora and EL; SUSE; Arch.
# -- the firmware for disks that are booted by one: OVMF, a file of another package than QEMU's -----------------------

# A file with code and variables in one is taken before one with the code alone; either keeps the variables of a machine in
# its memory, so nothing of them outlives it. Secure boot is never on.

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
