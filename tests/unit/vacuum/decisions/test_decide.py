"""Whose turn it is: Vac's own examples in compatible mode, and what the improved mode does better."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.model import GIB, to_json
from belljar.records import replace
from belljar.vacuum import MachineType, Mode, Space, TypeStatus
from belljar.vacuum.decisions.backoff import (
    NO_PAST,
    Gate,
    Past,
    Total,
    TypePast,
    View,
    blocked_until,
    gate,
    rank,
    view_of,
)
from belljar.vacuum.decisions.decide import Decision, Host, Reason, decide
from belljar.vacuum.decisions.packing import Machine

NOW = 1_767_268_800.0
COMPATIBLE = Space(
    "vac02.example.org", "f1.example.org", ("f1.example.org", "f2.example.org", "f3.example.org"), mode=Mode.COMPATIBLE,
    processors=4096,
)  # fmt: skip
IMPROVED = replace(COMPATIBLE, mode=Mode.IMPROVED)
HOST = Host(4096)


def half() -> float:
    return 0.5


def decided(
    space: Space, view: View, running: Sequence[Machine] = (), past: Past | None = None, **more: object
) -> Decision:
    facts = {"now": NOW, "host": HOST, "random": half} | more
    return decide(space=space, running=running, view=view, past=past or {}, **facts)  # type: ignore[arg-type]


def reasons(decision: Decision) -> dict[str, str]:
    return {one.machinetype: one.reason.value for one in decision.verdicts}


# -- shares, as Vac has them -------------------------------------------------------------------------------------------------

FQAN = "/atlas/Role=pilot"
TYPES = (
    MachineType("atlas-mc", 6.0, fqan=FQAN),
    MachineType("atlas-sc", 2.0, fqan=FQAN),
    MachineType("lhcb", 4.0),
    MachineType("gridpp", 1.0),
)
FOUR = replace(COMPATIBLE, types=TYPES)
HS06 = {"f1.example.org": (240.0, 40.0, 150.0, 20.0), "f2.example.org": (240.0, 20.0, 170.0, 10.0)}


def statuses(**changes: TypeStatus) -> list[TypeStatus]:
    """What two factories tell. *changes*: of `f1` or `f2` and a type, as in f1_gridpp."""
    told = {
        (factory, kind.name): TypeStatus(factory, kind.name, hs06)
        for factory, figures in HS06.items()
        for kind, hs06 in zip(TYPES, figures, strict=True)
    }
    told["f2.example.org", "lhcb"] = replace(told["f2.example.org", "lhcb"], young=1)
    for name, status in changes.items():
        factory, _, kind = name.partition("_")
        told[f"{factory}.example.org", kind] = status
    return list(told.values())


def order(told: Sequence[TypeStatus]) -> list[str]:
    """The types in the order in which Vac would start them: each in turn has no machine of its size to be started."""
    space, found = FOUR, list[str]()
    view = view_of(told, space)
    while starts := decided(space, view).starts:
        found.append(starts[0].machinetype)
        taken = {kind.name: replace(kind, min_processors=9999) for kind in TYPES if kind.name in found}
        space = replace(space, types=tuple(taken.get(kind.name, kind) for kind in TYPES))
    return found


NO_WORK = TypeStatus("f1.example.org", "gridpp", 20.0, message="300 Nothing to do", message_time=int(NOW) - 200)
FAILED = TypeStatus("f2.example.org", "lhcb", 170.0, young=1, message="700 Broken", message_time=int(NOW) - 700)


def test_the_order_is_that_of_vac() -> None:
    decision = decided(FOUR, view_of(statuses(f1_gridpp=NO_WORK), FOUR))
    scores = {one.machinetype: (one.score, one.group_score) for one in decision.verdicts}
    assert scores == {"atlas-mc": (80, 110), "atlas-sc": (30, 110), "lhcb": (80, 80), "gridpp": (30, 30)}
    assert order(statuses(f1_gridpp=NO_WORK)) == ["lhcb", "atlas-sc", "atlas-mc"]
    (gridpp,) = (one for one in decision.verdicts if one.machinetype == "gridpp")
    assert (gridpp.reason, gridpp.until) == (Reason.BACKING_OFF, NOW + 400)
    assert gridpp.why == "it backs off: its last machines found no work"


def test_without_an_abort_the_lowest_score_comes_first() -> None:
    assert order(statuses()) == ["gridpp", "lhcb", "atlas-sc", "atlas-mc"]


def test_a_young_machine_makes_the_back_off_longer() -> None:
    assert order(statuses(f2_lhcb=FAILED)) == ["gridpp", "atlas-sc", "atlas-mc"]
    assert order(statuses(f2_lhcb=replace(FAILED, young=0))) == ["gridpp", "lhcb", "atlas-sc", "atlas-mc"]


def test_what_is_tied_is_drawn() -> None:
    space = replace(COMPATIBLE, types=(MachineType("a", 1.0), MachineType("b", 1.0)))
    for draws in ([0.1, 0.9], [0.9, 0.1]):
        numbers = iter(draws)
        (start,) = decided(space, View({}), random=lambda numbers=numbers: next(numbers)).starts
        assert start.machinetype == ("a" if draws[0] < draws[1] else "b")


GROUPS = (MachineType("a1", 4.0, "a"), MachineType("a2", 4.0, "a"), MachineType("b", 8.0))


@pytest.mark.parametrize(("mode", "machines"), [(Mode.COMPATIBLE, (40, 40, 160)), (Mode.IMPROVED, (60, 60, 120))])
def test_a_group_of_two_has_its_whole_share_in_improved_mode_only(mode: Mode, machines: tuple[int, ...]) -> None:
    space = replace(COMPATIBLE, types=GROUPS, mode=mode, processors=240)
    assert filled(space, 240, half, 1.0) == machines


def filled(space: Space, starts: int, random: Callable[[], float], hs06: float) -> tuple[int, ...]:
    """Machines of each type when an empty space is filled, one free processor after the other."""
    running = dict.fromkeys((kind.name for kind in space.types), 0)
    for _ in range(starts):
        view = View({name: Total(count * hs06) for name, count in running.items()})
        there = [Machine("some", 1, NOW + 9e4)] * (space.processors - 1)
        (start,) = decided(space, view, there, random=random).starts
        running[start.machinetype] += 1
    return tuple(running.values())


# -- back-off ----------------------------------------------------------------------------------------------------------------

ONE = MachineType("one", 1.0)


def compatible_gate(since: float, young: int) -> Gate:
    return gate(since, COMPATIBLE, ONE, Total(0.0, young, 1e-9), NO_PAST)[0]


@pytest.mark.parametrize(
    ("since", "young", "is_open"),
    [
        (0, 1, False), (500, 0, False), (600, 0, False), (601, 0, True), (620, 1, False), (622, 2, False), (1200, 1, False),
        (1201, 2, True),
    ],
)  # fmt: skip
def test_back_off_and_its_extension_end_strictly_after_their_times(since: float, young: int, is_open: bool) -> None:
    assert (compatible_gate(float(since), young) is Gate.OPEN) is is_open


def test_a_test_that_finds_nothing_begins_the_back_off_anew_and_one_that_works_opens_for_another() -> None:
    assert gate(1400.0, COMPATIBLE, ONE, Total(last_abort=800.0), NO_PAST) == (Gate.BLOCKED, 1400.0)
    assert gate(1401.0, COMPATIBLE, ONE, Total(last_abort=800.0), NO_PAST)[0] is Gate.OPEN
    assert compatible_gate(800.0, 0) is Gate.OPEN  # both testers ended well before their fizzle time


def learned(space: Space, past: Past, now: float, **facts: float) -> Past:
    return decided(space, View({"one": Total(**facts)}), past=past, now=now).past  # type: ignore[arg-type]


def test_the_delay_grows_with_each_test_that_fails_and_is_forgotten_when_work_is_found() -> None:
    space, past, delays = replace(IMPROVED, types=(ONE,)), dict[str, TypePast](), list[float]()
    abort = NOW
    for _ in range(5):
        past = dict(learned(space, past, abort, last_abort=abort))
        delays.append(blocked_until(ONE, past["one"]) - abort)
        abort += delays[-1] + 100.0
    for delay, times in zip(delays, (1, 2, 4, 8, 8), strict=True):
        assert 600 * times <= delay <= 750 * times
    assert len({delay / times for delay, times in zip(delays, (1, 2, 4, 8, 8), strict=True)}) == 5
    past = dict(learned(space, past, abort, last_abort=abort, proved=abort - 50.0))
    assert past["one"].failures == 0


def test_aborts_of_machines_from_before_the_back_off_make_it_no_longer_each_time() -> None:
    space = replace(IMPROVED, types=(ONE,))
    past = learned(space, {}, NOW, last_abort=NOW)
    past = learned(space, past, NOW + 300, last_abort=NOW + 300)
    assert past["one"] == TypePast(NOW + 300, failures=0)


def test_an_abort_is_remembered_though_nobody_tells_it_any_more_and_after_a_restart() -> None:
    space = replace(IMPROVED, types=(ONE,))
    past = learned(space, {}, NOW, last_abort=NOW - 1)
    decision = decided(space, View({}), past=past, now=NOW + 60)
    assert decision.starts == () and reasons(decision) == {"one": "backing-off"}
    restored = {name: TypePast(**facts) for name, facts in json.loads(json.dumps(to_json(dict(past)))).items()}
    assert restored == past


def test_an_abort_of_a_later_day_is_no_fact() -> None:
    space = replace(IMPROVED, types=(ONE,))
    assert decided(space, View({"one": Total(last_abort=NOW + 86400)})).starts != ()


def test_one_factory_tests_then_two_then_four() -> None:
    names = tuple(f"f{number}.example.org" for number in range(16))
    space, past = replace(IMPROVED, types=(ONE,), factories=names), {"one": TypePast(NOW)}
    end = blocked_until(ONE, past["one"])

    def testers(now: float, young: int = 0) -> int:
        view = View({"one": Total(young=young, last_abort=NOW)})
        found = [decided(replace(space, factory=name), view, past=past, now=now) for name in names]
        assert all(len(one.starts) <= 1 for one in found)
        return sum(len(one.starts) for one in found)

    assert [testers(end), testers(end + 1), testers(end + 61), testers(end + 121)] == [0, 1, 2, 4]
    assert testers(end + 121, young=1) == 0
    assert sorted(rank("one", NOW, replace(space, factory=name)) for name in names) == list(range(16))


def test_work_that_was_found_after_the_abort_opens_the_type_for_all() -> None:
    space = replace(IMPROVED, types=(ONE,), processors=8)
    past = {"one": TypePast(NOW - 900.0, failures=2)}
    decision = decided(space, View({"one": Total(5.0, 1, NOW - 900.0, NOW - 200.0)}), past=past)
    assert len(decision.starts) == 8


def test_of_a_type_that_nobody_has_seen_find_work_only_some_are_started() -> None:
    space = replace(IMPROVED, types=(ONE,), processors=100)
    assert len(decided(space, View({})).starts) == 64
    assert len(decided(space, View({"one": Total(60.0, 60)})).starts) == 4
    assert reasons(decided(space, View({"one": Total(64.0, 64)}))) == {"one": "tested"}
    assert len(decided(space, View({"one": Total(64.0, 64, proved=NOW - 700.0)})).starts) == 100
    many = replace(space, factories=tuple(f"f{number}" for number in range(90)))
    assert len(decided(many, View({})).starts) == 90


def test_factories_that_tell_no_proof_have_at_least_said_how_their_last_machine_ended() -> None:
    told = [
        TypeStatus("f2.example.org", "one", message="200 Done", message_time=77),
        TypeStatus("f3.example.org", "one", proved=50),
    ]
    assert view_of(told, IMPROVED).totals["one"].proved == 77.0
    told = [TypeStatus("f2.example.org", "one", message="600 Broken", message_time=77, last_abort=99)]
    assert view_of(told, IMPROVED).totals["one"] == Total(0.0, 0, 99.0, 0.0)


# -- the factory's own limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("changes", "host", "given", "reason"),
    [
        ({"draining": True}, HOST, 0, "draining"),
        ({"shutdown_time": NOW}, HOST, 0, "shutdown"),
        ({"shutdown_time": NOW + 86400.0}, HOST, 0, "shutdown"),
        ({}, HOST, 8, "full"),
        ({}, Host(8, load=10.1), 0, "load"),
        ({}, Host(8, load=6.3), 5, "load"),
        ({}, Host(8, memory=GIB), 0, "size"),
    ],
)
def test_why_nothing_is_started(mode: Mode, changes: dict[str, float], host: Host, given: int, reason: str) -> None:
    space = replace(COMPATIBLE, mode=mode, types=(ONE,), processors=8, **changes)
    decision = decided(space, View({}), [Machine("one", 1, NOW + 9.0)] * given, host=host)
    assert decision.starts == () and reasons(decision) == {"one": reason}
    assert decision.verdicts[0].why


@pytest.mark.parametrize("mode", list(Mode))
def test_a_load_that_few_machines_explain_is_none(mode: Mode) -> None:
    space = replace(COMPATIBLE, mode=mode, types=(ONE,), processors=8)
    assert decided(space, View({}), [Machine("one", 1, NOW + 9.0)] * 4, host=Host(8, load=6.3)).starts


def test_a_machine_ends_with_its_factory() -> None:
    space = replace(IMPROVED, types=(replace(ONE, min_wallclock=600.0),), shutdown_time=NOW + 601.0, processors=1)
    assert decided(space, View({})).starts[0].ends == NOW + 601.0


# -- improved ----------------------------------------------------------------------------------------------------------------


def test_an_empty_factory_is_filled_by_one_decision_and_by_shares() -> None:
    space = replace(IMPROVED, types=(MachineType("a", 2.0), MachineType("b", 1.0)), processors=64)
    decision = decided(space, View({}), host=Host(64, memory=1000 * GIB))
    names = [one.machinetype for one in decision.starts]
    assert (names.count("a"), names.count("b")) == (43, 21)
    assert {one.machinetype: one.started for one in decision.verdicts} == {"a": 43, "b": 21}


def test_factories_that_decide_at_once_start_together_what_the_shares_say() -> None:
    """Each sees the same: two types that are ahead, one that is behind by ten, and room for 1600 more elsewhere."""
    import random

    space = replace(
        IMPROVED, types=(MachineType("a", 2.0), MachineType("b", 1.0), MachineType("c", 1.0)), processors=16
    )
    view, dice = (
        View({"a": Total(200.0, proved=NOW), "b": Total(100.0, proved=NOW), "c": Total(90.0, proved=NOW)}, room=1584.0),
        random.Random(1),
    )
    names = [one.machinetype for _ in range(100) for one in decided(space, view, random=dice.random).starts]
    assert len(names) == 1600
    assert [round(names.count(name) / 1600, 2) for name in "abc"] == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    herd = [
        one.machinetype
        for _ in range(100)
        for one in decided(space, replace(view, room=0.0), random=dice.random).starts
    ]
    assert herd.count("c") / 1600 > 0.6


def test_one_that_used_little_before_is_served_first_where_history_counts() -> None:
    types = (MachineType("busy", 1.0), MachineType("quiet", 1.0))
    view = View({"busy": Total(10.0), "quiet": Total(14.0)})
    full = [Machine("busy", 1, NOW + 9e4)] * 23
    for history, first in ((0.0, "busy"), (3600.0, "quiet")):
        space = replace(IMPROVED, types=types, processors=24, history=history)
        past = {"busy": TypePast(usage=20.0, at=NOW), "quiet": TypePast(usage=0.5, at=NOW)}
        assert decided(space, view, full, past).starts[0].machinetype == first


def test_the_average_of_the_past_halves_with_its_half_life() -> None:
    space = replace(IMPROVED, types=(ONE,), history=3600.0, draining=True)
    past = learned(space, {}, NOW, hs06=8.0)
    assert past["one"] == TypePast(usage=8.0, at=NOW)
    assert learned(space, past, NOW + 3600.0, hs06=0.0)["one"].usage == pytest.approx(4.0)


LARGE = MachineType("large", 1.0, min_processors=8, max_processors=8, min_wallclock=3600.0)
SMALL = MachineType("small", 1.0, min_wallclock=3600.0)
MIXED = replace(IMPROVED, types=(LARGE, SMALL), processors=16, factories=("f1.example.org",))


def test_a_large_place_goes_to_a_large_machine_and_a_hole_to_a_small_one() -> None:
    even = View({"large": Total(8.0), "small": Total(8.0)})
    big = [Machine("large", 8, NOW + 5000.0)]
    (start,) = decided(
        MIXED, View({"large": Total(0.0), "small": Total(8.0)}), [Machine("small", 1, NOW + 9.0)] * 8
    ).starts
    assert start.machinetype == "large"
    (start,) = decided(MIXED, even, [*big, *[Machine("small", 1, NOW + 9.0)] * 7]).starts
    assert start.machinetype == "small"


def test_for_a_large_machine_that_finds_no_place_one_is_kept_for_a_while() -> None:
    view = View({"large": Total(0.0), "small": Total(16.0)})
    there = [Machine("small", 1, NOW + 900.0)] * 7 + [Machine("small", 1, NOW + 50000.0)] * 8
    decision = decided(MIXED, view, there)
    assert decision.starts == () and reasons(decision) == {"large": "size", "small": "reserved"}
    assert decision.verdicts[1].until == NOW + 900.0
    there = [Machine("small", 1, NOW + 7200.0)] * 7 + there[7:]
    (start,) = decided(MIXED, view, there).starts
    assert (start.machinetype, start.ends) == ("small", NOW + 7200.0)


def test_a_test_of_an_empty_queue_takes_no_place_from_a_type_that_is_behind() -> None:
    """With the tested type's share counted, `large` would be ahead of its target."""
    dry = MachineType("dry", 8.0, backoff=600.0)
    space, past = replace(MIXED, types=(LARGE, SMALL, dry)), {"dry": TypePast(NOW - 5000.0, 1)}
    view = View({"large": Total(48.0), "small": Total(72.0), "dry": Total(0.0, last_abort=NOW - 5000.0)})
    there = [Machine("small", 1, NOW + 50000.0)] * 8
    decision = decided(space, view, there, past)
    assert [one.machinetype for one in decision.starts] == ["large"]
    decision = decided(space, view, [*there, Machine("small", 1, NOW + 50000.0)], past)
    assert [one.machinetype for one in decision.starts].count("dry") == 1


