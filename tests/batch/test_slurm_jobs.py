"""Jobs of an ordinary user on a real Slurm: each in its own machine, ending as the same job ends without one."""

from __future__ import annotations

import hashlib
import re
import time

import pytest
from tests.batch.slurm_fixtures import VM, Cluster, Ended

SPOOL = rb"/\S*/spool/n[0-9]/job[0-9]{5}/slurm_script"


def both(cluster: Cluster, text: str, *options: str, **more: object) -> tuple[Ended, Ended]:
    """The same job without and with a machine."""
    native = cluster.run(text, *options, **more)
    guest = cluster.run(text, *options, VM, **more)
    return native, guest


def same(one: bytes) -> bytes:
    """Output without what differs from job to job."""
    return re.sub(SPOOL, b"SCRIPT", one)


def test_script_arguments_folder_variables_and_umask(cluster: Cluster) -> None:
    text = """#!/bin/bash -u
printf '[%s]\\n' "$0" "$#" "$@"
pwd; umask; id; echo "$MINE"; printf '%s' "$WITH_LINES" | od -c
echo to-stderr >&2
cat; echo "stdin ended $?"
ulimit -n >/dev/null; cat -A "$0" | tail -1
"""
    env = {"MINE": "a 'b' \"c\" $(id)", "WITH_LINES": "x\n y\t"}
    args = ("a b", "c'd", 'e"f', "", "g\nh", "é", "$(id)", "--image=x")
    native, guest = both(cluster, text, env=env, args=args)
    assert (native.state, native.exit) == ("COMPLETED", "0:0"), native
    assert (guest.state, guest.exit) == ("COMPLETED", "0:0"), guest
    assert same(guest.out) == same(native.out)
    assert guest.err == native.err == b"to-stderr\n"


@pytest.mark.slow
def test_another_folder_and_an_input_file(cluster: Cluster) -> None:
    folder = cluster.site.home("bjalice") / "with blank"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "in").write_bytes(bytes(range(256)) * 16)
    text = "pwd; cat | md5sum; echo made >made"
    options = (f"--chdir={folder}", f"--input={folder}/in", f"--output={folder}/%j.out")
    for more in ((), (VM,)):
        ended = cluster.run(text, *options, *more)
        assert ended.exit == "0:0"
        assert (folder / f"{ended.job}.out").read_text() == (
            f"{folder}\n{hashlib.md5(bytes(range(256)) * 16).hexdigest()}  -\n"
        )
        (folder / "made").unlink()


def test_the_variables_of_slurm_are_inside(cluster: Cluster) -> None:
    native, guest = both(cluster, "env | grep ^SLURM | sort", "--time=5", "--cpus-per-task=2", "--mem=700")
    volatile = rb"SLURM_(JOB_?ID|JOB_SLUID|TASK_PID|NODELIST|JOB_NODELIST|TOPOLOGY_ADDR|JOB_COMMENT|JOB_(START|END)_TIME)=.*|SLURMD_NODENAME=.*"
    assert re.sub(volatile, b"", guest.out) == re.sub(volatile, b"", native.out)
    assert f"SLURM_JOB_ID={guest.job}".encode() in guest.out


@pytest.mark.slow
@pytest.mark.parametrize("language", ["#!/usr/bin/env python3", "#!/usr/bin/perl -w", "#!/bin/bash -e"])
def test_interpreters(cluster: Cluster, language: str) -> None:
    text = {"python3": "import sys; print(sys.argv[1:])", "-w": "print qq(@ARGV\\n);", "-e": "echo $-; false; echo no"}
    native, guest = both(cluster, f"{language}\n{text[language.split()[-1]]}\n", args=("x y",))
    assert (guest.exit, guest.out, same(guest.err)) == (native.exit, native.out, same(native.err))


@pytest.mark.slow
def test_an_interpreter_that_is_not_there(cluster: Cluster) -> None:
    """slurmstepd ends a native one with errno as its code; belljar says it as shells do."""
    native, guest = both(cluster, "#!/no/such/interpreter\n")
    assert (native.state, native.exit) == ("FAILED", "2:0")
    assert (guest.state, guest.exit) == ("FAILED", "126:0")
    assert b"could not be started" in guest.err


