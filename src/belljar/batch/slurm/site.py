"""What a site needs for Slurm: a job_submit plugin in Lua, Prolog and Epilog, three settings of slurm.conf."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.install.commands import Needs
from belljar.batch.install.files import filled, names, outside, read
from belljar.batch.install.pieces import Advice, OurFile, OurLines, Piece, Place, hook_text
from belljar.batch.slurm import lua as slurm_lua
from belljar.batch.slurm.dialect import KILL_WAIT
from belljar.batch.slurm.lua import quoted
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

PLUGIN, SUBMIT, LUA = "belljar.lua", "job_submit.lua", "job_submit_lua.so"
FETCHED = Path("/run/slurm/conf/slurm.conf")
OLDEST = (22, 5)
HOOKS = ("Prolog", "Epilog")

NO_LUA = """It cannot ask belljar at submission: --comment=vm=IMAGE and partitions with images mean nothing here. Users write
    #!{wrapper} --image=IMAGE
before the first line of a script; the node looks at it by the site's rules. Say --set submit=hand when that is as it is to be."""

MERGE = """Your {path} stays as it is. Let it ask belljar's: near its top
    local belljar = dofile({plugin})
and in slurm_job_submit(job_desc, part_list, submit_uid), before it returns slurm.SUCCESS,
    if belljar.submit(job_desc, part_list, submit_uid) ~= slurm.SUCCESS then return slurm.ERROR end
and the same with belljar.modify(job_desc, job_rec, part_list, modify_uid) in slurm_job_modify.
slurmctld reads its plugin again when that file changes: `belljar batch install slurm` touches it from then on."""


class SlurmSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/etc/slurm")
    needs = Needs(
        ("scontrol", "squeue"), ("SLURM_CONF",), home=lambda variables: _folder_of(variables.get("SLURM_CONF", "")),
        told_by=lambda folder: _conf_in(folder),
        queues=(("scontrol", "--all", "--oneliner", "show", "partition"), r"(?m)^PartitionName=(\S+)"),
    )  # fmt: skip

    def pieces(self, place: Place) -> list[Piece]:
        """Options: `feature`, words `FEATURE=IMAGE`: a node feature that stands for an image; `bait`, partitions
        whose jobs get nodes of their own; `line`, how much of a
        `#!` line a node's kernel reads; `submit`: `lua`, or `hand` if users write that line themselves."""
        conf, pieces, lines = _conf(place), list[Piece](), list[str]()
        if _asks_at_submission(place) and not _is_configless(place):
            if _has_lua(place):
                pieces += self._at_submission(place, conf)
                lines += [] if "jobsubmitplugins" in conf else ["JobSubmitPlugins=lua"]
            else:
                pieces.append(Advice("this Slurm has no Lua", NO_LUA.format(wrapper=place.wrapper)))
        for hook in HOOKS:
            pieces += self._hook(place, hook, conf)
            lines += [] if any(conf.get(hook.lower(), ())) else [f"{hook}={place.folder}/belljar-{hook.lower()}"]
        if lines and not _is_configless(place):
            pieces.append(OurLines("settings of Slurm", place.folder / "slurm.conf", tuple(sorted(lines))))
        return pieces

    def _at_submission(self, place: Place, conf: Mapping[str, list[str]]) -> Iterator[Piece]:
        plugin, submit, text = place.folder / PLUGIN, place.folder / SUBMIT, slurm_lua.plugin(place)
        yield OurFile("rules of the site, for slurmctld at submission", plugin, text)
        if not _is_theirs(submit):
            digest = hashlib.sha256(text).hexdigest()
            shim = filled(Path(__file__).with_name(SUBMIT), plugin=quoted(str(plugin)), digest=digest)
            yield OurFile("job_submit plugin of slurmctld", submit, shim)
        elif not names(submit, plugin.name):
            yield Advice(
                "your own job_submit.lua asks belljar's", MERGE.format(path=submit, plugin=quoted(str(plugin)))
            )
        plugins = ",".join(conf.get("jobsubmitplugins", []))
        if plugins and "lua" not in re.split(r"[,\s]+", plugins):
            advice = f"In slurm.conf, add lua to what is there: JobSubmitPlugins={plugins},lua"
            yield Advice("the Lua plugin of slurmctld", advice)

    def _hook(self, place: Place, hook: str, conf: Mapping[str, list[str]]) -> Iterator[Piece]:
        """The script, where it goes: a site's own hook stays, and calls ours."""
        verb, purpose = hook.lower(), f"{hook} of each job on a node"
        # Beside slurm.conf, which nodes without belljar share: a Prolog that is not there would drain them.
        theirs, content = [path for path in conf.get(verb, []) if path], hook_text(place, "slurm", verb)
        ours = place.folder / f"belljar-{verb}"
        if folder := next((path[:-1] for path in theirs if path.endswith("/*")), ""):
            yield OurFile(purpose, Path(folder) / f"50-belljar-{verb}", content)
            return
        yield OurFile(purpose, ours, content)
        if theirs and not any(path == str(ours) or names(Path(path), ours.name) for path in theirs):
            yield Advice(purpose, f"slurm.conf has {hook}={theirs[0]} already: let that script call {ours}.")

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        """slurmctld looks at the time of job_submit.lua alone: a site's own one that loads ours is made newer with it."""
        submit, reconfigure = place.folder / SUBMIT, ("scontrol", "reconfigure")
        if _asks_at_submission(place) and _is_theirs(submit) and names(submit, PLUGIN):
            return (("touch", "--", str(submit)), reconfigure)
        return (reconfigure,)

    def findings(self, place: Place) -> list[Finding]:
        try:
            version = place.output("scontrol", "--version").strip()
            shown = _shown(place)
        except BelljarError as exc:
            return [fail("slurmctld answers", exc.message, "Start it, or run this where `scontrol` works.")]
        config = {key: values[-1] for key, values in shown.items()}
        at_submission = _asks_at_submission(place) and not _is_configless(place)
        return [
            _version(version),
            *((_lua(place), _plugins(place, config)) if at_submission else ()),
            *(_hooked(place, hook, shown.get(hook.lower(), [])) for hook in HOOKS),
            _requeues(config),
            _kill_wait(place.settings, config),
        ]


SITE = SlurmSite()


def _folder_of(conf: str) -> Path | None:
    return Path(conf).parent if conf.startswith("/") else None


def _conf_in(folder: Path) -> dict[str, str]:
    """Slurm's own commands look in the default folder, and on a node without files of its own ask slurmctld."""
    conf = folder / "slurm.conf"
    return {"SLURM_CONF": str(conf)} if folder != SlurmSite.default_folder and conf.exists() else {}


def _is_theirs(path: Path) -> bool:
    text = read(path)
    return text is not None and not text.startswith(slurm_lua.MARK.encode())


def _conf(place: Place) -> dict[str, list[str]]:
    """The site's own settings of slurm.conf and of the files it includes, keys in lower case, each with all its values."""
    settings: dict[str, list[str]] = {}
    waiting, seen = [FETCHED if _is_configless(place) else place.folder / "slurm.conf"], set()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        text = read(path) or b""
        with suppress(ValueError):  # where the marks do not pair, install says so
            text = outside(text)
        for line in text.decode(errors="replace").splitlines():
            line = line.partition("#")[0].strip()
            if include := re.match(r"include\s+(\S+)$", line, re.IGNORECASE):
                waiting.append(place.folder / include[1])
            elif setting := re.match(r"(\w+)\s*=\s*(.*)$", line):
                settings.setdefault(setting[1].lower(), []).append(setting[2].strip())
    return settings


def _is_configless(place: Place) -> bool:
    """A node that fetched its slurm.conf from slurmctld has none to be changed. https://slurm.schedmd.com/configless_slurm.html"""
    return FETCHED.exists() and not (place.folder / "slurm.conf").exists()


