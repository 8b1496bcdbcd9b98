"""The error tree: what went wrong (message), what to do next (hint), and may one try again (retry).

    BelljarError
    ├── UsageError              the asker must change something        -> cause REFUSED
    │   ├── BadOption           a command-line option or a combination of them
    │   ├── BadSetting          a settings file: names file, key, value
    │   ├── UnreadableScript · ShareMissing · InputMissing · OutputMissing · OutputUnwritable
    │   ├── ImpossibleSize      memory, cpus or disk this host or image can never give
    │   ├── ContextImpossible   a way to contextualize that the image cannot do
    │   ├── BadUserData         user data that is too large, cannot be read, or could reach no guest
    │   ├── DriverLacks         something of a machine that the site's hypervisor driver cannot give
    │   ├── NoSuchNetwork       a bridge the site did not name, or a group's name that cannot be one
    │   ├── NoSuchMachine · AmbiguousMachine · MachineBusy
    │   ├── NotInAJob · ImageNotAllowed · OverLimit · DirectoryTooLarge      of a batch job
    │   ├── NotOurs             a file of the site's where one of ours is to be
    │   └── NotPermitted        somebody else's machine, store or template
    ├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
    │   ├── ImageUnknown · ImageInUse · ImageMismatch · ImageCorrupt · ImageTooLarge · ImageUnfit
    │   ├── DownloadFailed · DownloadStalled
    │   ├── NotAnIndex · IndexStale · SignatureRefused      of a site's master store
    │   ├── WorkshopFailed      the machine that works on disks nobody trusts could not do so
    │   └── BuildFailed
    ├── HostError               this host cannot                       -> cause NODE_FAULT
    │   ├── NoSpace · NoMemory · NoStore · CommandMissing · CommandFailed (CommandHung) · UnsafeFolder · LockTimeout
    │   ├── NoAccelerator · SshMissing
    │   ├── NoGuard · NetworkFailed
    │   ├── NoFolderServer · ShareLost      virtiofsd, which cannot run, or ended
    │   └── LibvirtLost         libvirt's daemon ended, hangs, or grew beyond its limit
    ├── SystemSilent            the batch system did not tell what had to be asked; nobody's fault but its own
    ├── ServerSilent            a file server does not answer; nobody's fault but its own
    ├── HypervisorError         QEMU did not do its part               -> cause BOOT_FAILED or NODE_FAULT
    │   ├── DomainDied · DomainKilled · QmpError · QmpTimeout · LibvirtRefused
    │   └── TemplateError       never reaches the user: the start falls back to a cold boot
    └── GuestError              the guest did not do its part          -> cause BOOT_FAILED or GUEST_LOST
        ├── BootFailed · BootTimeout · AgentLost · ProtocolViolation · AgentTooOld
        ├── GuestPanicked · GuestPoweredOff
        ├── SshRefused          an ssh server that does not let belljar in
        ├── IdentityRefused     a clone that did not prove that it is nobody's twin
        │   └── HostKeysRefused its ssh server could not be given keys of its own
        ├── GuestRefused        the agent could not do one thing it was asked, and says which
        ├── NoNineP · NoVirtiofs · NoNfs    what the guest's kernel cannot mount
        ├── NoDisk · NoPackedFolders   a further disk the guest cannot use
        ├── ExportRefused       a file server answered, and refuses the mount
        ├── MountFailed        a file server answered the host, but not the guest
        └── ShareNotFlushed     what a payload wrote may not be on the file server

Every class carries a hint; an instance may sharpen it.
"""

from __future__ import annotations

