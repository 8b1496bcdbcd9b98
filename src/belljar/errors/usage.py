"""What the asker must change: the request, or the image."""

from __future__ import annotations

from belljar.errors.base import BelljarError, Retry
from belljar.model import Cause


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
    retry = Retry.LATER


class SignatureRefused(ImageError):
    """An image does not carry the signature that was asked for."""

    hint = "Correct `--signer`, or ask who made the image for one with its signature."
    retry = Retry.NEVER