QUICK, ALL = (7, 125), (0, 1, 2, 7, 42, 98, 99, 100, 125, 126, 127, 128, 137, 213, 255)


@pytest.mark.parametrize("code", QUICK)
def test_exit_codes(cluster: Cluster, code: int) -> None:
    ended = cluster.run(f"exit {code}", VM)
    assert (ended.exit, ended.err) == (f"{code}:0", b"")
    assert ended.state == ("FAILED" if code else "COMPLETED")


@pytest.mark.slow
@pytest.mark.parametrize("code", sorted({*ALL} - {*QUICK}))
def test_all_exit_codes(cluster: Cluster, code: int) -> None:
    assert cluster.run(f"exit {code}", VM).exit == f"{code}:0"


@pytest.mark.parametrize("signal", ["SEGV"])
def test_a_payload_that_dies_by_a_signal(cluster: Cluster, signal: str) -> None:
    native, guest = both(cluster, f"kill -{signal} $$; sleep 9")
    assert (guest.state, guest.exit) == (native.state, native.exit)
    assert guest.exit == "0:11"


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "KILL", "USR1", "XCPU", "HUP", "INT", "ABRT", "PIPE"])
def test_all_signals_a_payload_dies_by(cluster: Cluster, signal: str) -> None:
    native, guest = both(cluster, f"kill -{signal} $$; sleep 9")
    assert (guest.state, guest.exit) == (native.state, native.exit)


def test_an_array_each_task_in_its_own_machine(cluster: Cluster) -> None:
    text = "echo $SLURM_ARRAY_TASK_ID $SLURM_ARRAY_JOB_ID $(cat /proc/sys/kernel/random/boot_id) $(hostname); exit $SLURM_ARRAY_TASK_ID"
    array = cluster.submit(text, "--array=2-5", VM)
    exits = [cluster.lab.ended(f"{array}_{task}")["ExitCode"] for task in range(2, 6)]
    assert exits == [f"{task}:0" for task in range(2, 6)]
    lines = [cluster.read(f"{array}.{task}.out").split() for task in range(2, 6)]
    assert [line[:2] for line in lines] == [[b"%d" % task, array.encode()] for task in range(2, 6)]
    assert len({line[3] for line in lines}) == 4
    shown = cluster.belljar("show", f"slurm:{array}_3", user="bjalice")
    assert b"exit code      3" in shown
    cluster.clean()


@pytest.mark.slow
def test_an_array_of_twenty(cluster: Cluster) -> None:
    array = cluster.submit("echo $SLURM_ARRAY_TASK_ID", "--array=1-20", VM)
    for task in range(1, 21):
        record = cluster.lab.ended(f"{array}_{task}")
        assert record["ExitCode"] == "0:0"
        assert cluster.read(f"{array}.{task}.out") == b"%d\n" % task


def test_output_arrives_while_the_job_runs(cluster: Cluster) -> None:
    job = cluster.submit("echo started; for i in 1 2 3; do sleep 1; date +%s.%N; done", VM)
    cluster.started(job)
    for number in range(1, 4):
        cluster.lab.until(lambda want=number: cluster.read(f"{job}.out").count(b"\n") > want, "the next line", 10)
        arrived = time.time()
        assert arrived - float(cluster.read(f"{job}.out").splitlines()[number]) < 1.0
    assert cluster.end(job).exit == "0:0"


def test_much_output(cluster: Cluster) -> None:
    text = "dd if=/dev/zero bs=1M count=40 2>/dev/null | tr '\\0' x; echo; echo end; echo err >&2; exit 3"
    ended = cluster.run(text, VM)
    assert (ended.exit, ended.err) == ("3:0", b"err\n")
    assert len(ended.out) == 40 * 2**20 + 5 and ended.out.endswith(b"x\nend\n") and set(ended.out[:-5]) == {ord("x")}


