"""`belljar vacuum`: this host as a factory of a space. What each act does is in the modules beside this one."""

from __future__ import annotations

from belljar.cli.parser import Verb
from belljar.cli.vacuum import factory, settings

VERBS = {
    "vacuum": Verb(
        "A factory: a host that starts machines by itself, by shares it has in common with its neighbours.",
        acts={**factory.ACTS, **settings.ACTS},
    )
}
