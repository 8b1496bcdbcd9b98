"""Files of Vac (vac.conf, of all its versions) become a vacuum.toml, with a report of every word: mapped, changed, ignored or refused.

Files are read as Vac reads them: a later one wins, sections of one name are one. https://github.com/vacproject/vac, vac.conf(5)
"""

from __future__ import annotations

import configparser
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from belljar.errors import BadSettings, HostError, InputMissing
from belljar.host.files import read_capped
from belljar.host.toml import written
from belljar.records import dataclass, replace
from belljar.vacuum.settings.settings import NAME, inspect
from belljar.vacuum.settings.vocabulary import CONTAINERS, GB, MODEL, Fate, Line, Places, number, translate, whole

LARGEST = 1 << 20
MIB = 1 << 20
ROOT = "/var/lib/vac"
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


# Option of [settings] -> (table, key, how its value is read).
WORDS: Mapping[str, tuple[str, str, Callable[[str], Any]]] = {
    "vac_space": ("space", "name", str), "gocdb_sitename": ("space", "site", str),
    "factories": ("space", "factories", str.split), "vacmon_hostport": ("space", "vacmon", lambda text: text.lower().split()),
    "total_processors": ("factory", "processors", whole), "cpu_total": ("factory", "processors", whole),
    "processors_per_superslot": ("factory", "processors_per_superslot", whole),
    "cpu_per_machine": ("factory", "processors_per_superslot", whole),
    "vcpu_per_machine": ("factory", "processors_per_superslot", whole),
    "mb_per_processor": ("factory", "memory", lambda text: whole(text) * MIB),
    "mb_per_cpu": ("factory", "memory", lambda text: whole(text) * MIB),
    "disk_gb_per_processor": ("factory", "disk", lambda text: int(number(text) * GB)),
    "disk_gb_per_cpu": ("factory", "disk", lambda text: int(number(text) * GB)),
    "scratch_gb": ("factory", "disk", lambda text: int(number(text) * GB)),
    "hs06_per_processor": ("factory", "hs06", number), "hs06_per_cpu": ("factory", "hs06", number),
    "overload_per_processor": ("factory", "overload", number), "overload_per_cpu": ("factory", "overload", number),
    "shutdown_time": ("factory", "shutdown_time", number), "cycle_seconds": ("factory", "cycle", number),
}  # fmt: skip
# Of older versions: they count for a machine, which had `cpu_per_machine` processors.
PER_MACHINE = {"mb_per_machine": "mb_per_processor", "hs06_per_machine": "hs06_per_processor"}
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
    settings = sections.get("settings", {})
    lines = [*_settings(settings), *_old_sections(sections)]
    for name, options in sections.items():
        lines += _machines(name, _inherited(name, options, sections))
    lines += [_the_mode()]
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


# -- [settings] --------------------------------------------------------------------------------------------------------


def _settings(options: Mapping[str, str]) -> Iterator[Line]:
    for option, text in options.items():
        if option.startswith(("user_data_option_", "user_data_file_")):
            for line in translate("settings", {option: text}, Places("", "", is_trusted=True)):
                yield replace(line, key=f"factory.{line.key}") if line.key else line
            continue
        line = _setting(option, text.strip(), options)
        yield line
        if line.key == "space.poll_silence":
            yield replace(line, key="space.poll_limit", raw=line.raw * 6, why="and then one more round")


def _setting(option: str, text: str, options: Mapping[str, str]) -> Line:
    line = Line("settings", option, text, Fate.MAPPED)
    try:
        if option in PER_MACHINE:
            return _per_machine(line, options)
        if option == "total_machines":
            return _total_machines(line, options)
        if option == "udp_timeout_seconds":
            limit = number(text)
            why = "of the whole time Vac waits a fifth in each round"
            return replace(line, fate=Fate.CHANGED, key="space.poll_silence", raw=limit / 5, why=why)
        if option == "draining":
            is_so = text.lower() == "yes"
            return replace(line, key="factory.draining", raw=True) if is_so else _ignored(line, "only yes counts")
        if option not in WORDS:
            return _ignored(line, _why_ignored(option))
        table, key, read = WORDS[option]
        value = read(text)
    except ValueError as exc:
        return replace(line, fate=Fate.REFUSED, why=str(exc))
    return replace(line, key=f"{table}.{key}", raw=value) if value else _ignored(line, "it says nothing")


def _why_ignored(option: str) -> str:
    if option.startswith("machinefeatures_option_"):
        return "a machine is told what belljar knows of it, and no words of the site's"
    return IGNORED.get(option, "no such word")


