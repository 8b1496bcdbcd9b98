"""Three factories of one space on loopback addresses, with real machines that pull real jobs from two experiments' queues."""

import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
from tests.live.conftest import Belljar

FACTORIES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# What an experiment puts into its machines: it pulls jobs until there are none, or until it has done so many, and says how it went.
PILOT = """#!/usr/bin/python3
import http.client, os, time, urllib.request
def ask(path, data=None):
    with urllib.request.urlopen("http://10.0.2.2:##user_data_option_port##/" + path, data, timeout=60) as answer:
        return answer.read().decode()
done, me = 0, open("/etc/jobfeatures/job_id").read()
while done < 3:
    job = ask("##user_data_option_queue##/take?" + me)
    if not job:
        break
    time.sleep(float(job.split()[1]))
    ask("##user_data_option_queue##/done?" + me, job.split()[0].encode())
    done += 1
message = b"200 Work done" if done else b"300 There is no work"
one = http.client.HTTPConnection("169.254.169.253", timeout=60)
one.request("PUT", "/joboutputs/shutdown_message", message)
assert one.getresponse().status == 201
"""
SETTINGS = """
[space]
name = "vac.example.org"
factories = {factories}
port = {port}
poll_silence = 0.5
site = "EXAMPLE"

[factory]
name = "{name}"
processors = 2
memory = "256M"
cycle = 2
overload = 1000
hs06 = 10

[machinetype.atlas]
share = 2
image = "debian12"
user_data = "{folder}/pilot"
options = {{ queue = "atlas", port = "{http}" }}
backoff = 4
fizzle = 6
max_wallclock = 600

[machinetype.lhcb]
share = 1
image = "debian12"
user_data = "{folder}/pilot"
options = {{ queue = "lhcb", port = "{http}" }}
backoff = 4
fizzle = 6
max_wallclock = 600
"""