def test_what_would_stay_idle_for_too_long_is_given_away() -> None:
    view, stubborn = View({"large": Total(0.0), "small": Total(16.0)}), replace(SMALL, min_wallclock=None)
    space = replace(MIXED, types=(LARGE, stubborn))
    there = [Machine("small", 1, NOW + 80000.0)] * 4 + [Machine("small", 1, NOW + 200000.0)] * 8
    assert [one.machinetype for one in decided(space, view, there).starts] == ["small"] * 4
    assert decided(replace(space, reserve=1.0), view, there).starts == ()


def test_a_decision_is_made_of_values_for_programs() -> None:
    decision = decided(FOUR, view_of(statuses(), FOUR))
    told = json.loads(json.dumps(to_json(decision)))
    assert told["starts"][0]["machinetype"] == "gridpp" and told["again"] == NOW + 60.0
    assert {one["machinetype"]: one["reason"] for one in told["verdicts"]}["lhcb"] == "size" or told["verdicts"]


# -- properties --------------------------------------------------------------------------------------------------------------

kinds = st.builds(
    lambda share, least, more, memory, disk, group, least_wall, abort: (
        share, least, least + more, memory, disk, group, least_wall, abort,
    ),
    st.sampled_from([0.0, 0.5, 1.0, 7.0]), st.integers(1, 8), st.integers(0, 8), st.integers(1, 6), st.integers(0, 20),
    st.sampled_from(["", "g"]), st.sampled_from([None, 600.0, 9000.0]), st.none() | st.floats(0.0, 20000.0),
)  # fmt: skip


