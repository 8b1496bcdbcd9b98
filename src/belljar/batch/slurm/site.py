"""What a site needs for Slurm: a job_submit plugin in Lua, Prolog and Epilog, three settings of slurm.conf."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Advice, Clash, OurFile, OurLines, Piece, Place, names, outside, read
from belljar.batch.job import judge, policy
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

PLUGIN, SUBMIT, LUA = "belljar.lua", "job_submit.lua", "job_submit_lua.so"
FETCHED = Path("/run/slurm/conf/slurm.conf")
HOOKS, CONFIG = ("Prolog", "Epilog"), ("scontrol", "show", "config")
PLUGINS = "jobsubmitplugins"
PAGE = "docs/batch/reference/slurm.md"
MARK = "-- Made by `belljar batch install slurm`"


class SlurmSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/etc/slurm")
    needs = Needs(
        ("scontrol", "squeue"), ("SLURM_CONF",), told_by=lambda folder: _conf_in(folder),
        home=lambda variables: Path(conf).parent if (conf := variables.get("SLURM_CONF", "")).startswith("/") else None,
        queues=(("scontrol", "--all", "--oneliner", "show", "partition"), r"(?m)^PartitionName=(\S+)"),
    )  # fmt: skip

    def pieces(self, place: Place) -> list[Piece]:
        """Options: `feature`, words `FEATURE=IMAGE`: a node feature that stands for an image; `bait`, partitions whose
        jobs get nodes of their own; `submit`: `lua`, or `hand` if users write the first line of a script themselves."""
        conf, pieces, lines = _conf(place), list[Piece](), list[str]()
        if _asks_at_submission(place):
            pieces += self._at_submission(place, conf)
            lines += [] if PLUGINS in conf else ["JobSubmitPlugins=lua"]
        for hook in HOOKS:
            pieces += self._hook(place, hook, conf)
            lines += [] if any(conf.get(hook.lower(), ())) else [f"{hook}={place.folder}/belljar-{hook.lower()}"]
        if lines and not _is_configless(place):
            pieces.append(OurLines("settings of Slurm", place.folder / "slurm.conf", tuple(sorted(lines))))
        return pieces

    def _at_submission(self, place: Place, conf: Mapping[str, list[str]]) -> Iterator[Piece]:
        plugin, submit, text = place.folder / PLUGIN, place.folder / SUBMIT, plugin_text(place)
        if not _has_lua(place):
            yield Clash("this Slurm has no Lua", f"install its {LUA}, or say --set submit=hand ({PAGE})")
        yield OurFile("rules of the site, for slurmctld at submission", plugin, text)
        if not _is_theirs(submit):
            digest = hashlib.sha256(text).hexdigest()
            shim = place.filled(Path(__file__).with_name(SUBMIT), plugin=in_lua(str(plugin)), digest=digest)
            yield OurFile("job_submit plugin of slurmctld", submit, shim)
        elif not names(submit, plugin.name):
            yield Advice("your own job_submit.lua asks belljar's", f"let {submit} call {plugin} ({PAGE})")
        plugins = ",".join(conf.get(PLUGINS, []))
        if plugins and "lua" not in re.split(r"[,\s]+", plugins):
            advice = f"In slurm.conf, add lua to what is there: JobSubmitPlugins={plugins},lua"
            yield Advice("the Lua plugin of slurmctld", advice)

    def _hook(self, place: Place, hook: str, conf: Mapping[str, list[str]]) -> Iterator[Piece]:
        """The script, where it goes: a site's own hook stays, and calls ours."""
        verb, purpose = hook.lower(), f"{hook} of each job on a node"
        # Beside slurm.conf, which nodes without belljar share: a Prolog that is not there would drain them.
        theirs, content = [path for path in conf.get(verb, []) if path], place.hook("slurm", verb)
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
        is_called = _asks_at_submission(place) and _is_theirs(submit) and names(submit, PLUGIN)
        return (*((("touch", "--", str(submit)),) if is_called else ()), reconfigure)

    def findings(self, place: Place) -> Iterator[Finding]:
        try:
            version, config = place.output("scontrol", "--version").strip(), shown(place.output(*CONFIG))
        except BelljarError as exc:
            yield fail("slurmctld answers", exc.message, "Start it, or run this where `scontrol` works.")
            return
        yield ok("slurmctld answers", version)
        if _asks_at_submission(place):
            what, submit, plugins = (
                "slurmctld asks belljar at submission",
                place.folder / SUBMIT,
                config.get(PLUGINS, [""])[-1],
            )
            if "lua" in plugins.split(",") and _is_theirs(submit) and not names(submit, PLUGIN):
                yield fail(what, f"{submit} is the site's own", f"Let it call {place.folder / PLUGIN} ({PAGE}).")
            else:
                remedy = "`scontrol reconfigure`, or restart slurmctld."
                yield expect(what, "lua" in plugins.split(","), f"JobSubmitPlugins={plugins}", remedy)
        for hook in HOOKS:
            yield _hooked(place, hook, config.get(hook.lower(), []))


