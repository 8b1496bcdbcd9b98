"""Files of Vac (vac.conf) become a vacuum.toml, with a report of every word: mapped, changed, ignored or refused.

Files are read as Vac reads them: a later one wins, sections of one name are one. https://github.com/vacproject/vac, vac.conf(5)"""

from __future__ import annotations

import configparser
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from belljar.errors import BadSettings, HostError, InputMissing
from belljar.host.files import read_capped
from belljar.host.service.tables import NAME
from belljar.host.toml import written
from belljar.host.values import number, whole
from belljar.records import dataclass, replace
from belljar.vacuum.settings import vocabulary
from belljar.vacuum.settings.settings import KINDS, inspect
from belljar.vacuum.settings.vocabulary import CONTAINERS, Fate, Line, Places, SetsNothing, Words, line_of, translate

LARGEST = 1 << 20
MIB = 1 << 20
ROOT = "/var/lib/vac"
ROUNDS = 5  # into which Vac divides the time it waits for answers
HEAD = "# Made by `belljar vacuum import-config` from {files}.\n\n"
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Imported:
    """The new file, and what became of each word of the old ones."""

    text: str
    lines: tuple[Line, ...]

    @property
    def is_whole(self) -> bool:
        return all(line.fate is not Fate.REFUSED for line in self.lines)


def _only_yes(text: str) -> bool:
    if text.lower() != "yes":
        raise SetsNothing("only yes counts")
    return True


WORDS: Words = {
    "vac_space": ("space.name", str), "gocdb_sitename": ("space.site", str), "factories": ("space.factories", str.split),
    "vacmon_hostport": ("space.vacmon", lambda text: text.lower().split()),
    "udp_timeout_seconds": ("space.poll_silence", lambda text: number(text) / ROUNDS),
    "total_processors": ("factory.processors", whole),
    "processors_per_superslot": ("factory.processors_per_superslot", whole),
    "mb_per_processor": ("factory.memory", lambda text: whole(text) * MIB),
    "disk_gb_per_processor": ("factory.disk", lambda text: int(number(text) * vocabulary.GB)),
    "hs06_per_processor": ("factory.hs06", number), "overload_per_processor": ("factory.overload", number),
    "shutdown_time": ("factory.shutdown_time", number), "cycle_seconds": ("factory.cycle", number),
    "draining": ("factory.draining", _only_yes),
}  # fmt: skip
OLDER = {  # other names of the same
    "cpu_total": "total_processors", "cpu_per_machine": "processors_per_superslot",
    "vcpu_per_machine": "processors_per_superslot", "mb_per_cpu": "mb_per_processor",
    "disk_gb_per_cpu": "disk_gb_per_processor", "scratch_gb": "disk_gb_per_processor",
    "hs06_per_cpu": "hs06_per_processor", "overload_per_cpu": "overload_per_processor",
}  # fmt: skip
GONE = {  # refused here; Vac 03.00 ignores these, and refuses the sections
    "total_machines": "processors are counted: write total_processors",
    "mb_per_machine": "memory is for a processor: write mb_per_processor",
    "hs06_per_machine": "HS06 are for a processor: write hs06_per_processor",
}
GONE_SECTIONS = {
    "factories": "Vac refuses it, too: its names are the option factories in [settings]",
    "targetshares": "Vac refuses it, too: a share is the option target_share of its machinetype",
}
SECTIONS = {"machinetype": "machinetype", "vmtype": "machinetype", "vacuum_pipe": "pipe"}  # and what they become
NETWORK = "a user network needs none on the host; each type may set another network"
IGNORED = {
    "description": "it is told to nobody", "domain_type": "machines are QEMU's",
    "volume_group": "disks are files in paths.scratch", "singularity_user": "containers are not started",
    "root_public_key": "`belljar console` and `belljar exec` reach a machine",
    "fix_networking": NETWORK, "network_type": NETWORK, "bridge_device": NETWORK, "nat_network": NETWORK,
    "forward_dev": "a user network goes where the host goes",
    "gocdb_cert_file": "capacity is not published", "gocdb_key_file": "capacity is not published",
    "version_logger": "belljar tells its version to nobody", "delete_old_files": "old records go by machine.keep_days",
}  # fmt: skip


def read(files: Iterable[Path]) -> Imported:
    """What the files become. Raises InputMissing where one cannot be read, BadSettings where nothing of use is in them."""
    names = list(files)
    sections = _sections(names)
    lines = [line for name, options in sections.items() for line in _section(name, options)]
    why = "the space may have factories of Vac; set improved when it has none"
    lines.append(Line("", "", "", Fate.CHANGED, "space.mode", "compatible", why))
    lines, text = _loadable(lines, HEAD.format(files=", ".join(path.name for path in names)))
    return Imported(text, tuple(lines))


def _sections(files: Iterable[Path]) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False, inline_comment_prefixes=(";",))
    for path in files:
        try:
            parser.read_string(read_capped(path, LARGEST).decode("utf-8"), str(path))
        except OSError as exc:
            raise InputMissing(f"{path}: {exc.strerror}", hint="Name the files of Vac, as /etc/vac.conf.") from exc
        except (HostError, configparser.Error, UnicodeDecodeError) as exc:
            what = " ".join(str(exc).split())
            raise InputMissing(f"{path}: not a file of Vac's: {what}", hint="Correct it, as Vac itself would.") from exc
    found: dict[str, dict[str, str]] = {}
    for section in parser.sections():
        found.setdefault(" ".join(section.lower().split()), {}).update(parser.items(section))
    return found


