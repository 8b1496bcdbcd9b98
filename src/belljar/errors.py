"""The error tree: what went wrong (message), what to do next (hint), and whether to try again (retry).

BelljarError
├── UsageError              the asker must change something        -> cause REFUSED
├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
├── HostError               this host cannot                       -> cause NODE_FAULT
├── RecordsLost            the database of leases does not answer; no fault of the node
├── HypervisorError         QEMU did not do its part               -> cause BOOT_FAILED or NODE_FAULT
└── GuestError              the guest did not do its part          -> cause BOOT_FAILED or GUEST_LOST
"""

from __future__ import annotations

import errno
import re

from belljar.model import Cause, Retry

OUR_FAILURE = 125


def about(hint: str, machine: str) -> str:
    """A hint with its ID filled in, as in `belljar logs ID`."""
    return hint if " ID" not in hint else re.sub("(`belljar [a-z]+ )ID\\b", lambda found: f"{found[1]}{machine}", hint)


def in_words(exc: OSError) -> str:
    """What the system refused, with the file where it is known."""
    words = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    return f"{words}: raise the limit on them (`ulimit -n`)" if exc.errno == errno.EMFILE else words


class BelljarError(Exception):
    """Something belljar could not do. `message` is one line; `hint` is the next step for the reader."""

    hint = "See `belljar logs ID` and `belljar doctor`."
    exit_code = OUR_FAILURE
    retry = Retry.LATER
    cause = Cause.NODE_FAULT

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint

    def __str__(self) -> str:
        return self.message


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

    hint = "`fuser` names the process that holds it, which may be stopped; try again later."
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


class UsageError(BelljarError):
    """The asker must change something before it can work."""

    hint = "See `belljar --help`."
    retry = Retry.NEVER
    cause = Cause.REFUSED


class BadOption(UsageError):
    """An option has a value that means nothing, or two options exclude each other."""

    hint = "`belljar VERB --help` tells the forms an option takes."


class BadRequest(UsageError):
    """A request in JSON that cannot be meant: its message names key and value."""

    hint = "`belljar VERB --help` tells what can be asked for, docs/detached.md what a request in JSON looks like."


class BadSetting(UsageError):
    """A settings file holds something belljar cannot use."""

    hint = "Correct the file, then run `belljar config check`."

    @classmethod
    def of(cls, mistakes: tuple[object, ...], *, hint: str | None = None) -> BadSetting:
        """All these mistakes, each a line of the message."""
        return cls("\n".join(map(str, mistakes)), hint=hint)


class UnreadableScript(UsageError):
    """The script to run cannot be read."""

    hint = "Give a readable file, or put `--` before a command that exists in the guest."


class InputMissing(UsageError):
    """A file to copy in does not exist or cannot be read."""

    hint = "Correct `--in PATH[:DST]`."


class OutputMissing(UsageError):
    """The payload did not leave a file that was to be copied out."""

    hint = "Check what the job writes, or drop the `--out` option."


class OutputUnwritable(UsageError):
    """A file copied out of the guest cannot be written to its place on the host."""

    hint = "Correct `--out PATH[:DST]`: a folder you may write to, and no special file in the way."


class ImpossibleSize(UsageError):
    """More memory, cpus or disk than this host or image can ever give, or less than it needs."""

    hint = "Ask for less; `belljar doctor` shows what this host has."


class BadUserData(UsageError):
    """User data cannot be read, is too large, or has no way to the guest."""

    hint = "See docs/pilots.md for what user data may be, and how it gets to a guest."


class DriverLacks(UsageError):
    """Something of the machine that the site's hypervisor driver cannot give."""

    hint = "Ask for a machine without it; docs/libvirt.md tells what machines by libvirt do not have."


class NoSuchNetwork(UsageError):
    """Machines of this host may not use the network that was asked for."""

    hint = "`--network` takes none, user, bridge, bridge:NAME with a bridge of `network.bridges`, or isolated:GROUP."


