"""The door of the context room: tells a guest who it is, and gives the agent to a guest that runs its own init.

The data have the forms that guests know (cloud-init's NoCloud, EC2's and OpenStack's metadata, Vac's user data), and come on a
disc or by HTTP from 169.254.169.254. `choose` decides on a machine's context: a pure function of what was asked and what the
image can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

from belljar.errors import UsageError
from belljar.hints import TYPE_CHECKING, Protocol
from belljar.model import GIB, MIB, Context, setting
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.context.metadata import Service as Service
    from belljar.host.python.interpreter import Interpreter


class MetadataMode(str, Enum):
    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


@dataclass(frozen=True)
class Settings:
    """`[context]` in the settings files."""

    metadata: MetadataMode = setting(
        MetadataMode.AUTO,
        "which machines in a user network have a metadata service; auto: with user data, or without a command",
    )
    joboutputs_size: int = setting(64 * MIB, "bytes a machine may leave as joboutputs, in all", unit="bytes")
    joboutputs_count: int = setting(100, "files a machine may leave as joboutputs")
    cvmfs_proxy: str = setting("", "HTTP proxies for CernVM-FS, told to user data as ##user_data_option_cvmfs_proxy##")
    space: str = setting("", "the vacuum space this host is in, told to user data")
    site: str = setting("", "the site's name in the grid, told to user data")
    empty_disk: int = setting(
        20 * GIB,
        "empty disk of a machine that boots from a disc (a CernVM), without --disk",
        unit="bytes",
    )


@dataclass(frozen=True)
class Means:
    """What an image has that belljar can use. `auto` treats what is not known as missing."""

    ramdisk: bool = False  # belljar starts its kernel with a ramdisk of belljar's own
    init: str = ""  # "systemd", "other", or "" where it is not known
    cloud_init: bool = False
    agent: bool = False  # it starts the agent itself, as docs/jobs/images.md says
    own: Context = Context.AUTO  # what its importer chose
    is_known: bool = True  # its root file system was examined; else any context that is asked for is tried


@dataclass(frozen=True)
class Chosen:
    """How a guest is contextualized, and why so."""

    context: Context
    reason: str


Features = Mapping[str, Mapping[str, str]]  # by folder ("machinefeatures", "jobfeatures"), then by key


@dataclass(frozen=True)
class About:
    """What a template of user data may ask of a machine. Empty: not known, or there is none."""

    uuid: str = ""
    hostname: str = ""  # of the guest
    machinetype: str = ""
    manager: str = ""  # name and version of what made the machine
    manager_hostname: str = ""  # of the host
    space: str = ""
    site: str = ""
    url: str = ""  # where the template came from
    image_url: str = ""
    machinefeatures: str = ""  # URLs
    jobfeatures: str = ""
    joboutputs: str = ""


@dataclass(frozen=True)
class Instance:
    """What a guest may know of itself."""

    uuid: str
    hostname: str
    user_data: bytes | None = None
    machinetype: str = ""
    zone: str = ""
    size: str = ""
    address: str = ""  # without its prefix
    mac: str = ""
    base_url: str = ""  # where features are read and outputs are put
    told: tuple[tuple[str, str], ...] = ()  # leaves of EC2's tree in place of these, or beside them


class Seed(Protocol):
    """A disc that tells a guest's own init what to do. Seeds of the same digest mean the same guest."""

    @property
    def digest(self) -> str:
        """For all that is on it, hexadecimal. Cheap: the disc need not be made for it."""

    def write(self, path: Path) -> None:
        """Make the disc (0600). Raises BadOption, NoSpace, HostError."""


def filled_in(template: bytes, about: About, options: Mapping[str, bytes], files: Mapping[str, bytes]) -> bytes:
    """The user data of one machine: a template whose `##user_data_...##` patterns have their values. Raises BadOption."""
    from belljar.context.userdata import fill_in, patterns

    return fill_in(template, patterns(about, options, files))


def cloud_init_seed(agent: Interpreter, unit: str, user_data: bytes = b"", *, grows: bool = False) -> Seed:
    """A seed whose user-data installs *agent* with its systemd *unit* and starts it once cloud-init has finished, before
    whatever *user_data* (any form cloud-init knows) asks for. *grows*: the disk is larger than the image's."""
    from belljar.context.discs import AgentSeed

    return AgentSeed(agent, unit, user_data, grows)


def user_seed(user_data: bytes, instance_id: str, hostname: str) -> Seed:
    """A seed for guests without the agent: the user's own data alone, in the forms of several clouds."""
    from belljar.context.discs import UserSeed

    return UserSeed(user_data, instance_id, hostname)


def metadata_service(
    instance: Instance, features: Callable[[], Features], outputs: Path, credentials: Path, settings: Settings
) -> Service:
    """A service for one machine. *features* is asked at each request; *outputs* is the folder for what the guest leaves,
    made with its first file; *credentials* that of small files which whoever asked for the machine renews."""
    from belljar.context.metadata import Service
    from belljar.context.outputs import Outputs

    kept = Outputs(outputs, most_bytes=settings.joboutputs_size, most_files=settings.joboutputs_count)
    return Service(instance, features, kept, credentials)


# What `auto` tries, in this order, and why each is taken.
PREFERENCE = (
    (Context.RAMDISK, "its kernel is started directly"),
    (Context.NONE, "it starts the agent itself"),
    (Context.CLOUD_INIT, "it has cloud-init"),
    (Context.INJECT, "it has systemd"),
)


def choose(asked: Context, means: Means, name: str) -> Chosen:
    """The context for a guest of the image *name*. Raises UsageError, with what is missing, when one was asked for
    that the image cannot do."""
    if asked is not Context.AUTO:
        return _insisted(asked, means, name, "asked for")
    if means.own is not Context.AUTO:
        return _insisted(means.own, means, name, "the image was imported so")
    for context, why in PREFERENCE:
        if not lacks(context, means) and (context is not Context.NONE or means.agent):
            return Chosen(context, why)
    return Chosen(Context.NONE, "nothing else is known to work: the image must start the agent itself")


def lacks(context: Context, means: Means) -> list[str]:
    """What an image is missing for this context; empty: nothing."""
    systemd = ("systemd", means.init == "systemd")
    wants = {
        Context.RAMDISK: [("kernel that belljar can start directly", means.ramdisk)],
        Context.CLOUD_INIT: [("cloud-init", means.cloud_init), systemd],
        Context.INJECT: [systemd],
    }
    return [what for what, has in wants.get(context, ()) if not has]


def _insisted(context: Context, means: Means, name: str, why: str) -> Chosen:
    # In an image that nobody has looked into, what is missing may be there.
    if missing := lacks(context, means) if context is Context.RAMDISK or means.is_known else []:
        raise UsageError(
            f"image {name}: --context {context.value} is not possible ({why}): no {' and no '.join(missing)} was found in it",
            hint="Choose another `--context`, or leave it at auto; `belljar image show` tells what the image has.",
        )
    return Chosen(context, why)
