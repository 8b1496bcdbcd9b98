"""A poll gets all that factories tell, whatever is lost on the way, and never takes longer than it may."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.vacuum.protocol.peers import SPACE, Answer, Message, common, free_port, of_type, peers, types

from belljar.errors import BadSetting
from belljar.host.files import read_secret
from belljar.records import replace
from belljar.vacuum import MachineStatus, Space, TypeStatus
from belljar.vacuum.protocol.fields import LONGEST, Why
from belljar.vacuum.protocol.poll import Answers, Known, Poller, full_name, remember
from belljar.vacuum.protocol.query import Kind

ONE, TWO, THREE = "127.0.9.1", "127.0.9.2", "127.0.9.3"
LONG = 20.0  # a silence that no test waits for


def space(port: int, *factories: str, silence: float = 0.25, limit: float = LONG) -> Space:
    return Space(SPACE, "vf01.example.org", factories or (ONE, TWO), port=port, poll_silence=silence, poll_limit=limit)


def names(answers: Answers) -> dict[str, list[str]]:
    return {
        factory: sorted(getattr(one, "machinetype", "") or "" for one in found)
        for factory, found in answers.found.items()
    }


async def ask(of: Space, kind: Kind = Kind.MACHINETYPES, key: bytes = b"") -> Answers:
    return await Poller(of, client="factory", key=key).ask(kind)


async def test_when_all_is_told_nobody_waits() -> None:
    port = free_port(ONE, TWO)
    answers = {ONE: types("atlas", "lhcb")(ONE), TWO: types("atlas")(TWO)}
    async with peers(port, answers) as there:
        found = await ask(space(port, silence=LONG))
    assert names(found) == {ONE: ["atlas", "lhcb"], TWO: ["atlas"]}
    assert (found.silent, found.short, found.refused, found.rounds) == ((), (), {}, 1)
    assert [len(one.asked) for one in there.values()] == [1, 1]


async def test_the_question_is_one_that_the_original_answers() -> None:
    port = free_port(ONE)
    async with peers(port, {ONE: types("atlas")(ONE)}) as there:
        await ask(space(port, ONE, silence=LONG))
    (asked,) = there[ONE].asked
    assert asked["message_type"] == "machinetypes_query"
    assert asked["space"] == SPACE
    assert len(asked["cookie"]) == 64 and set(asked["cookie"]) <= set("0123456789abcdef")


async def test_every_factory_has_its_own_cookie_and_every_poll_another() -> None:
    port = free_port(ONE, TWO)
    async with peers(port, {ONE: types("a")(ONE), TWO: types("a")(TWO)}) as there:
        for _ in range(3):
            await ask(space(port, silence=LONG))
    cookies = [asked["cookie"] for one in there.values() for asked in one.asked]
    assert len(cookies) == len(set(cookies)) == 6


async def test_a_lost_answer_is_asked_for_again_of_that_factory_alone() -> None:
    def loses_one(asked: Message, nth: int) -> list[Message | bytes]:
        sent: list[Message | bytes] = [of_type(ONE, asked, one, of=4) for one in "abcd"]
        return sent[1:] if nth == 1 else sent

    port = free_port(ONE, TWO)
    async with peers(port, {ONE: loses_one, TWO: types("a")(TWO)}) as there:
        found = await ask(space(port))
    assert names(found) == {ONE: ["a", "b", "c", "d"], TWO: ["a"]}
    assert (len(there[ONE].asked), len(there[TWO].asked), found.rounds) == (2, 1, 2)


async def test_a_whole_round_may_be_lost() -> None:
    port = free_port(ONE)
    async with peers(port, {ONE: lambda asked, nth: types("a")(ONE)(asked, nth) if nth > 1 else []}):
        found = await ask(space(port, ONE))
    assert (names(found), found.rounds) == ({ONE: ["a"]}, 2)


async def test_answers_may_come_later_than_the_next_question() -> None:
    port = free_port(ONE)
    async with peers(port, {ONE: types("a")(ONE)}, delay=0.3):
        found = await ask(space(port, ONE, silence=0.2))
    assert (names(found), found.refused) == ({ONE: ["a"]}, {})


async def test_answers_may_come_twice_and_in_any_order() -> None:
    def again(asked: Message, nth: int) -> list[Message | bytes]:
        sent: list[Message | bytes] = [of_type(ONE, asked, one, of=3) for one in "abc"]
        return [sent[2], sent[0], sent[2], sent[0], sent[1], sent[1]]

    port = free_port(ONE)
    async with peers(port, {ONE: again}):
        found = await ask(space(port, ONE, silence=LONG))
    assert (names(found), found.rounds) == ({ONE: ["a", "b", "c"]}, 1)


def lies(**changes: Any) -> Answer:
    return lambda asked, nth: [of_type(ONE, asked, "a", hs06=999.0) | changes, of_type(ONE, asked, "a")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lies(space="another"), Why.OTHER_SPACE),
        (lies(cookie="0" * 64), Why.STRANGE_COOKIE),
        (lies(cookie="0"), Why.STRANGE_COOKIE),
        (lies(factory=TWO), Why.OTHER_FACTORY),
        (lies(running_hs06="999"), Why.BAD_FIELD),
        (lies(message_type="machine_status"), Why.UNKNOWN),
        (lambda asked, nth: [b"42", of_type(ONE, asked, "a")], Why.STRANGE_COOKIE),
        (lambda asked, nth: [json.dumps(of_type(ONE, asked, "a")).encode()[:-9], of_type(ONE, asked, "a")], Why.NOT_JSON),
        (lambda asked, nth: [{"x": {"cookie": asked["cookie"]}, "cookie": 0, "space": SPACE}, of_type(ONE, asked, "a")], Why.UNKNOWN),
        (lambda asked, nth: [of_type(ONE, asked, "a", hs06=999.0) | {"x": {"cookie": asked["cookie"]}, "cookie": 1}, of_type(ONE, asked, "a")], Why.STRANGE_COOKIE),
    ],
)  # fmt: skip
async def test_what_is_not_this_factorys_answer_is_ignored(answer: Answer, why: Why) -> None:
    port = free_port(ONE)
    async with peers(port, {ONE: answer}):
        found = await ask(space(port, ONE, silence=LONG))
    assert [one.running_hs06 for one in found.found[ONE] if isinstance(one, TypeStatus)] == [10.0]
    assert found.refused == {why.value: 1}


async def test_one_factorys_cookie_is_no_good_for_another() -> None:
    """TWO answers at once with its own cookie in the name of ONE, which has not answered yet."""
    port = free_port(ONE, TWO)
    liar = lambda asked, nth: [of_type(ONE, asked, "a", hs06=999.0), of_type(TWO, asked, "a")]  # noqa: E731
    async with peers(port, {ONE: lambda asked, nth: [], TWO: liar}):
        found = await ask(space(port, silence=0.05, limit=1.0))
    assert (found.silent, list(found.found)) == ((ONE,), [TWO])


async def test_a_dead_factory_is_asked_six_times_and_when_it_was_silent_before_twice() -> None:
    port = free_port(ONE, TWO)
    poller = Poller(space(port, silence=0.05), client="factory")
    async with peers(port, {ONE: types("a")(ONE), TWO: lambda asked, nth: []}) as there:
        first = await poller.ask(Kind.MACHINETYPES)
        second = await poller.ask(Kind.MACHINETYPES)
        there[TWO].answer = types("a")(TWO)
        third = await poller.ask(Kind.MACHINETYPES)
    assert [one.silent for one in (first, second, third)] == [(TWO,), (TWO,), ()]
    assert [one.rounds for one in (first, second, third)] == [6, 2, 1]
    assert (len(there[ONE].asked), len(there[TWO].asked)) == (3, 9)


async def test_types_that_are_announced_and_never_told_are_not_waited_for_to_the_end() -> None:
    """Vac 03.00.01post10 counts idle types and tells nothing of them. Of one that did so the last time, one round is enough."""
    port, told = free_port(ONE), "ab"
    poller = Poller(space(port, ONE, silence=0.05), client="factory")
    async with peers(port, {ONE: lambda asked, nth: [of_type(ONE, asked, one, of=3) for one in told]}) as there:
        for rounds in (3, 1, 1):
            found = await poller.ask(Kind.MACHINETYPES)
            assert (names(found), found.short, found.rounds) == ({ONE: ["a", "b"]}, (ONE,), rounds)
        there[ONE].answer = lambda asked, nth: []
        assert (await poller.ask(Kind.MACHINETYPES)).rounds == 6
        told = "abc"
        there[ONE].answer = types(*told)(ONE)
        found = await poller.ask(Kind.MACHINETYPES)
    assert (found.short, found.rounds) == ((), 1)


async def test_a_liar_that_always_has_more_to_tell_is_listened_to_no_longer_than_the_limit() -> None:
    port = free_port(ONE)

    def endless(asked: Message, nth: int) -> list[Message | bytes]:
        loop, sender = asyncio.get_running_loop(), there[ONE].transport
        for number in range(2000):
            more = json.dumps(of_type(ONE, asked, f"t{nth}-{number}", of=10**9)).encode()
            loop.call_later(number / 100, lambda data=more: sender.is_closing() or sender.sendto(data, address[0]))
        return []

    address: list[Any] = []
    async with peers(port, {ONE: endless}) as there:
        received = there[ONE].datagram_received
        there[ONE].datagram_received = lambda data, where: (address.append(where), received(data, where))[1]  # type: ignore[method-assign]
        found = await ask(space(port, ONE, silence=LONG, limit=0.5))
    assert found.rounds == 1
    assert 0.45 < found.seconds < 5
    assert found.short == (ONE,)


async def test_rubbish_makes_no_round_longer() -> None:
    port = free_port(ONE)

    def floods(asked: Message, nth: int) -> list[Message | bytes]:
        again = of_type(ONE, asked, "a", of=2)
        return [b"rubbish", again] * 200

    async with peers(port, {ONE: floods}) as there:
        found = await ask(space(port, ONE, silence=0.1))
    assert (len(there[ONE].asked), found.short) == (3, (ONE,))
    assert found.refused[Why.STRANGE_COOKIE.value] > 0


async def test_a_name_with_capitals_is_the_same_factory() -> None:
    port = free_port("127.0.0.1")
    async with peers(port, {"127.0.0.1": types("a")("LocalHost")}):
        found = await ask(replace(space(port, "LOCALHOST", silence=LONG), factory="alone"))
    assert names(found) == {"LOCALHOST": ["a"]}
    assert [one.factory for one in found.found["LOCALHOST"]] == ["LOCALHOST"]


async def test_factories_are_asked_by_ipv6_as_well() -> None:
    port = free_port(ONE, "::1")
    async with peers(port, {ONE: types("a")(ONE), "::1": types("b")("::1")}):
        found = await ask(space(port, ONE, "::1", silence=LONG))
    assert names(found) == {ONE: ["a"], "::1": ["b"]}


async def test_a_long_message_reaches_us_cut() -> None:
    port = free_port(ONE)
    message = "300 \x1b[31m" + "x" * 20_000
    answer: Answer = lambda asked, nth: [of_type(ONE, asked, "a", shutdown_message=message, shutdown_time=1767268000)]  # noqa: E731
    async with peers(port, {ONE: answer}):
        found = await ask(space(port, ONE, silence=LONG))
    (status,) = found.found[ONE]
    assert isinstance(status, TypeStatus)
    assert status.message == "300 ?[31m" + "x" * (LONGEST - 9)


async def test_a_name_that_nobody_knows_is_a_silent_factory() -> None:
    port = free_port(ONE)
    nobody = f"{'x' * 64}.example.org"
    async with peers(port, {ONE: types("a")(ONE)}):
        found = await ask(space(port, ONE, nobody, silence=0.05))
    assert (names(found), found.silent) == ({ONE: ["a"]}, (nobody,))


async def test_machines_and_factories_are_asked_for_as_well() -> None:
    def answers(asked: Message, nth: int) -> list[Message | bytes]:
        if asked["method"] == "factories":
            return [common(ONE, asked, "factory_status") | {"running_cpus": 3, "total_cpus": 4, "vac_disk_avail_kb": 5}]
        slot = {"num_machines": 2, "state": "Shut down", "uuid": None, "created_time": None, "started_time": None}
        return [common(ONE, asked, "machine_status") | slot | {"machine": f"m-{n}", "hs06": 0.0} for n in range(2)]

    port = free_port(ONE)
    async with peers(port, {ONE: answers}):
        machines = await ask(space(port, ONE, silence=LONG), Kind.MACHINES)
        factories = await ask(space(port, ONE, silence=LONG), Kind.FACTORIES)
    assert [one.machine for one in machines.found[ONE] if isinstance(one, MachineStatus)] == ["m-0", "m-1"]
    (own,) = factories.found[ONE]
    assert (own.running_processors, own.max_processors, own.daemon_free_kb) == (3, 4, 5)  # type: ignore[union-attr]


# -- what is remembered ------------------------------------------------------------------------------------------------

A, B = TypeStatus(ONE, "a", 10.0), TypeStatus(TWO, "a", 20.0)


def test_a_silent_factorys_use_is_remembered_for_a_while() -> None:
    known, memory = remember({}, Answers({ONE: (A,), TWO: (B,)}), 1000.0)
    assert known == (A, B)
    silent = Answers({ONE: (replace(A, running_hs06=11.0),)}, silent=(TWO,))
    known, later = remember(memory, silent, 1599.0)
    assert sorted(one.running_hs06 for one in known) == [11.0, 20.0]
    known, _ = remember(later, silent, 1600.0)
    assert [one.running_hs06 for one in known] == [11.0]
    assert memory == {ONE: Known(1000.0, (A,)), TWO: Known(1000.0, (B,))}


def test_what_is_not_told_any_more_is_not_remembered() -> None:
    """A factory that answers has said all; one that left the space is not asked; a clock that went back makes no memory last."""
    _, memory = remember({}, Answers({ONE: (A, replace(A, machinetype="b")), TWO: (B,)}), 1000.0)
    assert remember(memory, Answers({ONE: (A,)}), 1010.0)[0] == (A,)
    assert remember(memory, Answers({}, silent=(ONE, TWO)), 900.0) == ((), {})


# -- names and secrets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "full"),
    [
        (".", "vf01.example.org"),
        ("vf02", "vf02.example.org"),
        ("vf02.other.org", "vf02.other.org"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_names_of_factories_are_completed(name: str, full: str) -> None:
    assert full_name(name, "vf01.example.org") == full


def test_a_secret_is_long_and_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(BadSetting, match="No such file"):
        read_secret(path)
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(BadSetting, match="others may read it"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"0123456789abcdef"
    path.write_bytes(b"short \n")
    with pytest.raises(BadSetting, match="5 bytes are not a secret"):
        read_secret(path)
