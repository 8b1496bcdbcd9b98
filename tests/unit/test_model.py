"""What is asked travels as JSON, and comes out as it went in; what nobody can have meant is refused by its key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.model import (
    Account,
    Context,
    MachineSpec,
    NetworkMode,
    Outcome,
    OwnWork,
    Payload,
    PlainFile,
    Probe,
    Request,
    RunPayload,
    Share,
    Sign,
    Start,
    StdinKind,
    Transfer,
    dumps,
    to_json,
)

some_text = st.text(st.characters(), max_size=8)  # with lone surrogates: paths are decoded so
some_bytes = st.binary(max_size=12)
sizes = st.integers(1, 1 << 50)
seconds = st.floats(0, 1e10)


def maybe(what: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | what


def several(what: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(what, max_size=3).map(tuple)


accounts = st.builds(
    Account, some_text, st.integers(0, 2**32 - 2), st.integers(0, 2**32 - 2), some_text,
    several(st.tuples(st.integers(0, 1000), some_text)), some_text, some_text,
)  # fmt: skip
transfers = st.builds(Transfer, some_text, some_text, several(some_text), st.booleans())
kinds = st.sampled_from(StdinKind)
payloads = st.builds(
    Payload, several(some_bytes), accounts, maybe(some_bytes), maybe(some_bytes), several(st.tuples(some_bytes, some_bytes)),
    st.integers(0, 0o777), several(st.tuples(some_text, st.integers(-1, 1 << 62), st.integers(-1, 1 << 62))),
    st.booleans(), kinds, kinds, kinds, several(transfers), several(transfers), maybe(some_bytes),
    several(st.builds(PlainFile, some_bytes, maybe(some_bytes), st.integers(0, 0o7777), st.booleans())), st.booleans(),
)  # fmt: skip
shares = st.builds(Share, some_text, some_text, st.booleans(), st.sampled_from(["", "9p"]))
machines = st.builds(
    MachineSpec, some_text, st.integers(1, 512), sizes, maybe(sizes), st.sampled_from(NetworkMode), several(shares),
    st.sampled_from(Start), st.sampled_from(Context), some_text, maybe(sizes), maybe(sizes),
)  # fmt: skip
probes = st.builds(Probe, st.sampled_from(Sign), some_text, maybe(seconds))
works = st.builds(RunPayload, payloads, maybe(some_bytes)) | st.builds(
    OwnWork, maybe(some_bytes), probes, st.booleans()
)
requests = st.builds(
    Request, st.from_regex(r"[0-9a-f]{12}", fullmatch=True), machines, works, some_text, some_text, seconds,
    maybe(seconds), seconds, st.booleans(), maybe(seconds), several(st.tuples(some_text, some_text)), several(some_text),
    sizes,
)  # fmt: skip

PLAIN = Request(
    "0123456789ab", MachineSpec("debian12", 1, 1 << 29), RunPayload(Payload((b"true",), Account("a", 1000, 1000, "a")))
)


@given(requests)
def test_a_request_comes_out_of_json_as_it_went_in(request: Request) -> None:
    assert Request.from_json(json.loads(dumps(request))) == request


def test_what_has_a_default_may_be_left_out() -> None:
    asked = {"id": "0123456789ab", "machine": {"image": "debian12", "cpus": 2, "memory": 1 << 29}, "work": {}}
    assert Request.from_json(asked) == Request("0123456789ab", MachineSpec("debian12", 2, 1 << 29), OwnWork())


def test_an_outcome_comes_out_of_json_too() -> None:
    outcome = replace(OUTCOME, phases={"boot": 1.5}, exit_code=3, troubles=("one",))
    assert Outcome.from_json(json.loads(dumps(outcome))) == outcome


OUTCOME = Outcome.from_json({"id": "0123456789ab", "cause": "finished", "class": "payload"})


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("id",), "../../etc", "id: '../../etc'"),
        (("id",), None, "id: None"),
        (("nonsense",), 1, "nonsense: 1"),
        (("machine",), [], "machine: []"),
        (("machine", "cpus"), "two", "machine.cpus: 'two'"),
        (("machine", "cpus"), True, "machine.cpus: True"),
        (("machine", "cpus"), 0, "machine.cpus: 0"),
        (("machine", "memory"), -5, "machine.memory: -5"),
        (("machine", "start"), "warm", "machine.start: 'warm'"),
        (("machine", "shares"), [{"source": 1, "target": "/x"}], "machine.shares[0].source: 1"),
        (("timeout",), float("nan"), "timeout: nan"),
        (("timeout",), "90s", "timeout: '90s'"),
        (("grace",), -1, "grace: -1"),
        (("keep",), 1, "keep: 1"),
        (("labels",), [["one"]], "labels[0]: ['one']"),
        (("labels",), {"a": "b"}, "labels: {'a': 'b'}"),
        (("work",), None, "work: None"),
        (("work", "payload"), None, "work.payload: None"),
        (("work", "payload", "argv"), ["€"], "work.payload.argv[0]: '€'"),
        (("work", "payload", "account", "uid"), 1.5, "work.payload.account.uid: 1.5"),
        (("work", "payload", "account", "groups"), [[1, "a", 2]], "work.payload.account.groups[0]: [1, 'a', 2]"),
    ],
)
def test_bad_input_is_refused_by_key_and_value(path: tuple[str, ...], value: object, told: str) -> None:
    asked: Any = json.loads(dumps(PLAIN))
    place = asked
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError) as caught:
        Request.from_json(asked)
    assert str(caught.value).startswith(told + ": ")


def test_what_is_missing_is_named() -> None:
    asked = to_json(PLAIN)
    del asked["machine"]["image"]
    with pytest.raises(ValueError, match=r"^machine\.image: is missing$"):
        Request.from_json(asked)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        Request.from_json({**to_json(PLAIN), "id": "x" * 10_000})
    assert len(str(caught.value)) < 200
