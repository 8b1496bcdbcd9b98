"""A stand-in for the servers of OpenPBS and Torque, as far as the pages for administrators use them: qmgr, qsub, qstat,
qselect, qalter, qhold and pbsnodes on one host, whose jobs the stand-in for pbs_mom (mom.py) starts.

    with serving("openpbs", Path("/srv/pbs")) as folder: ...    # folder / "bin" is what a login shell has in PATH

What it prints was seen on OpenPBS 23.06.06 and Torque 6.1.3 (tests/recordings, docs/batch). It schedules nothing: a job starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import struct
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.batch.lab import pbs_module
from tests.batch.lab.mom import Asked, Mom
from tests.batch.lab.pbs_module import Refused

COMMANDS = ("pbsnodes", "qalter", "qhold", "qmgr", "qselect", "qstat", "qsub")
CLIENT = """#!/usr/bin/python3 -IS
import json, os, socket, sys
stdin = sys.stdin.read() if sys.argv[1:] == [] else ""
told = {{"name": os.path.basename(sys.argv[0]), "argv": sys.argv[1:], "cwd": os.getcwd(), "stdin": stdin}}
with socket.socket(socket.AF_UNIX) as line:
    line.connect("{address}")
    line.sendall(json.dumps(told).encode() + b"\\n")
    out, err, code = json.loads(line.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
KINDS = {"x-config": "CF", "x-python": "PY"}  # how pbs_mom names what it has of a hook


class Complaint(Exception):
    """What a command says on stderr; it ends with *code*."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Job:
    """One that is not over; of Torque, one that is, too."""

    def __init__(self, ident: str, asked: Asked) -> None:
        self.id, self.asked, self.state, self.status = ident, asked, "R", 0


class Server:
    """One host that is server and node. `answer` is one command of somebody's."""

    def __init__(self, system: str, folder: Path, home: Path) -> None:
        self.system, self.bin, self.home = system, folder / "bin", home
        self.host = os.uname().nodename
        (home / "server_priv").mkdir(parents=True)
        self.mom = Mom(home, system, kill_delay=10.0, host=self.host)
        self.hooks_here = home / "mom_priv/hooks"
        self.hooks_here.mkdir()
        self.attributes: dict[str, str] = {"default_queue": "workq"}
        self.resources: dict[str, dict[str, str]] = {}
        self.hooks: dict[str, dict[str, str]] = {}
        self.jobs: dict[str, Job] = {}
        self.note, self.is_offline = "", False
        self.turn = threading.RLock()

    # -- the commands ----------------------------------------------------------------------------------------------------

    def answer(self, name: str, argv: list[str], user: str, cwd: str, stdin: str) -> tuple[str, str, int]:
        """(stdout, stderr, exit code)."""
        try:
            with self.turn:
                if name == "qsub":
                    return self.qsub(argv, user, Path(cwd), stdin) + "\n", "", 0
                return str(getattr(self, name)(argv, user)), "", 0
        except Complaint as complaint:
            return "", f"{complaint}\n", complaint.code
        except Refused as refusal:
            return "", f"qsub: {refusal}\n", 1

    def qsub(self, argv: list[str], user: str, cwd: Path, stdin: str) -> str:
        options = argparse.ArgumentParser(exit_on_error=False)
        for letter in "oeljNvqWS":
            options.add_argument(f"-{letter}", action="append", default=[])
        options.add_argument("script", nargs="?")
        said = options.parse_args(argv)
        resources = dict(word.partition("=")[::2] for one in said.l for word in one.split(","))
        unknown = [one for one in resources if one.startswith("vm_") and one not in self.resources]
        if unknown:
            why = (
                f"Unknown resource type  Resource_List.{unknown[0]}" if self.system == "torque" else "Unknown resource"
            )
            raise Complaint(f"qsub: submit error ({why})" if self.system == "torque" else f"qsub: {why}", 188)
        name = Path(said.script).name if said.script else "STDIN"
        script = (cwd / said.script).read_text() if said.script else stdin
        variables = dict(word.partition("=")[::2] for one in said.v for word in one.split(","))
        asked = Asked(script, resources=chunk(resources), env=variables, name=name, cwd=cwd)
        self.heard_by_the_hook(asked, resources, user)
        return self.start(asked, user, [cwd / path for path in (*said.o, *said.e)])

    def heard_by_the_hook(self, asked: Asked, resources: dict[str, str], user: str) -> None:
        hook = self.hooks.get("belljar_submit", {})
        if hook.get("enabled") != "true" or "x-python" not in hook:
            return
        event = pbs_module.event_of("QUEUEJOB", pbs_module.job_of("", user, asked, self.host, 10), requestor=user)
        event.job.__dict__.update(Resource_List=pbs_module.Resources(resources), Submit_arguments="-l", queue=None)
        script, config = (self.home / f"server_priv/belljar_submit.{KINDS[kind]}" for kind in ("x-python", "x-config"))
        server = types.SimpleNamespace(default_queue=self.attributes["default_queue"])
        pbs_module.run(script, config, event, {}, self.mom.log, server)

    def start(self, asked: Asked, user: str, files: list[Path]) -> str:
        """The job runs when this returns; its two files are there when it is over."""
        entry = pwd.getpwnam(user)
        if "belljar_node" in self.hooks:
            self.mom.hook, self.mom.config = (self.hooks_here / f"belljar_node.{part}" for part in ("PY", "CF"))
        self.mom.prologue = existing(self.home / "mom_priv/prologue")
        self.mom.epilogue = existing(self.home / "mom_priv/epilogue")
        self.mom.starter = starter_of(self.home / "mom_priv/config")
        running = self.mom.start(user, asked, home=Path(entry.pw_dir))
        job = self.jobs[running.id] = Job(running.id, asked)

        def end() -> None:
            running.process.wait()
            with self.turn:
                job.status = running.wait()
                for source, target in zip((running.out_file, running.err_file), files, strict=True):
                    shutil.copyfile(source, target)
                    os.chown(target, entry.pw_uid, entry.pw_gid)
                if self.system == "torque":
                    job.state = "C"
                else:
                    del self.jobs[job.id]

        threading.Thread(target=end, daemon=True).start()
        return running.id

    def qstat(self, argv: list[str], user: str) -> str:
        wanted = [one for one in argv if not one.startswith("-")] or list(self.jobs)
        if unknown := [one for one in wanted if one not in self.jobs]:
            raise Complaint(f"qstat: Unknown Job Id {unknown[0]}", 153)
        return "".join(
            f"Job Id: {job.id}\n    job_state = {job.state}\n    Rerunable = True\n    start_count = 1\n    run_count = 1\n\n"
            for job in map(self.jobs.__getitem__, wanted)
        )

    def qselect(self, argv: list[str], user: str) -> str:
        return "".join(f"{job.id}\n" for job in self.jobs.values() if job.state == "R")

    def qalter(self, argv: list[str], user: str) -> str:
        return self.qstat(argv[-1:], user)[:0]

    qhold = qalter

    def pbsnodes(self, argv: list[str], user: str) -> str:
        if argv[0] == "-o" or argv[0] in ("-r", "-c"):
            self.is_offline, self.note = argv[0] == "-o", argv[2]
            return ""
        note = "note" if self.system == "torque" else "comment"
        state = "offline" if self.is_offline else "free"
        return f"{self.host}\n     state = {state}\n" + f"     {note} = {self.note}\n" * bool(self.note)

    # -- qmgr ------------------------------------------------------------------------------------------------------------

    def qmgr(self, argv: list[str], user: str) -> str:
        (_, directive) = argv
        if user != "root" and not directive.startswith(("list", "print")):
            raise Complaint("qmgr obj= svr=default: Unauthorized Request", 15007 % 256)
        verb, kind, *rest = (
            shlex.split(directive.replace(",", " , ")) if directive.startswith("create") else shlex.split(directive)
        )
        name = rest[0] if rest else ""
        if kind == "server":
            return self.of_server(verb, rest)
        table = {"hook": self.hooks, "resource": self.resources}[kind]
        if verb == "create":
            values = dict(word.split("=") for word in rest[1:] if "=" in word)
            table[name] = {"enabled": "true", **values} if kind == "hook" else values
            return ""
        if name not in table:
            raise Complaint(f"qmgr obj={name} svr=default: {kind} not found", 1)
        if verb == "list":
            lines = [f"    {key} = {value}\n" for key, value in table[name].items() if not key.startswith("x-")]
            return f"{kind.capitalize()} {name}\n{''.join(lines)}\n"
        if verb == "delete":
            del table[name]
        elif verb == "set":
            table[name][rest[1]] = rest[3]
        else:
            return self.content(verb, name, rest[1].partition("/")[2], rest[3:])
        return ""

    def content(self, verb: str, name: str, kind: str, rest: list[str]) -> str:
        """`import` and `export` of a hook's script or settings. The node has it at once."""
        if verb == "export":
            return self.hooks[name].get(kind, "")
        self.hooks[name][kind] = Path(rest[0]).read_text()
        for folder in (self.hooks_here, self.home / "server_priv"):
            (folder / f"{name}.{KINDS[kind]}").write_text(self.hooks[name][kind])
        return ""

    def of_server(self, verb: str, rest: list[str]) -> str:
        if verb == "set":
            key, sign, value = rest
            old = self.attributes.get(key, "")
            self.attributes[key] = f"{old},{value}".strip(",") if sign == "+=" else value
        elif verb == "unset":
            self.attributes.pop(rest[0], None)
        elif verb == "list":
            return f"Server {self.host}\n" + "".join(f"    {key} = {value}\n" for key, value in self.attributes.items())
        else:
            return "".join(f"set server {key} = {value}\n" for key, value in self.attributes.items())
        return ""


def chunk(resources: dict[str, str]) -> dict[str, str]:
    """What the whole job asks for, and the first chunk of its selection."""
    parts = resources.get("select", "").split(":")
    rest = {name: value for name, value in resources.items() if name != "select"}
    return {**rest, **dict(part.partition("=")[::2] for part in parts if "=" in part)}


def existing(path: Path) -> Path | None:
    return path if path.exists() else None


def starter_of(config: Path) -> Path | None:
    """pbs_mom reads its settings again when it is told to; here, before each job."""
    found = re.search(r"^\$job_starter (.*)$", config.read_text(), re.MULTILINE) if config.exists() else None
    return Path(found[1]) if found else None


@contextmanager
def serving(system: str, folder: Path, home: Path) -> Iterator[Server]:
    """The commands work while this lasts. *home* is PBS_HOME, or Torque's home."""
    server = Server(system, folder, home)
    server.bin.mkdir(parents=True)
    address = folder / "socket"
    for name in COMMANDS:
        (server.bin / name).write_text(CLIENT.format(address=address))
        (server.bin / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        address.chmod(0o666)
        listener.listen()
        threading.Thread(target=_serve, args=(listener, server), daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, server: Server) -> None:
    with suppress(OSError):  # closed
        while True:
            line, _ = listener.accept()
            threading.Thread(target=_answer, args=(line, server), daemon=True).start()


def _answer(line: socket.socket, server: Server) -> None:
    """Who asks is who the kernel says."""
    with line, line.makefile("rw") as stream:
        _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        told: dict[str, Any] = json.loads(stream.readline())
        said = server.answer(told["name"], told["argv"], pwd.getpwuid(uid).pw_name, told["cwd"], told["stdin"])
        stream.write(json.dumps(said) + "\n")