class NoSuchMachine(UsageError):
    """No machine has this id, id prefix or name."""

    hint = "`belljar ps -a` lists the machines of this user, ended ones too."


class MachineBusy(UsageError):
    """The machine is not in a state in which this can be done."""

    hint = "`belljar show ID` tells the machine's state."


class NotInAJob(UsageError):
    """`belljar internal wrap` was called where no batch system started it."""

    hint = "The batch system calls this; to run something by hand, use `belljar run`."


class ImageNotAllowed(UsageError):
    """The site does not let this user or queue have that image."""

    hint = "Ask for another image, or ask your site for this one."


class OverLimit(UsageError):
    """A batch job asks for more than the site gives to one machine, or for less than a machine needs."""

    hint = "Change what the job asks for, or use another queue."


class LeaseDenied(UsageError):
    """The site's policy does not allow this lease: the message names what is asked for, what the user has already, and the limit. Or
    its client token was given before, with a request for something else."""

    hint = "Ask for less, wait until others of your machines have ended, or ask your site for more."

    def __init__(self, message: str, *, code: str = "InstanceLimitExceeded", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code  # EC2's


class NoSuchLease(UsageError):
    """No lease or machine with this id is this user's."""

    hint = "Ask for the list of leases; ended ones are in it for a while."


class LeaseEnded(UsageError):
    """The lease or machine is not in a state in which this can be done."""

    hint = "The list of leases has the state of each."


class NoSuchKeyPair(UsageError):
    """No key pair with this name is this user's."""

    hint = "Make or import one under that name first."


class KeyPairExists(UsageError):
    """This user has a key pair of that name."""

    hint = "Delete it first, or choose another name."


class NotOurs(UsageError):
    """The site has something of its own where ours is to be. Nothing was changed."""

    hint = "Do what is said there, then run it again. `belljar batch install --print` shows what ours is."


class NotPermitted(UsageError):
    """This belongs to somebody else."""

    hint = "Ask its owner, or run as root."


class ImageError(BelljarError):
    """The image cannot be used."""

    hint = "`belljar image list` shows the images that can be used."
    cause = Cause.IMAGE_FAULT


class ImageUnknown(ImageError):
    """No image has this name or digest."""

    hint = "`belljar image list` shows the names; `belljar image build` or `belljar image import` makes one."
    retry = Retry.NEVER


class ImageInUse(ImageError):
    """An image that a machine or a template runs on cannot be removed."""

    hint = "Wait until its machines ended (`belljar ps`, `fuser -v` on its lock) and remove its templates (`belljar template list`)."


class ImageMismatch(ImageError):
    """The bytes that arrived are not the image that was ordered."""

    hint = "Correct the digest, or ask the image's publisher."
    retry = Retry.NEVER


class ImageCorrupt(ImageError):
    """The image in the store is not what it was when it was stored."""

    hint = "Sync, import or build the image again."
    retry = Retry.ELSEWHERE


class ImageUnfit(ImageError):
    """The disk does not have what it is to be started by."""

    hint = "Leave `--firmware` at auto, or give a kernel (`--kernel`, `--initrd`)."


class ImageTooLarge(ImageError):
    """The download or the unpacked image is larger than the settings allow."""

    hint = "Raise `image.max_size` in the settings."
    retry = Retry.NEVER


class DownloadFailed(ImageError):
    """The image's source refused, broke off, or sent nothing for longer than `image.stall_timeout`."""

    hint = "Check the address, then try again: a broken download is resumed."


class RepositoryRefused(ImageError):
    """What a repository of images says is expired, older than what was seen, or not signed by enough keys of its role."""

    hint = "Whoever publishes under that role has to do it again: `belljar image publish`, see docs/image-life.md."


class SignatureRefused(ImageError):
    """An image does not carry the signature that was asked for."""

    hint = "Correct `--signer`, or ask who made the image for one with its signature."
    retry = Retry.NEVER