@given(
    mode=st.sampled_from(list(Mode)),
    drawn=st.lists(kinds, min_size=1, max_size=4),
    there=st.lists(st.tuples(st.integers(1, 8), st.integers(-50, 90000)), max_size=8),
    free=st.tuples(st.integers(0, 64), st.integers(0, 100)),
    group=st.integers(1, 9),
    left=st.none() | st.integers(-10, 100000),
    numbers=st.randoms(use_true_random=False),
)
def test_never_more_than_the_host_has_nor_what_backs_off_nor_for_longer_or_shorter_than_of_use(
    mode: Mode, drawn: list[tuple], there: list[tuple[int, int]], free: tuple[int, int], group: int, left: int | None,
    numbers: object,
) -> None:  # fmt: skip
    types = tuple(
        MachineType(f"t{number}", share, of, min_processors=least, max_processors=most, memory=memory * GIB, disk=disk * GIB, min_wallclock=wall)
        for number, (share, least, most, memory, disk, of, wall, _) in enumerate(drawn)
    )  # fmt: skip
    space = replace(
        COMPATIBLE, mode=mode, types=types, processors=24, processors_per_superslot=group,
        shutdown_time=None if left is None else NOW + left,
    )  # fmt: skip
    running = [Machine("some", processors, NOW + end) for processors, end in there]
    totals = {
        f"t{number}": Total(3.0, 0, NOW - one[-1] if one[-1] is not None else 0.0) for number, one in enumerate(drawn)
    }
    host = Host(24, memory=free[0] * GIB, disk=free[1] * GIB)
    decision = decided(space, View(totals), running, host=host, random=numbers.random)  # type: ignore[attr-defined]
    starts = decision.starts
    assert sum(one.processors for one in [*running, *starts]) <= max(24, sum(one.processors for one in running))
    assert sum(one.memory for one in starts) <= free[0] * GIB and sum(one.disk for one in starts) <= free[1] * GIB
    assert mode is Mode.IMPROVED or len(starts) <= 1
    for start in starts:
        kind = next(one for one in types if one.name == start.machinetype)
        assert kind.share > 0 and kind.min_processors <= start.processors <= kind.max_processors
        assert min(kind.least_wallclock, kind.max_wallclock) <= start.ends - NOW <= kind.max_wallclock
        abort = totals[kind.name].last_abort
        assert not abort or NOW - abort > kind.backoff
    counts = {one.machinetype: one.started for one in decision.verdicts if one.started}
    assert counts == {
        name: sum(one.machinetype == name for one in starts) for name in {one.machinetype for one in starts}
    }
    assert decision.again > NOW