def test_what_was_asked_for_is_inside(cluster: Cluster) -> None:
    text = "nproc; awk '/MemTotal/ {m=$2} /HugePages_Total/ {n=$2} /Hugepagesize/ {print int((m-n*$2)/1024)}' /proc/meminfo; for f in allocated_cpu wall_limit_secs; do cat $JOBFEATURES/$f; echo; done"
    ended = cluster.run(text, VM, "--cpus-per-task=2", "--mem=1G", "--time=10")
    cpus, memory, allocated, wall = map(int, ended.out.split())
    assert cpus == allocated == 2 and 600 <= memory <= 1024 - 200
    assert 300 < wall <= 600  # what is left of it


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--comment=vm=nope",), "no image is called nope here"),
        (("--comment=vm=../../x",), "is no name of an image"),
        (("--comment=vm=$(touch /tmp/belljar-pwned)",), "is no name of an image"),
        (("--comment=vm=debian12 vm=other",), "more than one image"),
        (("--comment=vm=" + "x" * 200,), "is no name of an image"),
        (("--comment=vm=d\u00e9bian",), "is no name of an image"),
        ((VM, "--mem=100"), "a job in a machine needs at least"),
        ((VM, "--nodes=2"), "a job in a machine has one"),
    ],
)
def test_refused_at_submission_in_words_a_user_understands(
    cluster: Cluster, options: tuple[str, ...], sentence: str
) -> None:
    done = cluster.sbatch("true", *options)
    assert done.returncode == 1 and sentence in done.stderr.decode(errors="replace"), done
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$(touch pwned)", "a'b\"c`d`", "x" * 200, "é\u202e", "a\nb", "; exit 9"])
def test_hostile_names_of_jobs(cluster: Cluster, name: str) -> None:
    native, guest = both(cluster, 'printf %s "$SLURM_JOB_NAME" | od -c; ls', f"--job-name={name}")
    assert (guest.exit, guest.out.partition(b"\n")[0]) == ("0:0", native.out.partition(b"\n")[0])
    assert not (cluster.site.home("bjalice") / "pwned").exists()
    shown = cluster.belljar("show", f"slurm:{guest.job}", user="bjalice")
    assert b"\x1b" not in shown and "\u202e".encode() not in shown


def test_a_partition_gives_its_image(cluster: Cluster) -> None:
    native = cluster.run("hostname", "--partition=batch")
    guest = cluster.run("hostname", "--partition=night")
    assert guest.exit == native.exit == "0:0"
    assert guest.out.startswith(b"belljar-") and not native.out.startswith(b"belljar-")


@pytest.mark.slow
def test_a_job_submitted_from_inside_an_array_is_its_own(cluster: Cluster) -> None:
    inner = cluster.script(
        "echo inner $(hostname) $SLURM_JOB_ID; awk '/MemTotal/ {m=$2} /HugePages_Total/ {n=$2} /Hugepagesize/ {print int((m-n*$2)/1024)}' /proc/meminfo",
        "inner.sh",
    )
    cluster.submit(f"sbatch --wait --mem=700 -o inner.out {VM} {inner}", "--array=7", "--mem=1500", env={})
    cluster.lab.until(lambda: cluster.read("inner.out").count(b"\n") > 1, "the inner job's output", 120)
    _, host, job, memory = cluster.read("inner.out").split()
    assert host.startswith(b"belljar-") and int(memory) < 600
    assert b"exit code      0" in cluster.belljar("show", f"slurm:{job.decode()}", user="bjalice")


def test_a_working_directory_that_is_nowhere_shared_is_carried_in_and_out(cluster: Cluster) -> None:
    folder = cluster.site.top / "elsewhere"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "input").write_text("41\n")
    ended = cluster.run(
        "pwd; echo $(($(cat input) + 1)) >result", VM, f"--chdir={folder}", "--output=out", "--error=err"
    )
    assert ended.exit == "0:0", (ended, (folder / "err").read_text())
    assert (folder / "out").read_text() == f"{folder}\n" and (folder / "result").read_text() == "42\n"
