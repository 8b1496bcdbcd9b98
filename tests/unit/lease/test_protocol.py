"""The pilots' channel: who has the lease's key is heard, and each message arrives once, in order, and nothing else does."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.lease.protocol import (
    LARGEST_OPENING,
    VERSION,
    Broken,
    Inbox,
    Message,
    Opening,
    Outbox,
    frame,
    lease_key,
    receive,
)
from belljar.model import to_json

SITE = b"s" * 32
LEASE = "r-0123456789abcdef0"
OWN = Opening(LEASE, 3, 2, "i" * 32, 7, "stream")


def key_of(opening: Opening) -> bytes | None:
    return lease_key(SITE, opening.lease) if opening.lease == LEASE else None


def arrived(*pieces: bytes) -> asyncio.StreamReader:
    """A connection on which these came, and then its end."""
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return reader


async def test_the_other_side_is_who_has_the_leases_key() -> None:
    said = OWN.frame(lease_key(SITE, LEASE))
    assert await Opening.heard(arrived(said), key_of) == OWN
    wrongs = (b"another key of this same size...", lease_key(SITE, "r-other"), SITE)
    for wrong in (*map(OWN.frame, wrongs), Opening("r-other", 0).frame(lease_key(SITE, "r-other"))):
        with pytest.raises(Broken, match="key"):
            await Opening.heard(arrived(wrong), key_of)


@pytest.mark.parametrize("changed", [{"slot": 4}, {"attempt": 1}, {"instance": "j" * 32}, {"seen": 8}, {"stream": ""}, {"proof": "\udcff"}, {"proof": 7}], ids=str)  # fmt: skip
async def test_a_proof_is_of_all_that_is_said(changed: Message) -> None:
    honest = await receive(arrived(OWN.frame(lease_key(SITE, LEASE))))
    with pytest.raises(Broken, match="key"):
        await Opening.heard(arrived(frame({**honest, **changed})), key_of)


@pytest.mark.parametrize("value", [{}, {"v": VERSION}, *({"v": VERSION, **to_json(OWN), **wrong} for wrong in (
    {"lease": 7}, {"slot": -1}, {"seen": True}, {"v": 1}, {"more": 1},
))], ids=str)  # fmt: skip
async def test_an_opening_is_whole(value: Message) -> None:
    with pytest.raises(Broken, match=r"version|an opening"):
        await Opening.heard(arrived(frame(value)), key_of)


async def test_an_opening_is_small() -> None:
    with pytest.raises(Broken, match="bytes"):
        await Opening.heard(arrived((LARGEST_OPENING + 1).to_bytes(4, "big")), key_of)


@given(st.binary(max_size=300))
def test_a_stranger_is_not_heard(noise: bytes) -> None:
    async def hear() -> None:
        await Opening.heard(arrived(noise), key_of)

    with pytest.raises((Broken, EOFError)):
        asyncio.run(hear())


@given(st.lists(st.dictionaries(st.text(max_size=8), st.text(max_size=30), max_size=4), max_size=12), st.data())
def test_frames_may_be_cut_anywhere(messages: list[Message], data: st.DataObject) -> None:
    stream, pieces = b"".join(map(frame, messages)), list[bytes]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        pieces.append(stream[:size])
        stream = stream[size:]

    async def hear() -> None:
        reader = arrived(*pieces)
        assert [await receive(reader) for _ in messages] == messages
        with pytest.raises(EOFError):
            await receive(reader)

    asyncio.run(hear())


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
