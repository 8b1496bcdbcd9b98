"""A clone is not a twin: what eight of them at once have of their own, and what the network gives them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.live.conftest import LONGEST, STORE, Belljar
from tests.live.test_faults import report, started

CLONES = 8
LARGEST_SKEW = 0.2  # seconds

# Runs in the guest while it is made into a template, outside of what is cleared away then: a Python that every clone
# finds running. It answers each caller with what it draws.
EARLY = """
import json, os, socket, uuid
listener = socket.socket(socket.AF_UNIX)
listener.bind("/run/early")
listener.listen()
with open("/sys/fs/cgroup/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
if os.fork() == 0:
    os.setsid()
    while True:
        caller = listener.accept()[0]
        caller.sendall(json.dumps([os.getpid(), uuid.uuid4().hex, os.urandom(16).hex()]).encode())
        caller.close()
"""

# `belljar run` as always, but for the guest that becomes a template: EARLY is started in it before it is frozen.
WITH_EARLY = """
import sys
from belljar import cli
from belljar.assembly import Runtime
from belljar.cli.machine.request import account_of
from belljar.guest import Streams
from belljar.guest.conversation import Conversation
from belljar.model import Payload

class Early(Conversation):
    async def settle(self):
        payload = Payload((b"python3", b"-c", sys.argv[1].encode()), account_of(None), cwd=b"/")
        process = await self.start(payload, Streams(None, None, None))
        status = await process.wait()
        assert status.exit_code == 0, status
        return await super().settle()

Runtime.converse = lambda self, port: Early(port, self.settings.guest)
sys.exit(cli.main(sys.argv[2:]))
"""

# What a clone says of itself; then the time, each time it is asked.
TELL = """
import glob, json, os, socket, sys, time, uuid
early = socket.socket(socket.AF_UNIX)
early.connect("/run/early")
said = json.loads(early.makefile().read())
text = lambda path: open(path).read().strip()
print(json.dumps({
    "urandom": os.urandom(32).hex(), "uuid": uuid.uuid4().hex, "early pid": said[0], "early uuid": said[1],
    "early urandom": said[2], "machine-id": text("/etc/machine-id"), "hostname": socket.gethostname(),
    "/etc/hostname": text("/etc/hostname"), "boot_id": text("/proc/sys/kernel/random/boot_id"),
    "kernel's uuid": text("/proc/sys/kernel/random/uuid"), "mac": text(glob.glob("/sys/class/net/[!l]*/address")[0]),
}), flush=True)
for line in sys.stdin:
    print(time.time(), flush=True)
"""
SAME = {"early pid"}


def test_eight_clones_at_once_are_eight_machines(belljar: Belljar, tmp_path: Path) -> None:
    belljar.env.update(BELLJAR_PATHS_STORE=str(tmp_path / "store"), BELLJAR_PATHS_SITE_STORE=str(STORE))
    belljar.env["BELLJAR_QEMU_SITE_TEMPLATES"] = "false"
    words = ("run", "--network", "user", "--start", "clone")
    made = [sys.executable, "-I", "-c", WITH_EARLY, EARLY, *words, "--", "true"]
    done = subprocess.run(
        made, env=belljar.env, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr.decode()

    jobs = [belljar.popen(*words, "--", "python3", "-uc", TELL, stdin=subprocess.PIPE) for _ in range(CLONES)]
    told = [json.loads(line_of(job)) for job in jobs]
    assert len(belljar.machines()) == CLONES  # all alive together
    for fact in told[0]:
        values = {each[fact] for each in told}
        assert len(values) == (1 if fact in SAME else CLONES), f"{fact}: {values}"
    for each, machine in zip(sorted(told, key=lambda one: one["hostname"]), belljar.machines(), strict=True):
        assert each["hostname"] == each["/etc/hostname"] == f"belljar-{machine}"
    for job in jobs:
        assert skew(job) < LARGEST_SKEW
    for job in jobs:
        assert job.communicate(timeout=LONGEST) == (b"", b"") and job.returncode == 0
    assert belljar.leftovers() == []


def line_of(job: subprocess.Popen[bytes]) -> bytes:
    assert job.stdout is not None
    line = job.stdout.readline()
    assert line, job.communicate(timeout=LONGEST)[1].decode()
    return line


def skew(job: subprocess.Popen[bytes]) -> float:
    """How far the guest's clock is, at least, from the time between our question and its answer."""
    assert job.stdin is not None
    before = time.time()
    job.stdin.write(b"\n")
    job.stdin.flush()
    inside = float(line_of(job))
    return max(before - inside, inside - time.time(), 0.0)


def test_a_cold_boot_has_an_identity_of_its_own_too(belljar: Belljar) -> None:
    script = "cat /etc/machine-id; hostname; cat /proc/sys/kernel/random/boot_id; hostname -f 2>&1 >/dev/null; head -c 16 /dev/urandom | od -An -tx1"
    one, other = (
        belljar.run("--start", start, "--", "sh", "-c", script).stdout.splitlines() for start in ("cold", "clone")
    )
    assert len(one) == len(other) == 4 and not set(one) & set(other)


# -- network ---------------------------------------------------------------------------------------------------------


def test_no_network_is_no_card(belljar: Belljar) -> None:
    done = belljar.run("--", "sh", "-c", "ls /sys/class/net; cat /proc/net/route | wc -l")
    assert done.stdout.split() == [b"lo", b"1"]


REACH = """
import json, socket, sys
routes = [line.split() for line in open("/proc/net/route")][1:]
asked = socket.create_connection(("10.0.2.2", int(sys.argv[1])), timeout=30)
asked.sendall(b"from inside\\n")
print(json.dumps({
    "gateways": [row[2] for row in routes if row[1] == "00000000"], "own": asked.getsockname()[0],
    "dns": open("/etc/resolv.conf").read(), "heard": asked.makefile().readline(),
}))
"""


def test_the_user_network_reaches_out(belljar: Belljar, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = belljar.popen(
            *("run", "--report", str(tmp_path / "r"), "--network", "user", "--", "python3", "-c", REACH, str(port)),
            env={"BELLJAR_NETWORK_ALLOW": f"127.0.0.1:{port}"},
        )
        server.settimeout(LONGEST)
        caller, _ = server.accept()
        with caller:
            caller.settimeout(LONGEST)
            assert caller.recv(100) == b"from inside\n"
            caller.sendall(b"from outside\n")
            told: dict[str, Any] = json.loads(line_of(job))
    assert job.wait(LONGEST) == 0
    assert told == {
        "gateways": ["0202000A"],
        "own": "10.0.2.15",
        "dns": "nameserver 10.0.2.3\n",
        "heard": "from outside\n",
    }
    assert report(tmp_path / "r")["start"] == "clone"


def test_machines_with_a_network_do_not_see_each_other(belljar: Belljar) -> None:
    listen = "import socket; s = socket.create_server(('', 999)); print('up', flush=True); s.accept()"
    started(belljar, "--network", "user", "--", "python3", "-c", listen)
    knock = "import socket; socket.create_connection(('10.0.2.15', 999), timeout=5)"
    done = belljar.run("--network", "user", "--", "python3", "-c", knock)  # its own address: nobody listens there
    assert done.returncode == 1 and b"ConnectionRefusedError" in done.stderr
