"""When a batch job is checkpointed, and what becomes of the job and its folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings
from belljar.batch.job.terms import Dialect, Ending, Job, Standing, Verdict
from belljar.batch.job.verdict import judge
from belljar.errors import CheckpointFailed, CommandFailed, HostError
from belljar.jobs.batch.checkpoints import Checkpoints
from belljar.machine.orders import Freeze, Order, Pause, Signal, Stop
from belljar.model import Cause, MachineSpec, Outcome, OutcomeClass, OwnWork, Request

TERM, USR1, USR2 = (Signal(number, alone=True) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
JOB = Job("slurm", "4711_3", aliases=("4714",), started_before=1, grace=28.0, checkpoint="")
OUTCOME = Outcome("0123456789ab", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=0)
GONE_ON = replace(OUTCOME, cause=Cause.CHECKPOINTED, klass=OutcomeClass.CANCELLED, exit_code=None)
CANCELLED = replace(OUTCOME, cause=Cause.CANCELLED, klass=OutcomeClass.CANCELLED, exit_code=None, signal=15)
REQUEST = Request(OUTCOME.id, MachineSpec("debian12", 1, 1 << 30), OwnWork())
BACK, OWN = Ending(99), Ending(3)


class Told(Dialect):
    """A system that says how the job stands, or cannot."""

    name = "slurm"

    def __init__(self, standing: Standing | None = Standing.RUNS) -> None:
        self.told = standing

    def ask_standing(self, job: Job) -> tuple[str, ...]:
        return ("show", job.id)

    def standing(self, job: Job, printed: bytes) -> Standing:
        if self.told is None:
            raise CommandFailed("show: exit 1")
        return self.told

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        return OWN if outcome is not GONE_ON else super().tell(job, verdict, outcome, tries, settings)

    def give_back(self, job: Job, *, is_queued: bool) -> Ending:
        return BACK


class Machine:
    """What a supervisor is given; each order to freeze ends as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.given: list[Order] = []
        self.error, self.number = error, 0
        self.hears = asyncio.Event()

    def give(self, order: Order) -> None:
        self.given.append(order)
        if isinstance(order, Freeze) and self.error is not None:
            order.done.set_exception(self.error)
        elif isinstance(order, Freeze):
            self.number += 1
            (order.folder / str(self.number)).mkdir(parents=True, exist_ok=True)
            order.done.set_result(self.number)
        self.hears.set()

    async def next(self) -> Order:
        """The latest order, once there is one that was not seen."""
        async with asyncio.timeout(10):
            await self.hears.wait()
        self.hears.clear()
        return self.given[-1]


def checkpoints(
    folder: Path, rule: str, dialect: Dialect | None = None, job: Job = JOB, **settings: object
) -> Checkpoints:
    site = Settings(checkpoint="on-request", checkpoint_folder=str(folder), **settings)  # type: ignore[arg-type]
    return Checkpoints(rule, job, dialect or Told(), site, lambda argv: b"")


def folder_of(top: Path) -> Path:
    return top / str(os.geteuid()) / "slurm-4711_3-4714"


@asynccontextmanager
async def minded(checks: Checkpoints, machine: Machine) -> AsyncIterator[Callable[[Order], None]]:
    """While the machine is kept; gives what hears the orders of its system."""
    checks.give = machine.give
    minding = asyncio.ensure_future(checks.mind())
    try:
        yield checks.hear
    finally:
        minding.cancel()
        with suppress(asyncio.CancelledError):
            await minding


async def freeze_after(order: Order, checks: Checkpoints, machine: Machine) -> Order:
    async with minded(checks, machine) as give:
        give(order)
        return await machine.next()


# -- the folder ----------------------------------------------------------------------------------------------------------


def test_a_job_has_a_folder_of_its_own_and_goes_on_at_its_second_start(tmp_path: Path) -> None:
    asked = checkpoints(tmp_path, "on-limit").asked(REQUEST)
    assert asked == replace(REQUEST, checkpointable=True, restore=str(folder_of(tmp_path)))
    (folder_of(tmp_path) / "of-another-job").mkdir(parents=True)
    first = checkpoints(tmp_path, "on-limit", job=replace(JOB, started_before=0))
    assert first.asked(REQUEST) == replace(REQUEST, checkpointable=True) and not folder_of(tmp_path).exists()


def test_a_folder_that_is_not_on_this_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="missing: the folder of checkpoints is not on this node"):
        checkpoints(tmp_path / "missing", "on-limit")


# -- warnings ------------------------------------------------------------------------------------------------------------


async def test_the_term_of_a_preemption_becomes_a_checkpoint_within_the_grace(tmp_path: Path) -> None:
    order = await freeze_after(TERM, checkpoints(tmp_path, "on-preempt", Told(Standing.QUEUED)), Machine())
    assert isinstance(order, Freeze) and order.stop and order.folder == folder_of(tmp_path)
    assert order.within is not None and 24 < order.within <= 25


async def test_the_term_of_a_cancel_is_what_it_always_was(tmp_path: Path) -> None:
    assert await freeze_after(TERM, checkpoints(tmp_path, "on-preempt", Told(Standing.OVER)), Machine()) == TERM
    assert await freeze_after(TERM, checkpoints(tmp_path, "on-limit+every=1h"), Machine()) == TERM


@pytest.mark.parametrize("rule", ["on-preempt", "on-limit"])
async def test_the_warning_signal_of_the_users_choice_needs_no_time_limit(tmp_path: Path, rule: str) -> None:
    order = await freeze_after(USR1, checkpoints(tmp_path, rule), Machine())
    assert isinstance(order, Freeze) and order.stop and order.within is None
    assert await freeze_after(USR2, checkpoints(tmp_path, rule), Machine()) == USR2
    assert await freeze_after(USR1, checkpoints(tmp_path, "every=1h"), Machine()) == USR1


