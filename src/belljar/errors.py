"""The error tree: what went wrong (message), what to do next (hint), and may one try again (retry).

    BelljarError
    ├── UsageError              the asker must change something        -> cause REFUSED
    │   ├── BadOption           a command-line option or a combination of them
    │   ├── BadSetting          a settings file: names file, key, value
    │   ├── UnreadableScript · ShareMissing · InputMissing · OutputMissing · OutputUnwritable
    │   ├── ImpossibleSize      memory, cpus or disk this host or image can never give
    │   ├── ContextImpossible   a way to contextualize that the image cannot do
    │   ├── BadUserData         user data that is too large, cannot be read, or could reach no guest
    │   ├── NoSuchNetwork       a bridge the site did not name, or a group's name that cannot be one
    │   ├── NoSuchMachine · AmbiguousMachine · MachineBusy
    │   ├── NotInAJob · ImageNotAllowed · OverLimit · DirectoryTooLarge      of a batch job
    │   ├── NotOurs             a file of the site's where one of ours is to be
    │   └── NotPermitted        somebody else's machine, store or template
    ├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
    │   ├── ImageUnknown · ImageInUse · ImageMismatch · ImageCorrupt · ImageTooLarge
    │   ├── DownloadFailed · DownloadStalled
    │   ├── NotAnIndex · IndexStale · SignatureRefused      of a site's master store
    │   ├── WorkshopFailed      the machine that works on disks nobody trusts could not do so
    │   └── BuildFailed
    ├── HostError               this host cannot                       -> cause NODE_FAULT
    │   ├── NoSpace · NoMemory · CommandMissing · CommandFailed · UnsafeFolder · LockTimeout
    │   ├── NoAccelerator · SshMissing
    │   └── NoGuard · NetworkFailed
    ├── SystemSilent            the batch system did not tell what had to be asked; nobody's fault but its own
    ├── ServerSilent            a file server does not answer; nobody's fault but its own
    ├── HypervisorError         QEMU did not do its part               -> cause BOOT_FAILED or NODE_FAULT
    │   ├── DomainDied · DomainKilled · QmpError · QmpTimeout
    │   └── TemplateError       never reaches the user: the start falls back to a cold boot
    └── GuestError              the guest did not do its part          -> cause BOOT_FAILED or GUEST_LOST
        ├── BootFailed · BootTimeout · AgentLost · ProtocolViolation · AgentTooOld
        ├── GuestPanicked · GuestPoweredOff
        ├── SshRefused          an ssh server that does not let belljar in
        ├── IdentityRefused     a clone that did not prove that it is nobody's twin
        ├── GuestRefused        the agent could not do one thing it was asked, and says which
        ├── NoNineP · NoNfs     the guest's kernel cannot mount 9p, or NFS
        ├── NoDisk · NoPackedFolders   a further disk the guest cannot use
        ├── ExportRefused       a file server answered, and refuses the mount
        ├── MountFailed        a file server answered the host, but not the guest
        └── ShareNotFlushed     what a payload wrote may not be on the file server

Every class carries a hint; an instance may sharpen it.
"""

from __future__ import annotations

from enum import Enum

from belljar.model import Cause

OUR_FAILURE = 125


class Retry(Enum):
    """May the same request be tried again?"""

    NEVER = "never"  # the request must change first
    LATER = "later"  # the same host may do it next time
    ELSEWHERE = "elsewhere"  # another host may do it


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


class UsageError(BelljarError):
    """The asker must change something before it can work."""

    hint = "See `belljar --help`."
    retry = Retry.NEVER
    cause = Cause.REFUSED


class BadOption(UsageError):
    """An option has a value that means nothing, or two options exclude each other."""

    hint = "See `belljar run --help` for the forms an option takes."


class BadSetting(UsageError):
    """A settings file holds something belljar cannot use."""

    hint = "Correct the file, then run `belljar config check`."


class UnreadableScript(UsageError):
    """The script to run cannot be read."""

    hint = "Give a readable file, or put `--` before a command that exists in the guest."


class ShareMissing(UsageError):
    """A folder to share does not exist or cannot be entered."""

    hint = "Create the folder, or correct `--share SRC[:DST][:ro|rw]`."


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


class ContextImpossible(UsageError):
    """A way to contextualize the guest was asked for that the image cannot do."""

    hint = "Choose another `--context`, or leave it at auto; `belljar image show` tells what the image has."


class BadUserData(UsageError):
    """User data cannot be read, is too large, or has no way to the guest."""

    hint = "See docs/pilots.md for what user data may be, and how it gets to a guest."


class NoSuchNetwork(UsageError):
    """The network asked for is none that machines of this host may be on."""

    hint = "`--network` takes none, user, bridge, bridge:NAME with a bridge of `network.bridges`, or isolated:GROUP."


class NoSuchMachine(UsageError):
    """No machine has this id, id prefix or name."""

    hint = "`belljar ps -a` lists the machines of this user, ended ones too."


class AmbiguousMachine(UsageError):
    """More than one machine fits this id prefix or name."""

    hint = "Give more characters of the id; `belljar ps -a` lists them."


class MachineBusy(UsageError):
    """The machine is not in a state in which this can be done."""

    hint = "`belljar show ID` tells the machine's state."


class NotInAJob(UsageError):
    """`belljar wrap` was called where no batch system started it."""

    hint = "The batch system calls this; to run something by hand, use `belljar run`."


