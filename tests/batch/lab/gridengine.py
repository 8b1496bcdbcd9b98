"""A private Grid Engine: one host, its own network, host name and folders; nothing of the system's is touched.

qmaster and execd run in namespaces (network, host name, mounts) of their own, with private folders over
/var/lib/gridengine and /var/spool/gridengine, so that several labs can be there at once. No systemd.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.batch.lab.site import USERS, Site

FIRST_JOB = 4711
HOST, QUEUE, ADMIN = "bjge", "all.q", "sgeadmin"
ROOT, SPOOL, CELL = Path("/var/lib/gridengine"), Path("/var/spool/gridengine"), "default"
PACKAGES = ("gridengine-master", "gridengine-exec", "gridengine-client")
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "SGE_ROOT": str(ROOT),
    "SGE_CELL": CELL,
}
# $1 folder, $2 host name. Two ends of a pair: Grid Engine wants an address that is not the loopback's.
HOLDER = """set -eu
ip link set lo up; ip link add v0 type veth peer name v1; ip addr add 10.78.0.1/24 dev v0; ip link set v0 up; ip link set v1 up
hostname "$2"
mount --bind "$1/hosts" /etc/hosts; mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/lib" /var/lib/gridengine; mount --bind "$1/spool" /var/spool/gridengine
echo up; exec sleep infinity"""
GLOBAL = {
    "load_report_time": "00:00:01",
    "execd_params": "ENABLE_ADDGRP_KILL=true",
    "mailer": "/bin/true",
    "loglevel": "log_info",
    "min_uid": "100",
    "min_gid": "100",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 joblog=false sharelog=00:00:00",
}
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}

Done = subprocess.CompletedProcess[bytes]


def is_installed() -> bool:
    return shutil.which("sge_qmaster", path="/usr/sbin") is not None


def install() -> None:
    """The distribution's packages, without a cell: every lab makes its own."""
    if is_installed():
        return
    answer = f"gridengine-common shared/gridengineconfig boolean true\ngridengine-common shared/gridenginecell string {CELL}\n"
    answer += f"gridengine-common shared/gridenginemaster string {HOST}\n"
    subprocess.run(["debconf-set-selections"], input=answer.encode(), check=True)
    words = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    subprocess.run(words, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=True, capture_output=True)


def until(wanted: Callable[[], Any], what: str, *, timeout: float = 30.0, every: float = 0.1) -> Any:
    """What *wanted* gives as soon as it gives something true. Grid Engine tells most of its states only when asked."""
    deadline = time.monotonic() + timeout
    while not (found := wanted()):
        assert time.monotonic() < deadline, f"after {timeout} s still waiting for: {what}"
        time.sleep(every)
    return found


