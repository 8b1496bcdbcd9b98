"""From a job to the request for its machine: what is carried in, what stays, what is refused."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings
from belljar.batch.job import request as making
from belljar.batch.job.request import Caller, build, measure, with_defaults
from belljar.batch.job.terms import Command, Job, Staged, Surroundings
from belljar.errors import InputMissing, NotPermitted, OverLimit, UsageError
from belljar.model import GIB, MIB, Account, MachineSpec, Payload, Request, RunPayload, Share, StdinKind

BOB = Account("bob", os.getuid(), os.getgid(), "bob", groups=((2000, "physics"),), home="/home/bob", shell="/bin/bash")
CALLER = Caller(
    BOB, 0o027, (("AS", -1, -1), ("CPU", 10, 20)), (StdinKind.NULL, StdinKind.STREAM, StdinKind.STREAM),
    MachineSpec("debian12", 1, 512 * MIB),
)  # fmt: skip
SCRIPT = b"/spool/job00001/slurm_script"
JOB = Job(
    "slurm", "4711_3", aliases=("4714",), name="$(id)\n", queue="night", cpus=2, memory=2 * GIB, wall=600.0, grace=28.0,
    native=Command(SCRIPT, (SCRIPT, b"a b", b"\xff")), script=SCRIPT, script_skips_line=True, started_before=1,
)  # fmt: skip
FILES = {SCRIPT: b"#!/wrap\n#!/bin/sh\necho \0binary\n", b"/nodes": b"host1\nhost2\n"}


def payload_of(request: Request) -> Payload:
    assert isinstance(request.work, RunPayload)
    return request.work.payload


def here(cwd: Path | str = "/tmp", **changes: object) -> Surroundings:
    def read(path: bytes) -> bytes:
        try:
            return FILES[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory", path) from None

    given = Surroundings(
        (SCRIPT,),
        ((b"A", b"1"), (b"LD_PRELOAD", b"x")),
        os.fsencode(cwd),
        os.getuid(),
        os.getgid(),
        (),
        {},
        lambda: b"",
        read,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def made(job: Job = JOB, cwd: Path | str = "/tmp", caller: Caller = CALLER, **settings: object) -> Request:
    return build(here(cwd), job, caller, Settings(**settings), 1000.0)  # type: ignore[arg-type]


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_an_image_that_is_not_allowed_is_refused_on_the_node_too() -> None:
    with pytest.raises(NotPermitted, match="not allowed for bob in queue night"):
        made(allow=("group:chemistry *",))
    assert made(allow=("group:physics *",)).machine.image == "debian12"


@pytest.mark.parametrize("limit", [{"max_cpus": 1}, {"max_memory": GIB}])
def test_what_the_site_does_not_give_is_refused(limit: dict[str, int]) -> None:
    with pytest.raises(OverLimit):
        made(**limit)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(OverLimit, match="100 MiB of memory: a job in a machine needs at least"):
        made(replace(JOB, memory=100 * MIB))


def test_a_script_that_vanished_is_told_by_its_path() -> None:
    with pytest.raises(InputMissing, match="/spool/gone: No such file"):
        made(replace(JOB, script=b"/spool/gone"))


def test_a_script_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "LARGEST_SCRIPT", 10)
    with pytest.raises(InputMissing, match="larger than"):
        made()


def test_a_working_directory_that_is_too_large_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(2 * MIB))
    with pytest.raises(UsageError, match=f"working directory {tmp_path}: .*more than 1 MiB"):
        made(cwd=tmp_path, stage_limit=MIB)


def test_too_many_files_are_as_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "MOST_ENTRIES", 3)
    for name in "abcde":
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="too large"):
        made(cwd=tmp_path)


# -- what goes in --------------------------------------------------------------------------------------------------------


def test_a_job_becomes_a_request() -> None:
    request = made()
    assert (request.name, request.requester, request.wall_limit, request.grace) == (
        "slurm:4711_3",
        "slurm:4711_3",
        600.0,
        28.0,
    )
    assert dict(request.labels) == {
        "alias": "4714",
        "queue": "night",
        "job name": "$(id)\n",
        "started before": "1",
        "overhead": "224 MiB of the job's 2048 MiB",
    }
    assert (request.machine.cpus, request.machine.disk, request.machine.shares) == (2, None, ())
    payload = payload_of(request)
    assert (payload.program, payload.argv) == (SCRIPT, (SCRIPT, b"a b", b"\xff"))
    assert (payload.cwd, payload.umask, payload.env, payload.stdin) == (b"/tmp", 0o027, ((b"A", b"1"),), StdinKind.NULL)
    assert payload.rlimits == CALLER.rlimits


def test_the_script_goes_in_without_our_line_and_otherwise_byte_for_byte() -> None:
    payload = payload_of(made())
    (script,) = payload.files
    assert (script.path, script.data, script.mode, script.is_users) == (
        SCRIPT,
        b"#!/bin/sh\necho \0binary\n",
        0o700,
        True,
    )


def test_a_sites_own_grace_stands_before_the_systems() -> None:
    assert made(grace=5.0).grace == 5.0


def test_the_schedulers_files_keep_their_places_and_missing_ones_are_no_mistake() -> None:
    staged = Staged(into=(b"/nodes", b"/missing", b"/home/x"), folders=(b"/tmp/4711.night", b"/home/y"))
    caller = replace(CALLER, machine=replace(CALLER.machine, shares=(Share("/home", "/home", False),)))
    payload = payload_of(made(replace(JOB, staged=staged), caller=caller))
    found = {file.path: (file.data, file.mode) for file in payload.files[1:]}
    assert found == {b"/nodes": (b"host1\nhost2\n", 0o644), b"/tmp/4711.night": (None, 0o700)}


def test_what_stands_on_standard_input_for_the_shell_is_a_stream_inside() -> None:
    shell = Command(b"/bin/bash", (b"-bash",), stdin=b"/spool/x\n")
    payload = payload_of(made(replace(JOB, native=shell)))
    assert payload.stdin is StdinKind.STREAM and payload.program == b"/bin/bash"


def test_a_limit_on_virtual_memory_makes_the_guest_smaller() -> None:
    caller = replace(CALLER, rlimits=(("AS", GIB, 2 * GIB),))
    assert made(caller=caller).machine.memory < made().machine.memory


# -- the working directory -----------------------------------------------------------------------------------------------


def test_belljars_own_folders_never_go_into_the_machine(tmp_path: Path) -> None:
    caller = replace(CALLER, own=(f"{tmp_path}/var/run", "/elsewhere/run"))
    (copy,) = payload_of(made(cwd=tmp_path, caller=caller)).inputs
    assert copy.skip == ("var/run",)
    # As HTCondor has it: a folder of the sandbox is mounted over one of the host's, and known by both names.
    outer = tmp_path / "var/tmp"
    sandbox = tmp_path / "sandbox"
    (sandbox / str(outer).lstrip("/")).parent.mkdir(parents=True)
    outer.mkdir(parents=True)
    (sandbox / str(outer).lstrip("/")).symlink_to(outer)
    caller = replace(CALLER, own=(f"{outer}/belljar-1/run",))
    (copy,) = payload_of(made(cwd=sandbox, caller=caller)).inputs
    assert copy.skip == (f"{outer}/belljar-1/run".lstrip("/"),)


def test_a_directory_on_no_share_is_copied_in_and_its_changes_out(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    payload = payload_of(made(cwd=tmp_path))
    (into,), (out,) = payload.inputs, payload.outputs
    assert (into.outside, into.inside) == (out.outside, out.inside) == (str(tmp_path), str(tmp_path))
    assert out.changed_only and not into.changed_only


@pytest.mark.parametrize("folder", ["", "below/it"])
def test_a_directory_on_a_share_is_there_already(tmp_path: Path, folder: str) -> None:
    (tmp_path / "below/it").mkdir(parents=True)
    caller = replace(CALLER, machine=replace(CALLER.machine, shares=(Share(str(tmp_path), str(tmp_path), False),)))
    payload = payload_of(made(cwd=tmp_path / folder, caller=caller))
    assert payload.inputs == payload.outputs == ()


def test_a_neighbour_of_a_share_is_not_on_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data2").mkdir()
    caller = replace(
        CALLER, machine=replace(CALLER.machine, shares=(Share(str(tmp_path / "data"), str(tmp_path / "data"), False),))
    )
    payload = payload_of(made(cwd=tmp_path / "data2", caller=caller))
    assert payload.inputs


@pytest.mark.parametrize("cwd", ["/", "/tmp", "/var/tmp", "/usr"])
def test_folders_that_every_guest_has_are_not_copied(cwd: str) -> None:
    payload = payload_of(made(cwd=cwd))
    assert payload.inputs == ()


def test_the_jobs_own_output_files_are_never_brought_back(tmp_path: Path) -> None:
    keep = os.dup(1)
    (tmp_path / "logs").mkdir()
    target = os.open(tmp_path / "logs/job.out", os.O_WRONLY | os.O_CREAT)
    try:
        os.dup2(target, 1)
        payload = payload_of(made(cwd=tmp_path))
    finally:
        os.dup2(keep, 1)
        os.close(keep)
        os.close(target)
    assert payload.inputs[0].skip == payload.outputs[0].skip == ("logs/job.out",)


def test_holes_and_links_cost_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10 * GIB)
    (tmp_path / "link").symlink_to("/")
    size, entries = measure(str(tmp_path), MIB, lambda _: False)
    assert size < MIB and entries == 2


def test_what_cannot_be_read_or_has_just_gone_is_not_counted(tmp_path: Path) -> None:
    """Else a job with such a folder would be a fault of each node that it comes to."""
    for name in ("kept", "lost/inner", "gone"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x" * 8192)

    def is_left_out(name: str) -> bool:
        if name in ("lost", "gone"):
            shutil.rmtree(tmp_path / name)  # seen, and not there any more when it is looked into
        return False

    size, entries = measure(str(tmp_path), MIB, is_left_out)
    assert size == 8192 and entries == 4


def test_an_interactive_job_has_its_terminal_and_one_whose_shell_is_told_by_a_pipe_has_none() -> None:
    caller = replace(CALLER, terminal=True)
    payload = payload_of(made(caller=caller))
    told = payload_of(made(replace(JOB, native=Command(b"/bin/bash", (b"-bash",), stdin=b"x\n")), caller=caller))
    assert payload.terminal
    assert told is not None and not told.terminal


# -- scratch -------------------------------------------------------------------------------------------------------------


def test_a_sites_scratch_disk_has_the_size_the_job_asks_for_as_disk() -> None:
    asking = replace(JOB, disk=20 * GIB)
    plain, own, sites = made(asking), made(asking, scratch=GIB), made(scratch=GIB)
    assert (plain.machine.disk, plain.machine.scratch) == (20 * GIB, None)
    assert (own.machine.disk, own.machine.scratch) == (None, 20 * GIB)
    assert (sites.machine.disk, sites.machine.scratch) == (None, GIB)
    assert dict(payload_of(sites).env)[b"TMPDIR"] == b"/scratch" and b"TMPDIR" not in dict(payload_of(plain).env)


def test_the_limit_on_disks_holds_for_scratch_disks_too() -> None:
    with pytest.raises(OverLimit):
        made(replace(JOB, disk=20 * GIB), scratch=GIB, max_disk=10 * GIB)


def test_a_container_images_variables_are_those_that_the_job_does_not_have() -> None:
    own = {b"PATH": b"/home/bob/bin:/usr/bin:/bin", b"CONDA_PREFIX": b"/home/bob/conda", b"LANG": b"C"}
    image = {
        b"PATH": b"/opt/cuda/bin:/usr/bin",
        b"CONDA_PREFIX": b"/opt/conda",
        b"CUDA_HOME": b"/opt/cuda",
        b"LD_LIBRARY_PATH": b"/opt/lib",
    }
    job = made(JOB)
    job = replace(job, work=RunPayload(replace(payload_of(job), env=tuple(own.items()))))
    assert dict(payload_of(with_defaults(job, {**image, b"HOME": b"/root"})).env) == {
        **image, **own, b"PATH": b"/home/bob/bin:/opt/cuda/bin:/usr/bin",
    }  # fmt: skip
    assert with_defaults(job, {}) == job


def test_an_image_without_a_search_path_leaves_the_jobs_and_a_job_without_one_gets_the_images() -> None:
    job = made(JOB)
    job = replace(job, work=RunPayload(replace(payload_of(job), env=((b"A", b"1"), (b"A", b"2")))))
    assert payload_of(with_defaults(job, {b"PATH": b"/x"})).env == ((b"A", b"1"), (b"A", b"2"), (b"PATH", b"/x"))
    assert payload_of(with_defaults(job, {b"A": b"3"})) == payload_of(job)
