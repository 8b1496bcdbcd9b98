"""A stand-in for LSF on one host: bsub with its esub, the job file, the job starter of a profile, bkill.

It keeps the conventions that a job can see (tests/recordings/lsf says where they are from). It has no queue: a job runs
when it is submitted. What the real one expands, quotes and deletes is left to the same shell.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.batch.lab.site import Site

LONGEST = 240.0
ABORT = 97
HEAD = "#! /bin/sh\n\n$LSB_TRAPSIGS\n$LSB_RCP1\n$LSB_RCP2\n$LSB_RCP3\n# LSBATCH: User input\n"
TAIL = '\nExitStat=$?\nwait\n# LSBATCH: End user input\ntrue\nexit `expr $? "|" $ExitStat`\n'
SCRIPT = (
    "( cat <<_USER_\\SCRIPT_\n{text}_USER_SCRIPT_\n) > $LSB_JOBFILENAME.shell\nchmod u+x $LSB_JOBFILENAME.shell\n"
    "{starter}$LSB_JOBFILENAME.shell\nsaveExit=$?\nrm -f $LSB_JOBFILENAME.shell\n(exit $saveExit)"
)
TERMINATE = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class Refused(Exception):
    """bsub: Request aborted by esub."""


@dataclass
class Ended:
    """What bhist would tell: a death by signal s shows as 128 + s."""

    code: int
    out: bytes
    err: bytes


class Sbatchd:
    """One host, one application profile."""

    def __init__(self, site: Site) -> None:
        self.site, self.configdir, self.serverdir = site, site.top / "configdir", site.top / "etc"
        for folder in (self.configdir, self.serverdir, site.top / "bin"):
            folder.mkdir()
        (self.configdir / "lsb.applications").write_text(
            "# the site's own\nBegin Application\nNAME = other\nEnd Application\n"
        )
        (site.top / "bin/badmin").write_text("#!/bin/sh\n")
        (site.top / "bin/badmin").chmod(0o755)
        self.number = 4700

    def install(self) -> None:
        """As the guide says."""
        words = ("--folder", self.configdir, "--prefix", self.site.top / "site", "--set", f"serverdir={self.serverdir}")
        env = {"PATH": f"{self.site.top}/bin:/usr/bin:/bin"}
        self.site.command("batch", "install", "lsf", *map(str, words), env=env)

    def profile(self, name: str) -> dict[str, str]:
        """A section of lsb.applications."""
        text = (self.configdir / "lsb.applications").read_text()
        for section in re.findall(r"^Begin Application\n(.*?)^End Application$", text, re.MULTILINE | re.DOTALL):
            pairs = (line.split("=", 1) for line in section.splitlines() if "=" in line and not line.startswith("#"))
            values = {key.strip(): value.strip() for key, value in pairs}
            if values.get("NAME") == name:
                return values
        return {}

    def bsub(
        self, command: str = "", *, script: str = "", vm: str | None = None, user: str = "bjalice", index: int = 0,
        memory: int = 768, queue: str = "normal", native: bool = False,
    ) -> Running:  # fmt: skip
        """Submit and start. `vm`: what stands in `-a "vm(...)"`. *native*: no esub and no starter, to compare with."""
        self.number += 1
        entry = pwd.getpwnam(user)
        options, env = {}, {}
        if not native and vm is not None:
            options, env = self._esub(vm, entry, queue, memory)
        profile = self.profile(options.get("LSB_SUB3_APP", ""))
        starter = profile.get("JOB_STARTER", "")
        if starter and "%USRCMD" not in starter:
            starter += " %USRCMD"
        head, _, tail = starter.partition("%USRCMD")
        body = SCRIPT.format(text=script, starter=head) if script else head + command + tail
        file = self.site.home(user) / f".lsbatch/1767225600.{self.number}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(HEAD + body + TAIL)
        for path in (file.parent, file):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        file.chmod(0o700)
        env.update(self._env(file, user, index, memory, queue, profile, starter))
        for hook in ("PRE_EXEC",):
            self._hook(profile.get(hook, ""), env)
        return Running(self, file, env, entry, lambda: self._hook(profile.get("POST_EXEC", ""), env))

    def _esub(
        self, vm: str, entry: pwd.struct_passwd, queue: str, memory: int
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Run esub.vm as the user; read back what it wants changed."""
        files = {name: self.site.home(entry.pw_name) / f".esub.{name.lower()}" for name in ("PARM", "MODIFY", "ENV")}
        asked = f'LSB_SUB_QUEUE="{queue}"\nLSB_SUB_RES_REQ="rusage[mem={memory}]"\nLSB_SUB_ADDITIONAL="vm({vm})"\n'
        for name, path in files.items():
            path.write_text(asked if name == "PARM" else "")
            os.chown(path, entry.pw_uid, entry.pw_gid)
        done = subprocess.run(
            [self.serverdir / "esub.vm", *filter(None, vm.split(","))], capture_output=True, timeout=60, check=False, cwd="/",
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[],
            env={"LSB_SUB_PARM_FILE": str(files["PARM"]), "LSB_SUB_MODIFY_FILE": str(files["MODIFY"]), "PATH": "/usr/bin:/bin",
                 "LSB_SUB_MODIFY_ENVFILE": str(files["ENV"]), "LSB_SUB_ABORT_VALUE": str(ABORT)},
        )  # fmt: skip
        if done.returncode == ABORT:
            raise Refused(done.stderr.decode())
        assert done.returncode == 0, done.stderr.decode()
        options, env = (
            dict(re.findall(r'^(\w+)="(.*)"$', files[name].read_text(), re.MULTILINE)) for name in ("MODIFY", "ENV")
        )
        return options, env

    def _env(
        self, file: Path, user: str, index: int, memory: int, queue: str, profile: Mapping[str, str], starter: str
    ) -> dict[str, str]:
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.site.home(user)), "USER": user, "LOGNAME": user,
            "LSFUSER": user, "LSB_JOB_EXECUSER": user, "LSB_JOBID": str(self.number), "LSB_JOBINDEX": str(index),
            "LSB_JOBNAME": "a name", "LSB_QUEUE": queue, "LSB_JOBFILENAME": str(file), "LSB_CHKFILENAME": str(file),
            "LSB_HOSTS": "node01", "LSB_MCPU_HOSTS": "node01 1", "LSB_DJOB_NUMPROC": "1", "LSB_MAX_NUM_PROCESSORS": "1",
            "LSB_TRAPSIGS": "trap # 15 10 12 2 1", "LSB_EFFECTIVE_RSRCREQ": f"select[type==any] rusage[mem={memory}.00]",
            "LS_SUBCWD": str(self.site.home(user)), "LSB_BATCH_JID": str(self.number), "LS_EXEC_T": "START",
        }  # fmt: skip
        if starter:
            env["LSB_JOB_STARTER"] = starter
        if profile.get("REQUEUE_EXIT_VALUES"):
            env["LSB_EXIT_REQUEUE"] = profile["REQUEUE_EXIT_VALUES"]
        return env

    def _hook(self, command: str, env: Mapping[str, str]) -> None:
        """PRE_EXEC and POST_EXEC as root, by LSB_PRE_POST_EXEC_USER."""
        if command:
            bare = {**env, "PATH": "/bin:/usr/bin:/sbin:/usr/sbin", "LSB_JOBEXIT_STAT": "0"}
            done = subprocess.run(
                ["/bin/sh", "-c", command], env=bare, capture_output=True, timeout=60, check=False, cwd="/tmp"
            )
            assert done.returncode == 0, done.stderr.decode()


