"""A stand-in for HTCondor's starter on one node: how it starts a job, ends it, and what it makes of the end.

It keeps the conventions that a job can see (tests/recordings/htcondor says where they are from): the execute directory
with the two ads, USER_JOB_WRAPPER with program and arguments, standard output in files of that directory, the soft kill
signal for the process alone, and the wrapper's file for errors, which sends the job back to Idle. It has no queue.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.batch.lab.site import Site

LONGEST = 240.0
ERRORS, OUT, ERR = ".job_wrapper_failure", "_condor_stdout", "_condor_stderr"


@dataclass
class Ended:
    """What the schedd would learn."""

    status: str  # Completed, Idle or Held
    code: int | None = None
    signal: int | None = None
    reason: str = ""
    out: bytes = b""
    err: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)  # all of the sandbox, as it would be transferred back


class Starter:
    """One node. `settings` are those of its config.d."""

    def __init__(self, site: Site) -> None:
        self.site, self.execute, self.config = site, site.top / "execute", site.top / "config.d"
        self.execute.mkdir(mode=0o755)
        self.config.mkdir()
        site.node.chmod(0o1777)  # HTCondor runs nothing as root before a job
        self.bin = site.top / "bin"
        self.bin.mkdir()
        (self.bin / "condor_reconfig").write_text("#!/bin/sh\n")
        (self.bin / "condor_reconfig").chmod(0o755)
        self.number = 0

    def install(self) -> None:
        """As the guide says."""
        folder, prefix = str(self.config), str(self.site.top / "site")
        env = {"PATH": f"{self.bin}:/usr/bin:/bin"}
        self.site.command("batch", "install", "htcondor", "--folder", folder, "--prefix", prefix, env=env)

    def param(self, name: str) -> str:
        """A setting, as condor_config_val tells it."""
        text = "".join(path.read_text() for path in sorted(self.config.iterdir()))
        found = re.findall(rf"^{re.escape(name)}\s*=\s*(.*)$", text, re.MULTILINE)
        return found[-1].strip() if found else ""

    def start(
        self, program: bytes | str, *args: str, user: str = "bjalice", ad: Mapping[str, object] | None = None,
        inputs: Mapping[str, bytes] | None = None, env: Mapping[str, str] | None = None, shadow_starts: int = 1,
        native: bool = False,
    ) -> Running:  # fmt: skip
        """A job with file transfer. *program* is a file to transfer, or the path of one that is there. *native*: without
        the wrapper, to compare with."""
        self.number += 1
        entry = pwd.getpwnam(user)
        sandbox = self.execute / f"dir_{os.getpid()}_{self.number}"
        sandbox.mkdir(mode=0o700)
        files = dict(inputs or {})
        if isinstance(program, bytes):
            files["condor_exec.exe"] = program
        for name, content in files.items():
            (sandbox / name).write_bytes(content)
            (sandbox / name).chmod(0o755)
        path = str(sandbox / "condor_exec.exe") if isinstance(program, bytes) else program
        values = {
            "ClusterId": 4700 + self.number, "ProcId": 0, "Cmd": path, "Owner": user, "JobUniverse": 5, "RequestCpus": 1,
            "RequestMemory": 768, "NumJobStarts": 0, "NumShadowStarts": shadow_starts, **(ad or {}),
        }  # fmt: skip
        (sandbox / ".job.ad").write_text(as_ad(values))
        (sandbox / ".machine.ad").write_text(as_ad({"Cpus": 1, "Memory": values["RequestMemory"], "Disk": 9999999}))
        for name in (OUT, ERR):
            (sandbox / name).touch()
        for path_ in (sandbox, *sandbox.iterdir()):
            os.chown(path_, entry.pw_uid, entry.pw_gid)
        wrapper = "" if native else self.param("USER_JOB_WRAPPER")
        argv = [path, path, *args] if wrapper else [path, *args]
        return Running(
            self, sandbox, wrapper or path, argv, entry, {**self._env(sandbox, bool(wrapper)), **(env or {})}
        )

    def _env(self, sandbox: Path, has_wrapper: bool) -> dict[str, str]:
        """Nothing of the starter's own but these."""
        scratch = str(sandbox)
        env = {
            "_CONDOR_SCRATCH_DIR": scratch, "_CONDOR_SLOT": "slot1_1", "_CONDOR_JOB_IWD": scratch,
            "_CONDOR_JOB_AD": f"{scratch}/.job.ad", "_CONDOR_MACHINE_AD": f"{scratch}/.machine.ad", "_CONDOR_JOB_PIDS": "",
            "_CONDOR_CHIRP_CONFIG": f"{scratch}/.chirp.config", "TMPDIR": scratch, "TMP": scratch, "TEMP": scratch,
            "OMP_NUM_THREADS": "1", "BATCH_SYSTEM": "HTCondor",
        }  # fmt: skip
        return {**env, "_CONDOR_WRAPPER_ERROR_FILE": f"{scratch}/{ERRORS}"} if has_wrapper else env

    def run(self, *words: bytes | str, **options: object) -> Ended:
        return self.start(*words, **options).wait()  # type: ignore[arg-type]

    def prepare(self, ad: Mapping[str, object], user: str = "bjalice") -> tuple[int, str]:
        """HOOK_PREPARE_JOB: (HookStatusCode, HookStatusMessage); 0 where the job may start."""
        entry = pwd.getpwnam(user)
        done = subprocess.run(
            [self.param("BELLJAR_HOOK_PREPARE_JOB")], input=as_ad(ad).encode(), capture_output=True, timeout=60,
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], env={}, check=True, cwd="/",
        )  # fmt: skip
        said = dict(line.split(" = ", 1) for line in done.stdout.decode().splitlines())
        return int(said.get("HookStatusCode", "0")), said.get("HookStatusMessage", "").strip('"')


