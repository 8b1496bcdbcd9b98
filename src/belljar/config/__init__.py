"""The settings: every room's own `Settings`, merged from files and environment, with the origin of each value.

    /etc/belljar/belljar.toml  <  /etc/belljar/conf.d/*.toml  <  ~/.config/belljar/belljar.toml  <  --config FILE
                               <  environment BELLJAR_<SECTION>_<KEY>

A later one stands before an earlier one, key by key; but what the site keeps for itself (`site.lock`) counts only from a
place of the site's: /etc/belljar, or a FILE that nobody but root can change. All mistakes are reported at once. What a key
means, its unit and its default stand beside the code that obeys it; that code is handed its part and never looks here.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar import accounting, batch, context, guest, hypervisor, image, machine, network
from belljar.errors import BadSetting, BelljarError
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.files import only_root_writes, private_folder
from belljar.host.room import Settings as HostSettings
from belljar.model import setting
from belljar.records import MISSING, dataclass, field, fields, replace

if TYPE_CHECKING:
    from belljar.host.toml import Mistake

ETC = Path("/etc/belljar")
DEFAULT_ORIGIN = "default"
SITE_STORE = Path("/var/lib/belljar")
NODE_PARTS = ("run", "scratch", "store", "logs")  # of a user's folder on a batch node


def _place(help: str, usual: str, **options: Any) -> Any:
    """A folder of belljar's; *usual* says in words where it is when nobody sets it."""
    return field(metadata={"help": help, "default": usual}, **options)


@dataclass(frozen=True)
class Paths:
    """`[paths]` in the settings files."""

    run: Path = _place(
        "running machines; wants a fast file system",
        "root: /run/belljar; users: $XDG_RUNTIME_DIR/belljar, else /run/user/UID/belljar, else /var/tmp/belljar-UID/run",
    )
    store: Path = _place(
        "images and templates; large",
        "root: /var/lib/belljar; users: $XDG_DATA_HOME/belljar, else ~/.local/share/belljar",
    )
    site_store: Path | None = _place(
        "the site's read-only images, searched after one's own; empty: none", "root: none; users: /var/lib/belljar"
    )
    scratch: Path = _place(
        "writable disks of running machines",
        "root: /var/lib/belljar/scratch; users: /var/tmp/belljar-UID/scratch",
    )
    logs: Path = _place(
        "records of ended machines",
        "root: /var/log/belljar; users: the store's folder logs",
    )
    node: Path | None = _place(
        "on a batch node: a local folder in which each user but root gets UID/ for run, scratch, store and logs",
        "none",
        default=None,
    )


@dataclass(frozen=True)
class Site:
    """`[site]` in the settings files."""

    lock: tuple[str, ...] = setting((
            "host.*", "image.*", "libvirt.*", "machine.cpus", "machine.hypervisor", "machine.memory", "machine.network", "network.*",
            "paths.*", "qemu.*",
        ), "patterns of SECTION.KEY that users cannot change, beside batch.* and site.*; the default holds in batch jobs, a list of the site's everywhere")  # fmt: skip


@dataclass(frozen=True)
class Testing:
    """`[testing]` in the settings files."""

    abort_at: str = setting("", "belljar kills itself at this point of a machine's life")


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
    accounting: accounting.Settings = field(default_factory=accounting.Settings)
    site: Site = field(default_factory=Site)
    testing: Testing = field(default_factory=Testing)


SECTIONS: Mapping[str, Any] = {
    section.name: Paths if section.default_factory is MISSING else section.default_factory
    for section in fields(Settings)
}


@dataclass(frozen=True)
class File:
    """A settings file, and whether it is an ordinary user's own."""

    path: Path
    is_users: bool


@dataclass(frozen=True)
class Loaded:
    """The settings with their history. With mistakes, a wrong value is left out and the one before it stands."""

    settings: Settings
    origins: Mapping[str, str]  # "section.key" -> "default", "/etc/belljar/belljar.toml:12", "environment BELLJAR_..."
    mistakes: tuple[Mistake, ...]

    def checked(self) -> Settings:
        """Raises BadSetting with every mistake there is."""
        if self.mistakes:
            raise BadSetting.of(self.mistakes)
        return self.settings


