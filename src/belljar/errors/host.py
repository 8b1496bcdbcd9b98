"""This host, or a server it needs, cannot."""

from __future__ import annotations

from belljar.errors.base import BelljarError, Retry
from belljar.model import Cause


class HostError(BelljarError):
    """This host cannot do it; another may."""

    hint = "`belljar doctor` explains what this host lacks."
    retry = Retry.ELSEWHERE


class NoSpace(HostError):
    """The disk is full or would become so."""

    hint = "Free space, or move `paths.scratch` or `paths.store` to a larger disk."


class NoMemory(HostError):
    """The host has too little memory left for this machine now."""

    hint = "Wait for other machines to end, or ask for less with --memory."


class NoProcessors(HostError):
    """The host's processors are given to other machines."""

    hint = "Wait for other machines to end, ask for fewer with --cpus, or set `host.cpus_per_cpu`."


class NoStore(HostError):
    """The store of images cannot be read here, or lacks an image that the site means every node to have."""

    hint = (
        "The site's administrator has to look at that folder: its mount, its owner and its mode. No image is at fault."
    )


class PositionLost(HostError):
    """The ledger cannot be read on from a position: its file was removed, cut or replaced meanwhile."""

    hint = "Read the ledger from its beginning, and leave out the machines that are known already."


class CommandMissing(HostError):
    """A program belljar needs is not installed."""

    hint = "`belljar doctor` names the packages to install."


class CommandFailed(HostError):
    """A program belljar called ended with an error."""


class CommandHung(CommandFailed):
    """A program belljar called was not done in time, and was killed."""


class SshMissing(HostError):
    """The library that speaks ssh is not installed."""

    hint = "Install belljar with its extra: `pip install 'belljar[ssh]'`."
    retry = Retry.NEVER


class SystemSilent(BelljarError):
    """The batch system did not answer, and to go on without its answer would do harm."""

    hint = "Try again when its server answers."


class ServerSilent(BelljarError):
    """The file server of a share does not answer, or its name cannot be resolved."""

    hint = "See whether the server runs and this host reaches its port; the job may be tried again."


class UnsafeFolder(HostError):
    """A folder or file belongs to somebody else or is open to others, so belljar does not trust it."""

    hint = "Remove it or correct its owner and mode (folders 0700, files 0600, owned by you)."
    retry = Retry.NEVER


class LockTimeout(HostError):
    """Another belljar process held a lock for longer than the deadline: nobody's fault but that process's."""

    hint = "See what the process that holds it is doing (it may be stopped); try again later."
    retry = Retry.LATER


class NoAccelerator(HostError):
    """The accelerator asked for by the settings does not boot a guest on this host."""

    hint = 'Set `qemu.accelerator = "auto"`; `belljar doctor` shows what was tried.'


class NoGuard(HostError):
    """The kernel, or the container belljar runs in, does not let it guard what a machine sends into the network."""

    hint = 'It takes Linux 5.9; `network.egress = "open"` lets machines go wherever their host may, loopback included.'


class NoFolderServer(HostError):
    """The program that serves a folder by virtiofs cannot be run on this host."""

    hint = "Share the folder without `virtiofs:`; docs/data.md tells what virtiofs takes."


class ShareLost(HostError):
    """The program that serves a folder by virtiofs ended while its machine lived."""

    hint = "`belljar logs ID --virtiofsd` shows what it said; the job may be tried again."
    retry = Retry.LATER
    cause = Cause.GUEST_LOST


class NetworkFailed(HostError):
    """A machine's connection to its network could not be made on this host, or was lost there."""

    hint = "See docs/networks.md for what the host needs; `--network user` needs nothing."


class LibvirtLost(HostError):
    """libvirt's daemon ended, does not answer in time, or uses more memory than its limit."""

    hint = (
        "See the daemon's log; `libvirt.restart_command` lets belljar restart it, `belljar doctor` tries a connection."
    )
