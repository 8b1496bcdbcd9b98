# ruff: noqa: F811 - `cell` is a fixture
"""Jobs of Grid Engine in machines: what they find, how they end, what is counted. Compared with the same job without."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
from tests.batch.lab.gridengine import until
from tests.batch.lab.gridengine_cell import IN_MACHINE, WITHOUT, Cell, cell  # noqa: F401

CODES = (0, 1, 2, 7, 42, 98, 126, 127, 128, 137, 213, 255)
SIGNALS = {"TERM": 15, "KILL": 9, "SEGV": 11, "USR1": 10, "XCPU": 24}
ORDINARY = r"""#!/bin/bash
printf '<%s>\n' "$@"
pwd; umask; id -un; id -gn; echo "$GREETING"; echo "$EMPTY" | od -c | head -2
cat; echo err one >&2; printf 'no newline at the end'
echo "in the home" > made.by.$1
"""


def test_an_ordinary_script_prints_the_same_bytes(cell: Cell) -> None:
    hostile = ("first", "a b", '"q"', "$HOME `id` $(id)", "*", "ü", "", "-x", "back\\slash")
    variables = ("-v", "GREETING=a b\nc 'd' \"e\" $(id),EMPTY=")
    home = cell.site.home("bjalice")
    (home / "stdin").write_bytes(b"standard input\0 with a zero\n")
    options = (*variables, "-i", str(home / "stdin"))
    machine, native = cell.both(ORDINARY, *options, args=hostile)
    assert native.exit == machine.exit == 0
    assert native.out == machine.out and b"<a b>" in machine.out
    assert native.err == machine.err == b"err one\n"
    assert (home / "made.by.first").read_text() == "in the home\n"


def test_exit_codes_and_signals_are_exact(cell: Cell) -> None:
    """One array for all: the task's number is the index of its end."""
    ends = [f"exit {code}" for code in CODES] + [f"kill -{name} $$; sleep 9" for name in SIGNALS]
    text = "case $SGE_TASK_ID in " + " ".join(f"{n}) {end};;" for n, end in enumerate(ends, 1)) + " esac"
    tasks = ("-t", f"1-{len(ends)}")
    jobs = [cell.submit(text, *tasks, *queue) for queue in (IN_MACHINE, WITHOUT)]
    rows = [
        {row["taskid"]: (row["failed"], row["exit_status"]) for row in cell.ended(job, rows=len(ends)).rows}
        for job in jobs
    ]
    assert rows[0] == rows[1]
    codes = [int(rows[0][str(n)][1].split()[0]) for n in range(1, len(ends) + 1)]
    assert codes == [*CODES, *(128 + number for number in SIGNALS.values())]
    cell.clean()


def test_99_and_100_mean_what_they_mean_without_a_machine(cell: Cell) -> None:
    again = '[ "$RESTARTED" = 0 ] && exit 99\necho restarted $RESTARTED; exit 3'
    first, held = cell.submit(again, *IN_MACHINE), cell.submit("exit 100", *IN_MACHINE)
    ended = cell.ended(first, rows=2)
    assert [row["exit_status"].split()[0] for row in ended.rows] == ["99", "3"]
    assert ended.out == b"restarted 1\n"
    cell.lab.until_state(held, "Eqw")
    cell.lab.run("qdel", held)


def test_each_task_of_an_array_has_a_machine_of_its_own(cell: Cell) -> None:
    text = "echo $SGE_TASK_ID $SGE_TASK_FIRST $SGE_TASK_LAST $SGE_TASK_STEPSIZE $(cat /etc/machine-id) $(ls /tmp | wc -l); touch /tmp/seen"
    job = cell.submit(text, "-t", "3-9:2", *IN_MACHINE)
    ended = cell.ended(job, rows=4)
    lines = [cell.out(f"{job}.{task}").decode().split() for task in (3, 5, 7, 9)]
    assert [line[:4] for line in lines] == [[str(task), "3", "9", "2"] for task in (3, 5, 7, 9)]
    assert len({line[4] for line in lines}) == 4
    assert {line[5] for line in lines} == {lines[0][5]}
    assert all(row["exit_status"].startswith("0") for row in ended.rows)


def test_the_machine_is_as_large_as_the_job_asked(cell: Cell) -> None:
    text = "nproc; awk '/MemTotal/ {m=$2} /HugePages_Total/ {n=$2} /Hugepagesize/ {print m-n*$2}' /proc/meminfo; df -B1 --output=size / | tail -1; cat $PE_HOSTFILE; echo $NSLOTS; echo $(cat $JOBFEATURES/wall_limit_secs); test -d $TMPDIR && test -O $TMPDIR && echo own"
    plain = cell.submit(text, *IN_MACHINE)
    large = cell.submit(text, "-pe", "smp", "2", "-l", "mem_free=1G,vm_disk=10G,h_rt=1:0:0", *IN_MACHINE)
    bounded = cell.submit(text, "-l", "h_vmem=2G", *IN_MACHINE)
    for job in (plain, large, bounded):
        assert cell.ended(job).exit == 0, cell.out(job, kind="e")
    cpus, memory, disk, *rest = cell.out(large).decode().split("\n")
    assert int(cpus) == 2
    assert 700 << 10 < int(memory) < 824 << 10, "what is left of 1 GiB"
    assert int(disk) > 9 << 30
    assert rest[0].startswith("bjge 2 all.q@bjge") and rest[1] == "2" and rest[3] == "own"
    assert 3500 < int(rest[2]) <= 3600
    assert cell.out(plain).decode().split("\n")[0] == "1"
    assert int(cell.out(bounded).decode().split("\n")[1]) < 1600 << 10, "QEMU has to live below h_vmem"


