"""The frame parser, fed with anything in any portions, on both sides of the wire."""

import itertools
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.payloads import fed

from belljar.agent.wire import (
    CALL,
    CREDIT,
    DATA,
    EOF,
    GREETING,
    GREETING_SIZE,
    HEADER,
    HELLO,
    MAGIC,
    MAX_CALL,
    MAX_DATA,
    PAD,
    PING,
    PONG,
    RESET,
    SIGNAL,
    TO_AGENT,
    TO_HOST,
    Parser,
    WireError,
    Words,
    frame,
    greeting,
    join,
    portions,
    stuffed,
)

NONCE = bytes(range(16))
Frame = tuple[int, int, bytes]

numbers = st.integers(0, (1 << 32) - 1)
to_agent = st.one_of(
    st.tuples(st.just(DATA), numbers, st.one_of(st.binary(max_size=300), st.just(MAGIC[:7]))),
    st.tuples(st.just(CALL), numbers, st.binary(max_size=3000)),
    st.tuples(st.just(EOF), numbers, st.just(b"")),
    st.tuples(st.just(CREDIT), numbers, st.binary(min_size=4, max_size=4)),
    st.tuples(st.just(PING), numbers, st.binary(min_size=8, max_size=8)),
    st.tuples(st.just(GREETING), st.just(0), st.binary(min_size=16, max_size=16)),
).filter(lambda one: MAGIC not in one[2])
# What may come before a greeting, as long as it holds none.
noise = st.one_of(st.binary(max_size=100), st.just(MAGIC), st.just(greeting(NONCE)[:20]))


def wire(frames: list[Frame]) -> bytes:
    return b"".join(greeting(body) if kind == GREETING else frame(kind, number, body) for kind, number, body in frames)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def parsed(parser: Parser, portions: list[bytes]) -> list[Frame]:
    return [found for portion in portions for found in fed(parser, portion)]


@given(st.lists(to_agent, max_size=12), st.lists(st.integers(0, 1 << 20), max_size=30))
def test_frames_arrive_whole_however_they_are_cut(frames: list[Frame], cuts: list[int]) -> None:
    begin: Frame = (GREETING, 0, NONCE)
    portions = split(wire([begin, *frames]), cuts)
    assert parsed(Parser(TO_AGENT), portions) == [begin, *frames]


@given(noise, st.lists(st.integers(0, 1 << 20), max_size=10))
def test_what_precedes_a_greeting_is_discarded(before: bytes, cuts: list[int]) -> None:
    data = before + greeting(NONCE) + frame(PING, 0, bytes(8))
    assert parsed(Parser(TO_AGENT), split(data, cuts))[-2:] == [(GREETING, 0, NONCE), (PING, 0, bytes(8))]


@given(
    st.integers(0, GREETING_SIZE - 1),
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(0, 1 << 20), max_size=10),
)
def test_a_greeting_that_broke_off_does_not_hide_the_next(length: int, nonce: bytes, cuts: list[int]) -> None:
    data = greeting(nonce)[:length] + PAD + greeting(NONCE)
    assert heard(split(data, cuts))[-1] == (GREETING, 0, NONCE)


@given(st.binary(max_size=200), st.lists(st.integers(0, 1 << 20), max_size=10))
def test_the_host_hears_only_the_answer_to_its_own_greeting(before: bytes, cuts: list[int]) -> None:
    stale = greeting(os.urandom(16)) + frame(HELLO, 0, b"{}") + frame(DATA, 5, b"stale")
    data = before + stale + greeting(NONCE) + frame(HELLO, 0, b"{}")
    portions = split(data, cuts)
    assert parsed(Parser(TO_HOST, greeting(NONCE)), portions) == [(GREETING, 0, NONCE), (HELLO, 0, b"{}")]


@given(st.binary(max_size=2000), st.lists(st.integers(0, 1 << 20), max_size=10), st.booleans())
@settings(max_examples=300)
def test_garbage_is_a_violation_or_a_frame_and_nothing_else(data: bytes, cuts: list[int], is_host: bool) -> None:
    parser = Parser(TO_HOST, greeting(NONCE)) if is_host else Parser(TO_AGENT)
    list(fed(parser, greeting(NONCE)))
    accepts = TO_HOST if is_host else TO_AGENT
    try:
        for kind, _, body in parsed(parser, split(data, cuts)):
            assert kind == GREETING or len(body) <= accepts[kind]
    except WireError:
        parser.forget()
        assert parsed(parser, [bytes(64), greeting(NONCE)])[-1] == (GREETING, 0, NONCE)


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(DATA, 0, 1, MAX_DATA + 1),
        HEADER.pack(CALL, 0, 1, MAX_CALL + 1),
        HEADER.pack(CALL, 0, 1, (1 << 32) - 1),
        HEADER.pack(DATA, 1, 1, 0),  # a flag
        HEADER.pack(EOF, 0, 1, 1),
        HEADER.pack(RESET, 0, 1, 1),
        HEADER.pack(CREDIT, 0, 1, 3),
        HEADER.pack(SIGNAL, 0, 1, 0),
        HEADER.pack(HELLO, 0, 0, 0),  # only the agent says hello
        HEADER.pack(PONG, 0, 0, 8),
        HEADER.pack(0, 0, 0, 0),
        HEADER.pack(99, 0, 0, 0),
        MAGIC[:3] + bytes(20),
        MAGIC + bytes(31) + b"x",  # a greeting whose nonces differ
    ],
)
def test_what_the_protocol_does_not_allow_is_refused_before_its_body_comes(header: bytes) -> None:
    parser = Parser(TO_AGENT)
    list(fed(parser, greeting(NONCE)))
    with pytest.raises(WireError):
        list(fed(parser, header))


