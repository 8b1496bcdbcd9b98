"""The error tree: what went wrong (message), what to do next (hint), and whether to try again (retry).

BelljarError
├── MachineFailed           a task's machine failed, not the task
├── UsageError              the asker must change something        -> cause REFUSED
├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
├── HostError               this host cannot                       -> cause NODE_FAULT
├── RecordsLost             the database of leases does not answer; no fault of the node
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
    return hint if " ID" not in hint else re.sub("(`belljar [a-z]+ )ID\\b", lambda match: f"{match[1]}{machine}", hint)


def in_words(exc: OSError) -> str:
    """What the system refused, with the file where it is known."""
    words = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    return f"{words}: raise the limit on them (`ulimit -n`)" if exc.errno == errno.EMFILE else words


def printable(text: str) -> str:
    """What a program, a guest or a stranger says, as a line that a terminal can show."""
    return "".join(char if char.isprintable() else "?" for char in text)


class BelljarError(Exception):
    """Something belljar could not do. `message` is one line; `hint` is the next step for the reader."""

    hint = "See `belljar logs ID` and `belljar doctor`."
    exit_code = OUR_FAILURE
    retry = Retry.LATER
    cause = Cause.NODE_FAULT

    def __init_subclass__(cls, hint: str = "", retry: Retry | None = None, cause: Cause | None = None) -> None:
        """What a subclass does not give is its parent's."""
        cls.hint, cls.retry, cls.cause = hint or cls.hint, retry or cls.retry, cause or cls.cause

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint


class MachineFailed(BelljarError, hint="Run the task again; `belljar show ID` tells of the machine."):
    """The host or the machine failed a task of an Executor: it may be run again."""


class HostError(BelljarError, hint="`belljar doctor` explains what this host lacks.", retry=Retry.ELSEWHERE):
    """This host cannot do it; another may."""


class NoSpace(HostError, hint="Free space, or move `paths.scratch` or `paths.store` to a larger disk."):
    """The disk is full or would become so."""


class NoMemory(HostError, hint="Wait for other machines to end, or ask for less with --memory."):
    """The host has too little memory left for this machine now."""


class NoProcessors(
    HostError, hint="Wait for other machines to end, ask for fewer with --cpus, or set `host.cpus_per_cpu`."
):
    """All the processors that this host gives to machines are taken now."""


class DeviceBusy(HostError, hint="`belljar device list` shows who has it.", retry=Retry.LATER):
    """Another machine, or the host, has the device."""


class NoStore(HostError, hint="No image is at fault: the site has to check that folder's mount, owner and mode."):
    """The store of images cannot be read here, or lacks an image of the site's."""


class PositionLost(HostError, hint="Read the ledger from its beginning; leave out machines that are known already."):
    """The ledger cannot be read on from a position: its file was removed, cut or replaced."""


class CommandMissing(HostError, hint="`belljar doctor` names the packages to install."):
    """A program belljar needs is not installed."""


class LibraryMissing(CommandMissing, hint="Install belljar-service, or `make install EXTRAS=lease,monitor`."):
    """A Python library that only daemons use is not installed."""


class CommandFailed(HostError, hint="What it says is the cause; run by hand it may say more."):
    """A program belljar called ended with an error."""


class NoCredentials(HostError, hint="Renew it; `belljar vacuum check-config` tries to read each.", retry=Retry.LATER):
    """A machinetype's proxy or token is missing, wrong or over."""


class RecordsLost(BelljarError, hint="Check that the database runs and can write; then ask again with the same token."):
    """The database of leases cannot be read or written now."""


class UnsafeFolder(HostError, hint="Remove it, or make it yours, with mode 0700 (a file 0600).", retry=Retry.NEVER):
    """A folder or file belongs to somebody else or is open to others."""


class LockTimeout(
    HostError, hint="`fuser` names the process that holds it, which may be stopped; try again later.", retry=Retry.LATER
):
    """Another belljar process held a lock for longer than the deadline."""


class ShareLost(
    HostError, hint="`belljar logs ID --virtiofsd` shows what it said.", retry=Retry.LATER, cause=Cause.GUEST_LOST
):
    """The program that serves a shared folder ended while its machine lived."""


class NetworkFailed(HostError, hint="docs/jobs/networks.md says what the host needs; `--network user` needs nothing."):
    """A machine's network could not be made on this host, or was lost."""


