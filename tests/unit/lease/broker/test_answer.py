"""What machines say: all that one may say, and what a lying one gets."""

from __future__ import annotations

from base64 import b64encode

import pytest

from belljar.lease.broker import Cluster, Context
from belljar.lease.broker.plan import LARGEST, Answer, Refused, read, token
from belljar.records import replace

CONTEXT = Context("r-1", "ada", Cluster("pi"), generation=2)
TOKEN = token(b"site", CONTEXT, "i-1", "plan")


def code(text: bytes) -> bytes:
    return b64encode(text)


def answer(*lines: bytes, mark: str = TOKEN) -> Answer | None:
    return read(b"".join(mark.encode() + b" " + line + b"\n" for line in lines), TOKEN, ("munge_key",))


def test_a_whole_answer() -> None:
    lines = (b"data munge_key " + code(b"\x00\xff"), b"log " + code(b"all well"), b"end 0 -")
    assert answer(*lines) == (0, "-", b"all well", (("munge_key", b"\x00\xff"),))


@pytest.mark.parametrize("length", [0, 1, 70, -1])
def test_one_that_was_cut_off_is_none(length: int) -> None:
    text = b"".join(TOKEN.encode() + line for line in (b" log " + code(b"all well") + b"\n", b" end 0 -\n"))
    assert read(text[:length], TOKEN, ()) is None


def test_a_failing_script_is_named() -> None:
    assert answer(b"log " + code(b"no such host"), b"end 3 1-ipandhost/head") == (
        3,
        "1-ipandhost/head",
        b"no such host",
        (),
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (token(b"site", CONTEXT, "i-2", "plan"), "another machine"),
        (token(b"site", replace(CONTEXT, generation=1), "i-1", "plan"), "an earlier generation"),
        (token(b"site", replace(CONTEXT, id="r-2"), "i-1", "plan"), "another cluster"),
        (token(b"site", CONTEXT, "i-1", "other"), "another plan"),
        (token(b"other site", CONTEXT, "i-1", "plan"), "another service"),
        ("", "none"),
    ],
)
def test_another_token_is_refused(other: str, why: str) -> None:
    with pytest.raises(Refused, match="another token"):
        answer(b"end 0 -", mark=other)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([b"data root_key " + code(b"mine")], "nothing that its role has to say"),
        ([b"data munge_key " + code(b"a"), b"data munge_key " + code(b"b")], "nothing that its role has to say"),
        ([b"data munge_key " + code(bytes(16_385))], "16385 bytes of at most 16384"),
        ([b"data munge_key !!!!"], "no base64"),
        ([b"data munge_key"], "nothing that its role has to say"),
        ([b"log " + code(bytes(4097))], "4097 bytes of at most 4096"),
        ([b"end 256 -"], "nothing that its role has to say"),
        ([b"end -1 -"], "nothing that its role has to say"),
        ([b"end 00 -"], "nothing that its role has to say"),
        ([b"end " + b"9" * 5000 + b" -"], "nothing that its role has to say"),
        ([b"end 1 \x1b[2J"], "nothing that its role has to say"),
        ([b""], "nothing that its role has to say"),
        ([b"end 1 " + b"x" * 201], "nothing that its role has to say"),
        ([b"shutdown"], "nothing that its role has to say"),
        ([bytes(LARGEST)], "more than"),
    ],
)
def test_a_lie_is_refused(lines: list[bytes], says: str) -> None:
    with pytest.raises(Refused, match=says):
        answer(*lines)


def test_a_second_answer_is_not_looked_at() -> None:
    assert answer(b"end 0 -", b"end 3 1-ipandhost/head", b"nonsense") == (0, "-", b"", ())