class Running:
    """A job that runs."""

    def __init__(
        self, lsf: Sbatchd, file: Path, env: Mapping[str, str], entry: pwd.struct_passwd, after: object
    ) -> None:
        self.file, self._after = file, after
        self.out, self.err = file.with_suffix(f"{file.suffix}.out"), file.with_suffix(f"{file.suffix}.err")
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                ["/bin/sh", str(file)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env),
                cwd=lsf.site.home(entry.pw_name), user=entry.pw_uid, group=entry.pw_gid, extra_groups=[],
                start_new_session=True,
            )  # fmt: skip

    def bkill(self, number: int = 0, interval: float = 10.0) -> None:
        """One signal to all of the job's processes; without one INT, TERM and KILL, until it is gone."""
        for one in (number,) if number else TERMINATE:
            os.killpg(self.process.pid, one)
            if number:
                return
            try:
                self.process.wait(interval)
                return
            except subprocess.TimeoutExpired:
                continue

    def has_said(self, word: bytes) -> None:
        """Wait until the word is in the job's output. LSF tells nobody about that, so it is looked for."""
        end = time.monotonic() + LONGEST
        while word not in self.out.read_bytes():
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"{word!r} was not said: {self.err.read_text()}")
            time.sleep(0.05)

    def wait(self) -> Ended:
        status = self.process.wait(LONGEST)
        self._after()  # type: ignore[operator]
        return Ended(status if status >= 0 else 128 - status, self.out.read_bytes(), self.err.read_bytes())
