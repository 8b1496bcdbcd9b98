"""A Python that this host does not have: what is left out of imports is still right there."""

import pytest
from tests.live.conftest import ROOT
from tests.roots import Room, root

PROGRAM = """
import runpy, sys
sys.path[:0] = ["/src", "/tests"]
tests = runpy.run_path("/tests/test_quick_imports.py")
names = [name for name in tests if name.startswith("test_")]
for name in names:
    tests[name]()
print(sys.version_info[:2], len(names) > 5)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_python_3_14_imports_no_more_than_a_job_needs() -> None:
    binds = {ROOT / "src": "/src", ROOT / "tests/unit/host": "/tests"}
    with Room(root("sid", ["python3.14"]), binds=binds) as room:
        assert room.run("python3.14", "-c", PROGRAM).stdout == b"(3, 14) True\n"
