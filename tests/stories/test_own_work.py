"""Machines that know their own work: no payload, no agent, user data, and what they say of their end."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.fakes.hypervisor import FakeDomain
from tests.stories.conftest import Runtime

from belljar.host.guard.traffic import Call
from belljar.hypervisor import EventKind
from belljar.machine import CREDENTIALS, JOBOUTPUTS
from belljar.machine.orders import Order, Signal, Stop
from belljar.model import Cause, NetworkMode, OutcomeClass, OwnWork, Probe, Request, Share, Sign, Start, State
from belljar.network import EgressMode, Networks, Settings

METADATA, FEATURES = ("169.254.169.254", 80), ("169.254.169.253", 80)


@pytest.fixture
def networked(runtime: Runtime) -> Runtime:
    runtime.networks = Networks(Settings(), runtime.folders.run)
    return runtime


def own_work(runtime: Runtime, **changes: Any) -> Request:
    changes.setdefault("machine", {"network": NetworkMode.USER})
    work = {"user_data": b"#!/bin/sh\n"} | changes.pop("work", {})
    return replace(runtime.request(**changes), work=OwnWork(**work))


def ends(runtime: Runtime, kind: EventKind = EventKind.SHUTDOWN) -> None:
    """The domain does this by itself as soon as it runs."""
    runtime.at["after-qmp"] = lambda: runtime.domain().happen(kind)


def says(runtime: Runtime, text: str | bytes) -> None:
    """The guest put its message before it powers itself off."""

    def put() -> None:
        folder = runtime.folders.machine("0123456789ab") / JOBOUTPUTS
        folder.mkdir(mode=0o700)
        (folder / "shutdown_message").write_bytes(text if isinstance(text, bytes) else text.encode())
        runtime.domain().happen(EventKind.SHUTDOWN)

    runtime.at["after-qmp"] = put


def test_a_guest_that_powers_itself_off_has_finished(networked: Runtime) -> None:
    ends(networked)
    outcome = networked.run(own_work(networked))
    assert (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.FINISHED, OutcomeClass.PAYLOAD, 0)
    assert outcome.reason == "the guest powered itself off and said nothing about it"
    assert (outcome.context, outcome.start) == ("none", Start.COLD.value)
    assert networked.states()[-4:] == [State.RUNNING, State.STOPPING, State.CLEANING, State.DONE]
    assert networked.leftovers() == []


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ("200 Intended work completed ok", 0, "200 Intended work completed ok"), ("300 No work\nmore\n", 0, "300 No work"),
        ("399 almost", 0, "399 almost"), ("400 banned", 1, "400 banned"), ("700 \x1b[31mtransient", 1, "700 [31mtransient"),
        ("99 no code", 0, "said nothing"), ("ok", 0, "said nothing"), ("", 0, "said nothing"), (b"\xff\xfe", 0, "said nothing"),
        ("200 " + "x" * 100_000, 0, "said nothing"), ("500 " + "x" * 1000, 1, "500 " + "x" * 296),
    ],
)  # fmt: skip
def test_its_message_is_the_outcome(networked: Runtime, message: str, code: int, reason: str) -> None:
    says(networked, message)
    outcome = networked.run(own_work(networked))
    assert (outcome.cause, outcome.exit_code) == (Cause.FINISHED, code)
    assert reason in outcome.reason


def test_a_guest_that_reboots_or_finds_nothing_to_boot_has_not(networked: Runtime) -> None:
    ends(networked, EventKind.RESET)
    outcome = networked.run(own_work(networked))
    assert (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, None)
    assert "rebooted" in outcome.reason


def test_a_ramdisk_of_ours_that_gave_up_has_not_either(networked: Runtime) -> None:
    def gives_up() -> None:
        (networked.folders.machine("0123456789ab") / "console.log").write_text("belljar: no root file system\n")
        networked.domain().happen(EventKind.SHUTDOWN)

    networked.at["after-qmp"] = gives_up
    outcome = networked.run(own_work(networked))
    assert (outcome.cause, outcome.reason) == (Cause.BOOT_FAILED, "belljar: no root file system")


def test_its_time_is_limited(networked: Runtime) -> None:
    outcome = networked.run(own_work(networked, timeout=3600.0))
    assert outcome.cause is Cause.WALLTIME and outcome.exit_code is None
    assert outcome.reason == "the time limit of 3600 s was reached; the guest did not end within 10 s"
    assert "press power" in networked.domain().done
    assert networked.leftovers() == []


@pytest.mark.parametrize("order", [Signal(15), Signal(2), Stop()])
def test_its_power_button_is_pressed_before_it_is_ended(networked: Runtime, order: Order) -> None:
    outcome = networked.run(own_work(networked), (50.0, order))
    assert outcome.cause is Cause.CANCELLED and "the guest did not end within 10 s" in outcome.reason
    assert "press power" in networked.domain().done


def test_a_guest_that_heeds_its_power_button_tells_its_own_end(
    networked: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeDomain.press_power

    async def off(domain: FakeDomain) -> None:
        await real(domain)
        says(networked, "100 as asked")
        networked.at["after-qmp"]()

    monkeypatch.setattr(FakeDomain, "press_power", off)
    outcome = networked.run(own_work(networked), (50.0, Signal(15)))
    assert (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.CANCELLED, OutcomeClass.CANCELLED, 0)
    assert outcome.reason == "cancelled; the guest powered itself off: 100 as asked"


def test_a_second_order_does_not_wait_for_the_guest(networked: Runtime) -> None:
    outcome = networked.run(own_work(networked), (50.0, Signal(15)), (51.0, Signal(15)))
    assert (outcome.cause, outcome.reason) == (Cause.CANCELLED, "cancelled twice")


def test_its_supervisor_answers_where_it_looks_for_its_user_data(networked: Runtime) -> None:
    runtime, heard = networked, dict[str, bytes]()
    ours, guests = socket.socketpair()
    ours.setblocking(False)

    def call() -> None:
        guests.send(b"GET /latest/user-data HTTP/1.0\r\n\r\n")
        runtime.domain().tell(Call(*METADATA, ours))

    runtime.at["after-qmp"] = call
    outcome = runtime.run(own_work(runtime, timeout=5.0))
    with guests:
        heard["answer"] = guests.recv(4096)
    assert outcome.cause is Cause.WALLTIME
    assert heard["answer"].startswith(b"HTTP/1.1 200 ") and heard["answer"].endswith(b"\r\n\r\n#!/bin/sh\n")
    egress = runtime.domain().spec.nic.egress  # type: ignore[union-attr]
    assert egress is not None and egress.answers == (METADATA, FEATURES)


def test_where_payloads_ask_there_are_no_user_data_and_credentials_are_in_no_record(networked: Runtime) -> None:
    runtime, ends = networked, [socket.socketpair() for _ in range(2)]

    def call() -> None:
        folder = runtime.folders.machine("0123456789ab") / CREDENTIALS
        folder.mkdir()
        (folder / "token").write_text("ey.secret")
        for (ours, guests), place in zip(ends, (FEATURES, METADATA), strict=True):
            ours.setblocking(False)
            path = b"/latest/user-data" if place is FEATURES else b"/credentials/token"
            guests.send(b"GET " + path + b" HTTP/1.0\r\n\r\n")
            runtime.domain().tell(Call(*place, ours))

    runtime.at["after-qmp"] = call
    runtime.run(own_work(runtime, timeout=5.0))
    refused, told = (guests.recv(4096) for _, guests in ends)
    for _, guests in ends:
        guests.close()
    assert refused.startswith(b"HTTP/1.1 404 ") and b"#!" not in refused
    assert told.endswith(b"\r\n\r\ney.secret")
    ended = runtime.folders.ended("0123456789ab")
    assert ended.exists() and not (ended / CREDENTIALS).exists()


def test_what_a_payload_puts_is_kept_with_its_records(networked: Runtime) -> None:
    runtime = networked
    ours, guests = socket.socketpair()
    ours.setblocking(False)

    def call() -> None:
        guests.send(b"PUT /joboutputs/log HTTP/1.0\r\nContent-Length: 4\r\n\r\ndone")
        runtime.domain().tell(Call(*FEATURES, ours))

    runtime.at["payload-sent"] = call
    runtime.plan(Script(runs_for=5.0))
    request = runtime.request(machine={"start": Start.COLD, "network": NetworkMode.USER}, user_data=b"x")
    assert runtime.run(request).cause is Cause.FINISHED
    guests.close()
    assert (runtime.folders.ended("0123456789ab") / JOBOUTPUTS / "log").read_bytes() == b"done"
    assert dict(runtime.guests[-1].payloads[-1].env)[b"JOBOUTPUTS"] == b"http://169.254.169.253/joboutputs"


def test_features_over_http_are_those_of_the_files(networked: Runtime) -> None:
    runtime = networked
    ours, guests = socket.socketpair()
    ours.setblocking(False)

    def call() -> None:
        guests.send(b"GET /jobfeatures/jobstart_secs HTTP/1.0\r\n\r\n")
        runtime.domain().tell(Call(*FEATURES, ours))

    runtime.at["payload-sent"] = call
    runtime.plan(Script(runs_for=5.0))
    runtime.run(runtime.request(machine={"start": Start.COLD, "network": NetworkMode.USER}, user_data=b"x"))
    with guests:
        answer = guests.recv(4096).rpartition(b"\r\n\r\n")[2]
    (file,) = [one for one in runtime.guests[-1].payloads[-1].files if one.path == b"/etc/jobfeatures/jobstart_secs"]
    assert answer == file.data != b""


def test_user_data_that_nothing_would_bring_is_refused(runtime: Runtime) -> None:
    outcome = runtime.run(runtime.request(user_data=b"x"))
    assert (outcome.cause, outcome.error) == (Cause.REFUSED, "BadOption")
    assert "--network user" in outcome.hint and runtime.hypervisor.domains == []


def test_an_open_network_is_guarded_for_the_answers_alone(runtime: Runtime) -> None:
    runtime.networks = Networks(Settings(egress=EgressMode.OPEN), runtime.folders.run)
    ends(runtime)
    assert runtime.run(own_work(runtime)).cause is Cause.FINISHED
    egress = runtime.domain().spec.nic.egress  # type: ignore[union-attr]
    assert egress is not None and egress.allow[0].mask == 0


def test_user_data_is_not_in_the_records(networked: Runtime) -> None:
    ends(networked)
    networked.run(own_work(networked, work={"user_data": b"a riddle"}))
    kept = (networked.folders.ended("0123456789ab") / "request.json").read_text()
    assert json.loads(kept)["work"]["user_data"] == 8 and "riddle" not in kept
    assert list(networked.folders.ended("0123456789ab").glob("seed*")) == []


def test_a_disc_is_booted_beside_an_empty_disk(networked: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = networked
    real = runtime.images.resolve
    monkeypatch.setattr(
        runtime.images,
        "resolve",
        lambda name: replace(real(name), kernel=None, initrd=None, facts={"boots_by": "disc"}),
    )
    ends(runtime)
    outcome = runtime.run(own_work(runtime, machine={"network": NetworkMode.USER, "disk": 1 << 30}))
    assert outcome.cause is Cause.FINISHED, outcome.reason
    spec = runtime.domain().spec
    assert spec.boot.is_disc and spec.seed is not None
    assert [(disk.name, disk.format, disk.readonly) for disk in spec.disks] == [("empty", "raw", False)]
    assert runtime.leftovers() == []
    refused = runtime.run(runtime.request(id="0123456789ab", machine={"network": NetworkMode.USER}))
    assert (refused.cause, refused.error) == (Cause.REFUSED, "UsageError")


# -- with an agent, and with a sign that it is ready -----------------------------------------------------------------------

AGENT = {"user_data": None, "ready": Probe(Sign.AGENT)}


def test_with_an_agent_it_is_a_clone_with_an_identity_of_its_own(runtime: Runtime) -> None:
    outcome = runtime.run(own_work(runtime, machine={}, work=AGENT), (3600.0, Stop()))
    assert (outcome.start, outcome.context, outcome.cause) == (Start.CLONE.value, "ramdisk", Cause.CANCELLED)
    guest = runtime.guests[-1]
    assert guest.done[:2] == ["greet", "identify"] and "end_payload" in guest.done
    assert runtime.states()[-6:] == ["booting", "ready", "running", "stopping", "cleaning", "done"]
    assert "press power" not in runtime.domain().done  # nobody is there who would heed it
    assert runtime.leftovers() == []


def test_its_shares_and_its_scratch_disk_are_there_before_it_is_ready(runtime: Runtime, tmp_path: Path) -> None:
    share = Share(str(tmp_path), "/data")
    runtime.at["after-agent"] = lambda: (
        asyncio.get_running_loop().call_later(60.0, runtime.orders.give, Stop()) and None
    )
    runtime.run(own_work(runtime, machine={"shares": (share,), "scratch": 16 << 20}, work=AGENT))
    assert any("mount" in word for word in runtime.guests[-1].done)
    assert any("scratch" in word for word in runtime.guests[-1].done)


def test_a_guest_with_an_agent_that_never_answers_failed_to_boot(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=None))
    outcome = runtime.run(own_work(runtime, machine={"start": Start.COLD}, work=AGENT))
    assert (outcome.cause, outcome.klass) == (Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)


def test_a_file_that_appears_in_the_guest_shows_that_it_is_ready(runtime: Runtime) -> None:
    runtime.plan(Script(collected=bytes(1024)))
    work = {"user_data": None, "ready": Probe(Sign.FILE, "/run/ready", within=600.0)}

    def appears() -> None:
        assert runtime.machines.list()[0].state == State.BOOTING
        runtime.guests[-1].script.collected = b"run/ready" + bytes(1024)

    runtime.at["after-agent"] = lambda: asyncio.get_running_loop().call_later(300.0, appears) and None
    outcome = runtime.run(own_work(runtime, machine={}, work=work), (500.0, Stop()))
    # In leaping time the phase is short.
    assert outcome.cause is Cause.CANCELLED and outcome.phases["ready"] + 301 >= 300
    (ready,) = [event for event in runtime.journal() if event["event"] == "ready"]
    assert (ready["sign"], ready["of"]) == ("file", "/run/ready")


def test_a_sign_that_does_not_come_is_a_boot_that_failed(runtime: Runtime) -> None:
    runtime.plan(Script(collected=bytes(1024)))
    outcome = runtime.run(
        own_work(runtime, machine={}, work={"user_data": None, "ready": Probe(Sign.FILE, "/run/ready")})
    )
    assert (outcome.cause, outcome.klass) == (Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)
    assert outcome.reason == "waited 180 s for the file /run/ready in the guest"


def test_a_line_on_the_console_in_two_pieces_shows_that_it_is_ready(networked: Runtime) -> None:
    def writes() -> None:
        loop, serial = asyncio.get_running_loop(), networked.domain().serial
        loop.call_later(50.0, serial.send, b"[ OK ]\r\nall is re")
        loop.call_later(60.0, serial.send, b"ady now\r\n")

    networked.at["after-qmp"] = writes
    work = {"ready": Probe(Sign.LINE, "is ready")}
    outcome = networked.run(own_work(networked, work=work), (100.0, Stop()))
    assert State.RUNNING in networked.states() and outcome.cause is Cause.CANCELLED


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ("200 Work done", 0, "the guest powered itself off: 200 Work done"),
        ("700 The pilot failed", 1, "the guest powered itself off: 700 The pilot failed"),
        ("", 0, "the guest powered itself off and said nothing about it"),
    ],
)
def test_a_script_that_is_the_user_data_may_end_by_powering_its_machine_off(
    networked: Runtime, message: str, code: int, reason: str
) -> None:
    outcome = networked.run(as_script(networked, EventKind.SHUTDOWN, message))
    assert (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.FINISHED, OutcomeClass.PAYLOAD, code)
    assert outcome.reason == reason and outcome.shutdown_message == message.partition(" ")[2]
    assert networked.leftovers() == []


def test_such_a_script_that_reboots_its_machine_has_lost_it(networked: Runtime) -> None:
    outcome = networked.run(as_script(networked, EventKind.RESET))
    assert (outcome.cause, outcome.exit_code) == (Cause.GUEST_LOST, None)
    assert "the payload rebooted the guest" in outcome.reason


def as_script(runtime: Runtime, kind: EventKind, message: str = "") -> Request:
    """A request for a script that leaves this message, and ends its machine so."""

    def end() -> None:
        if message:
            folder = runtime.folders.machine("0123456789ab") / JOBOUTPUTS
            folder.mkdir(mode=0o700)
            (folder / "shutdown_message").write_text(message)
        runtime.domain().happen(kind)

    runtime.plan(Script(runs_for=None))
    runtime.at["payload-started"] = end
    request = runtime.request(machine={"network": NetworkMode.USER, "start": Start.COLD})
    return replace(request, work=replace(request.work, user_data=b"#!/bin/sh\n"))
