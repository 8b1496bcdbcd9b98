"""Watches leases from outside, as a process of its own: the records as any reader of that file sees them, the batch system by its own command,
the host's processes, and pilots' journals. Nothing of it asks the service.

    observer = Observer.over(site); ...; observer.verdict()

I1  nothing lives that no live lease owns: no QEMU, pilot or job of one that has ended, a while after that
I2  in the end every lease and machine is in an end state, with a cause
I3  events of each thing are a chain of moves that the tables allow; what a pilot said is numbered without gaps
I4  what is charged is what ran, by the journal of its pilot, within a second; never negative, and less only where the pilot was killed
I5  no machine runs after its time and the grace, by the observer's own clock
I6  at most one QEMU for each machine at any moment
I7  a polling client sees pending, running, shutting-down, terminated, and never a step back
I8  what has ended is told in the same words for ever, whoever was killed; a machine's host keys do not change
I9  no owner has more than the policy allows
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.lease.states import EC2, INSTANCE_MOVES, LEASE_ENDS, LEASE_MOVES, SLOT_MOVES, InstanceState

if TYPE_CHECKING:
    from tests.batch.lab.lease import LeaseSite

RANKS = {"pending": 0, "running": 1, "shutting-down": 2, "terminated": 3}
ENDS = {one.value for one in LEASE_ENDS}
MOVES = {
    kind: {before.value: {one.value for one in after} for before, after in moves.items()}
    for kind, moves in (("lease", LEASE_MOVES), ("slot", SLOT_MOVES), ("instance", INSTANCE_MOVES))
}
CYCLE = 0.3
SLOW = 60.0  # seconds in which what has ended is gone, on a host that is as busy as this one
Records = dict[str, dict[str, dict[str, Any]]]  # kind -> id -> value


class Observer:
    """The process, as its test has it. What it found wrong is a line each in its file."""

    def __init__(self, site: LeaseSite, most: int) -> None:
        self._found = site.folder / "observer.log"
        words = (sys.executable, "-m", "tests.batch.lab.observer", str(site.folder), str(most))
        root = Path(__file__).resolve().parents[3]
        with open(self._found, "ab") as found:
            self._process = subprocess.Popen(words, cwd=root, env={**os.environ, **site.lab.env}, stdout=found)

    def so_far(self) -> list[str]:
        assert self._process.poll() is None, "the observer is gone"
        return self._found.read_text().splitlines()

    def verdict(self) -> list[str]:
        """What was wrong at any moment, and what is now that everything should have ended."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        return self._found.read_text().splitlines()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Watch:
    """The process itself. *grace*: of the site, in seconds."""

    def __init__(self, folder: Path, most: int, grace: float) -> None:
        self._folder, self._most, self._grace = folder, most, grace
        self._told: set[str] = set()
        self._over: dict[str, float] = {}  # since when each lease and machine has been seen to have ended
        self._there: dict[str, float] = {}  # since when each job and pilot has been seen without a break
        self._ran: dict[str, float] = {}  # since when each machine has been seen to run
        self._words: dict[str, str] = {}  # EC2's, as they were told last
        self._ended: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, list[str]] = {}
        self._position, self._chain = 0, dict[str, str]()
        self._machines: dict[str, str] = {}  # belljar's id -> that of the machine of a lease
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.look()
            time.sleep(CYCLE)
        self.look()
        self.end()

    def say(self, text: str) -> None:
        """Once."""
        if text not in self._told:
            self._told.add(text)
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def look(self) -> None:
        guests = dict(self.guests())  # before the records: what ends between the two is in them
        jobs = self.jobs()
        pilots = list(self.pilots())
        now, unasked = time.monotonic(), [one for one in self._there if one.startswith("job ")]
        seen = [*(unasked if jobs is None else (f"job {job}" for job in jobs)), *(f"pilot {pid}" for pid, _ in pilots)]
        self._there = {one: self._there.get(one, now) for one in seen}
        with suppress(sqlite3.Error):
            records = self.records()
            self.owned(records, guests, jobs or {}, pilots)
            self.timely(records, guests)
            self.forward(records)
            self.within_limits(records)
            self.events()

    # -- what there is -------------------------------------------------------------------------------------------------

    def _rows(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self._folder}/state/leases.sqlite?mode=ro", uri=True, timeout=5)) as file:
            return file.execute(question, values).fetchall()

    def records(self) -> Records:
        return {
            kind: {id: json.loads(text) for id, text in self._rows(f"SELECT id, value FROM {kind}")}
            for kind in ("leases", "slots", "instances")
        }

    def guests(self) -> Iterator[tuple[int, str]]:
        """QEMU processes, and the machine of a lease that each is."""
        for pid, words in processes():
            mark = next((word for word in words if word.startswith("guest=belljar-")), "")
            id = mark.removeprefix("guest=belljar-").partition(",")[0]
            for folder in ("run/machines", "logs") if id and id not in self._machines else ():
                with suppress(OSError, ValueError):
                    request = json.loads((self._folder / folder / id / "request.json").read_text())
                    self._machines[id] = dict(request.get("labels", ())).get("instance", "")
            if instance := self._machines.get(id):
                yield pid, instance

    def pilots(self) -> Iterator[tuple[int, str]]:
        """Processes, and the lease that each is of."""
        for pid, words in processes():
            if "pilot" in words[:-1] and words[0].endswith(("python", "python3")) and str(self._folder) in words[-1]:
                yield pid, Path(words[-1]).name.removeprefix("belljar-").rpartition("-")[0]

    def jobs(self) -> dict[str, str] | None:
        """Id -> name, of those that have not ended; None where the batch system does not answer."""
        words = ("squeue", "-h", "-o", "%A %j %T", "--states=PENDING,RUNNING,COMPLETING,CONFIGURING,SUSPENDED")
        done = subprocess.run(words, capture_output=True, timeout=60, check=False)
        rows = [line.split() for line in done.stdout.decode().splitlines()]
        return {row[0]: row[1] for row in rows if len(row) == 3} if done.returncode == 0 else None

    # -- at every moment -----------------------------------------------------------------------------------------------

    def owned(
        self, records: Records, guests: Mapping[int, str], jobs: Mapping[str, str], pilots: list[tuple[int, str]]
    ) -> None:
        now = time.monotonic()
        for kind, ends in (("leases", ENDS), ("instances", {"terminated"})):
            for id, one in records[kind].items():
                if one["state"] in ends:
                    self._over.setdefault(id, now)

        def is_late(what: str, lease: str) -> bool:
            """A slurmctld that was killed brings jobs back that were cancelled half a minute before: they are new then."""
            return now - max(self._over.get(lease, now), self._there[what]) > SLOW

        for pid, id in guests.items():
            if id not in records["instances"]:
                self.say(f"I1: QEMU {pid} is of {id}, which nobody asked for")
            elif now - self._over.get(id, now) > SLOW:
                self.say(f"I1: QEMU {pid} lives, and {id} has ended")
            if (others := sorted(one for one, of in guests.items() if of == id)) != [pid]:
                self.say(f"I6: {id} lives {len(others)} times: {others}")
        for pid, id in pilots:
            if is_late(f"pilot {pid}", id):
                self.say(f"I1: pilot {pid} lives, and {id} has ended")
        for job, name in jobs.items():
            id = name.removeprefix("belljar-").rpartition("-")[0]
            if id not in records["leases"]:
                self.say(f"I1: job {job} is of {id}, which nobody asked for")
            elif is_late(f"job {job}", id):
                self.say(f"I1: job {job} is there, and {id} has ended")

    def timely(self, records: Records, guests: Mapping[int, str]) -> None:
        now = time.monotonic()
        alive = set(guests.values())
        for id, one in records["instances"].items():
            if one["state"] == "running":
                self._ran.setdefault(id, now)
            late = now - self._ran.get(id, now) - one["seconds"] - self._grace
            if id in alive and late > SLOW:
                self.say(f"I5: {id} runs though its time is over since {late:.0f} s")

    def forward(self, records: Records) -> None:
        for id, one in records["instances"].items():
            word = EC2[InstanceState(one["state"])][1]
            before = self._words.get(id, "pending")
            if RANKS[word] < RANKS[before]:
                self.say(f"I7: {id} went from {before} to {word}")
            self._words[id] = word
            if one["host_keys"] and self._keys.setdefault(id, one["host_keys"]) != one["host_keys"]:
                self.say(f"I8: the host keys of {id} are others now")
        for kind, ends in (("leases", ENDS), ("instances", {"terminated"})):
            for id, one in records[kind].items():
                if one["state"] in ends and self._ended.setdefault(id, one) != one:
                    told = {
                        key: (value, one.get(key)) for key, value in self._ended[id].items() if one.get(key) != value
                    }
                    self.say(f"I8: {id} has ended, and changed: {told}")

    def within_limits(self, records: Records) -> None:
        live: dict[str, int] = {}
        for one in records["instances"].values():
            if one["state"] != "terminated":
                live[one["owner"]] = live.get(one["owner"], 0) + 1
        for owner, count in live.items():
            if count > self._most:
                self.say(f"I9: {owner} has {count} machines of {self._most}")

    def events(self) -> None:
        for position, text in self._rows(
            "SELECT position, value FROM events WHERE position > ? ORDER BY position", self._position
        ):
            self._position, event = position, json.loads(text)
            kind = "instance" if event["of"].startswith("i-") else "slot" if "." in event["of"] else "lease"
            before, after = event["before"], event["after"]
            if before != self._chain.get(event["of"], ""):
                self.say(f"I3: {event['of']} moved from {before}, and was {self._chain.get(event['of'], '')!r}")
            elif before and after not in MOVES[kind][before]:
                self.say(f"I3: {event['of']}: {after} after {before}")
            self._chain[event["of"]] = after

    # -- in the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        records = self.records()
        for id, one in records["leases"].items():
            if one["state"] not in ENDS or not one["cause"]:
                self.say(f"I2: {id} is {one['state']}, for {one['cause']}")
        for id, one in records["instances"].items():
            if one["state"] != "terminated" or not one["cause"]:
                self.say(f"I2: {id} is {one['state']}, for {one['cause']}")
        for what, left in (("QEMU", dict(self.guests())), ("pilot", dict(self.pilots())), ("job", self.jobs())):
            for one, of in left.items():
                self.say(f"I1: {what} {one} of {of} is left")
        for place in ("run/machines", "run/identities", "scratch"):
            for path in sorted((self._folder / place).glob("*")):
                self.say(f"I1: {path} is left")
        for path in sorted((self._folder / "jobs").glob("belljar-*")):
            if path.suffix != ".log":
                self.say(f"I1: {path}, which has a key, is left")
        for journal in sorted(self._folder.glob("logs/pilots/*/journal.jsonl")):
            self.told(journal, records)

    def told(self, journal: Path, records: Records) -> None:
        """What a pilot said, beside what was written down of it."""
        lines = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
        said = [one["report"] for one in lines if one["event"] == "said"]
        if [one["seq"] for one in said] != list(range(1, len(said) + 1)):
            self.say(f"I3: {journal.parent.name} numbered what it said {[one['seq'] for one in said]}")
        for id in {one["instance"] for one in said if one["instance"]}:
            moments = {one["state"]: one["mono"] for one in said if one["instance"] == id}
            one = records["instances"].get(id)
            if one is None or "running" not in moments or not one["launched"]:
                continue
            charged = max(0, ceil(one["ran_until"] - one["ran_from"]))
            ran = moments.get("terminated", max(report["mono"] for report in said)) - moments["running"]
            last = max(report["seq"] for report in said if report["instance"] == id)
            # Else its pilot was killed before.
            is_told = last <= records["slots"].get(one["slot"], {"seq": last})["seq"]
            is_whole = "terminated" in moments and is_told and one["cause"] != "Server.NodeLost"
            is_more = "terminated" in moments and charged > ran + 1
            if charged < 0 or is_more or (is_whole and abs(charged - ran) > 1):
                self.say(f"I4: {id} is charged {charged} s, and ran {ran:.1f} s by its pilot's journal")


def processes() -> Iterator[tuple[int, list[str]]]:
    """Those that live, and their words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                if words:
                    yield int(entry.name), words


def main() -> None:
    watch = Watch(Path(sys.argv[1]), int(sys.argv[2]), grace=3.0)

    def over(*_: object) -> None:
        watch.is_over = True

    signal.signal(signal.SIGTERM, over)
    watch.run()


if __name__ == "__main__":
    main()