@given(st.lists(to_agent, max_size=5), st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 20), max_size=20))
@settings(max_examples=300)
def test_a_new_greeting_is_seen_wherever_the_old_host_broke_off(frames: list[Frame], cut: int, cuts: list[int]) -> None:
    begun = wire([(GREETING, 0, bytes(16)), *frames])
    data = begun[: cut % (len(begun) + 1)] + PAD + greeting(NONCE) + frame(PING, 5, b"12345678")
    found = heard(split(data, cuts))
    assert found[-2:] == [(GREETING, 0, NONCE), (PING, 5, b"12345678")]


def heard(portions: list[bytes]) -> list[Frame]:
    """What comes, as the agent takes it: a violation ends a conversation, not the agent."""
    parser = Parser(TO_AGENT)
    found: list[Frame] = []
    for portion in portions:
        parser.feed(portion)
        found += all_of(parser)
    return found


def all_of(parser: Parser) -> list[Frame]:
    """What has come, as the agent takes it: a violation ends a conversation, not the agent."""
    found: list[Frame] = []
    while True:
        try:
            one = parser.take()
        except WireError:
            parser.forget()
            continue
        if one is None:
            return found
        found.append(one)


@given(st.lists(st.sampled_from([MAGIC, MAGIC[:5], MAGIC[5:], b"x", bytes(MAX_DATA), greeting(NONCE)]), max_size=8))
def test_data_that_looks_like_a_greeting_stays_data(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    frames = [frame(DATA, 4, part) for part in portions(data)]
    found = parsed(Parser(TO_AGENT), [greeting(NONCE), *frames])
    assert [kind for kind, _, _ in found[1:]] == [DATA] * len(frames)
    assert b"".join(body for _, _, body in found[1:]) == data


def test_to_the_host_a_greeting_inside_of_a_frame_is_data() -> None:
    data = greeting(NONCE) + frame(DATA, 5, greeting(bytes(16)))
    assert parsed(Parser(TO_HOST, greeting(NONCE)), [data])[1:] == [(DATA, 5, greeting(bytes(16)))]


def test_a_large_call_costs_its_size_once_and_the_memory_is_given_back() -> None:
    parser = Parser(TO_AGENT)
    list(fed(parser, greeting(NONCE)))
    body = os.urandom(5 << 20)
    data = frame(CALL, 1, body)
    assert parsed(parser, [data[at : at + 4096] for at in range(0, len(data), 4096)]) == [(CALL, 1, body)]
    assert not parser.buffer and sys.getsizeof(parser.buffer) < 4096


@given(st.lists(st.binary(max_size=20).filter(lambda word: b"\0" not in word), min_size=1), st.integers(0, 9))
def test_words_are_read_as_they_were_joined(words: list[bytes], number: int) -> None:
    reader = Words(join(b"%d" % len(words), *words, b"%d" % number).split(b"\0"))
    assert reader.some() == words
    assert reader.number() == number
    with pytest.raises(IndexError):
        reader.next()


@pytest.mark.parametrize("words", [[b"-1"], [b"2", b"one"], [b"1000000000"], [b"x"], [b""], []])
def test_a_list_that_is_not_there_is_an_error_and_not_a_cost(words: list[bytes]) -> None:
    with pytest.raises((ValueError, IndexError)):
        Words(words).some()


@given(
    st.lists(
        st.one_of(st.sampled_from([b"\xff", b"\1", b"\xff\1", MAGIC, MAGIC[1:], b""]), st.binary(max_size=20)),
        max_size=9,
    )
)
def test_a_call_may_say_anything_and_never_holds_a_greeting(parts: list[bytes]) -> None:
    body = b"".join(parts)
    assert MAGIC not in stuffed(body)
    assert Words.of_call(stuffed(body)).words == body.split(b"\0")
