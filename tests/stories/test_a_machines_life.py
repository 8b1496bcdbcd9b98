"""From the request to the outcome: the good way, and every way that is not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import ALL_STATES, Runtime

from belljar.errors import (
    BelljarError,
    DomainDied,
    GuestRefused,
    ImageCorrupt,
    NoSpace,
    PlugRefused,
    QmpError,
    QmpTimeout,
    TemplateError,
)
from belljar.guest import OTHER_SHARE
from belljar.host.locks import try_lock
from belljar.hypervisor import EventKind
from belljar.machine.extras import inputs
from belljar.machine.orders import Kill, Signal, Stop
from belljar.machine.planning.template import judge
from belljar.model import Cause, OutcomeClass, Share, Start, Transfer

COLD = {"machine": {"start": Start.COLD}}


def test_a_job_is_cloned_from_a_template_that_its_first_run_makes(runtime: Runtime) -> None:
    outcome = runtime.run()
    assert (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.FINISHED, OutcomeClass.PAYLOAD, 0)
    assert (outcome.start, outcome.accelerator) == ("clone", "tcg")
    assert outcome.accelerator_reason == "the fake has no KVM"
    assert runtime.states() == ALL_STATES
    assert [domain.spec.id for domain in runtime.hypervisor.domains] == ["0123456789ab"] * 2
    assert "settle" in runtime.guests[0].done and "settle" not in runtime.guests[1].done
    assert runtime.leftovers() == []
    assert runtime.saved_outcome()["exit_code"] == 0


def test_nothing_runs_before_the_guest_has_an_identity(runtime: Runtime) -> None:
    runtime.run(runtime.request(**COLD))
    done = runtime.guests[-1].done
    assert done.index("identify") < done.index("start")


def test_intent_is_in_the_journal_before_the_act(runtime: Runtime) -> None:
    seen: dict[str, Any] = {}
    runtime.at["after-overlay"] = lambda: seen.update(overlay=runtime.journal_of_the_living())
    runtime.at["after-spawn"] = lambda: seen.update(spawn=runtime.journal_of_the_living())
    runtime.run(runtime.request(**COLD))
    assert any(event.get("what") == "overlay" for event in seen["overlay"])
    assert seen["spawn"][-1]["state"] == "starting"


def test_every_named_point_is_passed_once_and_in_order(runtime: Runtime) -> None:
    runtime.run()
    assert runtime.passed == [
        "after-claim", "template-settled", "after-overlay", "after-spawn", "after-boot", "after-qmp", "after-agent",
        "payload-sent",
        "payload-started", "payload-ended", "status-written", "before-stop", "after-stop", "before-release",
        "outcome-written",
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "number"), [(0, None), (3, None), (255, None), (None, 9), (None, 15)])
def test_the_payloads_own_end_is_the_outcome(runtime: Runtime, code: int | None, number: int | None) -> None:
    runtime.plan(Script(exit_code=code, signal=number))
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.exit_code, outcome.signal, outcome.klass) == (code, number, OutcomeClass.PAYLOAD)


# -- clone or cold -------------------------------------------------------------------------------------------------------


def test_a_clone_that_does_not_answer_is_booted_cold_with_one_reason(runtime: Runtime) -> None:
    runtime.plan(Script(), Script(boots_in=None), Script())
    outcome = runtime.run()
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "clone" in outcome.start_reason
    assert runtime.leftovers() == []


def test_a_template_is_given_up_when_two_clones_in_a_row_were_silent_and_not_for_one(runtime: Runtime) -> None:
    """One may have been on a busy host, and a template of a whole distribution is minutes of work."""
    silent, fine = Script(boots_in=None), Script()
    runtime.plan(fine, silent, fine, fine, silent, fine, silent, fine)
    starts, left = [], []
    for number in range(4):
        outcome = runtime.run(runtime.request(id=f"{number:012x}"))
        assert outcome.exit_code == 0
        starts.append(outcome.start)
        left.append(len(runtime.hypervisor.templates()))
    assert (starts, left) == (["cold", "clone", "cold", "cold"], [1, 1, 1, 0])
    assert runtime.leftovers() == []


def test_a_template_that_was_made_anew_meanwhile_is_not_removed_for_the_one_before(runtime: Runtime) -> None:
    runtime.run()
    (old,) = runtime.hypervisor.templates()
    spec = runtime.domain().spec
    os.utime(old.folder / "facts", (1e9, 1e9))
    (new,) = runtime.hypervisor.templates()
    assert new.created != old.created
    judge(DomainDied("it broke"), old, spec, runtime.hypervisor)
    assert runtime.hypervisor.templates() == [new]
    judge(DomainDied("it broke"), new, spec, runtime.hypervisor)
    assert runtime.hypervisor.templates() == []


def test_a_template_is_not_given_up_for_what_its_image_lacks(runtime: Runtime) -> None:
    runtime.run()
    (template,) = runtime.hypervisor.templates()
    for _ in range(5):
        judge(PlugRefused("no ssh-keygen"), template, runtime.domain().spec, runtime.hypervisor)
    assert runtime.hypervisor.templates() == [template]


@pytest.mark.parametrize("fault", ["start_clone", "connect"])
def test_a_clone_that_fails_in_any_other_way_is_booted_cold_too(runtime: Runtime, fault: str) -> None:
    runtime.run()
    getattr(runtime.hypervisor.faults, fault).append(DomainDied("it broke"))
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "it broke" in outcome.start_reason


def test_a_clone_that_its_monitor_refuses_is_not_waited_for(runtime: Runtime) -> None:
    """Nor is its template doubted only: no other QEMU of this host will take it."""
    runtime.run()
    runtime.hypervisor.faults.connect.append(QmpError("QEMU refused: migration from a file is not supported"))
    runtime.plan(Script(boots_in=None), Script())
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "QEMU refused" in outcome.start_reason
    assert runtime.hypervisor.templates() == []


@pytest.mark.parametrize("fault", ["prepare_template", "save_template"])
def test_a_template_that_cannot_be_made_costs_the_user_nothing_but_time(runtime: Runtime, fault: str) -> None:
    getattr(runtime.hypervisor.faults, fault).append(NoSpace("no room for it"))
    outcome = runtime.run()
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "no room for it" in outcome.start_reason


@pytest.mark.parametrize("fault", ["prepare_template", "save_template"])
def test_nothing_is_left_of_a_template_that_could_not_be_made(runtime: Runtime, fault: str) -> None:
    getattr(runtime.hypervisor.faults, fault).append(TemplateError("it would not freeze"))
    runtime.run()
    assert list(runtime.hypervisor.folder.glob("*.draft")) == []


def test_a_template_that_is_cancelled_in_the_making_leaves_no_draft(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=None))
    drafts = []

    async def cast() -> None:
        task = asyncio.ensure_future(runtime.supervisor().make_template(runtime.request()))
        await asyncio.sleep(5)
        drafts.extend(runtime.hypervisor.folder.glob("*.draft"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runtime.leap(cast())
    assert len(drafts) == 1 and list(runtime.hypervisor.folder.glob("*.draft")) == []
    assert runtime.leftovers() == [] and runtime.saved_outcome()["cause"] == "cancelled"


def test_a_clone_wants_as_much_room_as_any_other_machine(runtime: Runtime) -> None:
    runtime.run()
    runtime.overlays.failure = NoSpace("/scratch: 3 MiB free, a machine needs 1024 MiB to start")
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    assert (outcome.error, outcome.exit_code) == ("NoSpace", None) and "3 MiB free" in outcome.reason
    assert runtime.leftovers() == []


def test_somebody_who_makes_the_template_for_ever_is_not_waited_for_for_ever(runtime: Runtime) -> None:
    runtime.run()
    (template,) = runtime.hypervisor.templates()
    runtime.hypervisor.remove_template(template.key)
    held = try_lock(runtime.hypervisor.folder / f"{template.key}.lock")
    assert held is not None
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    held.release()
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "another process" in outcome.start_reason


def test_an_image_whose_agent_never_answers_is_waited_for_once(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=None))
    outcome = runtime.run()
    assert outcome.error == "BootTimeout" and outcome.cause is Cause.BOOT_FAILED
    assert len(runtime.hypervisor.domains) == 1 and runtime.leftovers() == []


def test_who_insists_on_a_clone_is_told_why_there_is_none(runtime: Runtime) -> None:
    runtime.hypervisor.faults.save_template.append(TemplateError("it would not freeze"))
    outcome = runtime.run(runtime.request(machine={"start": Start.CLONE}))
    assert outcome.exit_code is None and "it would not freeze" in outcome.reason
    assert runtime.leftovers() == []


def test_a_damaged_template_is_made_anew(runtime: Runtime) -> None:
    runtime.run()
    (template,) = runtime.hypervisor.templates()
    runtime.hypervisor.damaged[template.key] = "somebody wrote to it"
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    assert outcome.start == "clone" and runtime.hypervisor.verify_template(template) == []


# -- what goes wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "event", "cause", "klass", "says"),
    [
        ("after-spawn", EventKind.SHUTDOWN, Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, "powered itself off before"),
        ("after-spawn", EventKind.RESET, Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, "the guest rebooted before"),
        ("payload-started", EventKind.SHUTDOWN, Cause.GUEST_LOST, OutcomeClass.USER, "payload powered the guest off"),
        ("payload-started", EventKind.RESET, Cause.GUEST_LOST, OutcomeClass.USER, "the payload rebooted the guest"),
    ],
)
def test_a_guest_that_switches_itself_off_is_the_payloads_doing_or_a_boot_that_failed(
    runtime: Runtime, point: str, event: EventKind, cause: Cause, klass: OutcomeClass, says: str
) -> None:
    runtime.plan(Script(runs_for=None))
    runtime.at[point] = lambda: runtime.domain().happen(event, "why", None)
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.cause, outcome.klass) == (cause, klass) and says in outcome.reason and outcome.hint
    assert runtime.leftovers() == []


@pytest.mark.parametrize(
    ("event", "status", "cause", "klass", "says"),
    [
        (EventKind.PANICKED, None, None, OutcomeClass.TRANSIENT, "kernel crashed"),
        (EventKind.DISK_FULL, None, Cause.NODE_FAULT, OutcomeClass.NODE, "no space left"),
        (EventKind.DISK_ERROR, None, None, OutcomeClass.TRANSIENT, "disk cannot be read"),
        (EventKind.SHARE_LOST, None, None, OutcomeClass.TRANSIENT, "shared folder is not served any more"),
        (EventKind.EXITED, 9, Cause.HOST_OOM, OutcomeClass.NODE, "killed from outside"),
        (EventKind.EXITED, 256, None, OutcomeClass.TRANSIENT, "exit code 1"),
        (EventKind.EXITED, 11, None, OutcomeClass.TRANSIENT, "signal 11"),
    ],
)
@pytest.mark.parametrize(
    ("point", "else_"), [("after-spawn", Cause.BOOT_FAILED), ("payload-started", Cause.GUEST_LOST)]
)
def test_what_a_domain_does_by_itself_has_its_class_and_its_sentence(
    runtime: Runtime,
    point: str,
    else_: Cause,
    event: EventKind,
    status: int | None,
    cause: Cause | None,
    klass: OutcomeClass,
    says: str,
) -> None:
    runtime.plan(Script(runs_for=None))
    runtime.at[point] = lambda: runtime.domain().happen(event, "why", status)
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.cause, outcome.klass) == (cause or else_, klass) and says in outcome.reason and outcome.hint
    assert outcome.exit_code is None and outcome.signal is None
    assert runtime.leftovers() == []


def test_a_guest_that_never_answers_is_given_up_at_the_deadline(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=None))
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.cause, outcome.klass) == (Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)
    assert "180 s" in outcome.reason and "agent" in outcome.reason


def test_a_monitor_that_never_answers_is_given_up_too(runtime: Runtime) -> None:
    runtime.at["after-spawn"] = lambda: setattr(runtime.domain(), "is_deaf", True)
    outcome = runtime.run(runtime.request(**COLD))
    assert outcome.cause is Cause.BOOT_FAILED and runtime.leftovers() == []


def test_a_monitor_that_refuses_is_told_as_such(runtime: Runtime) -> None:
    runtime.hypervisor.faults.connect.append(QmpTimeout("no answer to qmp_capabilities"))
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.error, outcome.cause) == ("QmpTimeout", Cause.NODE_FAULT)


@pytest.mark.parametrize(
    "wrong", [{"hostname": "template"}, {"machine_id": "0" * 32}, {"sample": "short"}, {"nonce": "x"}]
)
def test_a_guest_without_an_identity_of_its_own_gets_no_payload(runtime: Runtime, wrong: dict[str, object]) -> None:
    runtime.plan(Script(proof=wrong))
    outcome = runtime.run(runtime.request(**COLD))
    assert outcome.error == "IdentityRefused" and "start" not in runtime.guests[-1].done
    assert runtime.leftovers() == []


def test_a_twin_gets_no_payload(runtime: Runtime) -> None:
    runtime.plan(Script(proof={"sample": "ab" * 32}))
    runtime.folders.identities.mkdir(parents=True, mode=0o700)
    runtime.folders.run.chmod(0o700)
    (runtime.folders.identities / ("ab" * 32)).touch()
    outcome = runtime.run(runtime.request(**COLD))
    assert outcome.error == "IdentityRefused" and "twin" in outcome.reason


def test_a_guest_whose_clock_is_wrong_gets_one_more_chance(runtime: Runtime) -> None:
    runtime.plan(Script(skew=5.0))
    assert runtime.run(runtime.request(**COLD)).exit_code == 0
    assert "set_clock" in runtime.guests[-1].done


@pytest.mark.parametrize(
    ("error", "cause", "klass"),
    [
        (ImageCorrupt("truncated"), Cause.IMAGE_FAULT, OutcomeClass.NODE),
        (NoSpace("full"), Cause.NODE_FAULT, OutcomeClass.NODE),
    ],
)
def test_an_image_that_cannot_be_used_starts_nothing(
    runtime: Runtime, error: BelljarError, cause: Cause, klass: OutcomeClass
) -> None:
    runtime.images.failures["debian12"] = error
    outcome = runtime.run()
    assert (outcome.cause, outcome.klass) == (cause, klass) and runtime.hypervisor.domains == []
    assert runtime.states() == ["requested", "preparing", "cleaning", "done"]


def test_an_unknown_image_is_the_askers_affair(runtime: Runtime) -> None:
    outcome = runtime.run(runtime.request(machine={"image": "nixos"}))
    assert outcome.klass is OutcomeClass.USER and "nixos" in outcome.reason and outcome.hint


def test_an_overlay_without_room_leaves_nothing(runtime: Runtime) -> None:
    runtime.overlays.failure = NoSpace("scratch is full")
    outcome = runtime.run(runtime.request(**COLD))
    assert outcome.klass is OutcomeClass.NODE and runtime.leftovers() == []


def test_a_share_on_a_kernel_without_9p_names_the_alternative(runtime: Runtime, tmp_path: Path) -> None:
    runtime.plan(Script(refuses={"mount": GuestRefused("no 9p", hint=OTHER_SHARE)}))
    outcome = runtime.run(runtime.request(machine={"start": Start.COLD, "shares": (Share(str(tmp_path), "/data"),)}))
    assert outcome.error == "GuestRefused" and "--in" in outcome.hint and outcome.klass is OutcomeClass.USER


def test_a_guest_out_of_memory_ends_as_the_oom_killer_ends_it(runtime: Runtime) -> None:
    runtime.plan(Script(exit_code=None, signal=signal.SIGKILL, oom_killed=True))
    outcome = runtime.run(runtime.request(**COLD))
    assert (outcome.cause, outcome.klass, outcome.signal) == (Cause.GUEST_OOM, OutcomeClass.PAYLOAD, signal.SIGKILL)


def test_an_oom_kill_that_the_payload_survived_is_its_own_affair(runtime: Runtime) -> None:
    runtime.plan(Script(exit_code=0, oom_killed=True))
    assert runtime.run(runtime.request(**COLD)).cause is Cause.FINISHED


# -- files out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "error"), [(0, "OutputMissing"), (3, "")])
def test_a_missing_output_is_an_error_only_where_the_payload_had_none(runtime: Runtime, code: int, error: str) -> None:
    runtime.plan(Script(exit_code=code, outputs=frozenset({"there"})))
    outputs = (Transfer("/tmp/gone", "gone"), Transfer("/tmp/there", "there"))
    outcome = runtime.run(runtime.request(machine={"start": Start.COLD}, payload={"outputs": outputs}))
    assert outcome.exit_code == code and outcome.error == error
    assert runtime.guests[-1].done.count("get") == 2, "what is there is fetched whatever is not"


# -- asked from outside ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("at", [0.0, 0.5])
def test_a_start_that_is_cancelled_runs_nothing(runtime: Runtime, at: float, number: int) -> None:
    outcome = runtime.run(runtime.request(**COLD), (at, Signal(number)))
    assert (outcome.cause, outcome.klass, outcome.signal) == (Cause.CANCELLED, OutcomeClass.CANCELLED, number)
    assert all("start" not in guest.done for guest in runtime.guests)
    assert runtime.leftovers() == []


def test_a_job_whose_input_lies_on_a_dead_file_server_can_be_cancelled(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(inputs, "is_large", lambda folder, settings: answers.wait(20))
    items = (Transfer(str(tmp_path), "/tmp/there"),)
    outcome = runtime.run(runtime.request(payload={"inputs": items}, **COLD), (5.0, Signal(signal.SIGTERM)))
    assert not answers.is_set() and runtime.leftovers() == []
    answers.set()
    assert (outcome.cause, outcome.signal) == (Cause.CANCELLED, signal.SIGTERM)


def test_a_cancelled_template_is_left_to_nobody(runtime: Runtime) -> None:
    outcome = runtime.run(None, (0.5, Signal(signal.SIGTERM)))
    assert outcome.cause is Cause.CANCELLED
    assert runtime.leftovers() == [] and runtime.hypervisor.templates() == []


def test_term_is_the_payloads_to_obey(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))
    outcome = runtime.run(runtime.request(**COLD), (10.0, Signal(signal.SIGTERM)))
    assert (outcome.cause, outcome.signal) == (Cause.CANCELLED, signal.SIGTERM)


def test_who_ignores_term_is_ended_when_the_grace_is_over(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None, obeys=frozenset()))
    outcome = runtime.run(runtime.request(grace=30.0, **COLD), (10.0, Signal(signal.SIGTERM)))
    assert (outcome.cause, outcome.signal) == (Cause.CANCELLED, signal.SIGTERM) and "30 s" in outcome.reason
    assert outcome.phases["run"] < 60


def test_who_ignores_term_and_then_ends_by_itself_keeps_its_code(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=20.0, exit_code=7, obeys=frozenset()))
    outcome = runtime.run(runtime.request(grace=3600.0, **COLD), (10.0, Signal(signal.SIGTERM)))
    assert (outcome.cause, outcome.exit_code) == (Cause.CANCELLED, 7)


def test_a_second_term_waits_for_nothing(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None, obeys=frozenset()))
    orders = ((10.0, Signal(signal.SIGTERM)), (11.0, Signal(signal.SIGTERM)))
    outcome = runtime.run(runtime.request(grace=3600.0, **COLD), *orders)
    assert (outcome.cause, outcome.signal) == (Cause.CANCELLED, signal.SIGTERM) and "twice" in outcome.reason


def test_stop_has_a_grace_of_its_own_and_kill_has_none(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None, obeys=frozenset()))
    stopped = runtime.run(runtime.request(grace=3600.0, **COLD), (10.0, Stop(2.0)))
    assert stopped.cause is Cause.CANCELLED and "2 s" in stopped.reason
    killed = runtime.run(runtime.request(id="0123456789ac", **COLD), (10.0, Kill()))
    assert (killed.cause, killed.signal) == (Cause.CANCELLED, signal.SIGKILL)


@pytest.mark.parametrize(("obeys", "ended_by"), [(frozenset({15}), signal.SIGTERM), (frozenset(), signal.SIGKILL)])
def test_the_time_limit_ends_by_term_and_after_the_grace_by_kill(
    runtime: Runtime, obeys: frozenset[int], ended_by: int
) -> None:
    runtime.plan(Script(runs_for=None, obeys=obeys))
    outcome = runtime.run(runtime.request(timeout=3600.0, grace=30.0, **COLD))
    assert (outcome.cause, outcome.klass, outcome.signal) == (Cause.WALLTIME, OutcomeClass.WALLTIME, ended_by)
    assert "3600 s" in outcome.reason


def test_a_signal_that_comes_too_early_is_delivered_when_there_is_a_payload(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=5.0))
    runtime.run(runtime.request(**COLD), (0.5, Signal(signal.SIGUSR1)))
    assert runtime.guests[-1]._processes[0].signals == [signal.SIGUSR1]


def test_a_machine_that_is_kept_keeps_its_disk(runtime: Runtime) -> None:
    runtime.run(runtime.request(keep=True, **COLD))
    kept = sorted(os.listdir(runtime.folders.ended("0123456789ab")))
    assert "overlay.qcow2" in kept and "journal.jsonl" in kept
    assert runtime.leftovers() == []
