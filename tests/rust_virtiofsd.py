"""The virtiofsd in Rust for hosts whose own is none: Debian 13's, run by its own loader and libraries."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tests.roots import STATE, files, folder_for_all

from belljar.errors import BelljarError
from belljar.hypervisor.devices.share_virtiofs import find

PACKAGE = "virtiofsd"
SCRIPT = """#!/bin/sh
exec {libraries}/ld-linux-x86-64.so.2 --library-path {libraries} {root}/usr/libexec/virtiofsd "$@"
"""


def rust_virtiofsd() -> str:
    """Its path: this host's, or a script that everybody may run. It is unpacked the first time."""
    with suppress(BelljarError):
        return find("")
    made = files("trixie", [PACKAGE])
    program = folder_for_all(STATE / "programs") / PACKAGE
    draft: Path = program.with_suffix(f".{os.getpid()}")
    draft.write_text(SCRIPT.format(root=made, libraries=made / "usr/lib/x86_64-linux-gnu"))
    draft.chmod(0o755)
    draft.rename(program)
    return str(program)
