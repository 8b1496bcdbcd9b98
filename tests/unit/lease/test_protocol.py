"""The pilots' channel: whatever a network does to the frames, each message arrives once, in order, and nothing else does."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.lease.protocol import (
    LARGEST_OPENING,
    PILOT,
    SERVICE,
    VERSION,
    Broken,
    Connection,
    Inbox,
    Message,
    Opening,
    Outbox,
    lease_key,
    nonce,
)
from belljar.model import to_json

SITE = b"s" * 32
LEASE = "r-0123456789abcdef0"


def key_of(opening: Opening) -> bytes | None:
    return lease_key(SITE, opening.lease)


def connected(key: bytes | None = None) -> tuple[Connection, Connection, bytes, bytes]:
    """Both sides, and their openings."""
    pilot = Connection(PILOT, lambda opening: key or key_of(opening))
    service = Connection(SERVICE, key_of)
    first = pilot.open(Opening(LEASE, 0, 1, "i" * 32, nonce()))
    assert service.receive(first) == []
    second = service.open(Opening(LEASE, 0, nonce=nonce()))
    assert pilot.receive(second) == []
    return pilot, service, first, second


def test_both_sides_talk() -> None:
    pilot, service, *_ = connected()
    assert service.peer is not None and (service.peer.lease, service.peer.instance) == (LEASE, "i" * 32)
    assert not service.is_proved
    assert service.receive(pilot.send({"kind": "hello"})) == [{"kind": "hello"}]
    assert service.is_proved
    assert pilot.receive(service.send({"kind": "go"})) == [{"kind": "go"}]


KEYS = st.text(max_size=8).filter(lambda one: one != "stream")  # after that one no frames follow


@given(st.lists(st.dictionaries(KEYS, st.text(max_size=30), max_size=4), max_size=12), st.data())
def test_frames_may_be_cut_anywhere(messages: list[Message], data: st.DataObject) -> None:
    pilot, service, *_ = connected()
    stream, found = b"".join(map(pilot.send, messages)), list[Message]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += service.receive(stream[:size])
        stream = stream[size:]
    assert found == messages


@given(st.data())
def test_a_frame_that_was_changed_doubled_moved_or_left_out_ends_the_connection(data: st.DataObject) -> None:
    pilot, service, *_ = connected()
    messages = [{"n": number} for number in range(4)]
    frames = [pilot.send(one) for one in messages]
    at = data.draw(st.integers(0, 3))
    match data.draw(st.sampled_from(["changed", "doubled", "swapped", "left out"])):
        case "changed":
            place = data.draw(st.integers(0, len(frames[at]) - 1))
            other = data.draw(st.integers(1, 255))
            frames[at] = frames[at][:place] + bytes([frames[at][place] ^ other]) + frames[at][place + 1 :]
            good = at
        case "doubled":
            frames.insert(at, frames[at])
            good = at + 1
        case "swapped":
            at = min(at, 2)
            frames[at], frames[at + 1] = frames[at + 1], frames[at]
            good = at
        case _:
            at = min(at, 2)
            del frames[at]
            good = at
    found = list[Message]()
    try:
        for frame in frames:
            found += service.receive(frame)
        assert good == at and len(found) < 4  # a changed length only waits for more
    except Broken:
        with pytest.raises(Broken):
            service.receive(frames[-1])
    assert found == messages[: len(found)] and len(found) <= good


def test_frames_of_an_earlier_connection_are_of_no_use() -> None:
    pilot, _, first, _ = connected()
    old = pilot.send({"kind": "ended"})
    service = Connection(SERVICE, key_of)
    service.receive(first)  # the opening can be sent again ...
    service.open(Opening(LEASE, 0, nonce=nonce()))
    with pytest.raises(Broken):
        service.receive(old)  # ... and nothing after it
    assert not service.is_proved


def test_a_frame_cannot_be_sent_back_to_who_sent_it() -> None:
    pilot, _, first, _ = connected()
    with pytest.raises(Broken):
        pilot.receive(pilot.send({"kind": "void"}))
    lonely = Connection(PILOT, key_of)
    own = lonely.open(Opening(LEASE, 0, nonce=nonce()))
    with pytest.raises(Broken):
        lonely.receive(own)
    with pytest.raises(Broken):
        lonely.receive(first)


@given(st.binary(max_size=300))
def test_a_stranger_is_not_heard(noise: bytes) -> None:
    service = Connection(SERVICE, key_of)
    with suppress(Broken):
        assert service.receive(noise) == []
    assert service.peer is None
    with pytest.raises(Broken):
        service.send({})


@pytest.mark.parametrize("wrong", [b"another key of this same size...", lease_key(SITE, "r-other")])
def test_another_key_opens_nothing(wrong: bytes) -> None:
    with pytest.raises(Broken, match="key"):
        connected(wrong)


def test_an_opening_is_small_and_whole() -> None:
    service = Connection(SERVICE, key_of)
    with pytest.raises(Broken, match="bytes"):
        service.receive((LARGEST_OPENING + 1).to_bytes(4, "big"))
    good = {"v": VERSION, **to_json(Opening(LEASE, 0, 1, "x", nonce()))}
    for name, value in {"lease": 7, "slot": -1, "nonce": "aa", "seen": True, "v": 2, "instance": "x" * 200}.items():
        with pytest.raises(Broken):
            Opening.read({**good, name: value})
    with pytest.raises(Broken):
        Opening.read({})


def test_nobody_speaks_before_the_openings() -> None:
    pilot = Connection(PILOT, key_of)
    with pytest.raises(Broken):
        pilot.send({})
    unknown = Connection(SERVICE, lambda opening: None)
    with pytest.raises(Broken):
        unknown.receive(connected()[2])


def test_bytes_after_the_last_frame_are_for_who_takes_the_connection_over() -> None:
    pilot, service, *_ = connected()
    service.receive(pilot.send({"kind": "stream"})[:-1])
    assert service.rest() != b""


@settings(max_examples=200)
@given(st.data())
def test_messages_arrive_once_and_in_order_over_connections_that_break(data: st.DataObject) -> None:
    """Both sides may forget: a pilot keeps all, so a service whose database is of yesterday hears again what it lost."""
    outbox, inbox, heard = Outbox(keep_all=True), Inbox(), list[int]()
    wire: list[Message] = []
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["say", "hear", "break", "acknowledge", "forget"])):
            case "say":
                outbox.put({"n": outbox.last + 1})
                wire.append(outbox.messages[-1])
            case "hear" if wire:
                message = wire.pop(0)
                if inbox.take(message):
                    heard.append(message["n"])
            case "break":
                wire = outbox.after(inbox.last)
            case "acknowledge":
                outbox.acknowledged(inbox.last)
            case "forget":
                back = data.draw(st.integers(0, inbox.last))
                inbox, heard = Inbox(back), heard[:back]
                wire = outbox.after(inbox.last)
    for message in outbox.after(inbox.last):
        if inbox.take(message):
            heard.append(message["n"])
    assert heard == list(range(1, outbox.last + 1))


def test_what_was_missed_or_never_said_is_not_taken() -> None:
    inbox, outbox = Inbox(), Outbox()
    assert inbox.take({"seq": 1}) and not inbox.take({"seq": 1}) and inbox.take({"kind": "heartbeat"})
    with pytest.raises(Broken, match="after"):
        inbox.take({"seq": 3})
    with pytest.raises(Broken):
        inbox.take({"seq": -1})
    with pytest.raises(Broken):
        outbox.acknowledged(1)
    outbox.put({})
    outbox.put({})
    outbox.acknowledged(1)
    assert [one["seq"] for one in outbox.after(1)] == [2]
    with pytest.raises(Broken, match="kept"):
        outbox.after(0)