def inspect(
    config_file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
    etc: Path | None = None,
    in_job: bool = False,
) -> Loaded:
    """The settings as far as they can be understood, their origins, and all mistakes. Never raises. *in_job*: of a
    batch job."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    defaults = Settings(default_paths(uid, environ))
    *sites, own = _usual_files(uid, environ, etc or ETC)
    usual = [*(File(path, is_users=False) for path in sites), File(own, is_users=uid != 0)]
    files = [file for file in usual if os.path.lexists(file.path)]
    # Where root alone can write, it is read without any link that a user could turn meanwhile.
    if config_file is not None:
        real = Path(os.path.realpath(config_file))
        is_users = uid != 0 and not only_root_writes(real)
        files.append(File(config_file if uid == 0 or is_users else real, is_users))
    variables = {name: value for name, value in environ.items() if name.startswith("BELLJAR_")}
    if not files and not variables:  # the usual case is quick: nothing is parsed, nothing more is imported
        return Loaded(defaults, {}, ())
    from belljar.config.merge import merge

    loaded = merge(defaults, files, variables, is_root=uid == 0, in_job=in_job)
    paths = on_node(loaded.settings.paths, uid, loaded.origins, defaults.paths.store, in_job=in_job)
    return replace(loaded, settings=replace(loaded.settings, paths=paths))


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
        for key in fields(kind):
            yield section, key.name, getattr(getattr(settings, section), key.name), key.metadata


# -- where belljar keeps its files: the defaults; no folder is made here ----------------------------------------------


def default_paths(uid: int, environ: Mapping[str, str]) -> Paths:
    """The places for this user: run, store, site_store, scratch, logs."""
    if uid == 0:
        return Paths(Path("/run/belljar"), SITE_STORE, None, SITE_STORE / "scratch", Path("/var/log/belljar"))
    store = (_absolute(environ.get("XDG_DATA_HOME")) or home(uid, environ) / ".local/share") / "belljar"
    own = own_folder(Path(f"/var/tmp/belljar-{uid}"), store, uid)
    return Paths(_runtime_folder(uid, environ) or own / "run", store, SITE_STORE, own / "scratch", store / "logs")


def on_node(paths: Paths, uid: int, given: Container[str], store: Path, *, in_job: bool) -> Paths:
    """The places on a batch node: below `node`, where that is set, but for the keys somebody gave (`paths.run`, ...). Outside of
    jobs only where the user has a folder there, or can make it: on most systems a job's prolog does."""
    if paths.node is None or uid == 0:
        return paths
    own = own_folder(paths.node / str(uid), store, uid)
    if not in_job and not os.access(own if os.path.exists(own) else paths.node, os.W_OK):
        return paths
    parts = {key: own / key for key in NODE_PARTS if f"paths.{key}" not in given}
    return replace(paths, **parts)


def own_folder(usual: Path, store: Path, uid: int) -> Path:
    """The folder *usual*; where a stranger made it first, one beside it, whose name nobody can foresee. A link in the user's
    store leads there from then on, so that every later command finds it again. (Hosts may share the store.)"""
    link = store / "-".join((*usual.parent.parts[1:], os.uname().nodename))
    with suppress(OSError):
        return Path(os.readlink(link))
    with suppress(OSError, BelljarError):  # else whoever makes the folder tells whose it is
        if uid == os.geteuid() and os.lstat(usual).st_uid not in (uid, 0):
            private_folder(store)
            with suppress(FileExistsError):  # another process of ours was quicker
                link.symlink_to(f"{usual}-{os.urandom(8).hex()}")
            return Path(os.readlink(link))
    return usual


def home(uid: int, environ: Mapping[str, str]) -> Path:
    """The user's home folder: $HOME, else what the user database says (batch systems may start us without HOME)."""
    if named := _absolute(environ.get("HOME")):
        return named
    import pwd

    try:
        return Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        return Path(f"/var/tmp/belljar-{uid}")


def _runtime_folder(uid: int, environ: Mapping[str, str]) -> Path | None:
    """The session's runtime folder, if it is this user's: `su` keeps the variable of the user before."""
    for candidate in (_absolute(environ.get("XDG_RUNTIME_DIR")), Path(f"/run/user/{uid}")):
        try:
            if candidate is not None and os.stat(candidate).st_uid == uid:
                return candidate / "belljar"
        except OSError:
            continue
    return None


def _absolute(text: str | None) -> Path | None:
    """The path, unless it is missing, empty or relative: the XDG base directory specification ignores such."""
    return Path(text) if text and text.startswith("/") else None
