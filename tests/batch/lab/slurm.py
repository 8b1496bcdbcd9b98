"""A private Slurm on this one machine: slurmctld, several slurmd, a munged of their own; no systemd, loopback only.

    lab = Slurm(folder, nodes=2); lab.up(); ...; lab.down()

Everything lies in one folder. Two labs can be up at once: ports are looked for. Ordinary users need SLURM_CONF and
nothing else. Missing packages are installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAMS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge", "sbatch": "slurm-client", "scontrol": "slurm-client",
    "squeue": "slurm-client",
}  # fmt: skip
LONGEST = 60.0  # seconds anything of a lab may take to come up or go down
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

DEFAULTS = {
    "ClusterName": "lab",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "SlurmctldDebug": "debug",
    "SlurmdDebug": "debug2",
    "LogTimeFormat": "iso8601_ms",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_Memory",
    "SchedulerType": "sched/backfill",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "MpiDefault": "none",
    "SwitchType": "switch/none",
    "ReturnToService": "2",
    "PropagateResourceLimits": "NONE",
    "KillWait": "5",
    "InactiveLimit": "0",
    "MinJobAge": "600",
    "SlurmdTimeout": "60",
    "MessageTimeout": "10",
    "DefMemPerCPU": "600",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=0,nohold_on_prolog_fail",
    "JobRequeue": "1",
    "SlurmdParameters": "config_overrides",  # a node has what its line says
}


class Slurm:
    """`folder` holds all; `conf` is slurm.conf; `env` is what a user's commands need."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 1,
        node: str = "CPUs=2 RealMemory=8000 TmpDisk=100000",
        partitions: Iterable[str] = ("batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP",),
        cred_expire: int = 2,
        cgroup: bool = False,
        prefix: str = "n",
        inside: tuple[str, ...] = (),
        address: str = "",
        names: bool = False,
        **settings: str,
    ) -> None:
        """*inside*: words before every command, as of a network namespace; *address*: of this host in there. *names*: slurm.conf has
        no address, only the host's name, as at most sites: whoever reads it must be able to resolve that."""
        self.folder, self.conf, self.etc = folder, folder / "etc/slurm.conf", folder / "etc"
        self.nodes = [f"{prefix}{number + 1}" for number in range(nodes)]
        self.node_line, self.partitions = node, tuple(partitions)
        self.cred_expire, self.cgroup = cred_expire, cgroup
        self.inside, self.address, self.names = inside, address, names
        self.options: dict[str, tuple[str, ...]] = {}  # of a node's slurmd
        self.ending: list[subprocess.Popen[bytes]] = []  # children that `down` waits for
        self.accounting: Any = None  # a lab of slurmdbd's, which begins before slurmctld and ends after it
        self.settings = {**DEFAULTS, **(CGROUP if cgroup else {}), **settings}
        self.env = {"PATH": PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(self.conf)}
        self.ports = [free_port() for _ in range(nodes + 2)]

    # ------------------------------------------------------------------ up and down

    def up(self) -> None:
        """All nodes idle, or an AssertionError with the ends of the logs. What is up already stays."""
        install(PROGRAMS)
        for part in ("run", "log", "spool", "etc", "munge/run", "state", "munge/key"):
            (self.folder / part).mkdir(mode=0o755, parents=True, exist_ok=True)
        for private in ("state", "munge/key"):
            (self.folder / private).chmod(0o700)
        for part in ("run", "log", "state"):
            shutil.chown(self.folder / part, self.settings["SlurmUser"])
        if not self.pid("munged"):
            self._munge()
        if not self.conf.exists():
            self.write_conf()
        if self.accounting is not None and not self.pid("slurmdbd"):
            self.accounting.up()
        if not self.pid("slurmctld"):
            self.start_slurmctld()
        for node in self.nodes:
            if not self.pid(f"slurmd-{node}"):
                self.start_slurmd(node)
        self.until(lambda: self._idle() == len(self.nodes), "all nodes are idle")

    def down(self) -> None:
        """Nothing of the lab is left running, jobs included."""
        if self.pid("slurmctld"):
            for job in set(self.text("squeue", "-h", "-o", "%A", check=False).split()):
                self.run("scancel", job, check=False)
            with suppress(AssertionError):
                self.until(lambda: not self.text("squeue", "-h", check=False).strip(), "the jobs have ended", 15)
        for name in (*(f"slurmd-{node}" for node in self.nodes), "slurmctld", "slurmdbd", "mariadbd", "munged"):
            self.stop(name)
        for child in self.ending:
            child.wait(LONGEST)
        self.end_steps()
        self._rid_of_cgroups()

    def _munge(self) -> None:
        key = self.folder / "munge/key/munge.key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
        private = self.folder / "munge/key"
        command = ("munged", f"--key-file={key}", f"--socket={self.folder}/munge/run/munge.socket")
        command += (f"--pid-file={self.folder}/run/munged.pid", f"--log-file={private}/munged.log")
        command += (f"--seed-file={private}/munged.seed", "--num-threads=2", "--force")
        daemon((*self.inside, *command), self.env)
        self.until(lambda: (self.folder / "munge/run/munge.socket").exists(), "munged listens")

    def write_conf(self) -> None:
        """slurm.conf as the settings say. A site's own lines go in afterwards."""
        host = socket.gethostname().partition(".")[0]
        # Where the daemons listen: Debian's own hosts have 127.0.1.1.
        address = self.address or socket.gethostbyname(socket.gethostname())
        lines = [
            f"SlurmctldHost={host}" if self.names else f"SlurmctldHost={host}({address})",
            f"SlurmctldPort={self.ports[0]}",
            f"SlurmdPort={self.ports[1]}",
            f"AuthInfo=socket={self.folder}/munge/run/munge.socket,cred_expire={self.cred_expire}",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"SlurmctldPidFile={self.folder}/run/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/run/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/log/slurmctld.log",
            f"SlurmdLogFile={self.folder}/log/slurmd-%n.log",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={self.folder}/log/jobcomp.log",
            *(f"{key}={value}" for key, value in self.settings.items() if value),
        ]
        for node, port in zip(self.nodes, self.ports[2:], strict=True):
            where = f"NodeHostname={host}" if self.names else f"NodeHostname={host} NodeAddr={address}"
            lines.append(f"NodeName={node} {where} Port={port} {self.node_line} State=UNKNOWN")
        lines += [f"PartitionName={partition}" for partition in self.partitions]
        self.conf.write_text("\n".join(lines) + "\n")
        if self.cgroup:
            (self.etc / "cgroup.conf").write_text(CGROUP_CONF)

    def start_slurmctld(self) -> None:
        daemon((*self.inside, "slurmctld", "-i"), self.env)
        self.until(lambda: "is UP" in self.text("scontrol", "ping", check=False), "slurmctld answers")

    def start_slurmd(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(mode=0o755, exist_ok=True)
        daemon((*self.inside, "slurmd", "-N", node, *self.options.get(node, ())), self.env)

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a daemon of this lab by its pid file: `slurmctld`, `slurmd-NODE`, `munged`."""
        if (pid := self.pid(name)) is None:
            return

        def has_ended() -> bool:
            """A daemon that was told to read its settings again is another process a moment later, from Slurm 24.05 on."""
            nonlocal pid
            if (now := self.pid(name)) not in (None, pid):
                pid = now
                os.kill(pid, number)
            return now is None

        os.kill(pid, number)
        try:
            self.until(has_ended, f"{name} has ended", 15)
        except AssertionError:
            os.kill(pid, signal.SIGKILL)

    def pid(self, name: str) -> int | None:
        try:
            pid = int((self.folder / f"run/{name}.pid").read_text())
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return None
        return pid if name.partition("-")[0].encode() in line and state != "Z" else None

    def end_steps(self) -> None:
        """slurmstepd outlives slurmd on purpose; ours are those whose environment names a slurm.conf of ours."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    is_step = (entry / "comm").read_text().startswith("slurmstepd")
                    if is_step and f"SLURM_CONF={self.folder}/".encode() in (entry / "environ").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)
                except OSError:
                    continue

    def _rid_of_cgroups(self) -> None:
        if not self.cgroup:
            return
        for top in Path("/sys/fs/cgroup").glob("*/slurm_*"):
            if top.name.removeprefix("slurm_") in self.nodes:
                for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                    _rmdir(folder)
                _rmdir(top)

    # ------------------------------------------------------------------ asking

    def run(
        self, *words: str, check: bool = True, timeout: float = LONGEST, **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        """A command of Slurm's, as root."""
        done = subprocess.run(
            (*self.inside, *words),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            **options,
        )  # type: ignore[call-overload]
        if check and done.returncode:
            raise AssertionError(f"{words}: exit {done.returncode}\n{done.stdout.decode()}\n{done.stderr.decode()}")
        return done

    def text(self, *words: str, check: bool = True) -> str:
        return self.run(*words, check=check).stdout.decode(errors="replace")

    def _idle(self) -> int:
        rows = {line for line in self.text("sinfo", "-h", "-N", "-o", "%N %t", check=False).splitlines()}
        return sum(row.endswith(" idle") for row in rows)

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says. Values with blanks (a comment) are whole."""
        return _fields(self.text("scontrol", "show", "job", "-d", job))

    def node(self, node: str) -> dict[str, str]:
        return _fields(self.text("scontrol", "show", "node", node))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def ended(self, job: str, timeout: float = 240) -> dict[str, str]:
        """The job's record, once it is over."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"}
        self.until(lambda: self.state(job) in over, f"job {job} has ended", timeout)
        return self.job(job)

    def until(self, is_so: object, what: str, timeout: float = LONGEST) -> None:
        """Look again until it is so. Slurm tells nobody of most of its changes."""
        assert callable(is_so)
        end = time.monotonic() + timeout
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout:.0f} s: {what}\n{self.tail()}")
            time.sleep(0.1)

    def tail(self, lines: int = 15) -> str:
        """The ends of the daemons' logs."""
        parts = []
        for log in sorted((self.folder / "log").glob("slurm*.log")):
            parts += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)


CGROUP = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup",
    "JobAcctGatherType": "jobacct_gather/cgroup",
    "JobAcctGatherFrequency": "task=2",
}
CGROUP_CONF = """CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
"""


def install(needed: Mapping[str, str]) -> None:
    """*needed*: program -> its package of Debian's."""
    if all(shutil.which(program, path=PATH) for program in needed):
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        ["apt-get", "install", "-y", "--no-install-recommends", *sorted(set(needed.values()))],
        check=True,
        env=env,
        capture_output=True,
    )


def daemon(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Start what goes to the background by itself. Its standard descriptors must be open: slurmd with a closed one
    puts its listener there, and every launch fails."""
    done = subprocess.run(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rmdir(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _fields(printed: str) -> dict[str, str]:
    """`Key=Value` of scontrol's long form: one or more in a line, a value ends where the next key begins."""
    import re

    found: dict[str, str] = {}
    for line in printed.splitlines():
        if match := re.match(r"\s*(Comment|Reason|Command|AdminComment)=(.*)$", line):
            found.setdefault(match[1], match[2])
            continue
        for key, value in re.findall(r"([A-Za-z:/]+)=(\S*)", line):
            found.setdefault(key, value)
    return found