@given(st.lists(st.floats(0.5, 20.0), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_no_share_starves(shares: list[float], numbers: object) -> None:
    """Filled one by one, each type has what its share says, to two machines."""
    types = tuple(MachineType(f"t{number}", share) for number, share in enumerate(shares))
    space = replace(IMPROVED, types=types, processors=200)
    found = filled(space, 200, numbers.random, 1.0)  # type: ignore[attr-defined]
    for share, count in zip(shares, found, strict=True):
        assert abs(count - 200 * share / sum(shares)) <= 2.0


@given(st.integers(9, 32), st.integers(0, 10**6))
def test_a_large_type_does_not_starve_among_small_ones(processors: int, seed: int) -> None:
    """Small machines hold all processors and end one by one, and each is asked for again at once."""
    import random

    dice = random.Random(seed)
    space = replace(MIXED, processors=processors)
    running = [Machine("small", 1, NOW + dice.uniform(0.0, 86400.0)) for _ in range(processors)]
    now = NOW
    for _ in range(20 * processors):
        now = min(one.ends for one in running)
        running = [one for one in running if one.ends > now]
        has = {
            name: float(sum(one.processors for one in running if one.machinetype == name))
            for name in ("large", "small")
        }
        view = View({name: Total(hs06) for name, hs06 in has.items()})
        starts = decided(space, view, running, now=now, random=dice.random).starts
        if any(one.machinetype == "large" for one in starts):
            return
        running += starts
    raise AssertionError("no large machine was ever started")