class LibvirtLost(HostError, hint="See the daemon's log; `belljar doctor --only libvirt` tries a connection."):
    """libvirt's daemon ended, or does not answer in time."""


class HypervisorError(BelljarError, hint="`belljar logs ID --qemu` shows what QEMU said.", cause=Cause.BOOT_FAILED):
    """QEMU did not do its part."""


class DomainDied(HypervisorError):
    """QEMU ended before it was asked to."""


class DomainKilled(
    HypervisorError,
    hint="See the host's kernel log; QEMU needs the guest's memory and some 200 MiB more.",
    retry=Retry.ELSEWHERE,
    cause=Cause.HOST_OOM,
):
    """Something outside killed QEMU: the host's OOM killer, a limit, an administrator."""


class QmpError(HypervisorError):
    """QEMU refused a command."""


class PlugRefused(HypervisorError, hint="Ask for another size; `belljar template build --exact` makes this one."):
    """A clone could not be given what its template does not have: processors, memory, ssh host keys of its own."""


class QmpTimeout(HypervisorError, hint="Is the host overloaded? See `belljar logs ID --qemu`.", cause=Cause.NODE_FAULT):
    """QEMU did not answer in time."""


class LibvirtRefused(HypervisorError, hint="See libvirt's own log; `belljar doctor` tries a connection."):
    """libvirt answered, and refused what it was asked for."""


class TemplateError(
    HypervisorError, hint="`belljar template list` shows the templates; `belljar template remove KEY` drops one."
):
    """A template could not be made or used; the machine is booted cold instead."""


class CheckpointFailed(HostError, hint="The machine goes on; `belljar logs ID` says more.", retry=Retry.LATER):
    """A machine could not be written to a folder."""


class CheckpointUnfit(HostError, hint="Go on where image, processor model and QEMU are the same."):
    """A machine of this host cannot go on from this checkpoint; one of another host may."""


class GuestError(BelljarError, hint="`belljar logs ID --console` shows what the guest said.", cause=Cause.GUEST_LOST):
    """The guest did not do its part."""


class BootFailed(GuestError, hint="See `belljar logs ID --console`, `belljar image verify`.", cause=Cause.BOOT_FAILED):
    """The guest ended before its agent had answered."""


class BootTimeout(
    GuestError,
    hint="See `belljar logs ID --console`; an image that boots by itself must start our agent (`belljar image agent --tar`).",
    cause=Cause.BOOT_FAILED,
):
    """The guest's agent did not answer before the deadline."""


class AgentLost(GuestError):
    """The guest's agent stopped answering."""


class GuestPoweredOff(GuestError, hint="A job ends by exiting; it must not power its machine off.", retry=Retry.NEVER):
    """The guest was switched off or rebooted from inside before the payload had ended."""


class GuestRebooted(GuestError):
    """The guest rebooted, as it may: it is started again from its disk."""


class ProtocolViolation(GuestError):
    """The other side of the channel sent something the protocol does not allow."""


class AgentTooOld(
    GuestError,
    hint="Install the agent of this belljar in the image (`belljar image agent --tar`), and import the image again.",
    retry=Retry.NEVER,
    cause=Cause.IMAGE_FAULT,
):
    """The agent in the image speaks another version of the protocol."""


class IdentityRefused(
    GuestError, hint="`belljar template remove KEY` drops it; the next start makes a new one.", cause=Cause.BOOT_FAILED
):
    """A clone did not prove an identity of its own, so it gets no payload."""


class GuestRefused(GuestError, retry=Retry.NEVER, cause=Cause.REFUSED):
    """The agent could not do one thing it was asked."""


class NoPackedFolders(GuestRefused, hint="Use an image with the modules `squashfs` and `overlay` (and `modprobe`)."):
    """The guest's kernel cannot use a folder that came as a disk: it is copied instead."""


class PythonUnfit(
    GuestError,
    hint="Use an image whose python3 is of the version that runs this program (docs/jobs/executor.md).",
    retry=Retry.NEVER,
    cause=Cause.IMAGE_FAULT,
):
    """The guest has no Python for the tasks of an Executor, or one of another version."""


class UsageError(BelljarError, hint="See `belljar --help`.", retry=Retry.NEVER, cause=Cause.REFUSED):
    """The asker must change something before it can work."""


class BadOption(UsageError, hint="`belljar VERB --help` tells the forms an option takes."):
    """An option has a wrong value or place, or two options exclude each other."""


