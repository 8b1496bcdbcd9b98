"""What OpenPBS and Torque have in common on disk: a home folder that tells what this host is, and a mom's pid in it."""

from __future__ import annotations

from pathlib import Path

from belljar.batch.install.pieces import Place
from belljar.errors import BadOption


def is_part(place: Place, part: str) -> bool:
    """Is this host a server (`server_priv`), a node (`mom_priv`)?"""
    return (place.folder / part).is_dir()


def roles(place: Place, system: str, options: tuple[str, ...], home: str) -> tuple[bool, bool]:
    """(a server, a node). Raises BadOption for options nobody knows, and for a folder that is no home of the system."""
    if unknown := set(place.options) - set(options):
        raise BadOption(f"--set {min(unknown)}: no option of {system}", hint=f"Known are {', '.join(options)}.")
    is_server, is_node = is_part(place, "server_priv"), is_part(place, "mom_priv")
    if not (is_server or is_node):
        raise BadOption(
            f"{place.folder}: neither server_priv nor mom_priv is there", hint=f"Give {home} with --folder."
        )
    return is_server, is_node


def reread(place: Place) -> tuple[tuple[str, ...], ...]:
    """pbs_mom reads its configuration again at HUP. Its lock is the number, a newline, and in Torque a NUL; it stays when
    pbs_mom has died, and the number may be another's then."""
    try:
        pid = (place.folder / "mom_priv/mom.lock").read_bytes().rstrip(b"\0\n").decode("ascii", "replace")
        is_mom = pid.isdecimal() and Path(f"/proc/{pid}/comm").read_bytes() == b"pbs_mom\n"
    except OSError:
        return ()
    return (("kill", "-HUP", pid),) if is_mom else ()
