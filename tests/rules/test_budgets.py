"""How many lines each room may have. A number is lowered when its room gets smaller; a feature that does not fit makes room first.

Lines are those of a room's `.py` files, blank ones and comments included. The ground is what every room stands on.
"""

from collections import Counter

from tests.rules.offenders import assert_none
from tests.rules.test_layers import MODULES, name_of, room_of

BUDGETS = {
    "ground": 1580,
    "host": 2830,
    "hypervisor": 4570,
    "image": 4710,
    "network": 1030,
    "context": 890,
    "guest": 1490,
    "agent": 3690,
    "batch": 5650,
    "pool": 1800,
    "machine": 5450,
    "jobs": 2760,
    "service": 1690,
    "vacuum": 3830,
    "accounting": 460,
    "bait": 2940,
    "lease": 6730,
    "api": 410,
    "config": 540,
    "assembly": 170,
    "cli": 5030,
}
GROUND = ("__init__", "__main__", "errors", "findings", "hints", "journal", "model", "modules", "reading", "records")


def sizes() -> Counter[str]:
    rooms: Counter[str] = Counter()
    for path in MODULES:
        room = room_of(name_of(path)) or "__init__"
        rooms["ground" if room in GROUND else room] += len(path.read_text().splitlines())
    return rooms


def test_no_room_is_larger_than_its_budget() -> None:
    assert_none(
        f"{room}: {lines} lines, {BUDGETS[room]} allowed" for room, lines in sizes().items() if lines > BUDGETS[room]
    )


def test_a_budget_follows_its_room_down() -> None:
    """More than fifty lines to spare are given back: lower the number."""
    assert_none(
        f"{room}: {lines} lines, the budget is {BUDGETS[room]}"
        for room, lines in sizes().items()
        if lines < BUDGETS[room] - 50
    )
