"""Batch systems from the outside: what real ones printed, and what nobody should believe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from belljar.errors import BadOption
from belljar.model import GIB, MIB
from belljar.pool import JobState, Member, NodeState, Pool, load, machine_of, node_of
from belljar.pool.gridengine.nodes import GridEnginePool
from belljar.pool.slurm.nodes import FIELDS, JOIN, guest_conf
from belljar.records import replace

RECORDINGS = Path(__file__).parents[2] / "recordings"
MARK = "@0123456789abcdef@"
SLURM, GRID = load("slurm"), load("gridengine")
SQUEUE = (RECORDINGS / "slurm/squeue.txt").read_bytes()
NODES = (RECORDINGS / "slurm/nodes.txt").read_bytes()


def test_slurms_jobs_are_read_whole() -> None:
    jobs = SLURM.jobs(SQUEUE, MARK)
    assert {job: one.state for job, one in jobs.items()} == {
        "1": JobState.HELD, "2": JobState.HELD, "3": JobState.ENDED, "4_1": JobState.RUNNING, "4_2": JobState.WAITING,
        "4_3": JobState.WAITING,
    }  # fmt: skip
    first = jobs["1"]
    assert (first.owner, first.uid, first.group, first.queue, first.image) == (
        "alice",
        1001,
        "alice",
        "batch",
        "debian12",
    )
    assert (first.network, first.memory, first.starts) == ("open", GIB, 1)
    assert first.reruns and first.is_batch and not jobs["2"].reruns
    wide = jobs["2"]
    assert (wide.nodes, wide.cpus, wide.memory, wide.disk, wide.image) == (2, 4, 1200 * MIB, GIB, "")
    assert first.features == () and SLURM.jobs(SQUEUE.replace(b"(null)        ", b"[el9*2&a_b]   "), MARK)[
        "1"
    ].features == ("el9", "a_b")
    assert (jobs["4_1"].number, jobs["4_1"].array, jobs["4_1"].on) == ("5", ("4", "1"), ("bait2",))


def test_a_row_without_the_questions_own_mark_is_some_users_text() -> None:
    forged = SQUEUE.replace(b"0123456789abcdeX", b"0123456789abcdef")
    assert forged != SQUEUE and "1" in SLURM.jobs(SQUEUE, MARK)
    with pytest.raises(ValueError, match="its field arrayjobid is not 12 wide"):
        SLURM.jobs(forged, MARK)


@pytest.mark.parametrize(
    "printed", [b"slurm_load_jobs error: Unable to contact slurm controller\n", SQUEUE[:300], b"\xff" * 100]
)
def test_what_is_no_list_of_slurms_jobs_is_refused(printed: bytes) -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        SLURM.jobs(printed, MARK)
    assert SLURM.jobs(b"", MARK) == {}


def test_a_list_of_nodes_that_was_cut_off_is_the_first_of_them() -> None:
    """Else anybody's job over many nodes would hide all jobs from the bait."""
    row = SQUEUE.split(b"\n")[0].ljust(sum(width + 1 for _, width in FIELDS) + len(MARK))
    at = len(MARK) + sum(width + 1 for _, width in FIELDS[: [name for name, _ in FIELDS].index("nodelist")]) - 1
    for printed in (b"wn[" + b"1,3,5,7-8," * 100, b"n" * 1000):
        (job,) = SLURM.jobs(row[:at] + printed[:1000].ljust(1000, b"n") + row[at + 1000 :], MARK).values()
        assert list(job.on) == ["bait1"]


def test_a_list_of_nodes_is_read_in_no_time_whatever_it_says() -> None:
    row = SQUEUE.split(b"\n")[0].ljust(sum(width + 1 for _, width in FIELDS) + len(MARK))
    at = len(MARK) + sum(width + 1 for _, width in FIELDS[: [name for name, _ in FIELDS].index("nodelist")]) - 1
    wide = f"r[{','.join(str(number) for number in range(10, 99))}]n[1-2]".encode()
    (job,) = SLURM.jobs(row[:at] + wide.ljust(1000) + row[at + 1000 :], MARK).values()
    assert job.on == (wide.decode(),)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("hetjobid", b"11", "it is a component of a heterogeneous job: machines are made for jobs of one component"),
        ("reservation", b"night", "reservation night: machines that are made for a job are not in it"),
        ("tres-alloc", b"cpu=1,mem=1G,node=1,gres/gpu=1", "gres/gpu: machines do not have it"),
        ("reservation", b"(null)", ""), ("hetjobid", b"0", ""),
    ],
)  # fmt: skip
def test_what_cannot_start_on_a_machine_is_told(field: str, value: bytes, why: str) -> None:
    row = SQUEUE.split(b"\n")[0].ljust(sum(width + 1 for _, width in FIELDS) + len(MARK))
    names = [name for name, _ in FIELDS]
    at = len(MARK) + sum(width + 1 for _, width in FIELDS[: names.index(field)]) - 1
    (job,) = SLURM.jobs(row[:at] + value.ljust(dict(FIELDS)[field]) + row[at + dict(FIELDS)[field] :], MARK).values()
    assert job.unmovable == why


