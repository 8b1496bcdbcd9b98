"""Sizes and durations as people write them."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.host.values import PLAIN_FILE, amount, convert, duration, duration_text, size, size_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("512MiB", 512 << 20),
        ("512 MB", 512 << 20),
        ("2G", 2 << 30),
        ("1.5G", 3 << 29),
        ("1T", 1 << 40),
        ("7B", 7),
        (" 4K ", 4096),
    ],
)
def test_a_size_is_read_as_batch_systems_read_it(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1G", "2 G i B", "2X", "1e3", "0x10", "٣G", "2G2", "inf", "1_000"])
def test_what_is_no_size_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="512M"):
        size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("90s", 90),
        ("1.5", 1.5),
        ("500ms", 0.5),
        ("5m", 300),
        ("5min", 300),
        ("2h", 7200),
        ("1d", 86400),
        ("10:00", 600),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
    ],
)
def test_a_duration_is_read_with_its_unit_or_as_a_clock(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "-5s", "5 weeks", "1:99", "1h30m", "1:70:00", "1:60:00", "0:100:00", "1:2:3:4", "nan", "inf", "1e9"],
)
def test_what_is_no_duration_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="90s"):
        duration(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_that_was_shown_can_be_typed_again(count: int) -> None:
    assert size(size_text(count)) == count


@given(st.integers(min_value=0, max_value=10**5))
def test_a_duration_that_was_shown_can_be_typed_again(seconds: int) -> None:
    assert duration(duration_text(float(seconds))) == seconds


@pytest.mark.parametrize(
    ("raw", "moment"),
    [
        (1_800_000_000, 1.8e9),
        (datetime(2027, 1, 15, 8, 0, tzinfo=UTC), 1.8e9),
        ("2027-01-15T08:00:00+00:00", 1.8e9),
        ("2027-01-15T09:00+01:00", 1.8e9),
    ],
)
def test_a_moment_is_a_date_with_time_or_a_number(raw: object, moment: float) -> None:
    assert convert(raw, float, {"unit": "moment"}, is_text=False) == moment


@pytest.mark.parametrize("raw", ["tomorrow", "", True, ["2027-01-15"], "2027-13-01T00:00"])
def test_what_is_no_moment_is_refused_with_an_example(raw: object) -> None:
    with pytest.raises(ValueError, match="2026-12-24T18:00:00"):
        convert(raw, float, {"unit": "moment"}, is_text=False)


def test_a_text_has_the_form_of_its_key_or_is_empty() -> None:
    facts = {"form": PLAIN_FILE}
    assert [convert(raw, str, facts, is_text=False) for raw in ("heartbeat", "")] == ["heartbeat", ""]
    assert convert(["a", "b.txt"], tuple[str, ...], facts, is_text=False) == ("a", "b.txt")
    for raw, kind in (("a/b", str), ("..", str), (["a", "a b"], tuple[str, ...])):
        with pytest.raises(ValueError, match="is not a file's name"):
            convert(raw, kind, facts, is_text=False)


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7.0), ("0.5", 0.5), ("", 0.0), (None, 0.0), ("-1", 0.0), ("nan", 0.0), ("1e300", 0.0), ("x", 0.0)]
)  # fmt: skip
def test_a_label_that_is_no_amount_is_nothing(text: str | None, value: float) -> None:
    assert amount(text) == value
