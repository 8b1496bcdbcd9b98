"""`belljar vacuum ...`: factories of machines without a head node. Each module beside this one has some acts."""

from __future__ import annotations

from belljar.cli.parser import Verb
from belljar.cli.vacuum import asking, factory, settings

VERBS = {
    "vacuum": Verb(
        "The vacuum: a host decides alone which experiment's machine to start next, by target shares and by what other hosts tell.",
        acts={**factory.ACTS, **asking.ACTS, **settings.ACTS},
    )
}