def test_why_a_job_is_held_stands_in_its_comment_behind_what_its_user_wrote() -> None:
    job = SLURM.jobs(SQUEUE, MARK)["1"]
    assert (job.comment, job.image) == ("vm=debian12 net=open", "debian12")
    *_, admin, comment = SLURM.refuse(job, "no host has\nsuch an image")
    assert admin == "AdminComment=belljar: no host has?such an image"
    assert comment == "Comment=vm=debian12 net=open belljar: no host has?such an image"
    again = SQUEUE.replace(b"vm=debian12 net=open", b"belljar: 1 vm=other  ", 1)
    told = SLURM.jobs(again, MARK)["1"]
    assert told.image == "" and SLURM.refuse(told, "x")[-1].endswith("Comment= belljar: x")
    cut = replace(job, comment="x" * 200)
    assert SLURM.refuse(cut, "x") == SLURM.note(cut, "x")  # the rest of it would be lost


@pytest.mark.parametrize(
    ("number", "uid", "owner", "is_let_in"),
    [
        ("7", "1001", "1001 7", True), ("8", "1001", "1001 7", False), ("7", "1002", "1001 7", False),
        ("8", "1001", "1001 ", True), ("8", "1002", "", True),
    ],
)  # fmt: skip
def test_a_nodes_own_prolog_lets_in_the_one_job_that_it_is_for(
    tmp_path: Path, number: str, uid: str, owner: str, is_let_in: bool
) -> None:
    (script,) = re.findall(rb"(?s)put /run/belljar/prolog <<'END'\n(.*?)^END$", JOIN, re.MULTILINE)
    (tmp_path / "owner").write_text(f"{owner}\n")
    (tmp_path / "prolog").write_bytes(script.replace(b"/run/belljar/owner", os.fsencode(tmp_path / "owner")))
    env = {"SLURM_JOB_UID": uid, "SLURM_JOB_ID": number}
    assert (subprocess.run(["sh", tmp_path / "prolog"], env=env, check=False).returncode == 0) is is_let_in


