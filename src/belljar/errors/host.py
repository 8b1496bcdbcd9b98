"""What this host, a server it needs, the hypervisor, or the guest did not do."""

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


class NoStore(HostError):
    """The store of images cannot be read here, or lacks an image that the site means every node to have."""

    hint = "The site's administrator has to check that folder: its mount, owner and mode. No image is at fault."


class PositionLost(HostError):
    """The ledger cannot be read on from a position: its file was removed, cut or replaced meanwhile."""

    hint = "Read the ledger from its beginning, and leave out the machines that are known already."


class CommandMissing(HostError):
    """A program belljar needs is not installed."""

    hint = "`belljar doctor` names the packages to install."


class CommandFailed(HostError):
    """A program belljar called ended with an error."""

    hint = "What it says is the cause; run by hand it may say more."


class NoCredentials(HostError):
    """A machine cannot be given the proxy or the token its machinetype has: the site's own file is missing, wrong or over."""

    hint = "Renew that file; `belljar vacuum check-config` looks whether each can be read."
    retry = Retry.LATER


class RecordsLost(BelljarError):
    """The database of leases cannot be read or written now; what was asked for may not be written down."""

    hint = "See whether the database runs, and its disk is neither full nor read-only; then ask again, with the same token."


class UnsafeFolder(HostError):
    """A folder or file belongs to somebody else or is open to others, so belljar does not trust it."""

    hint = "Remove it or correct its owner and mode (folders 0700, files 0600, owned by you)."
    retry = Retry.NEVER


class LockTimeout(HostError):
    """Another belljar process held a lock for longer than the deadline: nobody's fault but that process's."""

    hint = "See what the process that holds it is doing (it may be stopped); try again later."
    retry = Retry.LATER


class NoGuard(HostError):
    """The kernel, or the container belljar runs in, does not let it guard what a machine sends into the network."""

    hint = 'It takes Linux 5.9; `network.egress = "open"` lets machines go wherever their host may, loopback included.'


class NoFolderServer(HostError):
    """The program that serves a folder by virtiofs cannot be run on this host."""

    hint = "Share the folder without `virtiofs:`; `belljar logs ID --virtiofsd` and docs/data.md tell what it lacks."


class ShareLost(HostError):
    """The program that serves a folder by virtiofs ended while its machine lived."""

    hint = "`belljar logs ID --virtiofsd` shows what it said; the job may be tried again."
    retry = Retry.LATER
    cause = Cause.GUEST_LOST


class NetworkFailed(HostError):
    """A machine's connection to its network could not be made on this host, or was lost there."""

    hint = "See docs/networks.md for what the host needs; `--network user` needs nothing."


class LibvirtLost(HostError):
    """libvirt's daemon ended, or does not answer in time."""

    hint = "See the daemon's log, and restart it; `belljar doctor --only libvirt` tries a connection."


class HypervisorError(BelljarError):
    """QEMU did not do its part."""

    hint = "`belljar logs ID --qemu` shows what QEMU said."
    cause = Cause.BOOT_FAILED


class DomainDied(HypervisorError):
    """QEMU ended before it was asked to."""


class DomainKilled(HypervisorError):
    """Somebody outside killed QEMU: the host's OOM killer, a limit, an administrator."""

    hint = "See the host's kernel log; QEMU needs the guest's memory and some 200 MiB more."
    retry = Retry.ELSEWHERE
    cause = Cause.HOST_OOM


class QmpError(HypervisorError):
    """QEMU refused a command."""


class PlugRefused(HypervisorError):
    """A clone could not be given the processors or the memory that its template does not have."""

    hint = "Ask for another size; `belljar template build --exact` makes a template of exactly this one."


class QmpTimeout(HypervisorError):
    """QEMU did not answer in time."""

    hint = "The host may be overloaded; see `belljar logs ID --qemu`."
    cause = Cause.NODE_FAULT


class LibvirtRefused(HypervisorError):
    """libvirt answered, and refused what it was asked for."""

    hint = "See libvirt's own log; `belljar doctor` tries a connection."


class TemplateError(HypervisorError):
    """A template could not be made or used; the machine is booted cold instead."""

    hint = "`belljar template list` shows the templates; `belljar template remove KEY` drops one."


class GuestError(BelljarError):
    """The guest did not do its part."""

    hint = "`belljar logs ID --console` shows what the guest said."
    cause = Cause.GUEST_LOST


class BootFailed(GuestError):
    """The guest ended before its agent had answered."""

    hint = "`belljar logs ID --console` shows what the guest said; `belljar image verify` checks its image."
    cause = Cause.BOOT_FAILED


class BootTimeout(GuestError):
    """The guest's agent did not answer before the deadline."""

    hint = "See `belljar logs ID --console`; an image that boots by itself must start our agent (`belljar image agent --tar`)."
    cause = Cause.BOOT_FAILED


class AgentLost(GuestError):
    """The guest's agent stopped answering."""


class GuestPoweredOff(GuestError):
    """The guest was switched off or rebooted from inside before the payload had ended."""

    hint = "A job ends by exiting; it must not power its machine off."
    retry = Retry.NEVER


class GuestRebooted(GuestError):
    """The guest rebooted, as it may: it is started again from its disk."""


class ProtocolViolation(GuestError):
    """The other side of the channel sent something the protocol does not allow."""


class AgentTooOld(GuestError):
    """The agent in the image speaks another version of the protocol."""

    hint = "Install the agent of this belljar in the image (`belljar image agent --tar`), and import the image again."
    retry = Retry.NEVER
    cause = Cause.IMAGE_FAULT


class IdentityRefused(GuestError):
    """A clone did not prove that it is nobody's twin, so it gets no payload."""

    hint = "Remove the template with `belljar template remove KEY`; the next start makes a new one."
    cause = Cause.BOOT_FAILED


class HostKeysRefused(IdentityRefused):
    """A clone that others reach could not give its ssh server keys that its template has not."""

    hint = "Put the present agent and OpenSSH's ssh-keygen into the image, or add `--start cold`."


class GuestRefused(GuestError):
    """The agent could not do one thing it was asked."""

    retry = Retry.NEVER
    cause = Cause.REFUSED


class NoFileSystem(GuestRefused):
    """The guest's kernel cannot mount a shared folder: it lacks 9p, or virtiofs."""

    hint = "Share it the other way (`virtiofs:SRC`, or `SRC` alone), copy files with `--in` and `--out`, or use an image whose kernel has the module (and `modprobe`)."


class NoPackedFolders(GuestRefused):
    """The guest's kernel cannot use a folder that came as a disk. Never reaches the user: it is copied instead."""

    hint = "Use an image with the kernel modules `squashfs` and `overlay` (and `modprobe`)."
