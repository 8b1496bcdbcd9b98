"""A stand-in for pbs_mom of OpenPBS and Torque: starts jobs as they do, as far as a job can see it.

    the script spooled as mom_priv/jobs/ID.SC; the user's shell as a login shell, that path as one line on a pipe
    (or in argv: `--enable-shell-use-argv`); tasks in argv form; `$job_starter`; OpenPBS's hooks, the real files;
    kill by session: TERM, kill_delay, KILL; suspend and resume; exit status n or 256 + s

What was taken from where: OpenPBS src/resmom/{start_exec.c,mom_hook_func.c,requests.c}, Torque src/resmom/start_exec.c.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.batch.lab import pbs_module

LONGEST = 240.0  # seconds any one job of a test may take


@dataclass
class Asked:
    """What a user asks for."""

    script: str | bytes = ""
    argv: Sequence[str | bytes] = ()  # of `qsub -- CMD`, instead of a script
    arguments: str = ""  # of `qsub -F`
    resources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str | bytes] = field(default_factory=dict)  # of `qsub -v`
    shell: str = "/bin/bash"
    name: str = "STDIN"
    queue: str = "workq"
    runs: int = 1
    cwd: Path | None = None
    sandbox: Path | None = None  # the folder of `-W sandbox=PRIVATE`
    task: Sequence[str] = ()  # one of the task manager's, instead of the job itself


class Running:
    """One job."""

    def __init__(
        self, mom: Mom, ident: str, asked: Asked, process: subprocess.Popen[bytes], out: Path, err: Path
    ) -> None:
        self.mom, self.id, self.asked, self.process = mom, ident, asked, process
        self.out_file, self.err_file = out, err
        self.given_back: dict[str, Any] = {}  # what the epilogue hook made of it

    @property
    def out(self) -> str:
        return self.out_file.read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        return self.err_file.read_text(errors="surrogateescape")

    def session(self) -> list[int]:
        """Every process of the job's session."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(words[3]) == self.process.pid and words[0] != "Z":
                    found.append(int(entry.name))
        return found

    def signal(self, number: int, *, top: bool = False) -> None:
        for pid in [self.process.pid] if top else self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout: float = LONGEST) -> int:
        """The job's exit status as PBS records it, after its epilogue."""
        code = self.process.wait(timeout)
        self.signal(signal.SIGKILL)
        status = code if code >= 0 else 256 - code
        self.mom.after(self, status)
        return status

    def delete(self) -> int:
        """`qdel`: TERM to the session, KILL to what is left of it after kill_delay, its leader or others."""
        self.signal(signal.SIGTERM)
        until(lambda: not self.session(), self.mom.kill_delay, "", must=False)
        self.signal(signal.SIGKILL)
        return self.wait()

    def suspend(self) -> None:
        """`qsig -s suspend`: OpenPBS sends STOP to all; Torque TSTP to the top task before."""
        if self.mom.system == "torque":
            self.signal(signal.SIGTSTP, top=True)
            until(lambda: is_stopped(self.process.pid), 5, "", must=False)
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


