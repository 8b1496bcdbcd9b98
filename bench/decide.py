"""What a decision of a vacuum factory costs, by the number of factories in its space: adding up what they told, and deciding.

Every factory tells of four machinetypes. The size of each space comes in every round, so that a noisy moment hits all; what counts
is the cost for each factory, against that in the smallest space: no more than 1 is no faster than linear.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from common import interleaved, parser, publish, summary, table

from belljar.records import replace
from belljar.vacuum import MachineType, Mode, Space, TypeStatus
from belljar.vacuum.decisions.backoff import view_of
from belljar.vacuum.decisions.decide import Host, decide
from belljar.vacuum.decisions.packing import Machine

FACTORIES = (50, 500, 5000)
TYPES = tuple(
    MachineType(f"type{number}", 1.0 + number, min_processors=size, max_processors=size, min_wallclock=3600.0)
    for number, size in enumerate((1, 8, 1, 4))
)
NOW = 1_767_268_800.0


def case(count: int, mode: Mode, repeats: int = 0) -> Callable[[], float]:
    """Seconds of processor time for one factory with three free processors of 64; the average of so many decisions."""
    names = tuple(f"f{number}.example.org" for number in range(count))
    space = Space("vac.example.org", names[0], names, TYPES, mode=mode, processors=64, processors_per_superslot=8)
    statuses = [TypeStatus(name, kind.name, 16.0, 16, proved=int(NOW)) for name in names for kind in TYPES]
    aborted = replace(statuses[0], message="300 Nothing to do", message_time=int(NOW) - 60, proved=None)
    statuses[:: len(TYPES)] = [replace(one, proved=None) for one in statuses[:: len(TYPES)]]
    statuses[0] = aborted
    running = [Machine("type0", 1, NOW + 60.0 * number) for number in range(61)]
    dice = random.Random(1)

    def run() -> float:
        begin = time.process_time()
        for _ in range(repeats):
            decide(NOW, space, running, view_of(statuses, space), {}, Host(64), dice.random)
        return (time.process_time() - begin) / repeats

    repeats = repeats or max(1, 20000 // count)
    return run


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=11)
    args = arguments.parse_args()
    cases = {(mode, count): case(count, mode) for mode in Mode for count in FACTORIES}
    times = interleaved({f"{mode.value} {count}": run for (mode, count), run in cases.items()}, args.runs)
    medians = {name: summary(found)["median"] for name, found in times.items()}
    rows, ratios = [], {}
    for mode, count in cases:
        name, first = f"{mode.value} {count}", f"{mode.value} {FACTORIES[0]}"
        ratios[name] = medians[name] / count / (medians[first] / FACTORIES[0])
        rows.append((mode.value, count, 1000 * medians[name], 1e6 * medians[name] / count, ratios[name]))
    table(("mode", "factories", "ms per decision", "us per factory", "times the smallest"), rows)
    publish(args, {"benchmark": "decide", "seconds": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