def _section(name: str, options: Mapping[str, str]) -> Iterator[Line]:
    kind, _, own = name.partition(" ")
    if name == "settings":
        yield from _settings(options)
    elif kind in SECTIONS:
        yield from _machines(name, kind, own, options)
    elif name in GONE_SECTIONS:
        yield Line(name, "", "", Fate.REFUSED, why=GONE_SECTIONS[name])
    else:
        yield Line(name, "", "", Fate.IGNORED, why="no section of Vac's")


def _settings(options: Mapping[str, str]) -> Iterator[Line]:
    words = {**WORDS, **{old: WORDS[new] for old, new in OLDER.items()}}
    for option, text in options.items():
        if option.startswith(tuple(vocabulary.FREE)):
            for line in translate("settings", {option: text}, Places("", "", is_trusted=True)):
                yield replace(line, key=f"factory.{line.key}") if line.key else line
        elif option.startswith("machinefeatures_option_"):
            why = "a machine is told what belljar knows of it, and no words of the site's"
            yield Line("settings", option, text, Fate.IGNORED, why=why)
        else:
            line = line_of("settings", option, text, words, IGNORED, GONE)
            if line.key and not line.raw:
                line = replace(line, fate=Fate.IGNORED, key="", raw=None, why="it says nothing")
            if line.key == "space.poll_silence":
                why = "of the whole time Vac waits a fifth in each round"
                line = replace(line, fate=Fate.CHANGED, why=why)
                yield replace(line, key="space.poll_limit", raw=line.raw * (ROUNDS + 1), why="and then one more round")
            yield line


def _machines(section: str, kind: str, name: str, options: Mapping[str, str]) -> Iterator[Line]:
    if not NAME.fullmatch(name):
        yield Line(section, "", "", Fate.REFUSED, why="no name of a machinetype: a-z, 0-9 and - inside")
        return
    table, left = f"{SECTIONS[kind]}.{name}", dict(options)
    default = f"{ROOT}/{'vmtypes' if kind == 'vmtype' else 'machinetypes'}/{name}"
    folder = left.pop("machinetype_path", default).strip().rstrip("/")
    if kind == "vacuum_pipe":
        url = left.pop("vacuum_pipe_url", "")
        yield Line(section, "vacuum_pipe_url", url, Fate.MAPPED, f"{table}.url", url)
        yield Line(section, "", "", Fate.CHANGED, f"{table}.files", f"{folder}/files", "where Vac looks for them")
    if folder != default:
        yield Line(section, "machinetype_path", folder, Fate.CHANGED, why="files are named by their whole paths")
    lines = list(translate(section, left, Places(f"{folder}/files", folder, is_trusted=True)))
    if any(line.option.endswith("_model") and line.fate is Fate.REFUSED for line in lines):
        yield from (replace(line, fate=Fate.REFUSED, key="", raw=None, why=CONTAINERS) for line in lines)
        return
    yield from (replace(line, key=f"{table}.{line.key}") if line.key else line for line in lines)
    if kind != "vacuum_pipe" and "backoff_seconds" not in options and "root_image" in options:
        yield Line(section, "", "", Fate.CHANGED, why="backoff_seconds is 600 where it is not given; 10 in Vac")


def _loadable(lines: list[Line], head: str) -> tuple[list[Line], str]:
    """The text of a file that loads: what would be a mistake in it is left out and refused. Raises BadSettings where
    something is missing that only a person can add."""
    for _ in range(len(lines) + 1):
        text = head + written(_tables(lines))
        with tempfile.TemporaryDirectory(prefix="belljar-import-") as folder:
            path = Path(folder, "vacuum.toml")
            path.write_text(text, encoding="utf-8")
            mistakes = inspect(path).mistakes
        if not mistakes:
            return lines, text
        lines = _without(lines, {one.key: one.what for one in mistakes})
    raise BadSettings(mistakes, hint="Correct these in the files of Vac, then import again.")


def _without(lines: list[Line], wrong: Mapping[str, str]) -> list[Line]:
    """*lines* without what is wrong; without the whole machinetype or pipe, where it lacks something."""
    kept = []
    present = {name for line in lines if line.raw is not None for name in (line.key, _parent(line.key))}
    lacking = {
        _parent(key): f"{key}: {what}" for key, what in wrong.items() if key not in present and "." in _parent(key)
    }
    for line in lines:
        table = ".".join(line.key.split(".")[:2])
        why = wrong.get(line.key) or wrong.get(_parent(line.key)) or lacking.get(table)
        is_wrong = why and line.raw is not None
        kept.append(replace(line, fate=Fate.REFUSED, key="", raw=None, why=str(why)) if is_wrong else line)
    return kept


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _tables(lines: Iterable[Line]) -> Tables:
    tables: Tables = {}
    for line in lines:
        if line.raw is not None:
            tables.setdefault(_parent(line.key), {})[line.key.rpartition(".")[2]] = line.raw
    kinds = list(KINDS)
    return dict(sorted(tables.items(), key=lambda one: (kinds.index(one[0].partition(".")[0]), one[0])))
