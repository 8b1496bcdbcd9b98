"""A stand-in for the module `pbs` that OpenPBS's hooks import: as much of it as ours use, with the same manners.

Resources that were not asked for are None; `accept` and `reject` leave by SystemExit; arguments pass line by line as
UTF-8 text without blanks at their ends, and a byte that is none loses them all (seen with OpenPBS 23).
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EVENTS = {
    "QUEUEJOB": 1, "MODIFYJOB": 2, "EXECJOB_BEGIN": 64, "EXECJOB_PROLOGUE": 128, "EXECJOB_EPILOGUE": 256,
    "EXECJOB_END": 512, "EXECJOB_LAUNCH": 2048, "EXECHOST_PERIODIC": 4096, "EXECHOST_STARTUP": 8192,
}  # fmt: skip


class Refused(Exception):
    """The hook rejected the event."""


class Resources(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        if key == "ngpus":
            raise KeyError("a resource that this site has not defined")


class Job:
    """A job as a hook has it. What the hook sets is in `changes`."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts, changes={})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self.changes[name] = value

    def in_ms_mom(self) -> bool:
        return True

    def rerun(self) -> None:
        self.changes["rerun"] = True

    def delete(self) -> None:
        self.changes["delete"] = True


class Event:
    def __init__(self, kind: str, job: Any, **facts: Any) -> None:
        self.type, self.job, self.rejected = EVENTS[kind], job, ""
        self.vnode_list: dict[str, Any] = {}  # not there where PBS could not read all of the job
        self.__dict__.update(facts)

    def accept(self) -> None:
        raise SystemExit(0)

    def reject(self, text: str = "") -> None:
        self.rejected = text
        raise SystemExit(1)


def event_of(kind: str, job: Any, **facts: Any) -> Event:
    return Event(kind, job, **facts)


def job_of(ident: str, user: str, asked: Any, host: str, kill_delay: float) -> Job:
    """On the node: the whole job's resources, and its selection with one chunk."""
    chunk = {name: asked.resources[name] for name in ("ncpus", "mem", "vm_image") if name in asked.resources}
    assigned = {name: value for name, value in chunk.items() if name != "vm_image"}
    others = {name: value for name, value in asked.resources.items() if name != "vm_image"}
    variables = {"PBS_O_PATH": "/usr/bin:/bin", "PBS_O_HOST": host, **asked.env}
    readable = not any(isinstance(value, bytes) for value in asked.env.values())
    return Job(
        id=ident, euser=user, Job_Name=asked.name, queue=types.SimpleNamespace(name=asked.queue), run_count=asked.runs,
        Resource_List=Resources(others), schedselect=":".join(["1", *(f"{k}={v}" for k, v in chunk.items())]),
        exec_vnode="({}:{})".format(host, ":".join(f"{k}={v}" for k, v in assigned.items())), exec_host2=f"{host}:15002/0",
        Variable_List=variables if readable else {"PBS_O_QUEUE": asked.queue, "PBS_O_HOST": host},
        executable=os.fsdecode(asked.argv[0]) if asked.argv else None, hashname=ident, job_kill_delay=int(kill_delay),
        argument_list=None, interactive=None, Hold_Types=None, Execution_Time=None, comment=None,
    )  # fmt: skip


def as_hook_argv(argv: Sequence[str | bytes]) -> list[str]:
    words = [os.fsencode(word) for word in argv]
    try:
        texts = [word.decode("utf-8") for word in words]
    except UnicodeDecodeError:
        return [texts_or_nothing(words[0])]
    return [text.partition("\n")[0].strip() for text in texts if text.partition("\n")[0].strip()]


def texts_or_nothing(word: bytes) -> str:
    return word.decode("utf-8", "replace")


def back_from_hook(argv: Sequence[str]) -> list[str | bytes]:
    return [word.partition("\n")[0].strip() for word in argv if word.strip()]


def as_hook_env(env: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: os.fsdecode(value) for name, value in env.items()}


def run(hook: Path, config: Path, event: Event, conf: Mapping[str, str], log: list[str], server: Any = None) -> None:
    """The hook's file, from its first line to accept or reject. Raises Refused."""
    module: Any = types.ModuleType("pbs")
    for name, number in EVENTS.items():
        setattr(module, name, number)
    module.LOG_WARNING, module.LOG_ERROR, module.LOG_DEBUG = 4, 3, 7
    module.hook_config_filename = str(config)
    module.event = lambda: event
    module.get_pbs_conf = lambda: dict(conf)
    module.hold_types = str
    module.server = lambda: server or types.SimpleNamespace(default_queue="workq")
    module.logmsg = lambda level, text: log.append(text)
    module.logjobmsg = lambda ident, text: log.append(f"{ident}: {text}")
    umask = os.umask(0o077)
    sys.modules["pbs"] = module
    try:
        runpy.run_path(str(hook))
    except SystemExit:
        pass
    finally:
        del sys.modules["pbs"]
        os.umask(umask)
    if event.rejected:
        raise Refused(event.rejected)