class GridEngine:
    """`run` a command in there, as root (a manager), sgeadmin or a user; `submit` and `ended` for jobs."""

    def __init__(self, site: Site, *, slots: int = 4) -> None:
        install()
        self.site, self.slots, self.top = site, slots, site.top / "gridengine"
        self.lib, self.spool, self.tmp = self.top / "lib", self.top / "spool", self.top / "tmp"
        self._holder: subprocess.Popen[bytes] | None = None
        self._make_folders()
        try:
            self._open_namespaces()
            self._init_cell()
            self.start("qmaster")
            self._configure()
            self.start("execd")
            self._wait_for_queue()
        except BaseException:
            self.close()
            raise

    # -- in the namespaces ---------------------------------------------------------------------------------------------

    def run(
        self, *words: str, user: str = "", check: bool = True, timeout: float = 60.0, stdin: bytes = b"", **env: str
    ) -> Done:
        """To its end, as root or a user in its home, with a bare environment."""
        done = subprocess.run(
            [*self._entry(user), *words], env=self._env(user, env), input=stdin, capture_output=True, timeout=timeout, check=False
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{words}: exit {done.returncode}\n{done.stdout.decode()}\n{done.stderr.decode()}")
        return done

    def _entry(self, user: str) -> list[str]:
        """argv in front of a command. `setpriv` gives the namespace's root up for the user."""
        assert self._holder is not None
        home = pwd.getpwnam(ADMIN).pw_dir if user == ADMIN else str(self.site.home(user)) if user else "/"
        words = ["nsenter", "-t", str(self._holder.pid), "-n", "-u", "-m", f"--wd={home}", "--"]
        return words + (["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"] if user else [])

    def _env(self, user: str, more: dict[str, str]) -> dict[str, str]:
        who = {"HOME": str(self.site.home(user)), "USER": user, "LOGNAME": user} if user in USERS else {}
        return {**ENV, **who, **more}

    def config(self, *words: str, stdin: bytes = b"") -> str:
        """`qconf words` as the manager the packages know."""
        return self.run("qconf", *words, user=ADMIN, stdin=stdin).stdout.decode()

    def set_queue(self, **values: str) -> None:
        for name, value in values.items():
            self.config("-mattr", "queue", name, value, QUEUE)

    def change(self, what: str, settings: dict[str, str]) -> None:
        """Lines of a configuration that qconf shows with -sX and reads back with -MX from a file."""
        show = {"conf": ("-sconf", "global"), "sconf": ("-ssconf",)}[what]
        text = "".join(line + "\n" for line in self.config(*show).splitlines() if not line.startswith("#"))
        for key, value in settings.items():
            text, count = re.subn(rf"(?m)^{key}\s.*$", lambda _, k=key, v=value: f"{k} {v}", text)
            text += "" if count else f"{key} {value}\n"
        path = self.top / "global" if what == "conf" else self.top / "scheduler"
        path.write_text(text)
        self.config("-Mconf" if what == "conf" else "-Msconf", str(path))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, *words: str, user: str = "bjalice", script: str = "", **env: str) -> str:
        """The job's number. *script* is given on standard input."""
        done = self.run("qsub", "-terse", *words, user=user, stdin=script.encode(), **env)
        return done.stdout.decode().split(".")[0].strip()

    def sync(
        self, *words: str, user: str = "bjalice", script: str = "", timeout: float = 120.0, **env: str
    ) -> tuple[str, int]:
        """Submit and wait with Grid Engine's own means: the number and what `qsub -sync y` ended with."""
        done = self.run(
            "qsub",
            "-terse",
            "-sync",
            "y",
            *words,
            user=user,
            stdin=script.encode(),
            check=False,
            timeout=timeout,
            **env,
        )
        first = done.stdout.decode().split("\n")[0].split(".")[0]
        assert first.isdigit(), done.stdout.decode() + done.stderr.decode()
        return first, done.returncode

    def account(self, job: str, *, task: str = "", timeout: float = 20.0, rows: int = 1) -> list[dict[str, str]]:
        """What the accounting holds of a job, one entry per start. It is written a moment after the end."""

        def look() -> list[dict[str, str]]:
            done = self.run("qacct", "-j", job, *(("-t", task) if task else ()), user=ADMIN, check=False)
            found = []
            for block in re.split(r"(?m)^=+$", done.stdout.decode()):
                pairs = (line.split(None, 1) for line in block.strip().splitlines() if line.strip())
                found.append({pair[0]: pair[1].strip() if len(pair) > 1 else "" for pair in pairs})
            found = [one for one in found if "jobnumber" in one]
            return found if len(found) >= rows else []

        return until(look, f"job {job} in the accounting", timeout=timeout, every=0.2)

    def state(self, job: str) -> str:
        """Its state letters as qstat shows them ("qw", "r", "Eqw", ...); "" when the system does not know it any more."""
        for line in self.run("qstat", "-u", "*").stdout.decode().splitlines():
            words = line.split()
            if words and words[0] == job:
                return words[4]
        return ""

    def until_state(self, job: str, *wanted: str, timeout: float = 30.0) -> str:
        return until(
            lambda: (found := self.state(job)) in wanted and (found or "gone"),
            f"job {job} in {wanted}",
            timeout=timeout,
        )

    def queue_state(self) -> str:
        for line in self.run("qstat", "-f", "-q", QUEUE).stdout.decode().splitlines():
            if line.startswith(QUEUE + "@"):
                words = line.split()
                return words[5] if len(words) > 5 else ""
        return "gone"

    def detail(self, job: str) -> str:
        return self.run("qstat", "-j", job, check=False).stdout.decode()

    # -- its life ------------------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        self.top.mkdir(mode=0o755)
        subprocess.run(["cp", "-a", str(ROOT), str(self.lib)], check=True)
        owner = pwd.getpwnam(ADMIN)
        for folder in (
            self.spool,
            self.spool / "execd",
            self.spool / "qmaster",
            self.spool / "qmaster/job_scripts",
            self.spool / "spooldb",
        ):
            folder.mkdir(mode=0o755)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        number = self.spool / "qmaster/jobseqnum"
        number.write_text(f"{FIRST_JOB}\n")  # a number that stands for nothing else in what jobs print
        os.chown(number, owner.pw_uid, owner.pw_gid)
        (self.lib / CELL / "common/act_qmaster").write_text(HOST + "\n")
        (self.top / "hosts").write_text(f"127.0.0.1 localhost\n10.78.0.1 {HOST} {HOST}.lab\n")
        (self.top / "passwd").write_text(
            "".join(self._at_home(line) for line in Path("/etc/passwd").read_text().splitlines(True))
        )
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)

    def _at_home(self, line: str) -> str:
        """A line of the password file; the site's users live on the site."""
        words = line.split(":")
        return ":".join([*words[:5], str(self.site.home(words[0])), *words[6:]]) if words[0] in USERS else line

    def _open_namespaces(self) -> None:
        words = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "bash", "-c", HOLDER, "hold"]
        self._holder = subprocess.Popen(
            [*words, str(self.top), HOST], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENV
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "no namespaces can be made here"

    def _init_cell(self) -> None:
        script = "/usr/share/gridengine/scripts/init_cluster"
        self.run(script, str(ROOT), CELL, str(SPOOL / "spooldb"), ADMIN, user=ADMIN)

    def _configure(self) -> None:
        self.run("qconf", "-am", "root", user=ADMIN, check=False)  # some builds know root already
        self.config("-as", HOST)
        names = "load_scaling complex_values user_lists xuser_lists projects xprojects usage_scaling report_variables"
        self._add("-Ae", f"hostname {HOST}\n" + "".join(f"{name} NONE\n" for name in names.split()))
        # Of this lab alone: Grid Engine kills whatever carries a job's group id.
        first = 20000 + os.getpid() % 400 * 100
        self.change("conf", {**GLOBAL, "gid_range": f"{first}-{first + 99}"})
        self.change("sconf", SCHEDULER)
        self._add("-Ahgrp", f"group_name @allhosts\nhostlist {HOST}\n")
        self._add("-Ap", "pe_name smp\nslots 99\nuser_lists NONE\nxuser_lists NONE\nstart_proc_args NONE\nstop_proc_args NONE\n"
                  "allocation_rule $pe_slots\ncontrol_slaves FALSE\njob_is_first_task TRUE\nurgency_slots min\naccounting_summary TRUE\nqsort_args NONE\n")  # fmt: skip
        self.add_queue(QUEUE)

    def add_queue(self, name: str) -> None:
        """A queue of this host as a site might have it."""
        template = self.config("-sq")
        values = {"qname": name, "hostlist": "@allhosts", "slots": str(self.slots), "shell_start_mode": "unix_behavior",
                  "load_thresholds": "NONE", "notify": "00:00:03", "rerun": "TRUE", "pe_list": "smp", "tmpdir": str(self.tmp)}  # fmt: skip
        for key, value in values.items():
            template = re.sub(rf"(?m)^{key}\s.*$", lambda _, k=key, v=value: f"{k} {v}", template)
        self._add("-Aq", template)

    def _add(self, option: str, text: str) -> None:
        path = self.top / ("new" + option)
        path.write_text(text)
        self.config(option, str(path))

    def start(self, daemon: str) -> None:
        """qmaster or execd: it puts itself into the background once it answers."""
        self.run(f"sge_{daemon}", timeout=30)
        if daemon == "qmaster":
            until(lambda: self.run("qconf", "-sh", check=False).returncode == 0, "sge_qmaster to answer")

    def stop(self, daemon: str, *, timeout: float = 30.0) -> None:
        """End a daemon, as the init script does; jobs go on."""
        files = {"qmaster": self.spool / "qmaster/qmaster.pid", "execd": self.spool / f"execd/{HOST}/execd.pid"}
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int(files[daemon].read_text())
            if Path(f"/proc/{pid}/comm").read_text().startswith("sge_"):
                descriptor = os.pidfd_open(pid)
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                _wait_for_end(descriptor, f"sge_{daemon}", timeout)

    def _wait_for_queue(self) -> None:
        until(
            lambda: self.queue_state() == "" and " lx-amd64" in self.run("qstat", "-f").stdout.decode(),
            "the queue to open",
        )

    @property
    def pid(self) -> int:
        """Of the process that holds its namespaces."""
        assert self._holder is not None
        return self._holder.pid

    def processes(self) -> list[int]:
        """Everything that runs in the lab's network."""
        assert self._holder is not None
        mine, found = os.readlink(f"/proc/{self._holder.pid}/ns/net"), []
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == mine:
                    found.append(int(entry))
        return found

    def close(self) -> None:
        """End everything that runs in there, at once: an orderly end of sge_qmaster takes ten seconds."""
        if self._holder is None:
            return
        for pid in self.processes():
            if pid != self._holder.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout:
            self._holder.stdout.close()
        self._holder = None


def _wait_for_end(descriptor: int, what: str, timeout: float) -> None:
    import select

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        assert poller.poll(timeout * 1000), f"{what} did not end within {timeout} s"
    finally:
        os.close(descriptor)