SITE = SlurmSite()


def _conf_in(folder: Path) -> dict[str, str]:
    """Slurm's own commands look in the default folder, and on a node without files of its own ask slurmctld."""
    conf = folder / "slurm.conf"
    return {"SLURM_CONF": str(conf)} if folder != SlurmSite.default_folder and conf.exists() else {}


def _is_theirs(path: Path) -> bool:
    text = read(path)
    return text is not None and not text.startswith(MARK.encode())


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
    """Not on a node that fetched its settings. Raises BadOption."""
    how = place.options.get("submit", "lua")
    if how not in ("lua", "hand"):
        raise BadOption(f"--set submit={how}: lua or hand", hint="hand: users write the first line of their scripts.")
    return how == "lua" and not _is_configless(place)


def shown(text: str) -> dict[str, list[str]]:
    """The configuration slurmctld goes by, keys in lower case. Slurm 24.11 numbers what may stand there several times."""
    settings: dict[str, list[str]] = {}
    for match in re.finditer(r"^(\w+)(?:\[[0-9]+\])?\s*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE):
        settings.setdefault(match[1].lower(), []).append(match[2].replace("(null)", ""))
    return settings


def _has_lua(place: Place) -> bool:
    """Was this Slurm built with Lua? Else slurmctld would not start with the plugin. If it cannot be seen, it was."""
    folders = [Path(name) for name in shown(place.asked(*CONFIG)).get("plugindir", [""])[-1].split(":") if name]
    return any((folder / LUA).exists() for folder in folders) or not any(folder.is_dir() for folder in folders)


def _hooked(place: Place, hook: str, scripts: Sequence[str]) -> Finding:
    ours, named = place.folder / f"belljar-{hook.lower()}", " ".join(scripts)
    is_called = any(
        (Path(script[:-1]) / f"50-{ours.name}").exists()
        if script.endswith("/*")
        else script == str(ours) or names(Path(script), ours.name)
        for script in scripts
    )
    remedy = f"or let {named} call {ours}." if named else f"or set {hook}={ours}."
    return expect(f"{hook} calls belljar", is_called, f"{hook}={named}", f"`scontrol reconfigure`, {remedy}")


# -- the job_submit plugin, in Lua ------------------------------------------------------------------------------------


def plugin_text(place: Place) -> bytes:
    """The site's settings as a table, then code that is the same everywhere. Raises BadSetting, BadOption for what cannot be
    said in it."""
    site, wrapper = policy.site_of(place.settings), str(place.wrapper)
    if re.search(r"\s", wrapper) or len(wrapper) > 80:
        raise BadOption(f"{wrapper}: a `#!` line takes no path with blanks and none longer than 80 characters")
    rules = [
        {"kind": kind, "name": name, "pattern": _pattern(glob), "shown": glob} for kind, name, glob in site["allow"]
    ]
    site |= {
        "wrapper": wrapper, "names": str(place.store / "images/names"), "features": _features(place), "allow": rules,
        "baits": {name: name for name in place.options.get("bait", "").split()}, "disk_is_scratch": bool(place.settings.scratch),
        "checkpoint_hint": policy.CHECKPOINT_HINT, "pull_hint": judge.PULL_HINT,
    }  # fmt: skip
    code = Path(__file__).with_name("submit.lua").read_text()
    made = f"{MARK} from the settings [batch]. Changes here are lost."
    lines = "".join(f"   {key} = {in_lua(value)},\n" for key, value in site.items())
    return f"{made}\nlocal site = {{\n{lines}}}\n\n{code}".encode()


def _features(place: Place) -> dict[str, str]:
    images = {}
    for word in place.options.get("feature", "").split():
        feature, _, image = word.partition("=")
        if not (re.fullmatch(r"[\w.-]+", feature) and judge.IMAGE_NAME.match(image)):
            hint = "Say --set 'feature=el9=alma9 el8=alma8'."
            raise BadOption(f"feature {word!r}: not of the form FEATURE=IMAGE", hint=hint)
        images[feature] = image
    return images


def _pattern(glob: str) -> str:
    """A pattern of image names as one of Lua, anchored."""
    return f"^{policy.in_words(glob, lambda char: f'%{char}' if char in '.-' else char)}$"


def in_lua(value: object) -> str:
    """Plain data as an expression of Lua's, whatever a text holds."""
    match value:
        case str():
            return '"' + re.sub(rb"[^\w/.\- *?:,]", lambda byte: b"\\%03d" % byte[0][0], value.encode()).decode() + '"'
        case dict():
            return "{" + ", ".join(f"[{in_lua(key)}] = {in_lua(each)}" for key, each in value.items()) + "}"
        case list():
            return "{" + ", ".join(map(in_lua, value)) + "}"
    return str(value).lower()
