"""Jobs under a real HTCondor in real machines: what comes back is what came back without them.

The daemons are those of Debian's package: 23.9 of trixie, and 25.14 of sid in the slow run, each with that suite's own
Python and QEMU, in a root of that suite (lab/condor.py). Control groups are off there. What a job does natively is
looked at before belljar is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.batch.lab.condor import NAME, Condor, Ended
from tests.batch.lab.pulls import NAME as NAME_OF_IMAGE
from tests.batch.lab.pulls import SCRIPT, drafts, printed, pulled
from tests.live.conftest import ROOT, STORE
from tests.live.terminal import terminal

pytestmark = pytest.mark.timeout(1800)
PAGE = ROOT / "docs/batch/htcondor.md"
AT_HOME = {"PATH": "/usr/bin:/bin", "HOME": "/home/bjalice", "USER": "bjalice", "TERM": "dumb"}
IMAGE = {"plus_VmImage": '"debian12"'}
LOOK = b"""#!/bin/sh
pwd; id -un; umask; echo "$@"; cat in; grep -c ClusterId "$_CONDOR_JOB_AD"
echo made >out; mkdir deep; echo 1 >deep/er; rm in
echo to stderr >&2
exit 42
"""
LOOKED = {"transfer_input_files": "in", "transfer_output_files": "out, deep"}
WORDS = "\"'two words' $HOME ''''\""
BARE = b"""#!/bin/sh
while read -r line; do case $line in Sig[!Q]*) echo "$line" ;; esac; done </proc/$$/status  # a shell that forks blocks signals
tr '\\0' '\\n' </proc/self/environ | sort; tr '\\0' ' ' </proc/$$/cmdline; echo
ulimit -a; umask; set -- /proc/$$/fd/*; echo $#
kill -SEGV $$
"""
NOT_EXECUTABLE = (b"#!/nowhere/sh\n", b"echo without a first line\n")
TRAP = b"#!/bin/sh\ntrap 'echo ended >>/home/bjalice/%s; exit 5' TERM\necho begun >/home/bjalice/%s\nwhile :; do sleep 0.1; done\n"


@dataclass
class Pool:
    """A node with belljar, and what jobs did there before."""

    condor: Condor
    looked: Ended
    bare: Ended
    unstarted: list[Ended]


@pytest.fixture(scope="module", params=["trixie", pytest.param("sid", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    condor = Condor(request.param)
    try:
        condor.up()
        (condor.outside("/home/bjalice/in")).write_bytes(b"input\n")
        jobs = [condor.job(LOOK, WORDS, **LOOKED), condor.job(BARE, "a")]
        jobs += [condor.job(script) for script in NOT_EXECUTABLE]
        looked, bare, *unstarted = (condor.wait(job) for job in jobs)
        condor.run("condor_rm", "-all")
        condor.write("/etc/condor/config.d/99-often.conf", "STARTD_CRON_BELLJAR_PERIOD = 2s\n")
        for section in ("1. Settings", "2. Install"):
            as_the_page_says(condor, section)
        condor.until(lambda: b"debian12" in images_of(condor), "the schedd knows the pool's images", 90)
        yield Pool(condor, looked, bare, unstarted)
        as_the_page_says(condor, "Undo")
        assert not condor.outside("/etc/condor/config.d/90-belljar.conf").exists()
    finally:
        condor.close()


def as_the_page_says(condor: Condor, section: str, user: str = "") -> list[str]:
    """What the commands of a section of the guide print, in their order; each block as one script, as it is there."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    return [condor.text("sh", "-ec", block, user=user) for block in blocks]


def images_of(condor: Condor) -> bytes:
    return condor.run("condor_status", "-schedd", "-af", "BelljarPoolImages", check=False).stdout


@pytest.fixture(autouse=True)
def settings(pool: Pool) -> Iterator[None]:
    pool.condor.configure()
    yield
    pool.condor.until(lambda: not pool.condor.leftovers(), "nothing is left of machines", 20)


def alike(out: bytes) -> list[bytes]:
    """Each run has a directory of its own, and processes of its own."""
    said = re.sub(rb"(dir_|_ANCESTOR_|PID=)[0-9]+[=:0-9]*", rb"\1", out)
    return re.sub(rb"job[0-9]+", b"job", said).splitlines()


# -- the guide -----------------------------------------------------------------------------------------------------------


def test_the_page_leads_from_a_fresh_node_to_a_job(pool: Pool) -> None:
    assert len(PAGE.read_text().split()) <= 700
    (said,) = as_the_page_says(pool.condor, "3. A job", "bjalice")
    (expected,) = re.findall(r"^(hello from .*)$", PAGE.read_text(), re.MULTILINE)
    assert re.sub("belljar-[0-9a-f]{12} as bjalice", "belljar-0123456789ab as alice", said.splitlines()[-1]) == expected
    checked, tested = as_the_page_says(pool.condor, "4. Check")
    assert [line for line in checked.splitlines() if not line.startswith("ok ")] == [] != checked.splitlines()
    assert " s" in tested
    images = ",".join(sorted(path.name for path in (STORE / "images/names").iterdir()))
    assert as_the_page_says(pool.condor, "Several nodes") == [f"{NAME} true {images}\n"]


# -- the same as without -------------------------------------------------------------------------------------------------


def test_a_job_in_a_machine_ends_as_it_does_without(pool: Pool) -> None:
    files = [pool.condor.outside(f"/home/bjalice/{name}") for name in ("out", "deep/er")]
    natively = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    ended = pool.condor.execute(LOOK, WORDS, **LOOKED, **IMAGE)
    assert (ended.status, ended.code, ended.err) == ("Completed", 42, b"to stderr\n"), ended
    assert (ended.status, ended.code, ended.err) == (pool.looked.status, pool.looked.code, pool.looked.err)
    assert alike(ended.out) == alike(pool.looked.out)
    assert [file.read_bytes() for file in files] == natively == [b"made\n", b"1\n"]


def test_a_job_without_an_image_is_untouched(pool: Pool) -> None:
    jobs = [pool.condor.job(BARE, "a"), *(pool.condor.job(script) for script in NOT_EXECUTABLE)]
    bare, *unstarted = (pool.condor.wait(job) for job in jobs)
    assert (bare.status, bare.code, bare.signal) == ("Completed", None, 11)
    assert (bare.status, bare.code, bare.signal) == (pool.bare.status, pool.bare.code, pool.bare.signal)
    assert alike(bare.out) == alike(pool.bare.out) and bare.err == pool.bare.err
    assert [one.status for one in unstarted] == ["Held", "Held"] == [one.status for one in pool.unstarted]
    for ours, theirs in zip(unstarted, pool.unstarted, strict=True):
        reason = re.search(r"\(errno=\d+: '[^']+'\)", theirs.hold)
        assert reason is not None and reason[0] in ours.hold, (ours.hold, theirs.hold)
    # What a hold left in the ad is for that start alone.
    program = pool.condor.programs[jobs[1]]
    pool.condor.write(f"/home/bjalice/{program}", "#!/bin/sh\necho mended\n", 0o755)
    pool.condor.run("condor_release", jobs[1], user="bjalice")
    pool.condor.happened(jobs[1], "JobTerminatedEvent")
    assert pool.condor.output(jobs[1])[0] == b"mended\n"
    pool.condor.run("condor_rm", jobs[2], user="bjalice")


def test_death_by_a_signal_is_death_by_that_signal(pool: Pool) -> None:
    jobs = {number: pool.condor.job(b"#!/bin/sh\nkill -%d $$\n" % number, **IMAGE) for number in (9, 11, 15)}
    for number, job in jobs.items():
        ended = pool.condor.wait(job)
        assert (ended.status, ended.code, ended.signal, ended.err) == ("Completed", None, number, b"")


def test_a_job_that_is_removed_is_told_and_its_machine_is_gone(pool: Pool) -> None:
    job = pool.condor.job(TRAP % (b"told", b"told"), **IMAGE)
    told = pool.condor.outside("/home/bjalice/told")
    pool.condor.until(told.exists, "the job runs")
    # While it runs the reaper knows its job, on a host without a domain too.
    said = pool.condor.belljar("reap", "--batch", "htcondor", "--format=json").stdout
    assert b"unknown" not in said and len(pool.condor.leftovers()) > 1
    pool.condor.run("condor_rm", job, user="bjalice")
    pool.condor.until(lambda: not pool.condor.leftovers(), "its machine is gone", 60)
    assert told.read_text() == "begun\nended\n"


# -- its owner beside it -------------------------------------------------------------------------------------------------


def test_condor_ssh_to_job_is_a_shell_in_the_machine_of_the_job(pool: Pool) -> None:
    condor = pool.condor
    job = condor.job(
        b"#!/bin/sh\nhostname; hostname >here; while [ ! -e done ]; do sleep 0.2; done\n",
        environment="MINE=own",
        **IMAGE,
    )
    words = ("condor_ssh_to_job", "-auto-retry", job)
    told = condor.run(
        *words,
        "until [ -s here ]; do sleep 0.2; done; cat here; hostname; id -un; echo $MINE; exit 7",
        user="bjalice",
        check=False,
    )
    assert told.returncode == 7, told
    here, host, *rest = told.stdout.decode().split()
    assert here == host and host.startswith("belljar-") and rest == ["bjalice", "own"]
    (machine,) = [
        line for line in condor.text("belljar", "ps", user="bjalice").splitlines() if f"htcondor:{job}" in line
    ]
    assert host.removeprefix("belljar-") in machine, "no other machine was made for it"
    with terminal() as user:
        user.start(condor.room.argv(*words, user="bjalice", cwd="/home/bjalice"), env=AT_HOME)
        user.expect(rb"[$#] $")
        user.type(b"tty; hostname; stty size; touch done; exit\r")
        seen = user.rest()
    assert b"/dev/pts/" in seen and host.encode() in seen and b"31 117" in seen
    ended = condor.wait(job)
    assert (ended.code, ended.out.decode().split()) == (0, [host])


def test_condor_submit_i_is_a_session_in_a_machine_and_ends_with_it(pool: Pool) -> None:
    condor = pool.condor
    condor.write("/home/bjalice/session.sub", 'request_memory = 1024\n+VmImage = "debian12"\nqueue\n')
    with terminal() as user:
        words = condor.room.argv("condor_submit", "-i", "session.sub", user="bjalice", cwd="/home/bjalice")
        user.start(words, env=AT_HOME)
        (id,) = re.findall(rb"submitted to cluster ([0-9]+)", user.expect(rb"[$#] $", 240))
        user.type(b"hostname; tty; exit\r")
        seen = user.rest()
    assert b"belljar-" in seen and b"/dev/pts/" in seen, seen
    condor.happened(f"{id.decode()}.0", "JobTerminatedEvent", "JobAbortedEvent")


# -- when there is no machine --------------------------------------------------------------------------------------------


def test_a_job_whose_machine_cannot_be_had_comes_back_and_is_held_at_last(pool: Pool) -> None:
    pool.condor.configure("retries = 2\nretry_delay = 0.2", qemu='binary = "/nowhere/qemu"')
    job = pool.condor.job(b"#!/bin/sh\necho ran\n", **IMAGE)
    held = pool.condor.wait(job)
    assert (held.status, held.out) == ("Held", b"") and held.hold.startswith("belljar: try 2 of 2: /nowhere/qemu")
    (error,) = [one["ErrorMsg"] for one in held.events if one["MyType"] == "RemoteErrorEvent"]
    assert "belljar: try 1 of 2: /nowhere/qemu" in error, "the first time it went back to Idle, with the reason"
    pool.condor.configure()
    pool.condor.run("condor_release", job, user="bjalice")
    pool.condor.happened(job, "JobTerminatedEvent")
    assert pool.condor.output(job)[0] == b"ran\n"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"plus_VmImage": "5"}, "must be the name of an image in quotation marks"),
        ({"plus_VmImage": '"../../etc/passwd"'}, "must be the name of an image in quotation marks"),
        ({"plus_VmImage": '"$(x)debian12;"'}, "must be the name of an image in quotation marks"),
        ({"plus_VmImage": '"nope"'}, "no node of this pool has this image. There are: debian12"),
        ({**IMAGE, "request_memory": "128"}, "needs request_memory = 480 or more"),
        ({**IMAGE, "request_memory": ""}, "needs request_memory = 480 or more"),
        ({**IMAGE, "request_gpus": "1"}, "a machine has no GPU"),
        ({**IMAGE, "universe": "scheduler"}, "only a job of the vanilla universe, without a container"),
        ({**IMAGE, "universe": "local"}, "only a job of the vanilla universe, without a container"),
        (
            {**IMAGE, "universe": "container", "container_image": "/x.sif"},
            "only a job of the vanilla universe, without",
        ),
        ({**IMAGE, "universe": "docker", "docker_image": "debian"}, "only a job of the vanilla universe, without"),
    ],
)
def test_what_cannot_run_is_refused_at_submit(pool: Pool, asked: dict[str, str], why: str) -> None:
    done = pool.condor.submit(b"#!/bin/sh\n", check=False, **asked)
    assert done.returncode != 0 and re.search(f"belljar: .*{re.escape(why)}", done.stderr.decode()), done.stderr


@pytest.mark.parametrize("image", [{}, IMAGE])
def test_what_a_job_says_of_its_own_hold_holds_for_a_factory_of_jobs_too(pool: Pool, image: dict[str, str]) -> None:
    """Late materialization: the schedd makes such jobs from their cluster."""
    own = {"on_exit_hold": "ExitCode == 1", "on_exit_hold_reason": '"mine"', "max_materialize": "1"}
    held = pool.condor.execute(b"#!/bin/sh\nexit 1\n", **own, **image)
    assert (held.status, held.hold) == ("Held", "mine"), held
    assert pool.condor.text("condor_q", "-allusers", "-af", "OnExitHold", "BelljarOnExitHold") == "true undefined\n"
    pool.condor.run("condor_rm", "-all")


def test_what_only_the_node_knows_to_be_forbidden_is_held_with_a_sentence(pool: Pool) -> None:
    pool.condor.configure('allow = ["group:nobodys *"]')
    held = pool.condor.execute(b"#!/bin/sh\n", **IMAGE)
    assert held.status == "Held" and "belljar: image debian12: not allowed for bjalice" in held.hold
    pool.condor.run("condor_rm", "-all")


@pytest.mark.slow
def test_a_node_that_is_closed_takes_other_jobs_only(pool: Pool) -> None:
    pool.condor.belljar("batch", "node", "htcondor", "close", "the disk is full")
    publish(pool.condor, works=False)
    try:
        waiting = pool.condor.job(b"#!/bin/sh\necho ran\n", **IMAGE)
        assert pool.condor.execute(b"#!/bin/sh\necho native\n").out == b"native\n"
        assert [one["MyType"] for one in pool.condor.events(waiting)] == ["SubmitEvent"]
        assert "belljar: the disk is full" in pool.condor.text("condor_status", "-af", "BelljarClosedReason")
    finally:
        pool.condor.belljar("batch", "node", "htcondor", "open")
        publish(pool.condor, works=True)
    assert pool.condor.wait(waiting).out == b"ran\n"


def publish(condor: Condor, works: bool) -> None:
    """The next look at the node."""
    wanted = b"true" if works else b"false"
    condor.until(
        lambda: wanted in condor.run("condor_status", "-af", "BelljarWorks").stdout.lower(), "the slots say so", 90
    )


@pytest.mark.parametrize(
    "make_another",
    [pytest.param("true", marks=pytest.mark.slow, id="missing"), pytest.param("mkdir -m 0711", id="0711")],
)
def test_a_node_whose_folder_keeps_users_out_takes_no_more_jobs_and_loses_none(pool: Pool, make_another: str) -> None:
    condor, folder = pool.condor, "/var/lib/belljar-node"
    publisher = condor.outside("/opt/belljar/libexec/htcondor/belljar-publish")
    condor.configure("retry_delay = 10")
    text = publisher.read_bytes()
    publisher.write_bytes(b"#!/bin/sh\n")  # a job comes before the node has said anything
    condor.run("sh", "-ec", f"mv {folder} {folder}-away; {make_another} {folder}")
    try:
        met = condor.job(b"#!/bin/sh\necho ran\n", **IMAGE)
        condor.happened(met, "ExecuteEvent")
        publisher.write_bytes(text)
        publish(condor, works=False)
        told = condor.text("condor_status", "-af", "BelljarClosedReason")
        assert f"{folder} (paths.node) must be" in told and "belljar batch install htcondor" in told, told
        condor.happened(met, "RemoteErrorEvent", "JobHeldEvent", "JobTerminatedEvent")
        waiting = condor.job(b"#!/bin/sh\necho ran\n", **IMAGE)
        assert condor.execute(b"#!/bin/sh\necho native\n").out == b"native\n", "other jobs run"
        assert [one["MyType"] for one in condor.events(waiting)] == ["SubmitEvent"]
    finally:
        publisher.write_bytes(text)
        condor.run("sh", "-ec", f"rm -rf {folder}; mv {folder}-away {folder}")
    publish(condor, works=True)
    assert [condor.wait(job).out for job in (met, waiting)] == [b"ran\n", b"ran\n"]
    kinds = [one["MyType"] for one in condor.events(met)]
    assert kinds.count("ExecuteEvent") == 2 and "JobHeldEvent" not in kinds, kinds


# -- the site ------------------------------------------------------------------------------------------------------------


def check(pool: Pool) -> list[str]:
    """What is wrong."""
    said = pool.condor.belljar("batch", "check", "htcondor", check=False).stdout.decode()
    return re.findall(r"^fail  ([^:\n]+)", said, re.MULTILINE)


def test_check_judges_what_all_files_say_together(pool: Pool) -> None:
    assert check(pool) == []
    later = "/etc/condor/config.d/99-site.conf"
    pool.condor.write(
        later, "START = True\nENABLE_CHIRP_DELAYED = False\nSYSTEM_PERIODIC_HOLD_NAMES = Own\nUSER_JOB_WRAPPER = /own\n"
    )
    try:
        assert set(check(pool)) == {"START", "ENABLE_CHIRP_DELAYED", "SYSTEM_PERIODIC_HOLD_NAMES", "USER_JOB_WRAPPER"}
    finally:
        pool.condor.outside(later).unlink()
    pool.condor.run("chmod", "0711", "/var/lib/belljar-node")
    assert check(pool) == ["the folder of machines /var/lib/belljar-node, mode 1777"]
    pool.condor.belljar("batch", "install", "htcondor")
    pool.condor.write("/etc/belljar/belljar.toml", "[batch]\n")
    assert "paths.node" in check(pool)
    refused = pool.condor.belljar("batch", "install", "htcondor", check=False)
    assert refused.returncode != 0 and b"paths.node: not set" in refused.stderr
    pool.condor.configure()
    assert check(pool) == []


@pytest.mark.slow
def test_a_sites_own_wrapper_stands_or_calls_ours(pool: Pool) -> None:
    condor = pool.condor
    condor.belljar("batch", "uninstall", "htcondor")
    own, wrapper = "/etc/condor/config.d/60-site.conf", "/usr/local/bin/site-wrap"
    condor.write(own, f"USER_JOB_WRAPPER = {wrapper}\n")
    condor.write(
        wrapper, '#!/bin/sh\nSITE=seen; export SITE\nexec /opt/belljar/libexec/htcondor/wrap-htcondor "$@"\n', 0o755
    )
    try:
        refused = condor.belljar("batch", "install", "htcondor", check=False)
        assert refused.returncode != 0 and f"{wrapper} (`condor_config_val" in refused.stderr.decode()
        assert not condor.outside("/etc/condor/config.d/90-belljar.conf").exists()
        condor.belljar("batch", "install", "htcondor", "--set", "wrapper=site")
        assert check(pool) == []
        assert condor.execute(b"#!/bin/sh\necho $SITE; hostname\n").out == b"seen\nbjnode\n"
        out = condor.execute(b"#!/bin/sh\necho $SITE; hostname\n", **IMAGE).out
        assert out.startswith(b"seen\nbelljar-")
    finally:
        condor.outside(own).unlink()
        condor.belljar("batch", "install", "htcondor", "--set", "wrapper=belljar")
    assert check(pool) == []


@pytest.mark.slow
def test_a_sites_own_hook_stands(pool: Pool) -> None:
    condor = pool.condor
    condor.belljar("batch", "uninstall", "htcondor")
    own = "/etc/condor/config.d/60-site.conf"
    condor.write(own, "STARTER_DEFAULT_JOB_HOOK_KEYWORD = SITE\nSITE_HOOK_PREPARE_JOB = /bin/true\n")
    try:
        refused = condor.belljar("batch", "install", "htcondor", check=False)
        assert refused.returncode != 0 and "SITE (`condor_config_val" in refused.stderr.decode()
    finally:
        condor.outside(own).unlink()
        condor.belljar("batch", "install", "htcondor")
    assert check(pool) == []


@pytest.mark.slow
def test_a_job_that_is_vacated_starts_anew_and_one_that_is_suspended_goes_on(pool: Pool) -> None:
    condor = pool.condor
    count = (
        b"#!/bin/sh\necho start >>/home/bjalice/%s\ni=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; sleep 0.1; done\n"
    )
    vacated, suspended = (condor.job(count % name, **IMAGE) for name in (b"vacated", b"suspended"))
    for name in ("vacated", "suspended"):
        condor.until(condor.outside(f"/home/bjalice/{name}").exists, f"{name} runs")
    condor.run("condor_suspend", suspended)
    condor.happened(suspended, "JobSuspendedEvent")
    condor.run("condor_vacate_job", "-fast", vacated)
    condor.happened(vacated, "JobEvictedEvent")
    condor.run("condor_continue", suspended)
    numbers = b"".join(b"%d\n" % number for number in range(1, 61))
    for job, starts in ((suspended, 1), (vacated, 2)):
        ended = condor.wait(job)
        assert (ended.status, ended.code, ended.out) == ("Completed", 0, numbers)
        name = "vacated" if job == vacated else "suspended"
        assert condor.outside(f"/home/bjalice/{name}").read_text() == "start\n" * starts


@pytest.mark.slow
def test_a_directory_on_a_share_is_not_copied(pool: Pool) -> None:
    pool.condor.configure()
    text = pool.condor.outside("/etc/belljar/belljar.toml").read_text()
    shared = text.replace(':rw"]', ':rw", "/var/lib/condor/execute:rw"]')
    pool.condor.write("/etc/belljar/belljar.toml", shared)
    ended = pool.condor.execute(
        b"#!/bin/sh\ngrep -c '^[^ ]* /var/lib/condor/execute ' /proc/mounts; rm in; ls\n",
        transfer_input_files="in",
        **IMAGE,
    )
    assert ended.code == 0 and ended.out.startswith(b"1\n") and b"\nin\n" not in ended.out


# -- images of registries ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_that_name_an_image_of_a_registry_pull_it_once_where_the_site_allows_it(
    pool: Pool, tmp_path: Path
) -> None:
    condor, home = pool.condor, pool.condor.outside("/home/bjalice")
    with pulled(home, tmp_path, ("nsenter", "-t", str(condor.room.pid), "-n", "--")) as (hub, image):
        asked = {"plus_VmImage": f'"{image}"'}
        refused = condor.submit(SCRIPT.encode(), check=False, **asked)
        assert refused.returncode and b"belljar: " in refused.stderr, refused
        condor.configure(f'pull = "site-registries"\nregistries = ["{hub.address}/team"]')
        condor.belljar("batch", "install", "htcondor")
        try:
            condor.until(
                lambda: b"team" in condor.run("condor_config_val", "-schedd", "SUBMIT_REQUIREMENT_BelljarKnown").stdout,
                "new rules",
                60,
            )
            jobs = [condor.job(SCRIPT.encode(), **asked) for _ in range(3)]
            ended = [condor.wait(job, timeout=600) for job in jobs]
            assert [(it.code, it.out) for it in ended] == [(7, printed(home))] * 3, ended
            assert list(hub.fetched(NAME_OF_IMAGE).values()) == [1, 1, 1]
            condor.configure()  # the node's are newer than what judges at submission
            held = condor.execute(SCRIPT.encode(), **asked)
            assert held.status == "Held" and "a job pulls images from no registry here" in held.hold, held
        finally:
            condor.run("condor_rm", "-all", check=False)
            condor.configure()
            condor.belljar("batch", "install", "htcondor")
    assert drafts(condor.outside("/var/lib/belljar-node")) == []
