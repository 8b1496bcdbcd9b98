"""What a wheel has beside the source tree: man pages, completions, systemd units, and the digest of the guest's agent."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPLETIONS = {
    "bash": "share/bash-completion/completions/belljar",
    "zsh": "share/zsh/site-functions/_belljar",
    "fish": "share/fish/vendor_completions.d/belljar.fish",
}


class Extras(BuildHookInterface[Any]):
    """Makes them in a folder that is gone when the wheel is there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        sys.path[:0] = [str(root / "src"), str(root / "packaging")]
        from argcomplete import shellcode  # type: ignore[attr-defined]
        from manpages import pages

        from belljar.agent import bundle

        made = self._made = Path(tempfile.mkdtemp())
        for name, page in pages().items():
            (made / name).write_text(page)
            build_data["shared_data"][str(made / name)] = f"share/man/man1/{name}"
        for shell, path in COMPLETIONS.items():
            (made / shell).write_text(shellcode(["belljar"], shell=shell) + "\n")
            build_data["shared_data"][str(made / shell)] = path
        build_data["shared_data"][str(root / "packaging/systemd")] = "share/belljar/systemd"
        (made / "agent").write_bytes(bundle._digest())
        build_data["force_include"][str(made / "agent")] = f"belljar/agent/{bundle.STAMP}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._made)
