"""ClassAds as text: literals are read, everything else is left alone, nothing ever breaks the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.batch.htcondor.ads import MOST, Expression, Value, parse, string, value_of

RECORDINGS = Path(__file__).parents[2] / "recordings/htcondor"


def recorded(name: str) -> bytes:
    return (RECORDINGS / name).read_bytes()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("-7", -7), ("0.5", 0.5), ("1.5E3", 1500.0), ("TRUE", True), ("false", False), ("undefined", None),
        ('"plain"', "plain"), ('"a \\"quoted\\" word"', 'a "quoted" word'), ('"C:\\dir"', "C:\\dir"), ('""', ""),
        ('"a" == "b"', Expression('"a" == "b"')), ("DiskUsage", Expression("DiskUsage")), ("", Expression("")),
        ("9" * 40, Expression("9" * 40)), ('"', Expression('"')),
    ],
)  # fmt: skip
def test_a_literal_is_its_value(text: str, value: Value) -> None:
    found = value_of(text)
    assert (found, type(found)) == (value, type(value))


def test_an_ad() -> None:
    ad = parse(recorded("job.ad"))
    assert (ad.number("ClusterId"), ad.number("procid"), ad.text("VMIMAGE")) == (4711, 3, "debian12")
    assert ad.text("Environment") == "A=1 B='two words' C=\"quoted\""
    assert isinstance(ad.get("requirements"), Expression)
    assert (ad.text("ClusterId"), ad.number("Owner"), ad.number("OnExitHold")) == ("", None, None)


def test_the_first_of_two_ads_counts_and_a_comparison_is_no_attribute() -> None:
    assert parse(b"\nA = 1\nB == 2\nC =?= 3\n\nA = 9\n").number("A") == 1
    assert len(parse(b"B == 2\nC =!= 3\nD=?=4\n")) == 0


def test_numbers_that_make_no_sense_are_none() -> None:
    ad = parse(recorded("hostile.ad"))
    assert [ad.number(name) for name in ("RequestCpus", "RequestMemory", "NumShadowStarts")] == [None, None, None]


def test_a_huge_ad_is_cut() -> None:
    assert len(parse(b"".join(b"A%d = 1\n" % number for number in range(MOST * 2)))) == MOST
    assert parse(b'A = "' + b"x" * (8 << 20)).text("A") == ""


@given(st.one_of(st.binary(max_size=400), st.text(alphabet="[]{}();=\"\\'aA1.\n =", max_size=200).map(str.encode)))
def test_nothing_breaks_the_reader(data: bytes) -> None:
    parse(data)


@given(st.text(max_size=60))
def test_what_is_written_as_a_string_is_one_literal(text: str) -> None:
    written = string(text)
    assert isinstance(value_of(written), str)
    assert "\n" not in written and written.isascii()