from belljar.errors.base import OUR_FAILURE, BelljarError, Retry, about
from belljar.errors.guest import (
    AgentLost,
    AgentTooOld,
    BootFailed,
    BootTimeout,
    ExportRefused,
    GuestError,
    GuestPanicked,
    GuestPoweredOff,
    GuestRefused,
    HostKeysRefused,
    IdentityRefused,
    MountFailed,
    NoDisk,
    NoNfs,
    NoNineP,
    NoPackedFolders,
    NoVirtiofs,
    ProtocolViolation,
    ShareNotFlushed,
    SshRefused,
)
from belljar.errors.host import (
    CommandFailed,
    CommandHung,
    CommandMissing,
    HostError,
    LibvirtLost,
    LockTimeout,
    NetworkFailed,
    NoAccelerator,
    NoFolderServer,
    NoGuard,
    NoMemory,
    NoSpace,
    NoStore,
    ServerSilent,
    ShareLost,
    SshMissing,
    SystemSilent,
    UnsafeFolder,
)
from belljar.errors.hypervisor import (
    DomainDied,
    DomainKilled,
    HypervisorError,
    LibvirtRefused,
    QmpError,
    QmpTimeout,
    TemplateError,
)
from belljar.errors.image import (
    BuildFailed,
    DownloadFailed,
    DownloadStalled,
    ImageCorrupt,
    ImageError,
    ImageInUse,
    ImageMismatch,
    ImageTooLarge,
    ImageUnfit,
    ImageUnknown,
    IndexStale,
    NotAnIndex,
    SignatureRefused,
    WorkshopFailed,
)
from belljar.errors.usage import (
    AmbiguousMachine,
    BadOption,
    BadSetting,
    BadUserData,
    ContextImpossible,
    DirectoryTooLarge,
    DriverLacks,
    ImageNotAllowed,
    ImpossibleSize,
    InputMissing,
    MachineBusy,
    NoSuchMachine,
    NoSuchNetwork,
    NotInAJob,
    NotOurs,
    NotPermitted,
    OutputMissing,
    OutputUnwritable,
    OverLimit,
    ShareMissing,
    UnreadableScript,
    UsageError,
)

__all__ = [
    "OUR_FAILURE",
    "AgentLost",
    "AgentTooOld",
    "AmbiguousMachine",
    "BadOption",
    "BadSetting",
    "BadUserData",
    "BelljarError",
    "BootFailed",
    "BootTimeout",
    "BuildFailed",
    "CommandFailed",
    "CommandHung",
    "CommandMissing",
    "ContextImpossible",
    "DirectoryTooLarge",
    "DomainDied",
    "DomainKilled",
    "DownloadFailed",
    "DownloadStalled",
    "DriverLacks",
    "ExportRefused",
    "GuestError",
    "GuestPanicked",
    "GuestPoweredOff",
    "GuestRefused",
    "HostError",
    "HostKeysRefused",
    "HypervisorError",
    "IdentityRefused",
    "ImageCorrupt",
    "ImageError",
    "ImageInUse",
    "ImageMismatch",
    "ImageNotAllowed",
    "ImageTooLarge",
    "ImageUnfit",
    "ImageUnknown",
    "ImpossibleSize",
    "IndexStale",
    "InputMissing",
    "LibvirtLost",
    "LibvirtRefused",
    "LockTimeout",
    "MachineBusy",
    "MountFailed",
    "NetworkFailed",
    "NoAccelerator",
    "NoDisk",
    "NoFolderServer",
    "NoGuard",
    "NoMemory",
    "NoNfs",
    "NoNineP",
    "NoPackedFolders",
    "NoSpace",
    "NoStore",
    "NoSuchMachine",
    "NoSuchNetwork",
    "NoVirtiofs",
    "NotAnIndex",
    "NotInAJob",
    "NotOurs",
    "NotPermitted",
    "OutputMissing",
    "OutputUnwritable",
    "OverLimit",
    "ProtocolViolation",
    "QmpError",
    "QmpTimeout",
    "Retry",
    "ServerSilent",
    "ShareLost",
    "ShareMissing",
    "ShareNotFlushed",
    "SignatureRefused",
    "SshMissing",
    "SshRefused",
    "SystemSilent",
    "TemplateError",
    "UnreadableScript",
    "UnsafeFolder",
    "UsageError",
    "WorkshopFailed",
    "about",
]
