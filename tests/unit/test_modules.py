"""An installed belljar imports its modules out of one file, and never other code than its sources say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import belljar


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A folder as `make install` leaves it, with that file."""
    ours = Path(belljar.__file__).parent
    shutil.copytree(ours, tmp_path / "belljar", ignore=shutil.ignore_patterns("__pycache__", "modules.cpython*"))
    said(tmp_path, "from belljar.modules import write; write()")
    return tmp_path


def said(lib: Path, code: str) -> str:
    script = f"import sys; sys.dont_write_bytecode = True; sys.path.append({str(lib)!r})\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-IS", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_come_from_the_file_and_are_as_ever(lib: Path) -> None:
    assert said(lib, """
        import inspect, traceback
        import belljar.model, belljar.batch.slurm
        from belljar.modules import Modules
        for module in (belljar.model, belljar.batch, belljar.batch.slurm):
            assert isinstance(module.__loader__, Modules), module
        assert belljar.batch.__path__ == [belljar.__path__[0] + "/batch"]
        assert belljar.model.__file__ == belljar.__path__[0] + "/model.py"
        assert belljar.model.__package__ == "belljar" and belljar.batch.__package__ == "belljar.batch"
        print("class Request" in inspect.getsource(belljar.model.Request))
    """) == "True\n"  # fmt: skip


def test_so_do_those_of_the_standard_library_that_were_imported_when_it_was_written(lib: Path) -> None:
    said(lib, "import wave, email.message; from belljar.modules import write; write()")
    assert said(lib, """
        import inspect
        from belljar.modules import Modules
        import wave, email, string, calendar, fractions
        assert isinstance(wave.__loader__, Modules) and isinstance(email.__loader__, Modules)
        assert not isinstance(fractions.__loader__, Modules)
        assert wave.__file__ == inspect.getsourcefile(wave.open) and email.__package__ == "email"
        import email.mime.text  # what is not in the file is found as ever, in a package that is
        print(wave.Error.__module__, "class Error" in inspect.getsource(wave.Error))
    """) == "wave True\n"  # fmt: skip


def test_a_source_that_was_changed_counts(lib: Path) -> None:
    (lib / "belljar/model.py").write_text("changed = True\n")
    assert said(lib, "import belljar.model; print(belljar.model.changed)") == "True\n"


def test_a_process_that_runs_when_belljar_is_installed_anew_reads_no_wrong_bytes(lib: Path) -> None:
    assert said(lib, """
        import belljar.errors
        with open(belljar.__path__[0] + "/added.py", "w") as source:
            source.write("x = 1\\n" * 1000)
        belljar.modules.write()
        import belljar.agent.wire
        print(type(belljar.errors.__loader__).__name__, type(belljar.agent.wire.__loader__).__name__)
    """) == "Modules SourceFileLoader\n"  # fmt: skip


def test_without_the_file_modules_are_found_as_ever(lib: Path) -> None:
    for file in (lib / "belljar").glob("modules.cpython*"):
        file.unlink()
    assert said(lib, "import belljar.model; print(type(belljar.model.__loader__).__name__)") == "SourceFileLoader\n"


def test_no_descriptor_stays_open(lib: Path) -> None:
    assert said(lib, "import os; os.close(0); import belljar.model; print(os.open('/dev/null', os.O_RDONLY))") == "0\n"
