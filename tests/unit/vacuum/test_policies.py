"""A space under a virtual clock: what is counted is right, and the improved mode keeps what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.vacuum_policies.__main__ import main
from bench.vacuum_policies.plot import plot
from bench.vacuum_policies.report import Report, targets
from bench.vacuum_policies.scenario import Course, Experiment, Factories, Queue, Scenario, load
from bench.vacuum_policies.simulate import Simulation

from belljar.errors import BadSetting
from belljar.records import replace
from belljar.vacuum import MachineType, Mode, TypeStatus
from belljar.vacuum.decisions.backoff import view_of

SCENARIOS = Path(__file__).parents[3] / "bench/vacuum_policies/scenarios"
HOUR = 3600.0


def experiment(
    name: str, share: float = 1.0, *, dry: tuple[tuple[float, float], ...] = (), **facts: object
) -> Experiment:
    of_queue = {key: facts.pop(key) for key in list(facts) if key in Queue.__dataclass_fields__}
    kind = MachineType(name, share, min_wallclock=HOUR, **facts)  # type: ignore[arg-type]
    return Experiment(kind, Queue(**of_queue), dry)  # type: ignore[arg-type]


def scenario(*experiments: Experiment, count: int = 1, processors: int = 4, **course: object) -> Scenario:
    return Scenario("some", Course(**course), (Factories(count, processors),), experiments)  # type: ignore[arg-type]


def ran(what: Scenario, mode: Mode = Mode.IMPROVED) -> Report:
    return Simulation(what, mode).run()


# -- what is counted ---------------------------------------------------------------------------------------------------------


def test_machines_run_their_job_and_make_room_for_the_next() -> None:
    what = scenario(experiment("one", length=HOUR, spread=0.0, jobs=1), lasts=2 * HOUR + 600)
    report = ran(what)
    assert (report.starts, report.wasted) == (12, 0)
    assert report.idle * report.lasts < 60 + 3 * 2.0
    assert [round(look.idle) for look in report.looks] == [0] * len(report.looks)


def test_a_machine_takes_jobs_while_there_is_time_for_one_more() -> None:
    what = scenario(experiment("one", length=HOUR, spread=0.0, max_wallclock=5.5 * HOUR), lasts=5.3 * HOUR)
    assert ran(what).starts == 8  # five jobs, then the next machine
    assert ran(replace(what, course=replace(what.course, lasts=5 * HOUR))).starts == 4


def test_an_empty_node_of_64_is_full_at_once_or_after_an_hour() -> None:
    what = scenario(experiment("one"), processors=64, lasts=2 * HOUR, sample=60.0)
    full = {mode: sum(look.idle > 0 for look in ran(what, mode).looks) for mode in Mode}
    assert full[Mode.IMPROVED] <= 1
    assert 62 <= full[Mode.COMPATIBLE] <= 68


def test_the_same_seed_is_the_same_course() -> None:
    what = scenario(experiment("a", 2.0), experiment("b"), count=5, lasts=12 * HOUR, loss=0.1, failures=2.0)
    assert ran(what) == ran(what)
    assert ran(what) != ran(replace(what, course=replace(what.course, seed=2)))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("machines_lost", [True, False])
def test_the_sums_are_those_of_all_factories_that_are_counted(mode: Mode, machines_lost: bool) -> None:
    what = scenario(
        experiment("large", 2.0, min_processors=4, max_processors=4, length=HOUR, dry=((6 * HOUR, 9 * HOUR),)),
        experiment("small", 1.0, length=2 * HOUR, jobs=1),
        count=20, processors=8, lasts=24 * HOUR, failures=3.0, superslot=4, machines_lost=machines_lost,
    )  # fmt: skip
    simulation = Simulation(what, mode)
    seen: list[bool] = []

    def check(now: float) -> None:
        told = simulation.view(simulation.factories[0]).totals
        statuses = [
            TypeStatus(
                f"f{factory.number}", one.kind.name, sum(guest.machine.processors for guest in mine), young=young
            )
            for factory in simulation.factories
            if factory.seen
            for one in what.experiments
            for mine in [[guest for guest in factory.guests if guest.machine.machinetype == one.kind.name]]
            for young in [sum(now - guest.started < one.kind.fizzle for guest in mine)]
        ]
        sums = view_of(statuses, simulation.factories[0].space).totals
        assert {name: (one.hs06, one.young) for name, one in told.items()} == {
            name: (one.hs06, one.young) for name, one in sums.items()
        }
        answering = [factory for factory in simulation.factories if factory.answers]
        assert simulation.answering == len(answering)
        assert simulation.room == sum(factory.room for factory in answering)
        for factory in simulation.factories:
            assert factory.free == 8 - sum(guest.machine.processors for guest in factory.guests) >= 0
        seen.append(len(answering) < 20)

    simulation.run(check)
    assert any(seen)


def test_targets_are_of_those_that_have_work_and_a_group_keeps_its_share() -> None:
    of = (
        experiment("a1", 1.0, group="a", dry=((0.0, 10.0),)), experiment("a2", 3.0, group="a"), experiment("b", 4.0),
        experiment("c", 2.0, dry=((20.0, 30.0),)),
    )  # fmt: skip
    assert targets(of, 5.0) == pytest.approx((0.0, 0.4, 0.4, 0.2))
    assert targets(of, 15.0) == pytest.approx((0.1, 0.3, 0.4, 0.2))
    assert targets(of, 25.0) == (0.125, 0.375, 0.5, 0.0)


def test_factories_that_fail_take_their_processors_with_them() -> None:
    what = scenario(experiment("one"), count=30, lasts=48 * HOUR, failures=4.0, failure_lasts=HOUR)
    report = ran(what)
    assert report.idle < 0.02 and report.starts > 30 * 4 * 3


# -- what the improved mode promises ------------------------------------------------------------------------------------------


def test_mixed_sizes_leave_half_the_processors_idle_and_shares_are_kept() -> None:
    what = load(SCENARIOS / "mixed.toml")
    what = replace(what, course=replace(what.course, lasts=96 * HOUR), factories=(Factories(20, 16),))
    vac, ours = ran(what, Mode.COMPATIBLE), ran(what)
    assert ours.idle < vac.idle / 2
    assert ours.worst_share < 0.02 < vac.worst_share


@pytest.mark.parametrize(("count", "size"), [(60, 16), (120, 8)])
def test_shares_are_kept_where_queues_run_dry_and_hosts_fail(count: int, size: int) -> None:
    """Also where the largest machine takes a whole host."""
    what = load(SCENARIOS / "dry.toml")
    report = ran(replace(what, course=replace(what.course, lasts=131 * HOUR), factories=(Factories(count, size),)))
    assert report.worst_share < 0.02 and report.idle < 0.01


def test_a_group_has_its_share() -> None:
    what = load(SCENARIOS / "groups.toml")
    what = replace(what, factories=(Factories(10, 32),))
    vac, ours = ran(what, Mode.COMPATIBLE), ran(what)
    assert vac.types[2].part == pytest.approx(2 / 3, abs=0.02)
    assert ours.types[2].part == pytest.approx(1 / 2, abs=0.02)


def test_an_empty_queue_is_asked_less_and_less() -> None:
    dry = experiment("dry", dry=((HOUR, 999 * HOUR),), length=HOUR, jobs=1)
    what = scenario(dry, count=40, processors=8, lasts=24 * HOUR)
    vac, ours = ran(what, Mode.COMPATIBLE), ran(what)
    assert ours.wasted < vac.wasted / 5


def test_a_queue_that_fills_again_has_its_share_back() -> None:
    what = scenario(
        experiment("back", dry=((2 * HOUR, 10 * HOUR),), length=HOUR, jobs=1), experiment("steady", length=HOUR, jobs=1),
        count=10, processors=8, lasts=24 * HOUR, settles=4 * HOUR, sample=300.0,
    )  # fmt: skip
    report = ran(what)
    dry = [look.parts[0] for look in report.looks if 4 * HOUR < look.at < 10 * HOUR]
    assert max(dry) < 0.05
    assert report.worst_share < 0.05 and report.idle < 0.01


def test_machines_that_their_hosts_kill_cost_their_types_nothing_elsewhere() -> None:
    """Ten kills an hour somewhere: told to the space as aborts, each would stop its type there for ten minutes or more."""
    what = scenario(
        experiment("a", 2.0, length=6 * HOUR, jobs=1), experiment("b", length=6 * HOUR, jobs=1),
        count=60, processors=8, lasts=48 * HOUR, kills=4.0,
    )  # fmt: skip
    for mode in Mode:
        calm, killed = ran(replace(what, course=replace(what.course, kills=0.0)), mode), ran(what, mode)
        assert killed.starts > calm.starts + 60 * 4 and killed.wasted == 0
        assert killed.worst_share < 0.02 and killed.idle < calm.idle + 0.001, mode


@pytest.mark.parametrize(("seed", "length"), [(1, 4.0), (2, 6.0), (3, 20.0)])
def test_after_an_outage_of_all_no_type_takes_the_whole_space(seed: int, length: float) -> None:
    """The first whose test succeeds leaves the others their part until they were tested, too."""
    dry = ((0.0, 14 * HOUR),)
    what = scenario(
        experiment("a", dry=dry, length=length * HOUR, jobs=1), experiment("b", dry=dry, length=length * HOUR, jobs=1),
        count=20, processors=16, lasts=24 * HOUR, seed=seed,
    )  # fmt: skip
    for mode in Mode:
        after = [look for look in ran(what, mode).looks if look.at > 16 * HOUR]
        assert max(abs(look.parts[0] - 0.5) for look in after) < 0.1, mode
        assert max(look.idle for look in after) < 0.05, mode


@pytest.mark.parametrize(("share", "length"), [(39.0, 6.0), (39.0, 20.0), (79.0, 6.0)])
def test_a_type_whose_share_is_less_than_half_of_its_smallest_machine_is_started(share: float, length: float) -> None:
    """It cannot have its share at each look. Vac always gives it a whole machine."""
    large = experiment("large", min_processors=8, max_processors=8, length=length * HOUR, jobs=1)
    small = experiment("small", share, length=length * HOUR, jobs=1)
    what = scenario(large, small, count=5, processors=16, lasts=168 * HOUR, superslot=8)
    vac, ours = ran(what, Mode.COMPATIBLE), ran(what)
    wanted = 1 / (1 + share)
    assert 0.5 * wanted < ours.types[0].part < vac.types[0].part and ours.types[0].starts > 2
    assert ours.idle < vac.idle


# -- scenarios, plots, the program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_read(path: Path) -> None:
    assert load(path).experiments


def test_every_mistake_of_a_scenario_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[simulation]\nlasts = "soon"\nlost = 1\n[factories.a]\ncount = 6000\n[experiment.x]\nmin_processors = 8\n'
        'dry = ["9h-6h"]\nshares = 1\n[more]\n'
    )
    with pytest.raises(BadSetting) as caught:
        load(path)
    lines = caught.value.message.splitlines()
    for place, key in [
        (":2", "simulation.lasts"), (":3", "simulation.lost"), (":5", "factories.a.count"), ("", "experiment.x.max_processors"),
        (":8", "experiment.x.dry"), (":9", "experiment.x.shares"), (":10", "more"),
    ]:  # fmt: skip
        assert any(line.startswith(f"{path}{place}, {key}: ") for line in lines), (key, lines)
    assert len(lines) == 7


@pytest.mark.parametrize("text", ["", "[factories.a]\n", "factories = 3\n", "[experiment]\nx = 1\n[factories.a]\n"])
def test_a_scenario_without_factories_or_experiments_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "none.toml"
    path.write_text(text)
    with pytest.raises(BadSetting):
        load(path)


def test_a_plot_is_png_and_svg(tmp_path: Path) -> None:
    what = scenario(experiment("a", 2.0), experiment("b"), lasts=2 * HOUR)
    png, svg = plot([ran(what, mode) for mode in Mode], tmp_path / "v1.0")
    assert (png.name, svg.name) == ("v1.0.png", "v1.0.svg")
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text()


def test_the_program_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text('[simulation]\nlasts = "2h"\n[factories.a]\n[experiment.x]\nshare = 1\n')
    assert main([str(path)]) == 0
    assert "compatible" in (out := capsys.readouterr().out) and "improved" in out and "IDLE %" in out
    assert main([str(path), "--mode", "improved", "--format", "json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report["mode"] == "improved" and report["types"][0]["machinetype"] == "x" and report["starts"] == 16
    assert main([str(tmp_path / "missing.toml")]) == 1
