"""What an OpenPBS site needs: two hooks and two resources on the server. Nodes get the launchers, and hooks from PBS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Change, OurFile, Piece, Place, SiteOfSystem
from belljar.batch.job import judge, policy
from belljar.batch.pbs import sizes
from belljar.batch.pbs.common import ANSWERS, PROGRAMS, QUEUES, roles
from belljar.findings import Finding, expect
from belljar.records import replace

FILES = Path(__file__).parent
NOTES = "/run/belljar-openpbs"
# https://github.com/openpbs/openpbs (doc/man8/qmgr.8B, pbs_hook_attributes.7B, pbs_mom.8B)
HOOKS = {
    "belljar_submit": ("queuejob", "modifyjob"),
    "belljar_node": (
        "execjob_begin", "execjob_launch", "execjob_epilogue", "execjob_end", "exechost_startup", "exechost_periodic",
    ),
}  # fmt: skip
ATTRIBUTES = {"belljar_submit": {"enabled": "true"}, "belljar_node": {"enabled": "true", "alarm": "60", "freq": "300"}}
RESOURCES = {"vm_image": ("string_array", "hm"), "vm_disk": ("size", "m")}
BUSY = (
    "PBS keeps a resource (15174) as long as a job has it, an ended one in the history (`qstat -x`) too. Uninstall again when"
    " they are gone: after the server's job_history_duration, or once each was deleted by `qdel -x JOB`."
)


class OpenPbsSite(SiteOfSystem):
    """`folder` is PBS_HOME. What it holds tells whether this host is the server (server_priv), a node (mom_priv) or both."""

    default_folder = Path("/var/spool/pbs")
    needs = Needs(
        PROGRAMS, ("PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER"), queues=QUEUES, answers=ANSWERS,
        bins=lambda variables: (f"{variables['PBS_EXEC']}/bin",) if "PBS_EXEC" in variables else (),
    )  # fmt: skip

    def pieces(self, place: Place) -> Iterator[Piece]:
        """Our folder is the same on all hosts, which may share it."""
        is_server, _ = roles(place, "openpbs", (), "PBS_HOME")
        config = OurFile("settings of the hooks", place.wrapper.with_name("belljar.json"), config_of(place))
        hooks = [OurFile(name, place.wrapper.with_name(f"{name}.py"), text_of(name)) for name in HOOKS]
        yield from (config, *hooks)
        if not is_server:
            return
        for hook in hooks:
            yield from _hook(hook, config)
        # Last here is first out: PBS refuses that while a job has one, which without the hooks would run on the node itself.
        for name, (kind, flags) in reversed(RESOURCES.items()):
            do, undo = f"create resource {name} type={kind},flag={flags}", f"delete resource {name}"
            change = _change(f"resource {name}", f"list resource {name}", partial(_has_flags, flags), [do], undo)
            yield replace(change, undo_hint=BUSY)

    def findings(self, place: Place) -> Iterator[Finding]:
        """A classic epilogue does not run beside a hook for the same event."""
        script = place.folder / "mom_priv/epilogue"
        detail = f"{script} does not run while a hook has execjob_epilogue" if script.exists() else ""
        remedy = "Make it a hook of that event, or call it from one."
        yield expect("no epilogue script that PBS would no longer run", not detail, detail, remedy)


def text_of(name: str) -> bytes:
    """A hook is one file to PBS. Both judge as nodes do, by the same text."""
    files = (Path(judge.__file__), Path(sizes.__file__), FILES / f"{name}.py")
    return b"\n\n".join(file.read_bytes() for file in files)


def config_of(place: Place) -> bytes:
    """What both hooks read. Raises BadSetting for settings that mean nothing."""
    values = {
        "wrapper": str(place.wrapper), "belljar": str(place.belljar), "store": str(place.store),
        "notes": NOTES, "scratch": place.settings.scratch, **policy.site_of(place.settings), "retries": place.settings.retries,
    }  # fmt: skip
    return json.dumps(values, indent=1, sort_keys=True).encode() + b"\n"


def _change(purpose: str, probe: str, is_done: Callable[[str], bool], do: list[str], undo: str = "") -> Change:
    """What qmgr is told, and how it is asked."""
    return Change(purpose, _qmgr(probe), is_done, tuple(map(_qmgr, do)), (_qmgr(undo),) if undo else ())


def _qmgr(directive: str) -> tuple[str, ...]:
    return ("qmgr", "-c", directive)


def _has_flags(flags: str, shown: str) -> bool:
    return set(flags) <= set(_attribute(shown, "flag"))


def _hook(source: OurFile, config: OurFile) -> Iterator[Piece]:
    """The hook itself, then what is in it: with no script in it yet it does nothing."""
    name, listed = source.path.stem, f"list hook {source.path.stem}"
    events, attributes = HOOKS[name], ATTRIBUTES[name]

    def is_set(shown: str) -> bool:
        values = {key: _attribute(shown, key).lower() for key in attributes}
        return values == attributes and {*_attribute(shown, "event").split(",")} == {*events}

    words = (f'event = "{",".join(events)}"', *(f"{key} = {value}" for key, value in attributes.items()))
    create, delete = f"create hook {name}", f"delete hook {name}"
    yield _change(f"hook {name} is known", listed, lambda shown: shown.startswith("Hook "), [create], delete)
    yield _change(f"hook {name}: its events", listed, is_set, [f"set hook {name} {word}" for word in words])
    for kind, what, file in (("x-config", "settings", config), ("x-python", "script", source)):
        probe, do = (f"{verb} hook {name} application/{kind} default" for verb in ("export", "import"))
        is_there = partial(_is_text, file.content.decode().strip())
        yield _change(f"hook {name}: its {what}", probe, is_there, [f"{do} {file.path}"])


def _is_text(text: str, shown: str) -> bool:
    return shown.strip() == text


def _attribute(shown: str, name: str) -> str:
    """An attribute's value in what `qmgr list` prints, which folds long ones; "" where it is not set."""
    match = re.search(rf"^ *{name} = (.*)$", shown.replace("\n\t", ""), re.MULTILINE)
    return match[1].strip().strip('"') if match else ""


SITE = OpenPbsSite()