class Queues:
    """The experiments' central queues, by HTTP."""

    def __init__(self) -> None:
        self.left = {"atlas": 0, "lhcb": 0}
        self.seconds = 1.0
        self.taken: dict[str, str] = {}  # job -> machine
        self.done: dict[str, str] = {}
        self.lock = Lock()
        queues = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, _, machine = self.path.strip("/").partition("/take?")
                self.reply(queues.take(name, machine))

            def do_POST(self) -> None:
                machine = self.path.partition("?")[2]
                job = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with queues.lock:
                    queues.done[job] = machine
                self.reply("")

            def reply(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, name: str, machine: str) -> str:
        with self.lock:
            if not self.left[name]:
                return ""
            self.left[name] -= 1
            job = f"{name}-{len(self.taken)}"
            self.taken[job] = machine
            return f"{job} {self.seconds}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Space:
    """The factories of one space, as processes."""

    def __init__(
        self,
        belljar: Belljar,
        folder: Path,
        queues: Queues,
        names: tuple[str, ...] = FACTORIES,
        settings: str = SETTINGS,
    ) -> None:
        self.belljar, self.folder = belljar, folder
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((names[0], 0))
            self.port = sock.getsockname()[1]
        (folder / "pilot").write_text(PILOT)
        belljar.env.update(BELLJAR_NETWORK_ALLOW=f"127.0.0.1:{queues.port}", BELLJAR_HOST_CPUS_PER_CPU="0")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            self.file(name).write_text(
                settings.format(name=name, factories=json.dumps(names), port=self.port, folder=folder, http=queues.port)
            )

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def state(self, name: str) -> Path:
        return self.folder / f"state-{name}"

    def start(self, name: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = self.belljar.popen(
                "vacuum",
                "run",
                str(self.file(name)),
                "--state",
                str(self.state(name)),
                "--format",
                "json",
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        # What keepers say of downloads is there, too.
        return [json.loads(line) for line in lines if line.startswith("{")]

    def machines(self) -> dict[str, str]:
        """Living ones, with their types."""
        found = self.belljar.json("ps")
        return {one["id"]: one["name"] for one in found}

    def reasons(self, name: str, machinetype: str, since: float) -> set[str]:
        """Why a type was or was not started at a factory, in all decisions since then."""
        lines = (self.state(name) / "decisions.jsonl").read_text().splitlines()
        decisions = [one for one in map(json.loads, lines) if one["time"] >= since]
        return {one["reason"] for each in decisions for one in each["verdicts"] if one["machinetype"] == machinetype}

    def rows(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for path in self.belljar.logs.glob("ledger-*") for line in path.read_text().splitlines()
        ]


@pytest.fixture
def queues() -> Iterator[Queues]:
    made = Queues()
    yield made
    made.close()


def until(is_so: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
    return found


@pytest.mark.slow  # shares, backing off and a killed factory: tests/unit/vacuum; real machines: below and test_vacuum_machines.py
def test_factories_share_a_space_and_lose_nothing(belljar: Belljar, tmp_path: Path, queues: Queues) -> None:
    queues.left, queues.seconds = {"atlas": 1000, "lhcb": 1000}, 3.0
    space = Space(belljar, tmp_path, queues)
    for name in FACTORIES:
        space.start(name)
    # Shares 2:1 of six places.
    until(lambda: Counter(space.machines().values()) == {"atlas": 4, "lhcb": 2}, "machines by the shares")

    # One factory is killed. Its machines go on; it finds them again, and starts none twice.
    victim = FACTORIES[0]
    space.processes[victim].kill()
    space.processes[victim].wait()
    before = set(space.machines())
    space.start(victim)
    until(
        lambda: any(one["event"] == "machine started" for one in space.log(victim)[-3:]),
        "the killed factory to start a machine",
    )
    assert len(space.machines()) <= 6 and len(before) <= 6

    # One queue runs dry: its type backs off everywhere, and the other has its places.
    queues.left["lhcb"] = 0
    dry = time.time()
    waits = {"backing-off", "others-test", "tested"}
    until(lambda: all(space.reasons(name, "lhcb", dry) & waits for name in FACTORIES), "lhcb to back off everywhere")
    until(lambda: Counter(space.machines().values())["atlas"] >= 5, "atlas to take the free places")
    # It fills again: one tester, then its share.
    queues.left["lhcb"] = 1000
    until(lambda: Counter(space.machines().values())["lhcb"] >= 2, "lhcb to come back")

    # What was decided then can be asked for later.
    told = belljar.json("vacuum", "explain", "--ago", "1s", "--state", str(space.state(victim)))
    assert {one["machinetype"] for one in told["verdicts"]} == {"atlas", "lhcb"} and told["time"] <= time.time()

    for name in FACTORIES:
        assert belljar("vacuum", "drain", "--state", str(space.state(name))).returncode == 0
    queues.left = {"atlas": 0, "lhcb": 0}
    until(lambda: not space.machines(), "all machines to end")
    rows = space.rows()
    for process in space.processes.values():
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert belljar.leftovers() == []

    # Nothing lost, nothing twice: each machine has one row, each job one machine, and accounting has all of them.
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids) and set(queues.taken.values()) <= set(ids) and queues.done == queues.taken
    assert {row["cause"] for row in rows} == {"finished"} and {row["start"] for row in rows} == {"clone"}
    assert {str(row["shutdown_code"]) for row in rows} == {"200", "300"}
    slots = Counter(dict(row["labels"])["factory"] for row in rows)
    assert set(slots) == set(FACTORIES)
    counted = [row for row in rows if int(row["ended"]) - int(row["started"]) >= 6]
    accounts = {"BELLJAR_ACCOUNTING_FOLDER": str(tmp_path / "accounting")}
    for archived in (len(counted), 0):
        done = belljar("accounting", "publish", "--format", "json", env=accounts)
        assert json.loads(done.stdout)["archived"] == archived, done.stderr
    records = json.loads(belljar("accounting", "list", "--format", "json", env=accounts).stdout)
    seen = {one["LocalJobId"]: (int(one["StartTime"]), int(one["EndTime"])) for one in records}
    assert seen == {row["id"]: (int(row["started"]), int(row["ended"])) for row in counted}


def test_a_power_cut_loses_no_machine_of_a_factory(belljar: Belljar, tmp_path: Path, queues: Queues) -> None:
    queues.left, queues.seconds = {"atlas": 1000, "lhcb": 1000}, 100.0
    name, accounts = FACTORIES[0], {"BELLJAR_ACCOUNTING_FOLDER": str(tmp_path / "accounting")}
    space = Space(belljar, tmp_path, queues, (name,), SETTINGS.replace("fizzle = 6", "fizzle = 0"))
    space.start(name)
    until(lambda: len(queues.taken) == 2, "machines at work")
    lost = set(space.machines())
    belljar.power_cut()
    space.start(name)

    def ended() -> set[str]:
        return {one["machine"] for one in space.log(name) if one["event"] == "machine ended"}

    until(lambda: lost <= ended(), "the ends of what lived")
    space.processes[name].send_signal(signal.SIGTERM)
    assert space.processes[name].wait(30) == 0
    rows = [row for row in space.rows() if row["id"] in lost]
    assert sorted(row["id"] for row in rows) == sorted(lost)
    assert all(row["reason"].startswith("the host was restarted") for row in rows)
    assert not [path for path in belljar.scratch.iterdir() if path.name.partition(".")[0] in lost]
    assert belljar("accounting", "publish", env=accounts).returncode == 0
    shown = belljar("accounting", "list", "--format", "json", env=accounts)
    assert len(lost) == 2 and lost <= {one["LocalJobId"] for one in json.loads(shown.stdout)}