def _ignored(line: Line, why: str) -> Line:
    return replace(line, fate=Fate.IGNORED, why=why)


def _each(options: Mapping[str, str]) -> int:
    """Processors of a machine, where they were the same for all."""
    return whole(options.get("cpu_per_machine") or options.get("vcpu_per_machine") or "1") or 1


def _per_machine(line: Line, options: Mapping[str, str]) -> Line:
    new = PER_MACHINE[line.option]
    if any(WORDS[one][:2] == WORDS[new][:2] for one in options if one in WORDS):
        return _ignored(line, f"{new} says it")
    table, key, read = WORDS[new]
    value = number(line.value) / _each(options)
    value = read(str(int(value))) if key == "memory" else value
    return replace(line, fate=Fate.CHANGED, key=f"{table}.{key}", raw=value, why="per processor now")


def _total_machines(line: Line, options: Mapping[str, str]) -> Line:
    if "total_processors" in options or "cpu_total" in options:
        return _ignored(line, "the number of processors says it")
    value = whole(line.value) * _each(options)
    return replace(line, fate=Fate.CHANGED, key="factory.processors", raw=value, why="processors are counted")


def _old_sections(sections: Mapping[str, Mapping[str, str]]) -> Iterator[Line]:
    """Up to 0.16 two lists had sections of their own; later versions refuse to start with them. All others are not read."""
    if names := sections.get("factories", {}).get("names"):
        why = "[factories] is gone since 0.17"
        yield Line("factories", "names", names, Fate.CHANGED, "space.factories", names.lower().split(), why)
    for section in sections:
        if section.partition(" ")[0] not in (
            "settings",
            "factories",
            "targetshares",
            "machinetype",
            "vmtype",
            "vacuum_pipe",
        ):
            yield Line(section, "", "", Fate.IGNORED, why="no section of Vac's")


def _the_mode() -> Line:
    why = "the space may have factories of Vac; set improved when it has none"
    return Line("", "", "", Fate.CHANGED, "space.mode", "compatible", why)


# -- machinetypes and pipes --------------------------------------------------------------------------------------------


def _inherited(name: str, options: Mapping[str, str], sections: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    kind, _, own = name.partition(" ")
    share = sections.get("targetshares", {}).get(own) if kind in ("machinetype", "vmtype") else None
    return {**({} if share is None else {"target_share": share}), **options}


def _machines(section: str, options: Mapping[str, str]) -> Iterator[Line]:
    kind, _, name = section.partition(" ")
    tables = {"machinetype": "machinetype", "vmtype": "machinetype", "vacuum_pipe": "pipe"}
    if kind not in tables:
        return
    if not NAME.fullmatch(name):
        yield Line(section, "", "", Fate.REFUSED, why="no name of a machinetype: a-z, 0-9 and - inside")
        return
    table, left = f"{tables[kind]}.{name}", dict(options)
    default = f"{ROOT}/{'vmtypes' if kind == 'vmtype' else 'machinetypes'}/{name}"
    folder = left.pop("machinetype_path", default).strip().rstrip("/")
    if kind == "vacuum_pipe":
        yield Line(
            section,
            "vacuum_pipe_url",
            left.get("vacuum_pipe_url", ""),
            Fate.MAPPED,
            f"{table}.url",
            left.pop("vacuum_pipe_url", ""),
        )
        yield Line(section, "", "", Fate.CHANGED, f"{table}.files", f"{folder}/files", "where Vac looks for them")
    if folder != default:
        yield Line(section, "machinetype_path", folder, Fate.CHANGED, why="files are named by their whole paths")
    lines = list(translate(section, left, Places(f"{folder}/files", folder, is_trusted=True)))
    if any(line.option in MODEL and line.fate is Fate.REFUSED for line in lines):
        yield from (replace(line, fate=Fate.REFUSED, key="", raw=None, why=CONTAINERS) for line in lines)
        return
    yield from (replace(line, key=f"{table}.{line.key}") if line.key else line for line in lines)
    if kind != "vacuum_pipe" and "backoff_seconds" not in options and "root_image" in options:
        yield Line(section, "", "", Fate.CHANGED, why="backoff_seconds is 600 where it is not given; 10 in Vac")


# -- the file ----------------------------------------------------------------------------------------------------------


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
    tables: Tables = {"space": {}, "factory": {}}
    for line in lines:
        if line.raw is not None:
            table, _, key = line.key.rpartition(".")
            tables.setdefault(table, {})[key] = line.raw
    return {name: table for name, table in sorted(tables.items(), key=_order) if table}


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    kinds = ("space", "factory", "machinetype", "pipe")
    return kinds.index(item[0].partition(".")[0]), item[0]
