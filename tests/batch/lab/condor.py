"""A real HTCondor on one node of its own: the daemons of a Debian suite's package in a room of that suite (tests/roots.py),
with that suite's Python and QEMU. The images are the tests' own; what is written on the node is gone with it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.live.conftest import ROOT, STORE
from tests.roots import Done, Room, root

PACKAGES = (
    "condor", "python3", "qemu-system-x86", "qemu-utils", "e2fsprogs", "iproute2", "openssh-server", "openssh-client",
    "skopeo", "umoci", "uidmap",
)  # fmt: skip
LONGEST = 240.0
USERS = {"bjalice": 1001, "bjbob": 1002}
NAME = "bjnode"  # without a domain

# A personal pool with the shortest times: what a site sets besides is its own affair.
POOL = """\
CONDOR_HOST = 127.0.0.1
NETWORK_INTERFACE = 127.0.0.1
use ROLE: CentralManager, Submit, Execute
use POLICY: Always_Run_Jobs
ENABLE_KERNEL_TUNING = False
BASE_CGROUP =
NUM_CPUS = 8
MEMORY = 9000
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = True
RUNBENCHMARKS = False
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
PERIODIC_EXPR_INTERVAL = 2
UPDATE_INTERVAL = 5
JOB_START_DELAY = 0
MAX_JOBS_SUBMITTED = 1000
EVENT_LOG = /var/log/condor/events
EVENT_LOG_FORMAT_OPTIONS = JSON
"""


@dataclass
class Ended:
    """What became of a job, as its ad and the log of events have it."""

    status: str  # Completed, Held, Removed or Idle
    code: int | None
    signal: int | None
    hold: str
    out: bytes
    err: bytes
    events: list[dict[str, Any]] = field(default_factory=list)


class Condor:
    """One node. `top` is its folder on the host."""

    def __init__(self, suite: str) -> None:
        self.top = Path(f"/var/tmp/belljar-lab-htcondor-{suite}-{os.getpid()}")
        self.top.mkdir(mode=0o755)
        images = {STORE / "images": "/var/lib/belljar/images"}
        self.room = Room(root(suite, PACKAGES), net=True, host=NAME, binds=images, upper=self.top)
        self.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {NAME}\n")
        self.number, self.programs = 0, dict[str, str]()
        for user, uid in USERS.items():
            self._add_user(user, uid)
        self._install()

    # ------------------------------------------------------------------ the node

    def outside(self, path: str | Path) -> Path:
        """The host's name of a file of the node."""
        return self.room.path(str(path))

    def run(self, *words: str, user: str = "", check: bool = True, timeout: float = LONGEST, **options: Any) -> Done:
        """A command on the node, as root, or as a user in its home."""
        options.setdefault("cwd", f"/home/{user}" if user else "/")
        if user:
            options.update(HOME=f"/home/{user}", USER=user, LOGNAME=user)
        return self.room.run(*words, user=user, check=check, timeout=timeout, **options)

    def text(self, *words: str, **options: Any) -> str:
        return self.run(*words, **options).stdout.decode()

    def belljar(self, *words: str, **options: Any) -> Done:
        return self.run("belljar", *words, **options)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.outside(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def _add_user(self, name: str, uid: int) -> None:
        home = self.outside(f"/home/{name}")
        home.mkdir(mode=0o711)
        os.chown(home, uid, uid)
        for file, line in (
            ("subuid", f"{name}:{uid << 16}:65536"),
            ("subgid", f"{name}:{uid << 16}:65536"),
            ("passwd", f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash"),
            ("group", f"{name}:x:{uid}:"),
        ):
            with open(self.outside(f"/etc/{file}"), "a") as table:
                table.write(f"{line}\n")

    def _install(self) -> None:
        """As `make install` leaves it, without the optional libraries."""
        lib = self.outside("/opt/belljar/lib/belljar")
        shutil.copytree(ROOT / "src/belljar", lib, ignore=shutil.ignore_patterns("__pycache__"))
        launcher = "#!/usr/bin/python3 -IS\nimport sys\n\nsys.path.append('/opt/belljar/lib')\n"
        self.write("/opt/belljar/bin/belljar", f"{launcher}from belljar.cli import entry\n\nentry()\n", 0o755)
        self.outside("/usr/local/bin/belljar").symlink_to("/opt/belljar/bin/belljar")
        self.run("python3", "-m", "compileall", "-q", "/opt/belljar/lib")
        self.run("chmod", "-R", "u=rwX,go=rX", "/opt/belljar/lib")

    def configure(self, batch: str = "", **sections: str) -> None:
        """The site's settings: lines of [batch], and of other sections by name."""
        text = f'[paths]\nnode = "/var/lib/belljar-node"\n{sections.pop("paths", "")}\n'
        text += f'[batch]\nshares = ["/home:rw"]\n{batch}\n'
        text += "".join(f"[{section}]\n{lines}\n" for section, lines in sections.items())
        self.write("/etc/belljar/belljar.toml", text)

    def close(self) -> None:
        """Everything of the node goes with its room."""
        self.room.close()
        shutil.rmtree(self.top, ignore_errors=True)

    # ------------------------------------------------------------------ the pool

    def up(self, more: str = "") -> None:
        """The daemons run and the node's slot is known."""
        self.write("/etc/condor/config.d/50-pool.conf", POOL + more)
        folders = ("/run/condor", "/run/lock/condor", "/var/log/condor", "/var/spool/condor", "/var/lib/condor/execute")
        self.run("mkdir", "-p", *folders)
        self.run("chown", "condor:condor", *folders)
        self.run("condor_master")
        self.until(lambda: bool(self.slots()), "the slot is known", 60)

    def slots(self) -> str:
        return self.run("condor_status", "-af", "Name", check=False).stdout.decode().strip()

    def until(self, is_so: Callable[[], object], what: str, timeout: float = LONGEST) -> None:
        """Wait for what HTCondor tells nobody about."""
        end = time.monotonic() + timeout
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        folder = self.outside("/var/log/condor")
        return "".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2500:]}\n"
            for path in sorted(folder.glob("*Log*"))
            if path.name.startswith(("Master", "Start", "Shadow", "Sched"))
        )

    # ------------------------------------------------------------------ jobs

    def submit(self, script: bytes, arguments: str = "", user: str = "bjalice", check: bool = True, **ad: str) -> Done:
        """condor_submit of a script, with these lines in the submit file; `plus_X` is `+X`. The job's number is printed."""
        folder = Path(f"/home/{user}")
        self.number += 1
        program = f"job{self.number}"
        file = self.outside(folder / program)
        file.write_bytes(script)
        file.chmod(0o755)
        lines = {
            "executable": program, "arguments": arguments, "output": f"{program}.out", "error": f"{program}.err",
            "request_memory": "1024", "request_cpus": "1", "should_transfer_files": "YES", **ad,
        }  # fmt: skip
        text = "".join(f"{name.replace('plus_', '+', 1)} = {value}\n" for name, value in lines.items() if value)
        self.outside(folder / f"{program}.sub").write_text(f"{text}queue\n")
        done = self.run("condor_submit", "-terse", f"{program}.sub", user=user, check=False)
        if check and done.returncode:
            raise AssertionError(done.stderr.decode())
        return done

    def job(self, script: bytes, arguments: str = "", user: str = "bjalice", **ad: str) -> str:
        """The id of a job that was submitted."""
        id = self.submit(script, arguments, user, **ad).stdout.decode().split()[0]
        self.programs[id] = f"job{self.number}"
        return id

    def events(self, id: str) -> list[dict[str, Any]]:
        """What the log of events has of this job so far."""
        cluster, proc = map(int, id.split("."))
        try:
            text = self.outside("/var/log/condor/events").read_text(errors="replace")
        except FileNotFoundError:
            return []
        return [one for one in _objects(text) if (one.get("Cluster"), one.get("Proc")) == (cluster, proc)]

    def happened(self, id: str, *kinds: str, count: int = 1, timeout: float = LONGEST) -> list[dict[str, Any]]:
        """The job's events, once so many of these kinds are among them."""

        def enough() -> bool:
            return sum(one["MyType"] in kinds for one in self.events(id)) >= count

        self.until(enough, f"{count} of {', '.join(kinds)} of job {id}", timeout)
        return self.events(id)

    def wait(self, id: str, user: str = "bjalice", timeout: float = LONGEST) -> Ended:
        """Until the job has ended, or is held."""
        events = self.happened(id, "JobTerminatedEvent", "JobHeldEvent", "JobAbortedEvent", timeout=timeout)
        last = [one for one in events if one["MyType"] in ("JobTerminatedEvent", "JobHeldEvent", "JobAbortedEvent")][-1]
        status = {"JobTerminatedEvent": "Completed", "JobHeldEvent": "Held", "JobAbortedEvent": "Removed"}
        number = last.get("TerminatedBySignal")
        return Ended(
            status[last["MyType"]], None if number is not None else last.get("ReturnValue"), number,
            str(last.get("HoldReason", "")), *self.output(id, user), events,
        )  # fmt: skip

    def output(self, id: str, user: str = "bjalice") -> tuple[bytes, bytes]:
        """What the job said on its standard output and error, as far as it was brought back."""
        files = (self.outside(f"/home/{user}/{self.programs[id]}.{end}") for end in ("out", "err"))
        out, err = (file.read_bytes() if file.is_file() else b"" for file in files)
        return out, err

    def execute(self, script: bytes, arguments: str = "", user: str = "bjalice", **ad: str) -> Ended:
        """A job from its submission to its end."""
        return self.wait(self.job(script, arguments, user, **ad), user)

    def leftovers(self) -> list[str]:
        """Everything of a machine that is still there, of any user."""
        node = self.outside("/var/lib/belljar-node")
        found = [
            str(path)
            for user in (node.iterdir() if node.is_dir() else ())
            for part in ("run/machines", "run/identities", "scratch")
            if (user / part).is_dir()
            for path in (user / part).iterdir()
        ]
        return found + self.text("pgrep", "-f", "guest=belljar-", check=False).split()


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a log, one after the other; an unfinished one is left out."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield found
