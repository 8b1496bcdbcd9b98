"""What `belljar run` imports before its machine starts: each module costs every job."""

import os
import subprocess
import sys
from pathlib import Path

HEAVY = {
    "rich", "tuf", "securesystemslib", "tarfile", "zipfile", "tempfile", "shutil", "subprocess", "multiprocessing", "ctypes",
    "difflib", "pdb", "unittest", "xml", "urllib.request", "http.client", "email", "importlib.metadata", "uuid", "random",
    "tomllib", "dataclasses", "inspect", "logging", "traceback", "textwrap", "gettext", "locale", "hashlib", "_hashlib",
    "urllib.parse", "ipaddress", "concurrent.futures", "datetime", "string", "curses", "pydoc", "decimal", "sqlite3", "ssl", "typing", "concurrent.futures.process",
    "belljar.config.merge", "belljar.host.toml", "belljar.host.values", "belljar.config.checking", "belljar.jobs.site.doctor", "belljar.host.watch",
    "belljar.image.build.debian", "belljar.image.intake.sources", "belljar.host.guard.egress",
}  # fmt: skip
OF_A_SETTINGS_FILE = {"tomllib", "belljar.config.merge", "belljar.host.toml", "belljar.host.values"}
MOST = 86  # modules of ours that a job takes: each costs 0.2 ms of processor time


def loaded_by(code: str) -> set[str]:
    """Names in sys.modules after *code*, in a Python as bare as the installed launcher's."""
    script = f"import sys; sys.path[:] = {sys.path!r}\n{code}\nprint(*sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("BELLJAR_")}
    done = subprocess.run([sys.executable, "-IS", "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_is_read_without_anything_heavy() -> None:
    loaded = loaded_by(
        "from belljar.cli import split, parser_of\n"
        "from belljar.assembly import Runtime\n"
        "line = split(['run', '--', 'true'])\n"
        "args = parser_of(line.verb).parse_args(line.rest)\n"
        "Runtime(None).settings"
    )
    assert loaded & HEAVY == set()


def test_the_parts_that_run_a_job_are_made_without_anything_heavy() -> None:
    loaded = loaded_by(
        "from belljar.cli import parser_of\nparser_of('run')\n"
        "from belljar.assembly import Runtime\n"
        "from belljar.cli.machine import run, request\nfrom belljar.jobs import attend, starting\n"
        "runtime = Runtime(None)\n"
        "runtime.supervisor(), runtime.reaper, runtime.images, runtime.hypervisor\n"
        "from pathlib import Path\nfrom belljar.image import Image\n"
        "assert Image('', (), Path(), 0, None, None, '', '', 0.0).container is None"
    )
    assert loaded & HEAVY == set()
    assert len([name for name in loaded if name.startswith("belljar")]) <= MOST


def test_with_a_settings_file_only_what_reads_it_comes_along(tmp_path: Path) -> None:
    file = tmp_path / "belljar.toml"
    file.write_text('[image]\ndefault = "other"\n[machine]\ncpus = 2\nmemory = "1G"\n[qemu]\nboot_timeout = 90.5\n')
    loaded = loaded_by(
        "from belljar.cli import parser_of\nparser_of('run')\n"
        "from belljar.assembly import Runtime\nfrom belljar.jobs import attend\n"
        f"runtime = Runtime({str(file)!r})\n"
        "assert runtime.settings.machine.memory == 1 << 30\n"
        "runtime.supervisor(), runtime.reaper, runtime.images, runtime.hypervisor"
    )
    assert loaded & HEAVY == OF_A_SETTINGS_FILE


def test_other_verbs_are_not_imported() -> None:
    loaded = loaded_by("from belljar.cli import parser_of\nparser_of('run')")
    assert {name for name in loaded if name.startswith("belljar.cli.")} <= {
        "belljar.cli.machine",
        "belljar.cli.machine.run",
        "belljar.cli.parser",
    }


def test_of_the_agent_only_the_wire_and_the_digest_of_its_sources_are_imported() -> None:
    loaded = loaded_by(
        "from belljar.assembly import Runtime\n"
        "import belljar.guest.conversation\n"
        "runtime = Runtime(None)\n"
        "runtime.supervisor(), runtime.reaper, runtime.images, runtime.hypervisor"
    )
    ours = {name for name in loaded if name.startswith("belljar.agent.")}
    assert ours == {"belljar.agent.wire", "belljar.agent.bundle"}