class BadRequest(UsageError, hint="See `belljar VERB --help`; docs/jobs/detached.md shows what a request looks like."):
    """A wrong request in JSON: the message names key and value."""


class BadSetting(UsageError, hint="Correct the file, then run `belljar config check`."):
    """A settings file holds something belljar cannot use."""

    @classmethod
    def of(cls, mistakes: tuple[object, ...], *, hint: str | None = None) -> BadSetting:
        """All these mistakes, each a line of the message."""
        return cls("\n".join(map(str, mistakes)), hint=hint)


class InputMissing(UsageError, hint="Correct `--in PATH[:DST]`."):
    """A file to copy in, or a script to run, does not exist or cannot be read."""


class OutputMissing(UsageError, hint="Check what the job writes, or drop the `--out` option."):
    """The payload did not leave a file that was to be copied out."""


class NoSuchMachine(UsageError, hint="`belljar ps -a` lists the machines of this user, ended ones too."):
    """No machine has this id, id prefix or name."""


class MachineBusy(UsageError, hint="`belljar show ID` tells the machine's state."):
    """The machine or lease is not in a state in which this can be done."""


class ForkRefused(UsageError, hint="Fork a machine that runs and is without this; `belljar cp` brings files."):
    """The machine has what its forks cannot have."""


class NotInAJob(UsageError, hint="The batch system calls this; to run something by hand, use `belljar run`."):
    """`belljar internal wrap` was called where no batch system started it."""


class OverLimit(UsageError, hint="Ask for another size; `belljar doctor` shows what this host has."):
    """More memory, cpus, disk or time than host, image or site give to a machine, or less than it needs."""


class LeaseDenied(UsageError, hint="Ask for less, wait until machines of yours have ended, or ask your site for more."):
    """The site's policy does not allow this lease: the message has the numbers. Or its client token was given before, with another request."""

    def __init__(self, message: str, *, code: str = "InstanceLimitExceeded", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code  # EC2's


class NoSuchLease(UsageError, hint="Ask for the list of leases; ended ones are in it for a while."):
    """No lease or machine with this id is this user's."""


class NoSuchKeyPair(UsageError, hint="Make or import one under that name first."):
    """No key pair with this name is this user's."""


class KeyPairExists(UsageError, hint="Delete it first, or choose another name."):
    """This user has a key pair of that name."""


class NotPermitted(UsageError, hint="Ask its owner, or run as root."):
    """This belongs to somebody else, or the site does not give it to this user or queue."""


class ImageError(BelljarError, hint="`belljar image list` shows the images that can be used.", cause=Cause.IMAGE_FAULT):
    """The image cannot be used."""


class ImageUnknown(
    ImageError, hint="`belljar image list` shows names; `belljar image build` or `import` makes one.", retry=Retry.NEVER
):
    """No image has this name or digest."""


class ImageInUse(
    ImageError, hint="Let its machines end (`belljar ps`, `fuser -v`); remove its templates (`belljar template list`)."
):
    """A machine or a template runs on this image."""


class ImageMismatch(
    ImageError, hint="Correct the digest or `--signer`, or ask the image's publisher.", retry=Retry.NEVER
):
    """The bytes that arrived are not the image that was ordered, or lack its signature."""


class ImageCorrupt(ImageError, hint="Sync, import or build the image again.", retry=Retry.ELSEWHERE):
    """The image in the store is not what it was when it was stored."""


class ImageUnfit(ImageError, hint="Leave `--firmware` at auto, or give a kernel (`--kernel`, `--initrd`)."):
    """The disk lacks what it is to be started by."""


class PrepareFailed(
    ImageError,
    hint="`belljar image show` has its recipe; `belljar run --image BASE` tries it by hand.",
    retry=Retry.NEVER,
):
    """The preparation of a warm image failed, took too long, or ended the guest."""


class ImageTooLarge(ImageError, hint="Raise `image.max_size` in the settings.", retry=Retry.NEVER):
    """The download or the unpacked image is larger than the settings allow."""


class DownloadFailed(ImageError, hint="Check the address, then try again: a broken download is resumed."):
    """The image's source refused, broke off, or was silent for `image.stall_timeout`."""


class RepositoryRefused(ImageError, hint="Its publisher has to do it again, by `belljar image publish`."):
    """A repository's metadata are expired, older than what was seen, or lack signatures."""
