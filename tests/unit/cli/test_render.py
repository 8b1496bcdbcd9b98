"""Tables and figures for people."""

import pytest

from belljar.cli.render import duration, table
from belljar.jobs import plain, size


def test_columns_are_aligned_numbers_to_the_right_and_empty_columns_left_out() -> None:
    assert table(("A", "N", "NONE"), [("x", 1, ""), ("long", 100, None)]) == "A       N\nx       1\nlong  100"


def test_an_empty_table_has_its_heads() -> None:
    assert table(("A", "B"), []) == "A  B"


def test_a_cell_is_one_line_without_control_characters() -> None:
    assert plain("a\nb\x1b[2J\x7f\u202e") == "a\\nb\\x1b[2J\\x7f\\u202e"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (512 << 20, "512 MiB"), (5 << 40, "5 TiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59, "59 s"), (61, "1 min 01 s"), (3660, "1 h 01 min"), (90000, "1 d 1 h")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
