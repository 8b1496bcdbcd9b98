"""What a site needs for Slurm: a job_submit plugin in Lua, Prolog and Epilog, three settings of slurm.conf.

The same pieces go to every host that has a slurm.conf: slurmctld's uses the plugin, the nodes the rest.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from belljar.batch import Settings, marks, slurm_lua, slurm_oci_site
from belljar.batch.client import Needs
from belljar.batch.siting import Advice, Finding, OurFile, OurLines, Piece, Place
from belljar.batch.slurm import KILL_WAIT
from belljar.batch.slurm_lua import quoted
from belljar.errors import OUR_FAILURE, BelljarError

PLUGIN, SUBMIT = "belljar.lua", "job_submit.lua"
OLDEST = (22, 5)
HOOK_DEADLINE = 60  # seconds; slurmd waits for Prolog and Epilog as long as they like
HOOKS = ("Prolog", "Epilog")

HOOK = """#!/bin/sh
# {name} of Slurm, as root on the node. Its exit code is always 0: with any other one slurmd drains the node.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
{first}timeout -k 5 {deadline} {belljar} batch {verb} slurm </dev/null || :
exit 0
"""

SHIM = """{mark}.
-- plugin {digest}
local belljar = dofile({plugin})

function slurm_job_submit(job_desc, part_list, submit_uid)
   return belljar.submit(job_desc, part_list, submit_uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return belljar.modify(job_desc, job_rec, part_list, modify_uid)
end

return slurm.SUCCESS
"""

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
    )  # fmt: skip

    def pieces(self, place: Place) -> list[Piece]:
        """Options: `feature`, words `FEATURE=IMAGE`: a node feature that stands for an image. `redirect`: `lua`, the line
        before a job's script; `oci`, `sbatch --container`; or both."""
        conf, found, lines = _conf(place), list[Piece](), list[str]()
        redirect = slurm_oci_site.redirect(place)
        if redirect != "oci":
            found += self._at_submission(place, conf)
            if not conf.get("jobsubmitplugins", ""):
                lines.append("JobSubmitPlugins=lua")
        if redirect != "lua":
            found += slurm_oci_site.pieces(place)
        for hook in HOOKS:
            found_hook, line = self._hook(place, hook, conf)
            found += found_hook
            lines += line
        if lines:
            clashes = tuple(rf"{line.partition('=')[0]}\s*=" for line in lines)
            found.append(
                OurLines("settings of Slurm", place.folder / "slurm.conf", tuple(sorted(lines)), clashes=clashes)
            )
        return found

    def _at_submission(self, place: Place, conf: dict[str, str]) -> Iterator[Piece]:
        plugin, text = place.folder / PLUGIN, slurm_lua.plugin(place)
        theirs = place.folder / SUBMIT if _is_theirs(place.folder / SUBMIT) else None
        yield OurFile("rules of the site, for slurmctld at submission", plugin, text, caller=theirs)
        yield from self._submit(place, plugin, text)
        plugins = conf.get("jobsubmitplugins", "")
        if plugins and "lua" not in re.split(r"[,\s]+", plugins):
            advice = f"In slurm.conf, add lua to what is there: JobSubmitPlugins={plugins},lua"
            yield Advice("the Lua plugin of slurmctld", advice)

    def _submit(self, place: Place, plugin: Path, text: bytes) -> Iterator[Piece]:
        path = place.folder / SUBMIT
        if _is_theirs(path):
            if _names(path, plugin):
                return
            advice = MERGE.format(path=path, plugin=quoted(str(plugin)))
            yield Advice("your own job_submit.lua asks belljar's", advice)
            return
        digest = hashlib.sha256(text).hexdigest()
        shim = SHIM.format(mark=slurm_lua.MARK, plugin=quoted(str(plugin)), digest=digest)
        yield OurFile("job_submit plugin of slurmctld", path, shim.encode())

    def _hook(self, place: Place, hook: str, conf: dict[str, str]) -> tuple[list[Piece], list[str]]:
        """The script, where it goes, and the line that names it: a site's own hook stays."""
        verb, first = hook.lower(), ""
        if hook == "Prolog" and slurm_oci_site.redirect(place) != "lua":
            first = slurm_oci_site.before_the_job(conf.get("slurmdspooldir", ""))
        content = HOOK.format(
            name=hook, verb=verb, deadline=HOOK_DEADLINE, belljar=shlex.quote(str(place.belljar)), first=first
        ).encode()
        theirs = conf.get(verb, "")
        purpose = f"{hook} of each job on a node"
        if theirs.endswith("/*"):
            return [OurFile(purpose, Path(theirs[:-1]) / f"50-belljar-{verb}", content, 0o755)], []
        path = place.folder / f"belljar-{verb}"
        if not theirs:
            return [OurFile(purpose, path, content, 0o755)], [f"{hook}={path}"]
        pieces: list[Piece] = [OurFile(purpose, path, content, 0o755, caller=Path(theirs))]
        if _names(Path(theirs), path):
            return pieces, []
        return [*pieces, Advice(purpose, f"slurm.conf has {hook}={theirs} already: let that script call {path}.")], []

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        """slurmctld looks at the time of job_submit.lua alone: a site's own one that loads ours is made newer with it."""
        submit, reconfigure = place.folder / SUBMIT, ("scontrol", "reconfigure")
        is_merged = slurm_oci_site.redirect(place) != "oci" and _is_theirs(submit)
        if is_merged and _names(submit, place.folder / PLUGIN):
            return (("touch", "--", str(submit)), reconfigure)
        return (reconfigure,)

    def findings(self, place: Place) -> list[Finding]:
        try:
            version = place.run(("scontrol", "--version")).decode(errors="replace").strip()
            shown = place.run(("scontrol", "show", "config")).decode(errors="replace")
        except BelljarError as exc:
            return [Finding("slurmctld answers", False, exc.message, "Start it, or run this where `scontrol` works.")]
        config = {
            match[1].lower(): match[2].replace("(null)", "")
            for match in re.finditer(r"^(\w+)\s*=[ \t]*(.*?)[ \t]*$", shown, re.MULTILINE)
        }
        return [
            _version(version),
            *(one for one in (_plugins(place, config), _images(place)) if slurm_oci_site.redirect(place) != "oci"),
            *(_hooked(place, hook, config) for hook in HOOKS),
            _requeue_codes(config),
            _requeues(config),
            _kill_wait(place.settings, config),
            _tracking(config),
        ]


SITE = SlurmSite()


# -- where it is -------------------------------------------------------------------------------------------------------


def _folder_of(conf: str) -> Path | None:
    return Path(conf).parent if conf.startswith("/") else None


def _conf_in(folder: Path) -> dict[str, str]:
    """Slurm's own commands look in the default folder, and on a node without files of its own ask slurmctld."""
    conf = folder / "slurm.conf"
    return {"SLURM_CONF": str(conf)} if folder != SlurmSite.default_folder and conf.exists() else {}


# -- what is there -----------------------------------------------------------------------------------------------------


def _is_theirs(path: Path) -> bool:
    try:
        return not path.read_text(errors="replace").startswith(slurm_lua.MARK)
    except FileNotFoundError:
        return False


def _names(script: Path, ours: Path) -> bool:
    """Whether a script of the site's has the name of a file of ours in it, by whatever path."""
    try:
        return ours.name in script.read_text(errors="replace")
    except OSError:
        return False


def _conf(place: Place) -> dict[str, str]:
    """The site's own settings of slurm.conf and of the files it includes, keys in lower case."""
    found: dict[str, str] = {}
    waiting, seen = [place.folder / "slurm.conf"], set()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            text = marks.take(path.read_bytes(), "#", str(path)).decode(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if include := re.match(r"include\s+(\S+)$", line, re.IGNORECASE):
                waiting.append(place.folder / include[1])
            elif setting := re.match(r"(\w+)\s*=\s*(.*)$", line):
                found.setdefault(setting[1].lower(), setting[2].strip())
    return found


def _version(printed: str) -> Finding:
    match = re.search(r"(\d+)\.(\d+)", printed)
    is_good = bool(match) and (int(match[1]), int(match[2])) >= OLDEST if match else False
    return Finding("Slurm is recent enough", is_good, printed, "belljar needs Slurm 22.05 or later.")


def _plugins(place: Place, config: dict[str, str]) -> Finding:
    plugins = config.get("jobsubmitplugins", "")
    what = "slurmctld asks belljar at submission"
    if "lua" not in plugins.split(","):
        return Finding(what, False, f"JobSubmitPlugins={plugins}", "`scontrol reconfigure`, or restart slurmctld.")
    path = place.folder / SUBMIT
    if _is_theirs(path) and not _names(path, place.folder / PLUGIN):
        return Finding(what, False, f"{path} is the site's own", f"Let it call {place.folder / PLUGIN}; see the guide.")
    return Finding(what, True, f"JobSubmitPlugins={plugins}")


def _hooked(place: Place, hook: str, config: dict[str, str]) -> Finding:
    current, what = config.get(hook.lower(), ""), f"{hook} calls belljar"
    if current.endswith("/*"):
        is_ours = (Path(current[:-1]) / f"50-belljar-{hook.lower()}").exists()
    elif current == str(place.folder / f"belljar-{hook.lower()}"):
        is_ours = True
    else:
        try:
            is_ours = "belljar" in Path(current).read_text(errors="replace")
        except OSError:
            is_ours = False
    remedy = f"`scontrol reconfigure`, or let {current} call {place.folder / f'belljar-{hook.lower()}'}."
    return Finding(what, is_ours, f"{hook}={current}", "" if is_ours else remedy)


def _requeue_codes(config: dict[str, str]) -> Finding:
    """A code in these lists means requeue, whoever exits with it: 125 is what a job that cannot run ends with."""
    found = [
        f"{key}={config[key]}" for key in ("requeueexit", "requeueexithold") if _has(config.get(key, ""), OUR_FAILURE)
    ]
    remedy = f"Take {OUR_FAILURE} out of it: a job that belljar refuses would be started again for ever."
    return Finding(
        f"exit code {OUR_FAILURE} is no order to requeue", not found, " ".join(found), remedy if found else ""
    )


def _has(codes: str, code: int) -> bool:
    for part in re.split(r"[,\s]+", codes):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(first) <= code <= int(last if last.isdecimal() else first):
            return True
    return False


def _requeues(config: dict[str, str]) -> Finding:
    is_on = config.get("jobrequeue", "1") == "1"
    remedy = "JobRequeue=1; else a job whose machine cannot be had fails with exit code 125 at its first try."
    return Finding(
        "jobs may be requeued", is_on, f"JobRequeue={config.get('jobrequeue', '?')}", "" if is_on else remedy
    )


def _kill_wait(settings: Settings, config: dict[str, str]) -> Finding:
    match = re.match(r"(\d+)", config.get("killwait", ""))
    wait = float(match[1]) if match else KILL_WAIT
    grace = settings.grace or KILL_WAIT - 2
    is_good = grace <= wait - 1
    ours = f"`grace = {max(wait - 2, 1):.0f}` in [batch]"
    remedy = f"KillWait={int(grace) + 2} in slurm.conf, or {ours}: a job's KILL comes first."
    return Finding(
        "a job's grace ends before Slurm's KILL",
        is_good,
        f"KillWait={wait:.0f} s, grace {grace:.0f} s",
        "" if is_good else remedy,
    )


def _tracking(config: dict[str, str]) -> Finding:
    kind = config.get("proctracktype", "")
    detail = (
        kind
        if kind.endswith("cgroup")
        else f"{kind}: what leaves the process tree escapes it; QEMU dies with its wrapper anyway"
    )
    return Finding("the job's processes are tracked", bool(kind), detail)


def _images(place: Place) -> Finding:
    """SlurmUser reads the names of images at submission."""
    folder = place.store / "images/names"
    try:
        is_open = all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
    except OSError:
        return Finding("slurmctld sees the names of images", True, f"{folder} is not here: nodes refuse unknown ones")
    return Finding(
        "slurmctld sees the names of images", is_open, str(folder), "" if is_open else f"chmod o+x up to {folder}"
    )
