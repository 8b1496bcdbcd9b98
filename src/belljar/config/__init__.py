"""The settings: every room's own `Settings`, merged from files and environment, with the origin of each value.

    /etc/belljar/belljar.toml  <  /etc/belljar/conf.d/*.toml  <  ~/.config/belljar/belljar.toml  <  --config FILE
                               <  environment BELLJAR_<SECTION>_<KEY>

A later one stands before an earlier one, key by key; but what the site keeps for itself (`site.lock`) counts only from a
place of the site's: /etc/belljar, or a FILE that nobody but root can change. All mistakes are reported at once. What a key
means, its unit and its default stand beside the door of the room that obeys it; rooms are handed their part and never look
here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from belljar import batch, context, guest, hypervisor, image, machine, network
from belljar.config.paths import Paths, default_paths, home, on_node
from belljar.errors import BadSetting
from belljar.host.files import only_root_writes
from belljar.host.room import Settings as HostSettings
from belljar.model import setting

if TYPE_CHECKING:
    from belljar.config.merge import Mistake

ETC = Path("/etc/belljar")
DEFAULT_ORIGIN = "default"


@dataclass(frozen=True)
class Site:
    """`[site]` in the settings files."""

    lock: tuple[str, ...] = setting((
            "host.*", "image.*", "libvirt.*", "machine.cpus", "machine.hypervisor", "machine.memory", "machine.network", "network.*",
            "paths.*", "qemu.*",
        ), "settings that users cannot change, patterns of SECTION.KEY, beside batch.* and site.*, which they never can; the default holds in batch jobs, a list of the site's everywhere")  # fmt: skip


@dataclass(frozen=True)
class Testing:
    """`[testing]` in the settings files."""

    abort_at: str = setting("", "belljar kills itself with SIGKILL at this point of a machine's life; for tests")


@dataclass(frozen=True)
class Settings:
    """All settings, by section."""

    paths: Paths
    host: HostSettings = field(default_factory=HostSettings)
    machine: machine.Settings = field(default_factory=machine.Settings)
    qemu: hypervisor.Settings = field(default_factory=hypervisor.Settings)
    libvirt: hypervisor.LibvirtSettings = field(default_factory=hypervisor.LibvirtSettings)
    image: image.Settings = field(default_factory=image.Settings)
    network: network.Settings = field(default_factory=network.Settings)
    guest: guest.Settings = field(default_factory=guest.Settings)
    context: context.Settings = field(default_factory=context.Settings)
    batch: batch.Settings = field(default_factory=batch.Settings)
    site: Site = field(default_factory=Site)
    testing: Testing = field(default_factory=Testing)


SECTIONS: Mapping[str, type[Any]] = {
    "paths": Paths,
    "host": HostSettings,
    "machine": machine.Settings,
    "qemu": hypervisor.Settings,
    "libvirt": hypervisor.LibvirtSettings,
    "image": image.Settings,
    "network": network.Settings,
    "guest": guest.Settings,
    "context": context.Settings,
    "batch": batch.Settings,
    "site": Site,
    "testing": Testing,
}


class File(NamedTuple):
    """A settings file, and whether it is an ordinary user's own."""

    path: Path
    is_users: bool


@dataclass(frozen=True)
class Loaded:
    """The settings with their history. With mistakes, a wrong value is left out and the one before it stands."""

    settings: Settings
    origins: Mapping[str, str]  # "section.key" -> "default", "/etc/belljar/belljar.toml:12", "environment BELLJAR_..."
    mistakes: tuple[Mistake, ...]


class BadSettings(BadSetting):
    """One or more mistakes in the settings, each a line of the message."""

    def __init__(self, mistakes: tuple[Mistake, ...]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = mistakes


def load(
    config_file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
    etc: Path | None = None,
    in_job: bool = False,
) -> Settings:
    """The settings of this process. Raises BadSettings with every mistake there is."""
    loaded = inspect(config_file, environ=environ, uid=uid, etc=etc, in_job=in_job)
    if loaded.mistakes:
        raise BadSettings(loaded.mistakes)
    return loaded.settings


def inspect(
    config_file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
    etc: Path | None = None,
    in_job: bool = False,
) -> Loaded:
    """The settings as far as they can be understood, where each came from, and what is wrong. Never raises. *in_job*: as a
    batch job's machine has them."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    defaults = Settings(default_paths(uid, environ))
    *sites, own = _usual_files(uid, environ, etc or ETC)
    files = [File(path, is_users=False) for path in sites] + [File(own, is_users=uid != 0)]
    files = [file for file in files if os.path.lexists(file.path)]
    if config_file is not None:
        files.append(_named(config_file, uid))
    variables = {name: value for name, value in environ.items() if name.startswith("BELLJAR_")}
    if not files and not variables:  # the usual case is quick: nothing is parsed, nothing more is imported
        return Loaded(defaults, {}, ())
    from belljar.config.merge import merge

    loaded = merge(defaults, files, variables, is_root=uid == 0, in_job=in_job)
    paths = on_node(loaded.settings.paths, uid, loaded.origins)
    return replace(loaded, settings=replace(loaded.settings, paths=paths))


def _named(path: Path, uid: int) -> File:
    """What `--config` names. Where root alone can write, it is read without any link that a user could turn meanwhile."""
    real = Path(os.path.realpath(path))
    is_users = uid != 0 and not only_root_writes(real)
    return File(path if uid == 0 or is_users else real, is_users)


def _usual_files(uid: int, environ: Mapping[str, str], etc: Path) -> Iterator[Path]:
    """The settings files that are looked at, weakest first."""
    yield etc / "belljar.toml"
    with suppress(OSError):
        yield from sorted(etc / "conf.d" / name for name in os.listdir(etc / "conf.d") if name.endswith(".toml"))
    folder = environ.get("XDG_CONFIG_HOME", "")
    yield (Path(folder) if folder.startswith("/") else home(uid, environ) / ".config") / "belljar/belljar.toml"


def every_setting(settings: Settings) -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
    """(section, key, value, metadata of the field), in the order of the sections."""
    for section, kind in SECTIONS.items():
        for one in fields(kind):
            yield section, one.name, getattr(getattr(settings, section), one.name), one.metadata
