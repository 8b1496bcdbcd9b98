"""kill -9 of factories, keepers, QEMUs and accounting at moments nobody chose, for BELLJAR_VACUUM_KILLS seconds (180): no machine is
lost, doubled or counted twice, each is accounted once, and afterwards nothing is left. BELLJAR_SEED repeats the moments."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import Belljar, command_line, marked_processes
from tests.live.test_vacuum import Queues, Space, until

NAMES = ("127.0.0.5", "127.0.0.6")
SECONDS = float(os.environ.get("BELLJAR_VACUUM_KILLS", "180"))
VICTIMS = {"factory": 2, "keeper": 3, "qemu": 3, "claim": 1, "all of a factory": 1, "accounting": 2}  # how often each
COUNTED_TWICE = 1.0  # seconds that a place may seem taken twice, as moments are kept in whole seconds
WAITED = 180.0
FIZZLE = 6  # seconds, in the settings; a machine that ended sooner is not accounted


@pytest.fixture
def queues() -> Iterator[Queues]:
    made = Queues()
    yield made
    made.close()


class Hunt:
    """Who is there to be killed, and what was seen meanwhile."""

    def __init__(self, belljar: Belljar, space: Space, chance: random.Random) -> None:
        self.belljar, self.space, self.chance = belljar, space, chance
        self.killed, self.restarts = Counter[str](), 0
        self.seen: set[str] = set()  # every machine that ever showed
        self.most = 0  # that lived at once at a factory
        self.accounts = {"BELLJAR_ACCOUNTING_FOLDER": str(space.folder / "accounting")}

    def ours(self) -> dict[int, str]:
        """Processes of this test's folders, and what each is."""
        living = set(self.belljar.machines())
        found = {pid: "qemu" for pid, machine in marked_processes() if machine in living}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            words, pid = command_line(int(entry)), int(entry)
            if str(self.belljar.folder).encode() in _environment(pid):
                found[pid] = next((kind for word, kind in KINDS if word in words), "other")
        return found

    def strike(self) -> None:
        """One of them, by the dice; nothing where there is none of its kind."""
        kind = self.chance.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if kind == "accounting":
            publisher = self.belljar.popen("accounting", "publish", env=self.accounts)
            time.sleep(self.chance.uniform(0.1, 1.5))
            publisher.kill()
            publisher.communicate()
        elif kind in ("factory", "all of a factory", "claim"):
            name = self.chance.choice(NAMES)
            if kind == "claim":  # at the moment at which it asks for machines
                at = len(self.started())
                end = time.monotonic() + 10
                while len(self.started()) == at and time.monotonic() < end:
                    time.sleep(0.01)
            self.space.processes[name].kill()
            self.space.processes[name].wait()
            if kind == "all of a factory":
                for pid in self.of(name):
                    _kill(pid)
            time.sleep(self.chance.uniform(0, 4))
            self.space.start(name)
            self.restarts += 1
        else:
            pids = [pid for pid, its in self.ours().items() if its == kind]
            if not pids:
                return
            _kill(self.chance.choice(pids))
        self.killed[kind] += 1

    def of(self, name: str) -> list[int]:
        """QEMUs of a factory's machines."""
        return [one["pid"] for one in self.look() if dict(one["labels"])["factory"] == name and one["pid"]]

    def started(self) -> list[str]:
        return [one["machine"] for name in NAMES for one in self.space.log(name) if one["event"] == "machine started"]

    def look(self) -> list[dict[str, Any]]:
        """All machines that show now; no factory has more than it may, and no two are in one place."""
        found = []
        for folder in (self.belljar.run_folder / "machines").glob("[0-9a-f]*"):
            try:
                request = json.loads((folder / "request.json").read_text())
                journal = (folder / "journal.jsonl").read_text()
            except (OSError, ValueError):
                continue  # it is just beginning, or ending
            pids = [json.loads(line).get("pid") for line in journal.splitlines() if '"spawned"' in line]
            found.append({"id": folder.name, "labels": request["labels"], "pid": pids[-1] if pids else None})
        places = Counter((dict(one["labels"])["factory"], dict(one["labels"])["slot"]) for one in found)
        assert max(places.values(), default=0) <= 1, f"a place is taken twice: {found}"
        self.seen |= {one["id"] for one in found}
        self.most = max([self.most, *Counter(factory for factory, _ in places).values()])
        return found