class Mom:
    """One node. `starter`: `$job_starter` (Torque); `hook`, `config`: files of the hook (OpenPBS)."""

    def __init__(
        self, folder: Path, system: str, *, starter: Path | None = None, hook: Path | None = None,
        config: Path | None = None, use_argv: bool = False, with_exec: bool = False, kill_delay: float = 10.0,
        prologue: Path | None = None, epilogue: Path | None = None, host: str = "pbshost",
    ) -> None:  # fmt: skip
        self.home, self.system, self.starter, self.hook, self.config = folder, system, starter, hook, config
        self.use_argv, self.with_exec, self.kill_delay = use_argv, with_exec, kill_delay
        self.prologue, self.epilogue, self.host = prologue, epilogue, host
        self.number = 0
        self.log: list[str] = []
        for part, mode in (
            ("", 0o755),
            ("mom_priv", 0o751),
            ("mom_priv/jobs", 0o751),
            ("aux", 0o755),
            ("spool", 0o1777),
        ):
            (folder / part).mkdir(exist_ok=True)
            (folder / part).chmod(mode)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, user: str, asked: Asked, *, home: Path, ident: str = "") -> Running:
        """The job runs when this returns. With a hook that refuses it, `Refused` is raised."""
        self.number += 1
        ident = ident or f"{self.number}.{self.host}"
        entry = pwd.getpwnam(user)
        script = self.home / f"mom_priv/jobs/{ident}.SC"
        _write(script, asked.script.encode() if isinstance(asked.script, str) else asked.script, 0o700, entry)
        _write(self.home / f"aux/{ident}", f"{self.host}\n".encode(), 0o644)
        temporary = Path(f"/var/tmp/pbs.{ident}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        os.chown(temporary, entry.pw_uid, entry.pw_gid)
        env = self._env(ident, entry, asked, temporary, home)
        program, argv, line = self._command(asked, script)
        if self.prologue:
            self._script(self.prologue, ident, entry, asked, ())
        if self.hook:
            program, argv, env = self._hooked(ident, entry, asked, program, argv, env)
        elif self.starter:
            # The shell's own argv[0] is lost here, as it is in pbs_mom.
            program, argv = os.fspath(self.starter), [os.fspath(self.starter), program, *argv[1:]] if not asked.task else [
                os.fspath(self.starter), *asked.task
            ]  # fmt: skip
        return self._launch(ident, entry, asked, program, argv, env, line, home)

    def _command(self, asked: Asked, script: Path) -> tuple[str | bytes, list[str | bytes], bytes | None]:
        """(program, argv, what its standard input carries)."""
        if asked.task:
            return asked.task[0], list(asked.task), None
        if asked.argv:
            return asked.argv[0], list(asked.argv), None
        name = "-" + os.path.basename(asked.shell)
        if self.use_argv:
            return asked.shell, [name, os.fspath(script)], None
        prefix = "exec " if self.with_exec else ""
        words = f" {asked.arguments}" if asked.arguments else ""
        path = os.fspath(script)
        if self.system == "openpbs":
            prefix = f"cd {asked.sandbox};" if asked.sandbox else ""
            path = path.replace("[", "\\[").replace("]", "\\]")
        return asked.shell, [name], f"{prefix}{path}{words}\n".encode()

    def _launch(
        self, ident: str, entry: pwd.struct_passwd, asked: Asked, program: str | bytes, argv: Sequence[str | bytes],
        env: Mapping[str, str | bytes], line: bytes | None, home: Path,
    ) -> Running:  # fmt: skip
        out, err = self.home / f"spool/{ident}.OU", self.home / f"spool/{ident}.ER"
        for path in (out, err):
            _write(path, b"", 0o600, entry)
        with out.open("rb+") as out_stream, err.open("rb+") as err_stream:
            process = subprocess.Popen(
                list(argv), executable=program, env=dict(env), cwd=asked.cwd or home, user=entry.pw_uid,
                group=entry.pw_gid, extra_groups=[], start_new_session=True, stdout=out_stream, stderr=err_stream,
                stdin=subprocess.PIPE if line is not None else subprocess.DEVNULL, restore_signals=True, umask=0o077,
            )  # fmt: skip
        if line is not None:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.close()
        return Running(self, ident, asked, process, out, err)

    def _env(
        self, ident: str, entry: pwd.struct_passwd, asked: Asked, temporary: Path, home: Path
    ) -> dict[str, str | bytes]:
        env: dict[str, str | bytes] = {
            "PATH": "/bin:/usr/bin", "PBS_O_HOME": str(home), "PBS_O_PATH": "/usr/bin:/bin", "PBS_O_HOST": self.host,
            "PBS_O_WORKDIR": str(asked.cwd or home), "PBS_O_QUEUE": asked.queue, **asked.env, "HOME": str(home),
            "LOGNAME": entry.pw_name, "PBS_JOBNAME": asked.name, "PBS_JOBID": ident, "PBS_QUEUE": asked.queue,
            "SHELL": asked.shell, "USER": entry.pw_name, "PBS_JOBCOOKIE": "0" * 32, "PBS_NODENUM": "0",
            "PBS_TASKNUM": "2" if asked.task else "1", "PBS_MOMPORT": "15003",
            "PBS_NODEFILE": str(self.home / f"aux/{ident}"), "TMPDIR": str(temporary), "PBS_ENVIRONMENT": "PBS_BATCH",
            "ENVIRONMENT": "BATCH",
        }  # fmt: skip
        cpus = asked.resources.get("ncpus", "1")
        if self.system == "torque":
            walltime = {"PBS_WALLTIME": asked.resources["walltime"]} if "walltime" in asked.resources else {}
            return {**env, "PBS_NUM_NODES": "1", "PBS_NUM_PPN": cpus, "PBS_NP": cpus, "PBS_VNODENUM": "0", **walltime}
        return {**env, "OMP_NUM_THREADS": cpus, "NCPUS": cpus, "PBS_JOBDIR": str(home)}

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _hooked(
        self, ident: str, entry: pwd.struct_passwd, asked: Asked, program: str | bytes, argv: list[str | bytes],
        env: dict[str, str | bytes],
    ) -> tuple[str | bytes, list[str | bytes], dict[str, str | bytes]]:  # fmt: skip
        """execjob_begin and execjob_launch. A hook gets and gives arguments line by line, as PBS hands them over."""
        is_program = bool(asked.argv)
        self.run_hook(ident, entry.pw_name, asked, "EXECJOB_BEGIN")
        event = pbs_module.event_of(
            "EXECJOB_LAUNCH", self.job_of(ident, entry.pw_name, asked), env=pbs_module.as_hook_env(env),
            progname=os.fsdecode(program), argv=pbs_module.as_hook_argv(argv) if is_program or asked.task else [],
        )  # fmt: skip
        self._run(event)
        if is_program or asked.task:
            return event.progname, pbs_module.back_from_hook(event.argv), env
        name = "-" + os.path.basename(event.progname)  # argv[0] of a script's shell is always made by pbs_mom
        return event.progname, [name, *pbs_module.back_from_hook(event.argv[1:])], env

    def run_hook(self, ident: str, user: str, asked: Asked, event: str, **facts: Any) -> Any:
        """One event of a job; returns the event as the hook left it."""
        made = pbs_module.event_of(event, self.job_of(ident, user, asked), **facts)
        self._run(made)
        return made

    def job_of(self, ident: str, user: str, asked: Asked) -> Any:
        return pbs_module.job_of(ident, user, asked, self.host, self.kill_delay)

    def _run(self, event: Any) -> None:
        assert self.hook is not None and self.config is not None
        pbs_module.run(
            self.hook, self.config, event, {"PBS_HOME": str(self.home), "PBS_EXEC": "/nonexistent"}, self.log
        )

    def after(self, job: Running, status: int) -> None:
        """The epilogue, and the end of the job on this node."""
        user = pwd.getpwuid(os.stat(job.out_file).st_uid)
        if self.hook:
            event = self.run_hook(job.id, user.pw_name, job.asked, "EXECJOB_EPILOGUE")
            job.given_back = event.job.changes
            self.run_hook(job.id, user.pw_name, job.asked, "EXECJOB_END")
        if self.epilogue:
            self._script(
                self.epilogue, job.id, user, job.asked, (str(job.process.pid), "", "", "", "", str(status), "")
            )
        shutil.rmtree(f"/var/tmp/pbs.{job.id}", ignore_errors=True)

    def _script(self, path: Path, ident: str, entry: pwd.struct_passwd, asked: Asked, more: Sequence[str]) -> None:
        asks = ",".join(f"{name}={value}" for name, value in asked.resources.items())
        script = str(self.home / f"mom_priv/jobs/{ident}.SC")
        words = (ident, entry.pw_name, entry.pw_name, asked.name, *(more or (asks, asked.queue, "", script)))
        env = {"PATH": "/usr/bin:/bin", "PBS_NODEFILE": str(self.home / f"aux/{ident}")}
        subprocess.run([path, *words], env=env, stdin=subprocess.DEVNULL, check=True, timeout=60)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(condition: Any, seconds: float, what: str, *, must: bool = True) -> None:
    """Look every 20 ms; AssertionError at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            assert not must, f"not within {seconds} s: {what}"
            return
        time.sleep(0.02)


def _write(path: Path, data: bytes, mode: int, owner: pwd.struct_passwd | None = None) -> None:
    path.write_bytes(data)
    path.chmod(mode)
    if owner:
        os.chown(path, owner.pw_uid, owner.pw_gid)
