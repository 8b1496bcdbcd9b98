"""Leases in a storm: several at a time on a real Slurm with real guests, while the service, pilots, machines, slurmctld and slurmds are killed
at random, and an observer watches from outside. BELLJAR_LEASE_STORM (seconds, 300) and BELLJAR_SEED say how long, and which."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite
from tests.batch.lab.observer import Observer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(14400)]

SECONDS = float(os.environ.get("BELLJAR_LEASE_STORM", "300"))
SEED = int(os.environ.get("BELLJAR_SEED", "0")) or int(time.time())
MOST = 5  # machines of the owner, by policy
SETTLING = 300.0  # seconds in which everything ends when nobody kills any more


class Storm:
    """What was asked for, and what was killed."""

    def __init__(self, site: LeaseSite) -> None:
        self.site, self.chance = site, random.Random(SEED)
        self.done: Counter[str] = Counter()
        self.acts: dict[str, tuple[int, Callable[[], bool]]] = {
            "asked": (6, self.ask), "released": (2, self.release), "one released": (2, self.release_one), "extended": (1, self.extend),
            "service": (2, self.service), "pilot": (2, self.pilot), "machine": (2, self.machine), "slurmctld": (1, self.slurmctld),
            "slurmd": (1, self.slurmd), "cancelled": (1, self.cancel), "pilot held up": (1, self.hold_up), "nothing": (4, lambda: True),
            "node resumed": (3, self.resume),
        }  # fmt: skip

    def act(self) -> None:
        """One of them; as often as its number says."""
        name = self.chance.choices(list(self.acts), [often for often, _ in self.acts.values()])[0]
        if self.acts[name][1]():
            self.done[name] += 1

    # -- owners --------------------------------------------------------------------------------------------------------

    def live(self) -> list[dict[str, Any]]:
        return [one for one in self.status()["leases"] if one["state"] in ("requested", "queued", "claiming", "active")]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.site("status", "--format", "json"))
        return found

    def ask(self) -> bool:
        words = [
            "-n",
            str(self.chance.choice((1, 1, 2, 3))),
            "--least",
            "1",
            "--time",
            self.chance.choice(("60s", "90s", "1h", "1h")),
        ]
        said = self.site("run", IMAGE, *words, check=False)
        assert "MACHINE" in said or "machines" in said, said  # a lease, or the denial of one too many
        return "MACHINE" in said

    def release(self) -> bool:
        live = self.live()
        if live:
            self.site("release", self.chance.choice(live)["id"], check=False)
        return bool(live)

    def release_one(self) -> bool:
        live = [one for one in self.status()["machines"] if one["state"] not in ("terminated", "stopping")]
        if live:
            self.site("release", self.chance.choice(live)["id"], check=False)
        return bool(live)

    def extend(self) -> bool:
        active = [one for one in self.live() if one["state"] == "active"]
        if active:
            self.site("extend", self.chance.choice(active)["id"], "60s", check=False)
        return bool(active)

    # -- kills ---------------------------------------------------------------------------------------------------------

    def service(self) -> bool:
        self.site.kill_service()
        time.sleep(self.chance.choice((0, 0, 3, 10)))
        self.site.start()
        return True

    def pilot(self) -> bool:
        return self._kill(self.site.pilots(), signal.SIGKILL)

    def machine(self) -> bool:
        return self._kill(self.site.belljar.domains(), signal.SIGKILL)

    def hold_up(self) -> bool:
        """A pilot that is silent for a while, and goes on."""
        pilots = self.site.pilots()
        if not pilots:
            return False
        one = self.chance.choice(pilots)
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
            time.sleep(self.chance.uniform(2, 8))
            os.kill(one, signal.SIGCONT)
        return True

    def _kill(self, pids: list[int], number: int) -> bool:
        with suppress(ProcessLookupError):
            if pids:
                os.kill(self.chance.choice(pids), number)
        return bool(pids)

    def slurmctld(self) -> bool:
        self.site.lab.stop("slurmctld", signal.SIGKILL)
        time.sleep(self.chance.choice((0, 5)))
        self.site.lab.start_slurmctld()
        return True

    def slurmd(self) -> bool:
        node = self.chance.choice(self.site.lab.nodes)
        self.site.lab.stop(f"slurmd-{node}", signal.SIGKILL)
        time.sleep(self.chance.choice((0, 5)))
        self.site.lab.start_slurmd(node)
        return True

    def resume(self) -> bool:
        """As an administrator does: a slurmctld that was killed before it saved a job's start drains the node (Duplicate jobid)."""
        nodes = (
            self.site.lab.run("sinfo", "--noheader", "--Node", "--states=drain", "--format=%N").stdout.decode().split()
        )
        for node in nodes:
            self.site.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        return bool(nodes)

    def cancel(self) -> bool:
        jobs = self.site.jobs()
        if jobs:
            self.site.lab.run("scancel", self.chance.choice(jobs), check=False)
        return bool(jobs)


@pytest.fixture
def storm() -> Iterator[Storm]:
    with LeaseSite(nodes=3, policy=f"machines = {MOST}").running() as site:
        yield Storm(site)


def test_whatever_is_killed_the_invariants_hold_and_nothing_is_left(storm: Storm) -> None:
    print(f"{SECONDS:.0f} s, seed {SEED}")
    site, observer = storm.site, Observer(storm.site, MOST)
    try:
        end = last = time.monotonic()
        end += SECONDS
        while (now := time.monotonic()) < end:
            storm.act()
            time.sleep(storm.chance.uniform(0, 3))
            assert not observer.so_far(), f"{observer.so_far()}\n{site.story()}"
            if now - last > 60:
                last = now
                print(f"{end - now:6.0f} s left: {dict(storm.done)}", flush=True)
        for lease in storm.live():
            site("release", lease["id"])
        site.until(lambda: not storm.live(), "all leases have ended", SETTLING)
        site.until(
            lambda: not [one for one in storm.status()["leases"] if one["state"] == "draining"],
            "nothing drains",
            SETTLING,
        )
        site.until_nothing_is_left()
        found = observer.verdict()
    finally:
        observer.close()
    ends = Counter(f"{one['state']}: {one['cause']}" for one in storm.status()["leases"])
    print(f"{dict(storm.done)}\nleases {dict(ends)}")
    assert found == [], site.story()
    assert sum(ends.values()) > SECONDS / 120 and storm.done["machine"] + storm.done["pilot"] > SECONDS / 120
    assert SECONDS < 600 or all(storm.done[name] for name in storm.acts if name != "node resumed"), (
        "this storm was too short for its seed"
    )