@pytest.mark.slow
def test_every_way_to_start_a_job_works_in_a_machine(cell: Cell) -> None:
    probe = 'echo "$0" "$@"; readlink /proc/$$/exe; shopt -q login_shell 2>/dev/null && echo login'
    for queue in ("all.q", "plain.q"):
        cell.lab.config("-mattr", "queue", "shell_start_mode", "posix_compliant", queue)
    try:
        machine, native = cell.both(probe, "-S", "/bin/bash", args=("a b", "c"))
        assert machine.out.replace(machine.job.encode(), b"N") == native.out.replace(native.job.encode(), b"N")
        for queue in ("all.q", "plain.q"):
            cell.lab.config("-mattr", "queue", "shell_start_mode", "script_from_stdin", queue)
        machine, native = cell.both('echo "$0" "$@"; read line; echo after', "-S", "/bin/bash", args=("a", "b"))
        assert machine.out == native.out and b"a b" in native.out
    finally:
        for queue in ("all.q", "plain.q"):
            cell.lab.config("-mattr", "queue", "shell_start_mode", "unix_behavior", queue)
    jobs = [
        cell.qsub(*queue, "-b", "y", "-shell", shell, "/bin/echo", "$HOME/x", "a  b")
        for shell in "yn"
        for queue in (IN_MACHINE, WITHOUT)
    ]
    outs = [cell.ended(job).out for job in jobs]
    assert outs[0] == outs[1] and outs[2] == outs[3] and outs[0] != outs[2]


def test_output_arrives_line_by_line_and_whole(cell: Cell) -> None:
    """A line within a second of its being written; 20 MB of both streams to the byte."""
    slow = cell.submit("echo started; for i in 1 2 3; do date +%s.%N; sleep 1; done", *IN_MACHINE)
    cell.started(slow)
    delays = []
    for count in (2, 3, 4):
        until(lambda n=count: cell.out(slow).count(b"\n") >= n, f"line {count}", timeout=10, every=0.02)
        delays.append(time.time() - float(cell.out(slow).decode().split("\n")[count - 1]))
    assert max(delays) < 1.0, delays
    text = "yes 0123456789abcdef | head -c 20000000; yes error | head -c 3000000 >&2; exit 3"
    machine, native = cell.both(text)
    assert machine.out == native.out and machine.err == native.err and machine.exit == native.exit == 3


def test_no_folder_outside_of_the_shares_is_lost(cell: Cell) -> None:
    """A working directory on no share is copied in, and what changed in it comes back."""
    place = cell.site.top / "scratch-of-alice"
    place.mkdir()
    place.chmod(0o777)
    (place / "input").write_text("from outside\n")
    script = cell.script("cat input; echo made > output; pwd")
    job = cell.lab.submit("-wd", str(place), "-o", "o.staged", "-e", "e.staged", *IN_MACHINE, script)
    assert cell.ended(job).exit == 0, (place / "e.staged").read_text()
    assert (place / "output").read_text() == "made\n"
    assert (place / "o.staged").read_text() == f"from outside\n{place}\n"


@pytest.mark.slow
def test_grid_engine_counts_what_the_machine_used(cell: Cell) -> None:
    """Two processors burnt for 20 seconds; memory not less than the guest's own."""
    burn = "end = time.time() + 20\nwhile time.time() < end: pass"
    text = f"python3 -c 'import time\nblock = b\"x\" * (200 << 20)\n{burn}' & python3 -c 'import time\n{burn}'; wait"
    size = ("-pe", "smp", "2", "-l", "mem_free=1G", *IN_MACHINE)
    cell.run("true", *size)  # makes the template
    is_quiet = os.getloadavg()[0] < 0.5
    ended = cell.run(text, *size)
    cpu = float(re.sub("[^0-9.]", "", ended.row["cpu"]))
    used = json.loads(cell.belljar("show", f"gridengine:{ended.job}", "--format", "json", user="bjalice").stdout)
    host = used["outcome"]["host"]
    print(f"qacct: {cpu} cpu-s; QEMU and belljar: {host['user'] + host['system']:.1f}")
    assert abs(cpu - host["user"] - host["system"]) < 3, "what Grid Engine counted is what QEMU and belljar used"
    assert cpu <= 46 and (cpu >= 38 or not is_quiet), ended.row
    assert _bytes(ended.row["maxvmem"]) > 200 << 20


def _bytes(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([KMGT]?)B?", text).groups()  # type: ignore[union-attr]
    return float(number) * 1024 ** " KMGT".index(unit or " ")


def test_nothing_of_all_these_is_left(cell: Cell) -> None:
    cell.clean()
    assert cell.lab.queue_state() == ""
