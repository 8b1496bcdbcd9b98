"""`belljar batch install`: the engine of one system on this host, with its commands, its launchers and what was chosen before."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from belljar import batch
from belljar.batch.install import commands as client
from belljar.batch.install import files
from belljar.batch.install.engine import Engine
from belljar.batch.install.pieces import OurFile, Piece, Place, SiteOfSystem
from belljar.errors import BadOption, HostError
from belljar.jobs.node import own_prefix
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from belljar.batch.install.commands import Client
    from belljar.jobs import House

LONGEST_SHEBANG = 120  # of 127 that older kernels read

LAUNCHER = """\
#!{python} -IS
# Made by `belljar batch install {system}`: {purpose}.
import os
import sys

sys.path += map(os.path.realpath, {libraries!r})  # an upgrade turns a link; this process stays with its own version
sys.argv[1:1] = {words!r}
from belljar.cli import entry

entry({commands!r})
"""


@dataclass(frozen=True)
class Asked:
    """What an administrator asks for; what is left out is as at the last installation."""

    folder: str = ""
    prefix: str = ""
    commands: str = ""  # folders, with colons between
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    anew: bool = False  # look for the system's commands again


class Site(NamedTuple):
    """One system on this host."""

    engine: Engine
    place: Place
    site: SiteOfSystem
    commands: Client
    prefix: str


def site_for(system: str, asked: Asked, house: House) -> Site:
    """Options that were given at the installation hold until others are. Raises BadOption."""
    site = batch.load(system).site
    folder = Path(asked.folder).absolute() if asked.folder else site.needs.home(os.environ) or site.default_folder
    try:
        before = files.load(files.path_of(folder, system))
    except ValueError as exc:
        raise BadOption(str(exc), hint="Repair or remove that file.") from exc
    prefixes = [Path(one).absolute() for one in (asked.prefix, before.prefix) if one] or [own_prefix()]
    ours = client_for(system, asked, site, folder, prefixes)
    settings, libexec = house.settings, prefixes[0] / "libexec"
    timeout = settings.batch.ask_timeout

    def execute(argv: tuple[str, ...], stdin: bytes) -> bytes:
        return ours.run(argv, timeout, stdin)

    place = Place(
        settings=settings.batch, wrapper=libexec / f"wrap-{system}", belljar=libexec / f"belljar-{system}",
        store=settings.paths.site_store or settings.paths.store, folder=folder, options={**before.options, **asked.options},
        node=settings.paths.node, run=lambda argv: execute(argv, b""),
    )  # fmt: skip
    config = ["--config", str(house.config_file.absolute())] if house.config_file else []
    own = functools.partial(launchers, ours, config=config)
    words = ["belljar", *config, "batch", "install", system, "--folder", str(folder)]
    words += ["--prefix", str(prefixes[0]), *(f"--set={key}={value}" for key, value in place.options.items())]
    return Site(
        Engine(system, site, place, own, execute, shlex.join(words)), place, site, ours, asked.prefix or before.prefix
    )


def client_for(system: str, asked: Asked, site: SiteOfSystem, folder: Path, prefixes: list[Path]) -> Client:
    """The system's commands: those of the installation, which `install` looks for anew. Raises BadOption."""
    listed = [client.path_of(prefix / "libexec/belljar", system) for prefix in prefixes]
    known = next((one for path in listed if (one := client.read(path, system))), None)
    if known is not None and not asked.anew:
        return known
    return client.find(
        system, site.needs, folder, os.environ, folders=asked.commands, named=asked.variables, known=known
    )


def launchers(ours: Client, place: Place, config: list[str]) -> list[Piece]:
    """The executables that systems and hooks start, one word each; and the list of the system's commands for them."""
    system = ours.system
    # Where the redirect says nothing to us, all that follows is the job's, dashes or not.
    wrap = [*config, "internal", "wrap", system, *(["--"] if batch.load(system).ends_words else [])]
    return [
        OurFile("the system's commands", client.path_of(place.wrapper, system), ours.as_json()),
        _launcher(system, "belljar for hooks, with this site's settings", place.belljar, config),
        _launcher(system, "what the system starts in place of a job", place.wrapper, wrap),
    ]


def _launcher(system: str, purpose: str, path: Path, words: list[str]) -> OurFile:
    python = sys.executable
    if len(python) > LONGEST_SHEBANG or any(char.isspace() for char in python):
        raise HostError(f"{python}: a path that a `#!` line cannot hold", hint="Install belljar with another Python.")
    listed = os.fspath(client.path_of(path, system))
    text = LAUNCHER.format(
        python=python, system=system, purpose=purpose, libraries=_libraries(), words=words, commands=listed
    )
    return OurFile(purpose, path, text.encode(), 0o755)


def _libraries() -> list[str]:
    """Where this belljar is, and what it needs: in one folder where it was installed, in two where it runs in a checkout."""
    found = [Path(__file__).resolve().parents[2]]
    if (needed := importlib.util.find_spec("h11")) is not None and needed.origin is not None:
        found.append(Path(needed.origin).resolve().parents[1])
    links = {
        one.with_name("lib").resolve(): one.with_name("lib") for one in found
    }  # an upgrade takes PREFIX/lib-* away
    return [os.fspath(links.get(one, one)) for one in dict.fromkeys(found)]
