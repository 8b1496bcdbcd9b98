"""A batch system's own commands and their variables, found once, at `batch install`, and never from a job's
surroundings.

They are listed beside the launchers in site.json, with all that `batch install` was told. A command that is not in it is not
run, so no other system's of the same name ever is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from belljar.errors import BadOption, BelljarError, CommandMissing
from belljar.host import commands
from belljar.host.commands import SEARCH_PATH
from belljar.host.files import LAST_SYSTEM_UID, only_root_writes, read_json
from belljar.reading import from_json
from belljar.records import dataclass, field

LARGEST = 1 << 16
ASK_TIMEOUT = 20.0
# What dialects use besides.
OF_THE_HOST = ("chmod", "env", "find", "kill", "ln", "mkdir", "rm", "rmdir", "stat", "touch")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
VALUE = re.compile(r"[^\x00-\x1f\x7f]{1,4096}")


@dataclass(frozen=True)
class Needs:
    """What belljar runs of one system, and how that system's commands find it."""

    programs: tuple[str, ...]  # the first is one that only this system has; the others lie beside it
    variables: tuple[str, ...] = ()  # taken over from the administrator's environment
    # Folders with the commands, from those variables; looked at before PATH.
    bins: Callable[[Mapping[str, str]], tuple[str, ...]] = lambda variables: ()
    # The folder of the system's settings, from those variables; and the variables a folder stands for.
    home: Callable[[Mapping[str, str]], Path | None] = lambda variables: None
    told_by: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    # The command that lists the queues of a system that has some, and the pattern of a name in what it prints.
    queues: tuple[tuple[str, ...], str] = ((), "")
    # Succeeds where the system answers at all, for a system that keeps settings of ours.
    answers: tuple[str, ...] = ()
    # Programs that lie elsewhere, each with the command that prints in which folder.
    told_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """One system's commands on one site."""

    system: str
    programs: dict[str, str] = field(default_factory=dict)  # name -> path
    variables: dict[str, str] = field(default_factory=dict)
    folders: str = ""  # --commands, as it was given
    named: dict[str, str] = field(default_factory=dict)  # --variable, as they were given
    site: str = ""  # --folder: where the system's settings are
    options: dict[str, str] = field(default_factory=dict)  # --queue, --set, as they were given

    def run(self, argv: tuple[str, ...], timeout: float) -> bytes:
        """What the command prints, run with this site's variables alone. Raises CommandMissing, CommandFailed."""
        name, *words = argv
        path = name if "/" in name else self.programs.get(name)
        if path is None and name in OF_THE_HOST:
            path = shutil.which(name, path=SEARCH_PATH)
        if path is None:
            raise CommandMissing(
                f"{name}: not among the commands of {self.system} that `belljar batch install {self.system}` found",
                hint=f"Run that again where {name} is, with --commands DIR if it is not in PATH.",
            )
        return commands.run((path, *words), timeout=timeout, env=self.environment()).out

    def missing(self, needs: Needs) -> list[str]:
        """What belljar runs and this host does not have."""
        names = (*needs.programs, *needs.told_folders)
        return [name for name in names if not os.access(self.programs.get(name, ""), os.X_OK)]

    def environment(self) -> dict[str, str]:
        bins = list(dict.fromkeys(os.path.dirname(path) for path in self.programs.values()))
        return {**commands.bare_environment(), "PATH": ":".join((*bins, SEARCH_PATH)), **self.variables}

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"


def path_of(launcher: Path) -> Path:
    """Where a launcher's commands are listed."""
    return launcher.with_name("site.json")


def read(path: Path, system: str) -> Client | None:
    """What an installation found; None where there was none. Raises BadOption for what is not such a file."""
    try:
        return from_json(Client, read_json(path, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as exc:
        hint = f"Remove it and run `belljar batch install {system}`."
        raise BadOption(f"{path}: not a list of commands: {exc}", hint=hint) from exc


def find(
    system: str, needs: Needs, folder: Path | None, environ: Mapping[str, str], *,
    folders: str = "", named: Mapping[str, str] | None = None, known: Client | None = None,
) -> Client:  # fmt: skip
    """Look for the commands: in *folders* if given, else by the variables, in PATH, and in the usual folders. What is
    *known* from before counts last. Raises BadOption for what others than the system could change."""
    known = known or Client(system)
    named = {**known.named, **(named or {})}
    given = {**(needs.told_by(folder) if folder else {}), **named}
    folders = folders or known.folders
    variables = _variables(needs, environ, known, given)
    before = map(os.path.dirname, known.programs.values())
    usual = [*needs.bins(variables), *environ.get("PATH", "").split(":"), *before, *SEARCH_PATH.split(":")]
    programs = _programs(needs.programs, folders.split(":") if folders else usual)
    client = Client(system, programs, variables, folders, named)
    for name, argv in needs.told_folders.items():
        with suppress(BelljarError):  # a system that does not answer
            if path := _first(name, [client.run(argv, ASK_TIMEOUT).decode(errors="replace").strip()]):
                programs[name] = path
    is_trusted = bool(folders) or os.geteuid() != 0
    if wrong := [f"{name}: {path}" for name, path in programs.items() if not (is_trusted or is_the_systems(path))]:
        raise BadOption(
            f"{wrong[0]} can be changed by others than root and the system's users, and root is to run it",
            hint="Take that folder out of PATH. If it is right all the same, say --commands DIR.",
        )
    return client


def is_the_systems(name: str) -> bool:
    """Does what is there belong to root or a system user, with nobody else to change it?"""
    return only_root_writes(Path(os.path.realpath(name)), highest_uid=LAST_SYSTEM_UID)


def _variables(needs: Needs, environ: Mapping[str, str], known: Client, given: Mapping[str, str]) -> dict[str, str]:
    """What is given, and the others of the administrator's environment, else of before."""
    for name, value in given.items():
        if not (NAME.fullmatch(name) and VALUE.fullmatch(value)):
            raise BadOption(f"{name}={value[:80]}: not a variable of one line", hint="Say --variable NAME=VALUE.")
    others = {name: environ.get(name) or known.variables.get(name, "") for name in needs.variables if name not in given}
    for name, value in others.items():
        if value and (not VALUE.fullmatch(value) or (value.startswith("/") and not is_the_systems(value))):
            raise BadOption(
                f"{name}={value[:200]}: is not there, or can be changed by others than root and the system's users",
                hint=f"Correct it, or say --variable {name}=VALUE if it is right all the same.",
            )
    return {name: value for name, value in {**others, **given}.items() if value}


def _programs(names: tuple[str, ...], folders: Iterable[str]) -> dict[str, str]:
    """The first by its folder, then the others beside it: another system's may have the same names."""
    if (at := _first(names[0], folders)) is None:
        return {}
    beside = dict.fromkeys(os.path.dirname(path) for path in (at, os.path.realpath(at)))
    around = [*beside, *(f"{os.path.dirname(folder)}/{part}" for folder in beside for part in ("bin", "sbin"))]
    return {name: path for name in names if (path := _first(name, around))}


def _first(name: str, folders: Iterable[str]) -> str | None:
    return shutil.which(name, path=":".join(folder for folder in folders if folder.startswith("/")))
