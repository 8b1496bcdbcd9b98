"""Where libvirt's Python binding is looked for."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

from belljar.errors import CommandMissing
from belljar.hypervisor.libvirt import link

SOURCE = Path(link.__file__).parents[3]
FINDS = """import site, sys
sys.path.append({source!r})
site.getsitepackages = lambda: {folders!r}
from belljar.hypervisor.libvirt.link import _binding
print(_binding().WHERE)
"""


def find(*folders: Path) -> subprocess.CompletedProcess[str]:
    """By a Python that searches no modules of the system, as an installed belljar's."""
    code = FINDS.format(source=str(SOURCE), folders=[str(one) for one in folders])
    return subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, timeout=60)


def test_the_distributions_binding_is_found_by_an_installed_belljar(tmp_path: Path) -> None:
    (tmp_path / "libvirt.py").write_text("WHERE = 'a package of the distribution'\n")
    assert find(tmp_path).stdout == "a package of the distribution\n"


def test_what_anybody_may_have_put_under_usr_local_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/usr/local/lib/python3/dist-packages"])
    monkeypatch.setattr(sys, "path", [str(SOURCE), *(one for one in sys.path if "site-packages" not in one)])
    monkeypatch.delitem(sys.modules, "libvirt", raising=False)
    with pytest.raises(CommandMissing) as caught:
        link._binding()
    assert "python3-libvirt" in caught.value.hint
    assert not any(one.startswith("/usr/local/") for one in sys.path)
