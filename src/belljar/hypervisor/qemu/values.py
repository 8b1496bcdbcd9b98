"""What is wrong with the values of `[qemu]` beyond their types: programs, files, users and processors that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from belljar.errors import BadSetting, BelljarError
from belljar.host.commands import run
from belljar.hypervisor import Settings
from belljar.hypervisor.qemu import abilities, firmware
from belljar.hypervisor.qemu.virtiofs import virtiofsd

QUESTION_TIMEOUT = 30.0
BY_ITSELF = ("", "auto")


def wrong_values(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each."""
    looks: list[tuple[str, str, Callable[[str], object]]] = [
        ("binary", settings.binary, _check_binary),
        ("uefi", settings.uefi, firmware.find_uefi),
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
