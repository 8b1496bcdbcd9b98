# ruff: noqa: F811 - `cell` is a fixture
"""A job that wants no machine is what it is without belljar: the same process, as far as it can tell itself."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.batch.lab.gridengine_cell import WITH_BELLJAR, WITHOUT, Cell, cell  # noqa: F401

# Prints what a process can see of itself, as JSON, whatever started it.
PROBE = r"""#!/usr/bin/python3 -IS
import json, os, sys
def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
mine = status("self")
keys = ("Name", "Umask", "Uid", "Gid", "SigQ", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd")
with open("/proc/self/environ", "rb") as file:
    env = file.read().decode("latin-1").split("\0")
with open("/proc/self/cmdline", "rb") as file:
    argv = file.read().decode("latin-1").split("\0")
tree, pid = [], os.getpid()
while pid > 1:
    one = status(pid)
    tree.append([one["Name"], pid == os.getpgid(pid), pid == os.getsid(pid)])
    pid = int(one["PPid"])
    if tree[-1][0] == "sge_shepherd":
        break
fds = {n: [os.readlink(f"/proc/self/fd/{n}"), os.get_inheritable(int(n))] for n in sorted(os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{n}")}
print(json.dumps({
    "argv": argv, "env": env, "status": {key: mine.get(key, "") for key in keys}, "limits": open("/proc/self/limits").read(),
    "fds": fds, "tree": tree, "cwd": os.getcwd(), "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(),
    "groups": len(os.getgroups()), "stdin": sys.stdin.read(),
}, indent=1))
sys.exit(7)
"""
SHELL_PROBE = '#!/bin/sh\nexec {probe} "$0" "$@"\n'


def seen(cell: Cell, job: str, queue: str) -> Any:
    """What the probe printed, without what differs between any two jobs."""
    ended = cell.ended(job)
    assert ended.exit == 7, ended.err.decode() + ended.out.decode()
    text = ended.out.decode().replace(queue, "QUEUE")
    text = re.sub(rf"\b{job}\b", "JOB", text)
    found = json.loads(text[text.index("{") :])
    found["status"].pop("SigQ")
    found["env"].sort()
    return found


def compare(cell: Cell, *words: str, env: dict[str, str] | None = None) -> Any:
    jobs = {queue[1]: cell.qsub(*queue, *words, **(env or {})) for queue in (WITH_BELLJAR, WITHOUT)}
    with_belljar, without = (seen(cell, job, queue) for queue, job in jobs.items())
    assert with_belljar == without
    return without


@pytest.fixture(params=["unix_behavior", "posix_compliant", "script_from_stdin"])
def mode(request: pytest.FixtureRequest, cell: Cell) -> str:
    for queue in ("all.q", "plain.q"):
        cell.lab.config("-mattr", "queue", "shell_start_mode", request.param, queue)
    return str(request.param)


def test_a_script_with_arguments_is_untouched(cell: Cell, mode: str) -> None:
    probe = cell.script(PROBE, "probe.py")
    script = cell.script(SHELL_PROBE.format(probe=probe), "job.sh")
    hostile = ["a b", '"q"', "$HOME", "*", "ü", "it's", "-x", "--y", "back\\slash"]
    found = compare(cell, script, *hostile)
    assert found["argv"][-len(hostile) - 1 : -1] == [word.encode().decode("latin-1") for word in hostile]
    assert found["tree"][-1][0] == "sge_shepherd"
    assert not any(word.startswith(("SGE_STARTER", "BELLJAR", "VM_IMAGE")) for word in found["env"])


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["y", "n"])
@pytest.mark.parametrize("mode", ["unix_behavior", "posix_compliant"], indirect=True)
def test_a_command_is_untouched(cell: Cell, mode: str, shell: str) -> None:
    probe = cell.script(PROBE, "probe.py")
    compare(
        cell, "-b", "y", "-shell", shell, probe, "a b", "it's" if shell == "n" else "its", "*" if shell == "n" else "+"
    )


@pytest.mark.parametrize("mode", ["unix_behavior"], indirect=True)
def test_a_command_is_looked_for_in_the_jobs_own_path(cell: Cell, mode: str) -> None:
    home = cell.site.home("bjalice")
    cell.script(PROBE, "probe.py")
    compare(cell, "-b", "y", "-shell", "n", "-v", f"PATH={home}:/usr/bin:/bin", "probe.py", "x")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["unix_behavior", "posix_compliant"], indirect=True)
@pytest.mark.parametrize("shell", ["/bin/bash", "/usr/bin/python3"])
def test_the_shell_asked_for_is_used(cell: Cell, mode: str, shell: str) -> None:
    probe = cell.script(PROBE, "probe.py")
    script = cell.script(SHELL_PROBE.format(probe=probe), "job.sh") if shell.endswith("bash") else probe
    compare(cell, "-S", shell, script, "one", "two")


@pytest.mark.parametrize("mode", ["unix_behavior"], indirect=True)
def test_a_script_without_a_first_line_a_hostile_environment_and_limits(cell: Cell, mode: str) -> None:
    """The shell's own fallback; variables that could change belljar itself; limits and arrays."""
    probe = cell.script(PROBE, "probe.py")
    path = cell.site.home("bjalice") / "bare"
    cell.script("#!", "bare")
    path.write_text(f'exec {probe} "$0" "$@"\n')
    hostile = "PYTHONPATH=/nowhere,PYTHONSTARTUP=/etc/passwd,BASH_ENV=/nowhere,X=a\nb,EMPTY=,IFS=x,LC_ALL=C"
    compare(cell, "-v", hostile, "-l", "h_vmem=3G,h_fsize=1G,s_core=0", "-pe", "smp", "2", str(path), "1")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["posix_compliant"], indirect=True)
def test_exit_codes_are_grid_engines_own(cell: Cell, mode: str) -> None:
    """Requeued by 99, held by 100; death by a signal."""
    again = '[ "$RESTARTED" = 0 ] && exit 99\nexit 3'
    jobs = [cell.submit(again, *queue) for queue in (WITH_BELLJAR, WITHOUT)]
    jobs += [cell.submit("kill -SEGV $$", *queue) for queue in (WITH_BELLJAR, WITHOUT)]
    held = [cell.submit("exit 100", *queue) for queue in (WITH_BELLJAR, WITHOUT)]
    rows = [
        [(row["failed"], row["exit_status"]) for row in cell.ended(job, rows=n).rows]
        for job, n in zip(jobs, (2, 2, 1, 1), strict=True)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 2
    assert rows[2] == rows[3]
    for job in held:
        cell.lab.until_state(job, "Eqw")
        assert "exit_status of job start = 100" in cell.error_reason(job)
        cell.lab.run("qdel", job)
