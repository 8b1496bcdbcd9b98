"""The moments that `stop --at` understands."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from belljar.cli import parser_of
from belljar.errors import BadOption


def moment(text: str) -> float:
    return float(parser_of("stop").parse_args(["--at", text, "job"]).at)


def test_a_time_of_the_day_is_the_next_one() -> None:
    soon = datetime.fromtimestamp(time.time() + 3600)
    then = moment(soon.strftime("%H:%M"))
    assert 0 < then - time.time() <= 86400 and datetime.fromtimestamp(then).strftime("%H:%M") == soon.strftime("%H:%M")
    assert 86000 < moment(datetime.now().strftime("%H:%M")) - time.time() <= 90000


def test_a_date_and_time_and_a_duration_from_now() -> None:
    assert moment("2030-12-24T18:00") == datetime(2030, 12, 24, 18).timestamp()
    assert moment("2030-12-24T18:00+00:00") == 1924365600.0
    assert abs(moment("+45m") - time.time() - 2700) < 5


@pytest.mark.parametrize("text", ["noon", "25:00", "", "+", "+x", "2030-13-01", "-5m"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--at"):
        moment(text)
