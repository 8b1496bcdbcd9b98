"""`belljar doctor`: what this host offers, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import acts
from belljar.cli.render import show_findings
from belljar.config import inspect
from belljar.config.checking import all_mistakes
from belljar.findings import Finding, examine, fail, ok
from belljar.jobs.site.doctor import CHECKS as CHECKS_OF_HOST


def doctor(args: argparse.Namespace, runtime: Runtime) -> int:
    runtime.be_lenient()  # a mistake in the settings is the first check's; the others look at what can be understood
    checks = [look for look in CHECKS if not args.only or look.__name__ in args.only]
    return show_findings((examine(look.__name__, partial(look, runtime)) for look in checks), as_=args.format)


def settings(runtime: Any) -> Finding:
    loaded = inspect(runtime.config_file)
    if mistakes := all_mistakes(loaded):
        return fail("settings", "\n".join(map(str, mistakes)), "Correct them; `belljar config check` looks again.")
    return ok("settings", f"{len(loaded.origins)} set, the rest are defaults")


CHECKS: tuple[Callable[[Any], Finding], ...] = (settings, *CHECKS_OF_HOST)


ROWS = f"""
# doctor +format | Check this host, and say what is missing and how to get it. Exits 1 if no machine can run.
--only {{{",".join(look.__name__ for look in CHECKS)}}} CHECK * | only this check (repeatable)"""
VERBS = acts(ROWS, globals())
