"""Asks a running machine to be forked, and has the machines started that go on where it stands."""

from __future__ import annotations

import os

from belljar.errors import BelljarError
from belljar.hints import TYPE_CHECKING
from belljar.jobs.starting import make_request
from belljar.machine import MachineView
from belljar.machine.life import control
from belljar.machine.outside.detached import Keeper
from belljar.model import MachineId, MachineSpec, OwnWork, Payload, Probe, RunPayload, Sign, Start
from belljar.reading import from_json
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.jobs import Runtime

PATIENCE = 1800.0  # seconds for the memory of a large machine


def fork(
    runtime: Runtime, view: MachineView, count: int, payload: Payload | None, *, name: str = "", requester: str = "cli"
) -> list[MachineId]:
    """So many machines that go on where this one stands, all claimed when this returns, or none lives. Each runs the *payload*; without
    one it stands ready. Raises MachineBusy, and what kept one from being claimed."""
    work = OwnWork(ready=Probe(Sign.AGENT)) if payload is None else RunPayload(payload)
    parent: MachineSpec = from_json(MachineSpec, view.request["machine"])
    with control.connect(view.folder, patience=PATIENCE) as connection:
        key = str(control.ask(connection, "fork", count=count)["fork"])
        machine = replace(parent, fork=key, start=Start.CLONE, ports=())
        asked = make_request(runtime.settings, work, requester=requester, labels={"fork-of": view.id})
        names = [f"{name}-{number}" if name and count > 1 else name for number in range(1, count + 1)]
        requests = [replace(asked, id=os.urandom(6).hex(), name=called, machine=machine) for called in names]
        answers = Keeper(config_file=runtime.config_file, count=count).take_all(requests)
    machines = [answer for answer in answers if isinstance(answer, str)]
    for problem in answers:
        if isinstance(problem, BelljarError):
            for id in machines:
                runtime.reaper.end(runtime.machines.find(id))
            raise problem
    return machines