class ImageNotAllowed(UsageError):
    """The site does not let this user or queue have that image."""

    hint = "Ask for another image, or ask your site for this one."


class OverLimit(UsageError):
    """A batch job asks for more than the site gives to one machine, or for less than a machine needs."""

    hint = "Change what the job asks for, or use another queue."


class DirectoryTooLarge(UsageError):
    """The working directory is on no shared folder, and too large to be copied into the machine."""

    hint = "Submit from a shared folder (your home), or clean the folder up."


class NotOurs(UsageError):
    """A file of somebody else's stands where one of ours is to be."""

    hint = "Move it away, or merge what `belljar batch install --print` shows into it by hand."


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

    hint = "Wait until its machines ended (`belljar ps`) and remove its templates (`belljar template list`)."


class ImageMismatch(ImageError):
    """The bytes that arrived are not the image that was ordered."""

    hint = "Correct the digest, or ask the image's publisher."
    retry = Retry.NEVER


class ImageCorrupt(ImageError):
    """The image in the store is not what it was when it was stored."""

    hint = "Remove it with `belljar image remove NAME --force`, then import or build it again."
    retry = Retry.ELSEWHERE


class ImageUnfit(ImageError):
    """The disk does not have what it is to be started by."""

    hint = "Leave `--firmware` at auto, or give a kernel (`--kernel`, `--initrd`)."


class ImageTooLarge(ImageError):
    """The download or the unpacked image is larger than the settings allow."""

    hint = "Raise `image.max_size` in the settings."
    retry = Retry.NEVER


class DownloadFailed(ImageError):
    """The image's source refused or broke off."""

    hint = "Check the address, then try again: a broken download is resumed."


class DownloadStalled(DownloadFailed):
    """No bytes arrived for longer than `image.stall_timeout`."""

    hint = "Try again: the download goes on where it stopped."


class NotAnIndex(ImageError):
    """What a source of images offers is no index that belljar has written."""

    hint = "Check `image.sources`: the folder that `belljar image publish` writes, or its address on a web server."
    retry = Retry.LATER


class IndexStale(ImageError):
    """A source's index has expired, or is older than one this host has seen of it already."""

    hint = (
        "Ask whoever publishes there: `belljar image publish --to DIR` renews an index. If the store was made anew on purpose:"
        " `belljar image sync --forget`."
    )
    retry = Retry.LATER


class SignatureRefused(ImageError):
    """An image or an index is not signed, not signed by one who may publish that name, or not what was signed."""

    hint = "`image.trust` in the settings says who may publish which names; see docs/image-life.md."
    retry = Retry.NEVER


class WorkshopFailed(ImageError):
    """The machine in which belljar works on disks that nobody trusts could not do what was asked."""

    hint = "Check that the image has a file system belljar's default image knows, and that the paths are there."


class BuildFailed(ImageError):
    """The image could not be built."""

    hint = "The last lines of the build's log are above; the whole log's path is in the message."


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


class CommandMissing(HostError):
    """A program belljar needs is not installed."""

    hint = "`belljar doctor` names the packages to install."


class CommandFailed(HostError):
    """A program belljar called ended with an error."""


class SshMissing(HostError):
    """The library that speaks ssh is not installed."""

    hint = "Install belljar with its extra: `pip install 'belljar[ssh]'`."
    retry = Retry.NEVER


class SystemSilent(BelljarError):
    """The batch system did not tell something about a job that the job cannot do without."""

    hint = "Its server was down or busy; the job may be tried again."


class ServerSilent(BelljarError):
    """The file server of a share does not answer, or its name cannot be resolved."""

    hint = "See whether the server runs and this host reaches its port; the job may be tried again."


class UnsafeFolder(HostError):
    """A folder or file belongs to somebody else or is open to others, so belljar does not trust it."""

    hint = "Remove it or correct its owner and mode (folders 0700, files 0600, owned by you)."
    retry = Retry.NEVER


class LockTimeout(HostError):
    """Another belljar process held a lock for longer than the deadline."""

    hint = "See which process holds it in the message; try again later."


class NoAccelerator(HostError):
    """The accelerator asked for by the settings does not boot a guest on this host."""

    hint = 'Set `qemu.accelerator = "auto"`; `belljar doctor` shows what was tried.'


class NoGuard(HostError):
    """The kernel, or the container belljar runs in, does not let it guard what a machine sends into the network."""

    hint = 'It takes Linux 5.9; `network.egress = "open"` lets machines go wherever their host may, loopback included.'


class NetworkFailed(HostError):
    """A machine's connection to a bridge or to its group could not be made on this host."""

    hint = "See docs/networks.md for what the host needs; `--network user` needs nothing."


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


class QmpTimeout(HypervisorError):
    """QEMU did not answer in time."""

    hint = "The host may be overloaded; see `belljar logs ID --qemu`."
    cause = Cause.NODE_FAULT


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


class GuestRefused(GuestError):
    """The agent could not do one thing it was asked."""

    retry = Retry.NEVER
    cause = Cause.REFUSED


class SshRefused(GuestError):
    """A guest's ssh server answers, and does not let belljar in."""

    hint = "See `belljar logs ID --journal`: the image must take belljar's key from cloud-init, for root or the user of its own."
    retry = Retry.NEVER
    cause = Cause.BOOT_FAILED


class NoNineP(GuestRefused):
    """The guest's kernel cannot mount a shared folder."""

    hint = "Use an image whose kernel has 9p, or copy files with `--in` and `--out`."


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
