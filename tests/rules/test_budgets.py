"""How many lines each room may have. A number is lowered when its room gets smaller; a feature that does not fit makes room first.

Lines are those of a room's `.py` files, blank ones and comments included. The ground is what every room stands on. The verbs of
the monitor and of the soak count as their own.
"""

from collections import Counter

from tests.rules.offenders import assert_none
from tests.rules.test_layers import MODULES, name_of, room_of

BUDGETS = {
    "ground": 1510,
    "host": 3660,
    "hypervisor": 4660,
    "image": 4560,
    "network": 920,
    "context": 850,
    "guest": 1370,
    "agent": 3580,
    "batch": 4950,
    "pool": 1500,
    "machine": 6100,
    "jobs": 2800,
    "service": 1400,
    "vacuum": 3220,
    "accounting": 440,
    "bait": 2650,
    "lease": 6460,
    "monitor": 1630,
    "soak": 430,
    "api": 910,
    "adapters": 520,
    "config": 450,
    "assembly": 170,
    "cli": 4360,
}
GROUND = ("__init__", "__main__", "errors", "findings", "hints", "journal", "model", "modules", "reading", "records")


def sizes() -> Counter[str]:
    rooms: Counter[str] = Counter()
    for path in MODULES:
        apart = next((room for room in ("monitor", "soak") if f"/cli/{room}/" in str(path)), "")
        room = apart or room_of(name_of(path)) or "__init__"
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