async def test_an_announced_end_is_a_warning_too(tmp_path: Path) -> None:
    job = replace(JOB, notice=(signal.SIGUSR2, 60.0))
    order = await freeze_after(USR2, checkpoints(tmp_path, "on-preempt", job=job), Machine())
    assert isinstance(order, Freeze) and order.within is not None and 59 < order.within <= 60


async def test_other_orders_pass(tmp_path: Path) -> None:
    pause = Pause(asyncio.Event())
    assert await freeze_after(pause, checkpoints(tmp_path, "on-preempt"), Machine()) is pause


@pytest.mark.parametrize(
    ("warning", "notice", "is_passed"), [(USR1, None, False), (USR2, (signal.SIGUSR2, 60.0), True)]
)
async def test_where_no_checkpoint_can_be_made_only_usr1_reaches_no_program(
    warning: Signal,
    notice: tuple[int, float] | None,
    is_passed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("belljar.jobs.batch.checkpoints.complain", lambda message: told.set_result(message))
    full = Machine(CheckpointFailed("no room: 900 MiB are needed, 10 MiB are free"))
    checks = checkpoints(tmp_path, "on-preempt", job=replace(JOB, notice=notice))
    async with minded(checks, full) as give:
        give(warning)
        async with asyncio.timeout(10):
            assert "not checkpointed: no room: 900 MiB are needed" in await told
        await asyncio.sleep(0)
    assert full.given[1:] == ([warning] if is_passed else [])


async def test_what_does_not_fit_into_the_grace_is_stopped_with_that_reason(tmp_path: Path) -> None:
    slow, checks = Machine(CheckpointFailed("not written within 25 s")), checkpoints(tmp_path, "on-preempt")
    async with minded(checks, slow) as give:
        give(TERM)
        while not isinstance(order := await slow.next(), Stop):
            pass
    assert order.why == "cancelled by TERM, not checkpointed: not written within 25 s"
    assert order.grace is not None and 27 < order.grace <= 28


async def test_before_its_limit_by_belljars_own_clock(tmp_path: Path) -> None:
    for wall, lead in ((0.2, 0.15), (0.02, 120.0)):  # a limit below the lead: at half of it
        machine = Machine()
        checks = checkpoints(tmp_path, "on-limit", job=replace(JOB, wall=wall), checkpoint_lead=lead)
        async with minded(checks, machine):
            order = await machine.next()
        assert isinstance(order, Freeze) and order.stop


async def test_again_and_again_while_the_machine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("belljar.jobs.batch.checkpoints.duration", lambda text: float(text) / 1000)
    for machine, complaints in ((Machine(), 0), (Machine(CheckpointFailed("no room")), 1)):
        checks = (
            checkpoints(tmp_path / str(complaints), "every=2") if (tmp_path / str(complaints)).mkdir() is None else None
        )
        assert checks is not None
        async with minded(checks, machine):
            for _ in range(3):
                order = await machine.next()
                assert isinstance(order, Freeze) and not order.stop
        assert capsys.readouterr().err.count("not checkpointed: no room") == complaints


# -- the end -------------------------------------------------------------------------------------------------------------


def made(tmp_path: Path, dialect: Dialect, rule: str = "on-preempt") -> Checkpoints:
    checks = checkpoints(tmp_path, rule, dialect)
    (folder_of(tmp_path) / "1").mkdir(parents=True)
    return checks


def told(checks: Checkpoints, verdict: Verdict, outcome: Outcome) -> Ending:
    return checks.tell(JOB, verdict, outcome, 1, Settings())


@pytest.mark.parametrize(
    ("outcome", "standing", "ending", "is_kept"),
    [
        (OUTCOME, Standing.RUNS, OWN, False),
        (GONE_ON, Standing.RUNS, BACK, True),
        (GONE_ON, Standing.QUEUED, BACK, True),
        (GONE_ON, Standing.OVER, Ending(None, signal.SIGTERM), False),  # cancelled meanwhile
        (CANCELLED, Standing.OVER, OWN, False),
        (CANCELLED, Standing.QUEUED, OWN, True),  # it starts again, from an earlier one
        (CANCELLED, Standing.RUNS, OWN, False),  # by its owner's `belljar stop`
    ],
)
def test_checkpoints_go_with_their_job(
    outcome: Outcome, standing: Standing, ending: Ending, is_kept: bool, tmp_path: Path
) -> None:
    checks = made(tmp_path, Told(standing))
    assert told(checks, judge(outcome, JOB, 1, Settings()), outcome) == ending
    assert folder_of(tmp_path).exists() is is_kept


def test_a_job_whose_node_failed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    lost = Outcome("0123456789ab", Cause.GUEST_LOST, OutcomeClass.TRANSIENT, phases={"run": 9.0})
    checks = made(tmp_path, Told())
    assert checks.has_any()
    for verdict in (Verdict.REQUEUE, Verdict.HOLD):
        assert told(checks, verdict, lost) == OWN and checks.has_any()
    assert judge(lost, replace(JOB, reruns=False), 1, Settings()) is Verdict.FAIL
    assert judge(lost, replace(JOB, reruns=True), 1, Settings()) is Verdict.REQUEUE


def test_a_system_that_does_not_answer_takes_back_what_it_told_to_end(tmp_path: Path) -> None:
    checks = made(tmp_path, Told(None))
    assert told(checks, Verdict.MIRROR, CANCELLED) == OWN and not folder_of(tmp_path).exists()
    checks = made(tmp_path, Told(None), "every=1h")
    checks.give = lambda order: None
    checks.hear(TERM)
    assert told(checks, Verdict.MIRROR, CANCELLED) == OWN and folder_of(tmp_path).exists()