class Running:
    """A job that runs."""

    def __init__(
        self, starter: Starter, sandbox: Path, program: str, argv: Sequence[str], entry: pwd.struct_passwd,
        env: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.sandbox = sandbox
        with open(sandbox / OUT, "wb") as out, open(sandbox / ERR, "wb") as err:
            self.process = subprocess.Popen(
                argv, executable=program, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=sandbox, env=dict(env),
                user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], start_new_session=True,
            )  # fmt: skip

    def soft_kill(self, number: int = signal.SIGTERM) -> None:
        """condor_rm, condor_hold and condor_vacate_job: KillSig to the job's process, not to its group."""
        os.kill(self.process.pid, number)

    def hard_kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def has_said(self, word: bytes) -> None:
        """Wait until the word is in the job's output. HTCondor tells nobody about that, so it is looked for."""
        end = time.monotonic() + LONGEST
        while word not in (self.sandbox / OUT).read_bytes():
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"{word!r} was not said: {(self.sandbox / ERR).read_text()}")
            time.sleep(0.05)

    def wait(self) -> Ended:
        """JobReaper: a file for errors comes before the exit code."""
        status = self.process.wait(LONGEST)
        out, err = ((self.sandbox / name).read_bytes() for name in (OUT, ERR))
        errors = self.sandbox / ERRORS
        if errors.exists():
            ended = Ended("Idle", reason=errors.read_text().strip().replace("\n", " "), out=out, err=err)
        else:
            code, number = (status, None) if status >= 0 else (None, -status)
            ended = Ended("Completed", code, number, out=out, err=err)
        ended.files = {
            str(path.relative_to(self.sandbox)): path.read_bytes()
            for path in sorted(self.sandbox.rglob("*"))
            if path.is_file() and path.name not in (OUT, ERR)
        }
        shutil.rmtree(self.sandbox)
        return ended


def as_ad(values: Mapping[str, object]) -> str:
    """An ad of the old form."""
    lines = []
    for name, value in values.items():
        text = str(value) if isinstance(value, int) else '"' + str(value).replace('"', '\\"') + '"'
        lines.append(f"{name} = {text}\n")
    return "".join(lines)