def _asks_at_submission(place: Place) -> bool:
    """Raises BadOption."""
    how = place.options.get("submit", "lua")
    if how not in ("lua", "hand"):
        raise BadOption(f"--set submit={how}: lua or hand", hint="hand: users write the first line of their scripts.")
    return how == "lua"


def _shown(place: Place) -> dict[str, list[str]]:
    """The configuration slurmctld goes by, keys in lower case. Slurm 24.11 numbers what may stand there several times."""
    text = place.output("scontrol", "show", "config")
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^(\w+)(?:\[[0-9]+\])?\s*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE):
        found.setdefault(match[1].lower(), []).append(match[2].replace("(null)", ""))
    return found


def _has_lua(place: Place) -> bool:
    """Was this Slurm built with Lua? Else slurmctld would not start with the plugin. If it cannot be seen, it was."""
    try:
        folders = [Path(one) for one in _shown(place).get("plugindir", [""])[-1].split(":") if one]
    except BelljarError:
        return True
    return any((one / LUA).exists() for one in folders) or not any(one.is_dir() for one in folders)


def _lua(place: Place) -> Finding:
    remedy = "Install Slurm's Lua plugin, or say `belljar batch install slurm --set submit=hand`."
    return expect("Slurm has its Lua plugin", _has_lua(place), f"{LUA}: needed to ask belljar at submission", remedy)


def _version(printed: str) -> Finding:
    match = re.search(r"(\d+)\.(\d+)", printed)
    is_good = match is not None and (int(match[1]), int(match[2])) >= OLDEST
    return expect("Slurm is recent enough", is_good, printed, "belljar needs Slurm 22.05 or later.")


def _plugins(place: Place, config: dict[str, str]) -> Finding:
    plugins = config.get("jobsubmitplugins", "")
    what = "slurmctld asks belljar at submission"
    if "lua" not in plugins.split(","):
        return fail(what, f"JobSubmitPlugins={plugins}", "`scontrol reconfigure`, or restart slurmctld.")
    path = place.folder / SUBMIT
    if _is_theirs(path) and not names(path, PLUGIN):
        return fail(what, f"{path} is the site's own", f"Let it call {place.folder / PLUGIN}; see the guide.")
    return ok(what, f"JobSubmitPlugins={plugins}")


def _hooked(place: Place, hook: str, current: Sequence[str]) -> Finding:
    ours, named = place.folder / f"belljar-{hook.lower()}", " ".join(current)
    is_called = any(
        (Path(one[:-1]) / f"50-{ours.name}").exists()
        if one.endswith("/*")
        else one == str(ours) or names(Path(one), ours.name)
        for one in current
    )
    remedy = f"or let {named} call {ours}." if named else f"or set {hook}={ours}."
    return expect(f"{hook} calls belljar", is_called, f"{hook}={named}", f"`scontrol reconfigure`, {remedy}")


def _requeues(config: dict[str, str]) -> Finding:
    value = config.get("jobrequeue", "1")
    remedy = "JobRequeue=1; else a job for which no machine can be started fails with exit code 125 at its first try."
    return expect("jobs may be requeued", value == "1", f"JobRequeue={value}", remedy)


def _kill_wait(settings: Settings, config: dict[str, str]) -> Finding:
    match = re.match(r"(\d+)", config.get("killwait", ""))
    wait = float(match[1]) if match else KILL_WAIT
    grace = settings.grace or KILL_WAIT - 2
    ours = f"`grace = {max(wait - 2, 1):.0f}` in [batch]"
    remedy = f"KillWait={int(grace) + 2} in slurm.conf, or {ours}: a job's KILL comes first."
    detail = f"KillWait={wait:.0f} s, grace {grace:.0f} s"
    return expect("a job's grace ends before Slurm's KILL", grace <= wait - 1, detail, remedy)
