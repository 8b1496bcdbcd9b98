"""The guest did not do its part."""

from __future__ import annotations

from belljar.errors.base import BelljarError, Retry
from belljar.model import Cause


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

    hint = (
        "See `belljar logs ID --console`; an image that boots by its own firmware or ramdisk must start belljar's agent:"
        " `belljar image agent --print` and `--unit`."
    )
    cause = Cause.BOOT_FAILED


class AgentLost(GuestError):
    """The guest's agent stopped answering."""


class GuestPanicked(GuestError):
    """The guest's kernel crashed."""


class GuestPoweredOff(GuestError):
    """The guest was switched off or rebooted from inside before the payload had ended."""

    hint = "A job ends by exiting; it must not power its machine off."
    retry = Retry.NEVER


class ProtocolViolation(GuestError):
    """The other side of the channel sent something the protocol does not allow."""


class AgentTooOld(GuestError):
    """The agent in the image speaks another version of the protocol."""

    hint = "Install the agent of this belljar in the image (`belljar image agent --print`), and import the image again."
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


class SshRefused(GuestError):
    """A guest's ssh server answers, and does not let belljar in."""

    hint = (
        "See `belljar logs ID --journal` and `--console`: the image must take belljar's key, for root or the user it names,"
        " and its ssh server must let that user in with a key."
    )
    retry = Retry.NEVER
    cause = Cause.BOOT_FAILED


class NoNineP(GuestRefused):
    """The guest's kernel cannot mount a folder shared by 9p."""

    hint = "Share the folder as `--share virtiofs:SRC`, copy files with `--in` and `--out`, or use an image whose kernel has 9p."


class NoVirtiofs(GuestRefused):
    """The guest's kernel cannot mount a folder shared by virtiofs."""

    hint = "Use an image with the kernel module `virtiofs` (and `modprobe`), or share the folder without `virtiofs:`."


class NoDisk(GuestRefused):
    """The guest's kernel does not find a disk its machine has."""

    hint = "Use an image whose kernel has virtio_blk and looks at the PCI bus anew when told; or add `--start cold`."


class NoPackedFolders(GuestRefused):
    """The guest's kernel cannot use a folder that came as a disk. Never reaches the user: it is copied instead."""

    hint = "Use an image with the kernel modules `squashfs` and `overlay` (and `modprobe`)."


class NoNfs(GuestRefused):
    """The guest's kernel cannot mount NFS 4."""

    hint = "Use an image with the kernel modules `nfs` and `nfsv4` (and `modprobe`), or share a host folder instead."


class ExportRefused(GuestRefused):
    """The file server answered, and does not let the guest mount the export."""

    hint = (
        "Check the path, and the server's export: it must allow this host, by NFS 4, with `sec=sys`, and from ports"
        " above 1023 (`insecure`)."
    )


class MountFailed(GuestRefused):
    """The file server answered the host, and then did not answer the guest's mount."""

    hint = "See whether the server runs; the job may be tried again."
    retry = Retry.LATER
    cause = Cause.NODE_FAULT


class ShareNotFlushed(GuestRefused):
    """What the payload wrote to a file server could not be written out to its end, so some of it may be missing there."""

    hint = "See whether the server runs and has space and quota left; check the job's files there, and run it again."
    retry = Retry.LATER
    cause = Cause.NODE_FAULT