@pytest.mark.parametrize(("number", "is_for_one", "ends"), [("7", True, True), ("8", True, False), ("7", False, False)])
def test_slurmd_ends_when_the_epilog_of_the_one_job_has_ended(
    tmp_path: Path, number: str, is_for_one: bool, ends: bool
) -> None:
    joining = JOIN.replace(b"/run/belljar", os.fsencode(tmp_path))
    (epilog,) = re.findall(rb"(?s)/epilog <<'END'\n(.*?)^END$", joining, re.MULTILINE)
    (waiting,) = re.findall(rb"(?ms)^if \[ -n \"\$\{ONE_JOB-\}.*?^fi$", joining)
    (tmp_path / "owner").write_text("1001 7\n")
    argv, one_job = ["sh", "-euc", waiting + b"\necho\nexec cat"], {"ONE_JOB": "1"} if is_for_one else {}
    with subprocess.Popen(argv, env=one_job, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as slurmd:
        assert slurmd.stdin and slurmd.stdout and slurmd.stdout.readline()
        env = {"SLURM_JOB_UID": "1001", "SLURM_JOB_ID": number}
        for _ in range(100):  # on a busy host nobody may listen yet when the first epilog ends
            done = subprocess.run(["sh", "-c", epilog], env=env, timeout=30, check=False)
            assert done.returncode == 0  # else slurmctld drains the node for an epilog that failed
            with suppress(subprocess.TimeoutExpired):
                if not ends or slurmd.wait(0.3) is not None:
                    break
        if not ends:
            slurmd.stdin.close()
        assert slurmd.wait(30) == (-signal.SIGTERM if ends else 0)
        if is_for_one and not ends:  # nothing of it stays behind
            (tmp_path / "over").write_text("\n")


def test_slurms_nodes_are_read_with_their_states() -> None:
    nodes = SLURM.nodes(NODES)
    assert {name: (one.state, one.features) for name, one in nodes.items()} == {
        "bait1": (NodeState.IDLE, ()),
        "bait2": (NodeState.BUSY, ()), "vm0123456789abx": (NodeState.OUT, ("belljar",)),
    }  # fmt: skip
    assert nodes["vm0123456789abx"].reason.startswith("belljar: its job has ended")


@pytest.mark.parametrize(
    ("state", "is_now"),
    [
        ("IDLE+DYNAMIC_NORM", NodeState.IDLE), ("IDLE+COMPLETING+DRAIN", NodeState.DRAINING), ("MIXED", NodeState.BUSY),
        ("DOWN+COMPLETING+DYNAMIC_NORM", NodeState.DRAINING), ("DOWN+NOT_RESPONDING", NodeState.OUT), ("IDLE*", NodeState.AWAY),
        ("UNKNOWN+DYNAMIC_NORM", NodeState.AWAY), ("ALLOCATED+DRAIN", NodeState.DRAINING), ("IDLE+CLOUD+POWERED_DOWN", NodeState.AWAY),
    ],
)  # fmt: skip
def test_each_state_of_slurms_means_something(state: str, is_now: NodeState) -> None:
    line = re.sub(rb" State=\S+ ", f" State={state} ".encode(), NODES.split(b"\n")[0])
    assert SLURM.nodes(line + b"\n")["bait1"].state is is_now


def test_slurms_commands_take_one_job_and_one_node() -> None:
    job = SLURM.jobs(SQUEUE, MARK)["1"]
    update, release = SLURM.move(job, ("vm1x", "vm2x"), "belljar")
    assert update[-4:] == (
        "Partition=belljar",
        "ReqNodeList=vm1x,vm2x",
        "NumNodes=2-2",
        "StartTime=now",
    ) and release == (
        "scontrol",
        "release",
        "1",
    )
    assert SLURM.unpin(job, "batch") == (("scontrol", "update", "JobId=1", "Partition=batch", "ReqNodeList="),)
    assert SLURM.take_back(job) == (("scontrol", "hold", "1"),)
    once = replace(job, state=JobState.RUNNING, reruns=False)
    assert SLURM.take_back(once) == (
        ("scontrol", "update", "JobId=1", "Requeue=1"),
        ("scontrol", "requeuehold", "1"),
    )
    assert SLURM.move(once, ("vm1x",), "belljar", reruns=False)[1] == (
        "scontrol",
        "update",
        "JobId=1",
        "Requeue=0",
    )
    assert SLURM.note(job, "a\nb; c")[-1] == "AdminComment=belljar: a?b; c"
    for wrong in ("ALL", "a,b", "-x", "n[1-2]", ""):
        with pytest.raises(ValueError, match="is no name of a node"):
            SLURM.remove(wrong)


def test_a_guests_slurm_conf_has_nothing_of_this_hosts_places() -> None:
    text = guest_conf((RECORDINGS / "slurm/slurm.conf").read_bytes()).decode()
    keys = [line.partition("=")[0] for line in text.splitlines()]
    assert "SlurmctldHost" in keys and "SlurmdPort" in keys and len(set(keys)) == len(keys)
    assert not {"NodeName", "PartitionName", "NodeSet", "StateSaveLocation", "JobCompLoc"} & set(keys)
    assert "AuthInfo=cred_expire=2\n" in text and "SlurmdSpoolDir=/var/spool/slurmd\n" in text and "/home" not in text


def test_the_pools_secret_is_in_nothing_that_is_written_down() -> None:
    member = Member(
        "vm1x", 2, GIB, ("belljar",), ("alice:x:1001:1001::/home/alice:/bin/sh", "alice:x:1001:"), "10.0.0.1 head"
    )
    joining = SLURM.joining(member, Path("/opt/slurm/slurm.conf"), b"SlurmctldHost=head\n")
    env = dict(joining.env)
    assert (
        env[b"CONF"] == b"CPUs=2 RealMemory=1024 Feature=belljar"
        and env[b"PASSWD"].startswith(b"alice:x:1001:")
        and env[b"NODE"] == b"vm1x"
    )
    assert b"cat > /etc/munge/munge.key" in joining.script  # from standard input alone
    assert [file.path for file in joining.files] == [b"/opt/slurm/slurm.conf", b"/opt/slurm/cgroup.conf"]


def test_a_nodes_name_is_its_machines() -> None:
    assert machine_of(node_of("0123456789ab")) == "0123456789ab" and node_of("0123456789ab")[-1].isalpha()
    assert machine_of("vm0123x") == "" and machine_of("bait1") == ""


def test_grid_engines_jobs_are_read_whole() -> None:
    running = GRID.jobs((RECORDINGS / "gridengine/qstat-r-running.xml").read_bytes(), "")
    assert {job: (one.state, one.on) for job, one in running.items()} == {
        "4712": (JobState.RUNNING, ("wn01",)), "4714": (JobState.RUNNING, ("wn01",)), "4713": (JobState.HELD, ()),
    }  # fmt: skip
    assert (running["4712"].image, running["4712"].memory, running["4712"].owner) == ("debian12", 600 * MIB, "alice")
    assert (running["4714"].cpus, running["4714"].memory, running["4714"].queue) == (2, 600 * MIB, "all.q")
    held = GRID.jobs((RECORDINGS / "gridengine/qstat-r-held.xml").read_bytes(), "")
    assert (held["4712"].state, held["4712"].starts) == (JobState.HELD, 1)


def test_what_is_no_list_of_grid_engines_is_refused() -> None:
    whole = (RECORDINGS / "gridengine/qstat-r-running.xml").read_bytes()
    hosts = (RECORDINGS / "gridengine/qhost-q.xml").read_bytes()
    for printed in (b"", b"error: commlib error\n", whole[:900]):
        with pytest.raises(ValueError, match="qstat printed"):
            GRID.jobs(printed, "")
    for printed in (b"", hosts[:-20]):
        with pytest.raises(ValueError, match="qhost printed"):
            GRID.nodes(printed)


def test_grid_engines_hosts_are_read_with_the_state_of_their_queue() -> None:
    nodes = GridEnginePool("all.q")
    hosts = (RECORDINGS / "gridengine/qhost-q.xml").read_bytes()
    assert {name: one.state for name, one in nodes.nodes(hosts).items()} == {
        "wn01": NodeState.BUSY,
        "vm1": NodeState.IDLE,
    }
    others = GRID.nodes(hosts)  # a queue that is not ours has instances, a bait may be one of them
    assert (others["all.q@wn01"].state, others["wn01"].state) == (NodeState.BUSY, NodeState.IDLE)
    failed = others | GRID.nodes(hosts.replace(b"'state_string'><", b"'state_string'>E<"))
    assert (failed["all.q@vm1"].state, failed["all.q@vm1"].reason) == (NodeState.OUT, "Prolog error")
    head, _, tail = hosts.partition(b"<host name='vm1'>")
    closed = head + b"<host name='vm1'>" + tail.replace(b"'state_string'><", b"'state_string'>d<")
    assert nodes.nodes(closed)["vm1"].state is NodeState.OUT


def test_grid_engine_moves_a_job_to_one_node() -> None:
    job = GRID.jobs((RECORDINGS / "gridengine/qstat-r-held.xml").read_bytes(), "")["4712"]
    assert GRID.move(job, ("vm1",), "all.q") == (
        ("qalter", "-q", "all.q@vm1", "4712"),
        ("qrls", "-h", "o", "4712"),
    )
    task = replace(job, id="4712.3", array=("4712", "3"))
    assert [one[-1] for one in GRID.move(task, ("vm1",), "all.q")] == ["4712", "4712.3"]
    assert GRID.note(task, "no, never") == ("qalter", "-ac", "belljar=no_never", "4712")
    with pytest.raises(BadOption, match="gets one machine"):
        GRID.move(job, ("vm1", "vm2"), "all.q")
    with pytest.raises(BadOption, match="no worker nodes"):
        _ = load("torque")


def test_the_nodes_of_a_job_are_named_one_by_one() -> None:
    row = SQUEUE.split(b"\n")[0]
    at = len(MARK) + sum(width + 1 for _, width in FIELDS[: [name for name, _ in FIELDS].index("nodelist")]) - 1
    for text, names in (
        (b"wn[08-10,21],head", ("wn08", "wn09", "wn10", "wn21", "head")),
        (b"r[1-2]n[1-2]", ("r[1-2]n[1-2]",)), (b"wn[x]", ("wn[x]",)), (b"vm0123456789abx", ("vm0123456789abx",)),
    ):  # fmt: skip
        (job,) = SLURM.jobs(row[:at] + text.ljust(1000) + row[at + 1000 :], MARK).values()
        assert job.on == names


def test_what_an_administrator_wrote_at_a_job_moves_no_other_field() -> None:
    before = SLURM.jobs(SQUEUE, MARK)
    assert before["4_2"].note == "belljar: two" and before["1"].note == ""
    for words in ("für\nzwei|drei".encode(), b"x" * 1000):
        after = SLURM.jobs(SQUEUE.replace(b"belljar: two".ljust(1000), words.ljust(1000)), MARK)
        assert replace(after["4_2"], note="") == replace(before["4_2"], note="") and set(after) == set(before)


HOSTS = ("10.99.0.10 vm10", "10.99.1.10 vm11", "10.99.0.12 vm12")


def bait(name: str = "vm.q@wn01", nodes: tuple[str, ...] = HOSTS) -> Pool:
    return GRID.of_bait(name, "belljar", "bait_wn01", nodes)


def test_a_machine_of_grid_engines_has_a_name_and_an_address_out_of_the_list() -> None:
    nodes = bait()
    found = {nodes.new_machine(("wn01", "vm10")) for _ in range(40)}
    assert {nodes.name_of(one) for one in found} == {"vm11", "vm12"} and len(found) == 40
    assert {nodes.address_of(one) for one in found} == {"10.99.1.10", "10.99.0.12"}
    assert nodes.new_machine(("vm10", "vm11", "vm12")) == ""
    lost = nodes.machine_of("vm11")  # whatever machine it was
    assert nodes.name_of(lost) == "vm11" and re.fullmatch(r"[0-9a-f]{12}", lost) and nodes.machine_of("wn01") == ""
    hosts = (RECORDINGS / "gridengine/qhost-q.xml").read_bytes().replace(b"'vm1'", b"'vm10'")
    assert {name: one.features for name, one in nodes.nodes(hosts).items()}["vm10"] == ("bait_wn01",)


@pytest.mark.parametrize(
    ("name", "hosts", "key"),
    [
        ("wn01", HOSTS, "name"), ("vm.q@wn01", (), "nodes"), ("vm.q@wn01", ("10.99.0.10",), "nodes"), ("vm.q@wn01", ("fe80::1 vm1",), "nodes"),
        ("vm.q@wn01", ("10.99.0.10 a,b",), "nodes"), ("vm.q@wn01", ("10.99.0.10 vm10", "10.98.0.10 vm11"), "nodes"),
        ("vm.q@wn01", ("10.99.0.10 vm10", "10.99.0.11 vm10"), "nodes"),
    ],
)  # fmt: skip
def test_a_bait_of_grid_engines_with_wrong_names_is_told(name: str, hosts: tuple[str, ...], key: str) -> None:
    with pytest.raises(ValueError) as caught:
        bait(name, hosts)
    assert caught.value.args[0] == key and len(caught.value.args) == 3


def test_a_prolog_gives_grid_engines_job_back_and_what_runs_elsewhere_is_rescheduled() -> None:
    client = bait("all.q@wn01")
    job = bait("all.q@wn01").jobs((RECORDINGS / "gridengine/qstat-r-running.xml").read_bytes(), "")["4712"]
    hold = ("qhold", "-h", "o", "4712")
    assert job.on == ("all.q@wn01",) and client.take_back(job) == (hold,)  # its prolog ends with 99
    assert client.take_back(replace(job, on=("vm10",))) == (hold, ("qmod", "-rj", "4712"))
    held = replace(job, reason="hr")
    assert client.is_back(held) and not client.is_back(job) and client.take_back(held) == ()
    assert client.is_back(replace(job, state=JobState.WAITING))
    many = tuple(replace(job, id=f"4712.{task}") for task in range(1200))
    assert [len(one) for one in client.arrive(many)] == [503, 503, 203]


def test_a_machine_joins_grid_engine_with_the_cells_own_files() -> None:
    place = Path("/opt/sge/cell/common")
    member = Member("vm10", 2, GIB, (), ("alice:x:1001:1001::/home/alice:/bin/sh",), "10.99.0.1 head")
    joining = bait().joining(member, place / "bootstrap", b"security_mode           none\n")
    assert joining.copies == (place / "bootstrap", place / "act_qmaster") and joining.files == ()
    env = dict(joining.env)
    assert (env[b"SGE_ROOT"], env[b"SGE_CELL"], env[b"NODE"]) == (b"/opt/sge", b"cell", b"vm10")
    with pytest.raises(BadOption, match="security_mode csp"):
        bait().joining(member, place / "bootstrap", b"security_mode           csp\n")