KINDS = (("internal\0keep", "keeper"), ("vacuum\0run", "factory"), ("accounting", "accounting"))


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_whatever_is_killed_whenever_each_machine_counts_once(
    belljar: Belljar, tmp_path: Path, queues: Queues, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("BELLJAR_SEED", time.time_ns()))
    chance = random.Random(seed)
    queues.left, queues.seconds = {"atlas": 10**6, "lhcb": 10**6}, 2.0
    space = Space(belljar, tmp_path, queues, NAMES)
    hunt = Hunt(belljar, space, chance)
    for name in NAMES:
        space.start(name)
    until(lambda: len(hunt.look()) == 4, "both factories to be full", WAITED)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pause = time.monotonic() + chance.uniform(0.5, 6)
        while time.monotonic() < pause:
            hunt.look()
            time.sleep(0.5)
        hunt.strike()

    # Whatever was killed: it goes on.
    done = len(queues.done)
    until(lambda: len(queues.done) > done + 4, f"work to be done after the last kill, seed {seed}", WAITED)
    for name in NAMES:
        assert belljar("vacuum", "drain", "--state", str(space.state(name))).returncode == 0
    queues.left = {"atlas": 0, "lhcb": 0}
    until(lambda: not hunt.look(), f"all machines to end, seed {seed}", WAITED)
    for process in space.processes.values():
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert belljar("reap").returncode == 0
    assert belljar.leftovers() == [] and hunt.ours() == {}, f"seed {seed}"

    rows = space.rows()
    causes = Counter(row["cause"] for row in rows)
    figures = {
        "seed": seed, "seconds": SECONDS, "killed": dict(hunt.killed), "factories restarted": hunt.restarts, "machines": len(rows),
        "causes": dict(causes), "jobs taken": len(queues.taken), "jobs done": len(queues.done), "most at a factory": hunt.most,
    }  # fmt: skip
    with capsys.disabled():
        print(json.dumps(figures))
    check_none_lost_none_doubled(rows, hunt, queues)
    check_accounting(belljar, rows, hunt)


def check_none_lost_none_doubled(rows: list[dict[str, Any]], hunt: Hunt, queues: Queues) -> None:
    ids = Counter(row["id"] for row in rows)
    assert set(ids.values()) == {1}
    assert set(queues.taken.values()) | set(hunt.started()) | hunt.seen <= ids.keys()
    assert all(queues.taken[job] == machine for job, machine in queues.done.items())
    assert hunt.most <= 2
    told = Counter(one["machine"] for name in NAMES for one in hunt.space.log(name) if one["event"] == "machine ended")
    assert max(told.values()) == 1 and told.keys() <= ids.keys()  # each end counted once, whoever was restarted between
    lost = ids.keys() - told.keys()
    assert len(lost) <= hunt.restarts  # an end is written down before it is told: a kill between the two costs the line
    places: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        labels = dict(row["labels"])
        places.setdefault((labels["factory"], labels["slot"]), []).append((row["started"], row["ended"]))
    for spans in places.values():
        spans.sort()
        for (_, over), (begun, _) in itertools.pairwise(spans):
            assert begun >= over - COUNTED_TWICE


def check_accounting(belljar: Belljar, rows: list[dict[str, Any]], hunt: Hunt) -> None:
    def records() -> list[dict[str, str]]:
        shown = belljar("accounting", "list", "--format", "json", env=hunt.accounts)
        assert shown.returncode == 0, shown.stderr
        return list(json.loads(shown.stdout))

    done: subprocess.CompletedProcess[bytes] = belljar("accounting", "publish", env=hunt.accounts)
    assert done.returncode == 0, done.stderr
    first = records()
    again = json.loads(belljar("accounting", "publish", "--format", "json", env=hunt.accounts).stdout)
    assert again["archived"] == 0 and records() == first
    spans = {one["LocalJobId"]: (int(one["StartTime"]), int(one["EndTime"])) for one in first}
    assert len(spans) == len(first)
    counted = {row["id"]: (int(row["started"]), int(row["ended"])) for row in rows if row["id"] in spans}
    assert spans == counted
    worked = {row["id"] for row in rows if "run" in row["phases"] and int(row["ended"]) - int(row["started"]) >= FIZZLE}
    assert worked == spans.keys()  # those that were killed at work, too
