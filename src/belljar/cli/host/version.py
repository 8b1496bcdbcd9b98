"""`belljar version`: belljar's version, and those of what it stands on."""

from __future__ import annotations

import argparse

from belljar.cli.parser import add_format

NEEDS_NO_HOUSE = True
HELP = "Show the version of belljar, of Python and of the system it runs on."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_format(parser)


def run(args: argparse.Namespace, house: None) -> int:
    from belljar.cli.render import show

    facts = versions()
    show(facts, ("what", "version"), list(facts.items()), as_=args.format)
    return 0


def versions() -> dict[str, str]:
    """Name and version of each layer."""
    import os
    import platform
    from pathlib import Path

    import belljar

    kernel = os.uname()
    return {
        "belljar": belljar.__version__,
        "python": platform.python_version(),
        "kernel": f"{kernel.sysname} {kernel.release} {kernel.machine}",
        "installed": str(Path(belljar.__file__).parent),
    }
