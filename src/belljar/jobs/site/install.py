"""`belljar batch install`: one system on this host, with its commands, its launchers and what was chosen before."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from belljar import batch
from belljar.batch.install import commands as client
from belljar.batch.install.commands import Client
from belljar.batch.install.engine import Installation
from belljar.batch.install.pieces import Place
from belljar.errors import HostError
from belljar.jobs import Runtime
from belljar.jobs.node import LAUNCHERS, own_prefix
from belljar.records import replace

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


def installation(
    system: str, runtime: Runtime, *, prefix: str, folder: str, bins: str, variables: Mapping[str, str],
    options: Mapping[str, str], anew: bool,
) -> tuple[Installation, Client]:  # fmt: skip
    """What is empty, but for the prefix, is as at the last installation. *anew*: look for the system's commands again,
    first in *bins*, folders with colons between. Raises BadOption."""
    site, settings = batch.load(system).site, runtime.settings
    top = Path(prefix).absolute() if prefix else own_prefix()
    ours = top / LAUNCHERS / system
    known = client.read(client.path_of(ours / "belljar"), system)
    last = Path(known.site) if known and known.site else site.default_folder
    where = Path(folder).absolute() if folder else site.needs.home(os.environ) or last
    options = {**(known.options if known else {}), **options}
    commands = known
    if commands is None or anew:
        commands = client.find(system, site.needs, where, os.environ, folders=bins, named=variables, known=known)
    now = replace(commands, site=str(where), options=options)
    place = Place(
        settings=settings.batch, wrapper=ours / f"wrap-{system}", belljar=ours / f"belljar-{system}",
        store=settings.paths.site_store or settings.paths.store, folder=where, options=options,
        run=lambda argv: now.run(argv, settings.batch.ask_timeout), node=settings.paths.node,
    )  # fmt: skip
    config = ["--config", str(runtime.config_file.absolute())] if runtime.config_file else []
    words = ["belljar", *config, "batch", "install", system, "--folder", str(where), "--prefix", str(top)]
    command = shlex.join([*words, *(f"--set={key}={value}" for key, value in options.items())])
    before = replace(place, folder=last, options=known.options) if known else None
    return Installation(system, site, place, launchers(now, place, config), command, before), now


def launchers(commands: Client, place: Place, config: list[str]) -> dict[str, bytes]:
    """The executables that systems and hooks start, one word each; and the list of the system's commands for them."""
    system, listed = commands.system, client.path_of(place.wrapper)
    # Where the redirect says nothing to us, all that follows is the job's, dashes or not.
    wrap = [*config, "internal", "wrap", system, *(["--"] if batch.load(system).ends_words else [])]
    return {
        listed.name: commands.as_json(),
        place.belljar.name: _launcher(system, "belljar for hooks, with this site's settings", listed, config),
        place.wrapper.name: _launcher(system, "what the system starts in place of a job", listed, wrap),
    }


def _launcher(system: str, purpose: str, listed: Path, words: list[str]) -> bytes:
    python = sys.executable
    if len(python) > LONGEST_SHEBANG or any(char.isspace() for char in python):
        raise HostError(f"{python}: a path that a `#!` line cannot hold", hint="Install belljar with another Python.")
    return LAUNCHER.format(
        python=python, system=system, purpose=purpose, libraries=_libraries(), words=words, commands=os.fspath(listed)
    ).encode()


def _libraries() -> list[str]:
    """Where this belljar is, and what it needs: in one folder where it was installed, in two where it runs in a checkout."""
    folders = [Path(__file__).resolve().parents[3]]
    if (needed := importlib.util.find_spec("h11")) is not None and needed.origin is not None:
        folders.append(Path(needed.origin).resolve().parents[1])
    # An upgrade takes PREFIX/lib-* away.
    links = {folder.with_name("lib").resolve(): folder.with_name("lib") for folder in folders}
    return [os.fspath(links.get(folder, folder)) for folder in dict.fromkeys(folders)]
