"""The memory of a host is given away once: to machines of this test's own processes, and in stories with fakes."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.stories.conftest import Runtime

from belljar.host.room import Settings, host_memory
from belljar.model import MIB, OutcomeClass

STARTER = """
import asyncio, sys, time
from pathlib import Path
from belljar.errors import NoMemory
from belljar.host.room import Settings
from belljar.machine import Folders
from belljar.machine.life import claim
from belljar.model import MachineSpec, OwnWork, Request

write = claim.write_whole
claim.write_whole = lambda *words: (time.sleep(0.05), write(*words))  # whoever looks meanwhile sees nothing yet
folder, id, memory, kept = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
folders = Folders(*(folder / name for name in ("run", "scratch", "store", "logs")))
request = Request(id, MachineSpec("i", 1, memory), OwnWork())
life = claim.claim(request, folders, lambda point: None)
print("claimed", flush=True)
moment = float(sys.stdin.readline())
try:
    time.sleep(max(0.0, moment - time.time()))
    asyncio.run(claim.reserve(request, folders, Settings(kept_memory=kept)))
    print("reserved", flush=True)
except NoMemory as error:
    print(error.message, flush=True)
sys.stdin.readline()
"""
STARTERS = 6


def test_starters_that_race_do_not_take_the_last_memory_twice(tmp_path: Path) -> None:
    available = host_memory()[1]
    memory = available // 4
    kept = available - memory - memory // 2  # so there is room for one and a half, whatever others do meanwhile
    words = [sys.executable, "-c", STARTER, str(tmp_path)]
    starters = [
        subprocess.Popen(
            [*words, f"{number:012x}", str(memory), str(kept)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(STARTERS)
    ]
    try:
        assert [one.stdout.readline() for one in starters] == ["claimed\n"] * STARTERS  # type: ignore[union-attr]
        for one in starters:
            one.stdin.write(f"{time.time() + 0.2}\n")  # type: ignore[union-attr]
            one.stdin.flush()  # type: ignore[union-attr]
        said = [one.stdout.readline().strip() for one in starters]  # type: ignore[union-attr]
        assert said.count("reserved") == 1, said
        assert all("1 other machines of this user have reserved" in one for one in said if one != "reserved"), said
    finally:
        for one in starters:
            one.communicate("\n")


def test_a_machine_that_there_is_no_room_for_is_the_nodes_affair(runtime: Runtime) -> None:
    runtime.host = Settings(kept_memory=1 << 60)
    outcome = runtime.run()
    assert (outcome.klass, outcome.error) == (OutcomeClass.NODE, "NoMemory")
    assert outcome.reason.startswith("64 MiB of memory: 0 MiB are left on ") and outcome.hint
    assert runtime.hypervisor.domains == [] and runtime.leftovers() == []
    assert runtime.saved_outcome()["error"] == "NoMemory"


def test_what_a_batch_system_has_set_aside_is_not_refused_and_counts_for_others(runtime: Runtime) -> None:
    runtime.host = Settings(kept_memory=1 << 60)
    seen: list[int] = []

    def look() -> None:
        from belljar.machine.life.claim import taken

        seen.extend(one.need.memory for one in taken(runtime.folders))

    runtime.at["payload-started"] = look
    outcome = runtime.run(replace(runtime.request(), is_allotted=True))
    assert outcome.exit_code == 0 and seen == [64 * MIB]
