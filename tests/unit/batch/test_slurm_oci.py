"""Jobs with a container, from recordings of Slurm 22.05.8; and what a site is given for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings, slurm_oci
from belljar.batch.siting import OurFile, OurLines, Place
from belljar.batch.slurm import Slurm
from belljar.batch.slurm_site import SITE
from belljar.batch.terms import Command, Surroundings
from belljar.cli.settling import settled
from belljar.errors import (
    BadOption,
    BelljarError,
    CommandFailed,
    CommandMissing,
    ImageNotAllowed,
    NotInAJob,
    OverLimit,
    SystemSilent,
)
from belljar.machine.states import class_of_error
from belljar.model import OutcomeClass

RECORDED = Path(__file__).parents[2] / "recordings/slurm"
SPOOL = "/var/spool/slurmd/n1"
CONFIG, ARRAY = ((RECORDED / name).read_bytes() for name in ("container.json", "container-array.json"))
ROWS = (RECORDED / "container-squeue.txt").read_bytes()
# slurmd's, not the job's
ENV = {
    "SLURMD_NODENAME": "n1",
    "PWD": f"{SPOOL}/oci-job00001-batch",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "HOME": "/",
}


def surroundings(
    config: bytes = CONFIG, rows: bytes | BelljarError = ROWS, job: str = "00001", script: bytes = b"#!/bin/bash -e\n:\n",
    folder: str = "",
) -> Surroundings:  # fmt: skip
    files = {f"{SPOOL}/oci-job{job}-batch/config.json": config, f"{SPOOL}/job{job}/slurm_script": script}

    def read(path: bytes) -> bytes:
        if path.decode() not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return files[path.decode()]

    def ask(argv: tuple[str, ...]) -> bytes:
        assert argv[:3] == ("env", "SLURM_CONF=/etc/slurm/slurm.conf", "squeue") and f"--jobs={int(job)}" in argv
        if isinstance(rows, BelljarError):
            raise rows
        return rows

    env = tuple((name.encode(), value.encode()) for name, value in ENV.items())
    options = {"oci": folder or f"{SPOOL}/oci-job{job}-batch/"}
    return Surroundings((), env, ENV["PWD"].encode(), 1001, 1002, (), options, lambda: b"", read, ask)


def changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(CONFIG.decode("utf-8", "replace")), **changes}).encode()


# -- a job ---------------------------------------------------------------------------------------------------------------


def test_a_recorded_job() -> None:
    job = Slurm().read(surroundings())
    script = f"{SPOOL}/job00001/slurm_script".encode()
    assert (job.id, job.image, job.queue, job.name, job.trouble) == ("1", "debian12", "batch", "job.sh", None)
    assert job.inside == Command(script, (script, b"a b", b"c'd", b"", b"\xff\xc3\xa9"))
    assert (job.script, job.script_skips_line) == (script, False)
    assert (job.cwd, job.cpus, job.memory, job.disk, job.wall) == (b"/tmp", 2, 1200 << 20, 1500 << 20, 300.0)
    assert not job.signals_reach_all and job.started_before == 0


def test_the_variables_are_those_of_a_batch_script() -> None:
    env = Slurm().read(surroundings()).env or ()
    assert len({name for name, _ in env}) == len(env)
    assert dict(env).items() >= {
        b"MINE": b'x"y\nz\\\xff', b"HOME": b"/home/alice", b"SLURM_SUBMIT_DIR": b"/home/alice", b"SLURMD_NODENAME": b"n1",
        b"SLURM_PROCID": b"0", b"SLURM_LOCALID": b"0", b"SLURM_NODEID": b"0", b"SLURM_GTIDS": b"0", b"SLURM_JOB_UID": b"1001",
        b"SLURM_JOB_GID": b"1002", b"SLURM_JOB_USER": b"alice", b"SLURM_CPUS_ON_NODE": b"2", b"TMPDIR": b"/tmp",
    }.items()  # fmt: skip
    assert not {b"SLURM_UMASK", b"SLURM_RESTART_COUNT", b"PWD"} & dict(env).keys()


def test_the_last_task_of_an_array_has_the_arrays_number() -> None:
    job = Slurm().read(surroundings(ARRAY, job="00002"))
    assert (job.id, job.aliases, job.cwd, job.disk, job.wall) == ("2_4", ("2",), b"/home/alice", None, 3064 * 60.0)


def test_a_job_from_inside_a_task_is_no_task() -> None:
    config = json.loads(CONFIG.decode("utf-8", "replace"))
    process = {**config["process"], "env": [*config["process"]["env"], "SLURM_ARRAY_JOB_ID=7", "SLURM_ARRAY_TASK_ID=1"]}
    assert Slurm().read(surroundings(changed(process=process))).id == "1"


def test_a_second_start_is_known() -> None:
    job = Slurm().read(surroundings(rows=ROWS.replace(b"|alice|0|/tmp", b"|alice|2|/tmp")))
    assert job.started_before == 2 and (b"SLURM_RESTART_COUNT", b"2") in (job.env or ())


@pytest.mark.parametrize(
    ("first", "skips"),
    [(b"#!/opt/b/libexec/wrap-slurm --array=no\n", True), (b"#!/bin/bash --login\n", False), (b"#!/bin/sh\n", False)],
)
def test_only_our_own_first_line_is_taken_off(first: bytes, skips: bool) -> None:
    assert Slurm().read(surroundings(script=first + b"#!/bin/sh\n")).script_skips_line is skips


def test_the_folder_may_hold_anything() -> None:
    job = Slurm().read(surroundings(rows=ROWS.replace(b"|/tmp|", b"|/a|b c \xff|")))
    assert job.cwd == b"/a|b c \xff"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (b"", "told nothing of job 1"),
        (b"slurm_load_jobs error: Invalid job id specified\n", "told nothing of job 1"),
        (ROWS.replace(b"1|N/A", b"11|N/A"), "told nothing of job 1"),
        (ROWS.replace(b"|/tmp|", b"|/tmp"), "told nothing of job 1"),  # a folder with a line break
        (ROWS.replace(b"|/tmp|", b"|tmp|"), "told nothing of job 1"),
        (ROWS.replace(b"|0|/tmp|", b"|many|/tmp|"), "told nothing of job 1"),
        (CommandFailed("env: not within 20 s"), "squeue: not within 20 s"),
    ],
)
def test_a_slurmctld_that_tells_nothing_is_no_fault_of_the_jobs(rows: bytes | BelljarError, said: str) -> None:
    job = Slurm().read(surroundings(rows=rows))
    assert isinstance(job.trouble, SystemSilent) and said in job.trouble.message
    assert (job.id, job.image) == ("1", "debian12")


def test_a_node_without_squeue_is_at_fault() -> None:
    trouble = Slurm().read(surroundings(rows=CommandMissing("squeue: not installed"))).trouble
    assert trouble is not None and class_of_error(trouble) is OutcomeClass.NODE
    assert class_of_error(SystemSilent("")) is OutcomeClass.TRANSIENT


@pytest.mark.parametrize("annotations", [{}, {"belljar.image": 7}, {"belljar.image": ""}, [], None, "belljar.image"])
def test_a_bundle_of_somebody_elses_is_refused(annotations: object) -> None:
    trouble = Slurm().read(surroundings(changed(annotations=annotations))).trouble
    assert isinstance(trouble, ImageNotAllowed) and "not a bundle of belljar's" in trouble.message


def test_several_nodes_are_refused() -> None:
    trouble = Slurm().read(surroundings(rows=ROWS.replace(b"N/A|1|", b"N/A|2|"))).trouble
    assert isinstance(trouble, OverLimit) and trouble.message == "2 nodes: a job in a machine has one"


@pytest.mark.parametrize(
    "folder", ["", "x", f"{SPOOL}/oci-job00001-00000/", f"{SPOOL}/oci-job00001-extern", "oci-job00001-batch", "/tmp"]
)
def test_what_is_no_batch_step_is_no_job(folder: str) -> None:
    with pytest.raises(NotInAJob, match="not the folder of a batch job"):
        Slurm().read(replace(surroundings(), options={"oci": folder}))


HOSTILE: Mapping[str, bytes] = {
    "nothing": b"",
    "no object": b"[]",
    "half": CONFIG[:500],
    "deep": b"[" * 200_000,
    "large": b" " * (slurm_oci.LARGEST_CONFIG + 1),
    "no process": changed(process=None),
    "args a string": changed(process={"args": "/tmp/slurm/startup", "env": []}),
    "no args": changed(process={"args": [], "env": []}),
    "number": changed(process={"args": ["x", 7], "env": []}),
    "NUL": changed(process={"args": ["x", "a\0b"], "env": []}),
    "lone surrogate": changed(process={"args": ["x"], "env": ["A=\ud800"]}),
    "env an object": changed(process={"args": ["x"], "env": {"A": "b"}}),
    "too many": changed(process={"args": ["x"] * (slurm_oci.MOST_WORDS + 1), "env": []}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_config_that_slurmstepd_would_not_write(name: str) -> None:
    with pytest.raises(NotInAJob, match=r"config\.json"):
        Slurm().read(surroundings(HOSTILE[name]))


def test_a_config_that_is_not_there() -> None:
    with pytest.raises(NotInAJob, match="No such file"):
        Slurm().read(surroundings(folder=f"{SPOOL}/oci-job00009-batch"))


def test_words_that_are_no_variables_are_left_out() -> None:
    config = changed(process={"args": ["x"], "env": ["=x", "lonely", "A=", "SLURM_JOB_ID=999"]})
    env = Slurm().read(surroundings(config)).env or ()
    assert (b"A", b"") in env and (b"SLURM_JOB_ID", b"1") in env and b"lonely" not in dict(env)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        ("5:00", "5"),
        ("1:00:00", "60"),
        ("2-03:04:00", "3064"),
        ("0:30", "1"),
        ("UNLIMITED", ""),
        ("INVALID", ""),
        ("", ""),
    ],
)
def test_time_limits(limit: str, minutes: str) -> None:
    row = ROWS.replace(b"|5:00|", f"|{limit}|".encode())
    assert slurm_oci.facts("1", row).minutes == minutes


@pytest.mark.parametrize(
    ("size", "mebibytes"), [("0", "0"), ("1500M", "1500"), ("2G", "2048"), ("1.50T", "1572864"), ("1K", "1"), ("x", "")]
)
def test_disks(size: str, mebibytes: str) -> None:
    assert slurm_oci.facts("1", ROWS.replace(b"|1500M|", f"|{size}|".encode())).disk == mebibytes


# -- its process ---------------------------------------------------------------------------------------------------------


def test_the_wrapper_takes_the_jobs_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setattr("os.environ", {"HOME": "/root", "LD_PRELOAD": "x", "TZ": "UTC"})
    import os

    here = surroundings()
    job = replace(Slurm().read(here), cwd=os.fsencode(tmp_path))
    now = settled(here, job)
    assert (os.getcwd(), now.cwd, now.env) == (str(tmp_path), os.fsencode(tmp_path), job.env)
    assert os.environ["HOME"] == "/home/alice" and not {"LD_PRELOAD", "TZ", "MINE"} & os.environ.keys()
    gone = settled(here, replace(job, cwd=b"/no/such\xff"))
    assert (gone.cwd, os.getcwd()) == (b"/tmp", "/tmp")
    assert "No such file or directory: going to /tmp instead" in capsys.readouterr().err


# -- a site --------------------------------------------------------------------------------------------------------------


def place(folder: Path, **options: str) -> Place:
    (folder / "store/images/names").mkdir(parents=True, exist_ok=True)
    for name in ("alma9", "debian12", ".hidden", "a b"):
        (folder / "store/images/names" / name).touch()
    settings = Settings(queue_images=("night=special",))
    paths = (Path("/opt/b/libexec/wrap-slurm"), Path("/opt/b/libexec/belljar-slurm"), folder / "store", folder)
    return Place(settings, *paths, options=options)


def files(here: Place) -> dict[str, OurFile]:
    return {str(piece.path): piece for piece in SITE.pieces(here) if isinstance(piece, OurFile)}


def test_a_site_without_containers_has_nothing_of_them(tmp_path: Path) -> None:
    assert not [path for path in files(place(tmp_path)) if "oci" in path or "bundles" in path]


def test_both_ways(tmp_path: Path) -> None:
    found = files(place(tmp_path, redirect="both", bundle="named"))
    images = ("alma9", "debian12", "named", "special")
    assert {f"{tmp_path}/bundles/{image}/config.json" for image in images} == {
        path for path in found if "bundles" in path
    }
    config = json.loads(found[f"{tmp_path}/bundles/alma9/config.json"].content)
    assert config["annotations"] == {"belljar.image": "alma9"} and config["root"]["path"]
    conf = found[f"{tmp_path}/oci.conf"].content.decode()
    assert 'RunTimeRun="exec /opt/b/libexec/wrap-slurm --oci=%b"\n' in conf
    assert set("".join(line.split("%")[1][0] for line in conf.splitlines() if "%" in line)) == {"b"}
    assert (
        f"{tmp_path}/job_submit.lua" in found
        and f'bundles = "{tmp_path}/bundles/"' in found[f"{tmp_path}/belljar.lua"].content.decode()
    )


def test_without_lua(tmp_path: Path) -> None:
    here = place(tmp_path, redirect="oci")
    assert not [path for path in files(here) if path.endswith(".lua")]
    (lines,) = (piece.lines for piece in SITE.pieces(here) if isinstance(piece, OurLines))
    assert [line.partition("=")[0] for line in lines] == ["Epilog", "Prolog"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"redirect": "perl"}, "redirect 'perl'"), ({"redirect": "oci", "bundle": "../x"}, "not a name of an image")],
)
def test_options_that_mean_nothing(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(BelljarError, match=said):
        SITE.pieces(place(tmp_path, **options))


@pytest.mark.parametrize("name", ["with blank", "per%cent", 'quo"te', "semi;colon"])
def test_a_path_that_oci_conf_cannot_hold(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadOption, match=r"oci\.conf takes no path"):
        SITE.pieces(replace(place(tmp_path, redirect="oci"), wrapper=Path(f"/opt/{name}/wrap-slurm")))


@pytest.mark.parametrize("act", ["query", "kill", "delete"])
def test_what_slurmstepd_asks(tmp_path: Path, act: str) -> None:
    helper = tmp_path / "helper"
    helper.write_bytes(files(place(tmp_path, redirect="oci"))["/opt/b/libexec/oci-slurm"].content)
    helper.chmod(0o755)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folder = tmp_path / "oci-job00001-batch"
    (folder / "deep/er").mkdir(parents=True)
    for name in ("config.json", "core", "deep/config.json", "-rf", "$(id)"):
        (folder / name).touch()
    (folder / "link").symlink_to(kept)
    for where in (folder, f"{folder}/", kept, tmp_path / "oci-job99999-batch", ""):
        done = subprocess.run([helper, act, where], capture_output=True, timeout=20, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b'{"status":"stopped"}\n', b"")
    assert [path.name for path in kept.iterdir()] == ["file"]
    assert folder.exists() == (act != "delete")


@pytest.mark.parametrize(
    ("job", "is_gone"), [("7", True), ("123456", True), ("", False), ("0", False), ("x/../7", False)]
)
def test_prolog_removes_what_a_killed_slurmstepd_left(tmp_path: Path, job: str, is_gone: bool) -> None:
    (tmp_path / "slurm.conf").write_text(f"SlurmdSpoolDir={tmp_path}/it's $(id)/%n\n")
    here = replace(place(tmp_path, redirect="oci"), belljar=Path("/bin/false"))
    prolog = tmp_path / "belljar-prolog"
    prolog.write_bytes(files(here)[str(prolog)].content)
    prolog.chmod(0o755)
    spool = tmp_path / "it's $(id)/n1"
    folders = [spool / f"oci-job{number}-batch" for number in ("00007", "00000", "123456", "00001")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
    env = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1"}
    assert subprocess.run([prolog], env=env, timeout=20, check=False).returncode == 0
    gone = [folder for folder in folders if not folder.exists()]
    assert gone == ([spool / f"oci-job{int(job):05}-batch"] if is_gone else [])


def test_prolog_without_containers_removes_nothing(tmp_path: Path) -> None:
    assert b"oci-job" not in files(place(tmp_path))[f"{tmp_path}/belljar-prolog"].content
