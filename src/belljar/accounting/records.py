"""From a row of the ledger to a usage record: a pure function.

A machine is accounted when its row has the labels `space`, `factory` and `machinetype`, its guest began to work, and it did not
end within its type's fizzle time. Other labels: `site`, `fqan`, `hs06` or `hepscore` (of one processor), `fizzle`
(seconds), `wall_limit` (seconds)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from belljar.accounting import UsageRecord, word
from belljar.host.values import amount
from belljar.model import Outcome

BEGAN = "run"  # the phase that a guest at work has
# Label, and its name in a record; the first that is there counts.
BENCHMARKS = (("hepscore", "HEPscore23"), ("hs06", "HEPSPEC"))


def record_of(row: Mapping[str, Any]) -> UsageRecord | None:
    """None for a row that is not accounted, or not a machine's."""
    try:
        outcome = Outcome.from_json(row)
    except ValueError:
        return None
    labels = {name: word(text) for name, text in outcome.labels}
    start, end = int(outcome.started), int(outcome.ended)
    is_counted = labels.get("space") and labels.get("factory") and labels.get("machinetype") and BEGAN in outcome.phases
    if not is_counted or end < start or end - start < amount(labels.get("fizzle")):
        return None
    measured = ((name, amount(labels.get(label))) for label, name in BENCHMARKS)
    benchmark, power = next((one for one in measured if one[1] > 0), ("", 1.0))
    guest, host = outcome.guest, outcome.host
    return UsageRecord(
        outcome.id, labels["machinetype"], labels["space"], labels["factory"], start, end,
        cpu=round(guest.user + guest.system or host.user + host.system), processors=outcome.cpus, memory=outcome.memory,
        memory_used=host.peak_memory, site=labels.get("site", ""), fqan=labels.get("fqan", ""),
        benchmark=benchmark, power=power, wall_limit=int(amount(labels.get("wall_limit"))),
    )  # fmt: skip
