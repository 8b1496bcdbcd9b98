"""OpenPBS's jobs and nodes from the outside, as a real server of 23.06 told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from belljar.errors import BadOption
from belljar.model import MIB, PlainFile
from belljar.pool import JobState, JobView, Member, NodeState, load
from belljar.pool.pbs.openpbs.client import OpenPbsClient
from belljar.pool.pbs.openpbs.nodes import OpenPbsNodes, chunks_of
from belljar.records import replace

RECORDINGS = Path(__file__).parents[2] / "recordings/openpbs"
CLIENT, NODES = OpenPbsClient(), OpenPbsNodes()


def jobs(name: str) -> dict[str, JobView]:
    return CLIENT.jobs((RECORDINGS / f"qstat-{name}.json").read_bytes(), "")


def test_jobs_are_read_whole() -> None:
    found = jobs("jobs")
    assert {id: one.state for id, one in found.items()} == {
        "0.wn01": JobState.HELD, "1.wn01": JobState.WAITING, "3.wn01": JobState.HELD, "4.wn01": JobState.HELD,
        "5.wn01": JobState.HELD,
    }  # fmt: skip
    taken = found["0.wn01"]
    assert (taken.owner, taken.group, taken.queue, taken.image, taken.number) == (
        "alice",
        "alice",
        "batch",
        "worker",
        "0",
    )
    assert (taken.cpus, taken.memory, taken.nodes, taken.starts) == (1, 300 * MIB, 1, 1)
    assert not taken.is_held_by_user and taken.reruns and taken.is_batch
    assert (
        found["1.wn01"].nodes == 2 and found["1.wn01"].cpus == 2 and found["1.wn01"].selection == "2:ncpus=1:mem=100mb"
    )
    assert found["3.wn01"].is_held_by_user and not found["3.wn01"].reruns  # its account is not UTF-8
    assert found["4.wn01"].image == "el9"  # asked for by the whole job


def test_a_job_that_is_held_in_its_hook_on_the_bait_is_off_it() -> None:
    arriving, running = jobs("arriving")["4.wn01"], jobs("running")["10.wn01"]
    assert (arriving.state, arriving.on) == (JobState.ENDING, ("wn01",))  # job_state R, Hold_Types s
    assert (running.state, running.on) == (JobState.RUNNING, ("vm10",))
    assert jobs("arriving")["0.wn01"].state is JobState.ENDING  # job_state E
    theirs = jobs("held-by-user")["4.wn01"]
    assert theirs.is_held_by_user and theirs.queue == "belljar" and theirs.selection.endswith(":host=vm10")


def test_subjobs_cannot_be_held_and_their_array_is_none_of_them() -> None:
    found = {id: one for id, one in jobs("array").items() if "[" in id}
    assert {id: (one.array, one.is_batch, one.number) for id, one in found.items()} == {
        "11[1].wn01": (("11", "1"), False, "11[1]"), "11[2].wn01": (("11", "2"), False, "11[2]"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "printed", [b"", b"[]", b"{}", b"Connection refused\n", b'{"pbs_server": "wn01", "Jobs": []}', b'{"pbs_server":1,"Jobs":{"x;y":{}}}',
                b'{"pbs_server": "wn01", "Jobs": {"1.wn01": "Q"}}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_list_of_jobs_is_refused(printed: bytes) -> None:
    with pytest.raises(ValueError, match="qstat printed"):
        CLIENT.jobs(printed, "")


def test_no_jobs_are_no_mistake() -> None:
    assert CLIENT.jobs(b'{"timestamp": 1, "pbs_version": "23.06.06", "pbs_server": "wn01"}', "") == {}


# As src/lib/Libcmds/pbs_json.c of 23.06.06 writes it: what strtod takes for a number is bare, and backslashes stay.
OF_A_RELEASE = r"""{
    "timestamp":1795411540,
    "pbs_version":"23.06.06",
    "pbs_server":"wn01",
    "Jobs":{
        "5.wn01":{
            "Job_Name":"first",
            "Job_Owner":"alice@wn01",
            "job_state":"R",
            "queue":"batch",
            "exec_host":"vm10/0",
            "Resource_List":{
                "mem":"300mb",
                "ncpus":2,
                "select":"1:ncpus=2:mem=300mb:vm_image=9.4"
            },
            "run_count":1,
            "euser":"alice"
        },
        "6.wn01":{
            "Job_Name":"second",
            "job_state":"Q",
            "comment":"say \"now\"\n",
            "Variable_List":{
                "A":WORD,
                "PBS_O_HOST":"wn01"
            },
            "euser":"bob"
        }
    }
}
"""


@pytest.mark.parametrize(
    "word", ['"x"', ".5", "+5", "nan", "0x0", "5.", "00", "9" * 5000, r'"\u@\h \w"', '"ends with \\"', '"{"', '":{"',
             r'"\\"},"job_state":"F","x":{"y":"z"', r'"\\"}},"5.wn01":{"job_state":"F","x":{"y":"z"'],
)  # fmt: skip
def test_no_users_variable_hides_or_alters_a_job(word: str) -> None:
    found = CLIENT.jobs(OF_A_RELEASE.replace("WORD", word).encode(), "")
    assert {id: (one.state, one.owner) for id, one in found.items()} == {
        "5.wn01": (JobState.RUNNING, "alice"), "6.wn01": (JobState.WAITING, "bob"),
    }  # fmt: skip
    first = found["5.wn01"]
    assert (first.cpus, first.memory, first.image, first.on, first.starts) == (2, 300 * MIB, "9.4", ("vm10",), 1)
    assert found["6.wn01"].reason == 'say "now"?'
    with pytest.raises(ValueError, match="qstat printed"):
        CLIENT.jobs(OF_A_RELEASE[:-4].encode(), "")


@pytest.mark.parametrize("forged", ["5.wn01", "7.wn01"])
def test_a_variables_name_with_line_breaks_ends_nobodys_job(forged: str) -> None:
    """What stands there twice is not known; nothing is done with a job in that state."""
    name = f'A":1\n    "Jobs":{{\n        "{forged}":{{\n            "job_state":"F",\n            "euser":"eve"\n        }},\n    "B'
    real = OF_A_RELEASE.replace('"A":WORD', f'"{name}":1').replace(
        "\n    }\n}\n",
        ',\n        "7.wn01":{\n            "job_state":"R",\n            "euser":"carol"\n        }\n    }\n}\n',
    )
    states = {id: one.state for id, one in CLIENT.jobs(real.encode(), "").items()}
    others = {"5.wn01": JobState.RUNNING, "6.wn01": JobState.WAITING, "7.wn01": JobState.RUNNING}
    assert states == others | {forged: JobState.UNKNOWN}


def test_no_users_variable_is_nested_too_deeply() -> None:
    text = (RECORDINGS / "qstat-jobs.json").read_text(errors="replace")
    deep = text.replace('"PBS_O_LANG":\t"C.UTF-8"', f'"A":\t{"[" * 1000}{"]" * 1000}')
    assert deep != text and CLIENT.jobs(deep.encode(), "") == CLIENT.jobs(text.encode(), "")


def test_an_image_whose_name_looks_like_a_number_is_asked_for() -> None:
    text = (
        (RECORDINGS / "qstat-jobs.json")
        .read_text(errors="replace")
        .replace('"ncpus":', '"vm_image":\t9.4,\n\t\t\t\t"ncpus":')
    )
    assert CLIENT.jobs(text.encode(), "")["0.wn01"].image == "9.4"


def test_what_its_user_chose_is_taken_as_plain_words() -> None:
    document = json.loads((RECORDINGS / "qstat-held-by-user.json").read_bytes())
    facts = document["Jobs"]["4.wn01"]
    facts |= {
        "queue": "-x; rm",
        "euser": "a b",
        "exec_host": "vm1/0*2+vm2/1+vm1/3",
        "comment": "a\nb",
        "run_count": "-4",
    }
    facts["Resource_List"] |= {"vm_image": "../etc", "ncpus": "1e9", "mem": "1xb", "select": "1:vm_image=el8"}
    job = CLIENT.jobs(json.dumps(document).encode(), "")["4.wn01"]
    assert (job.queue, job.owner, job.image, job.cpus, job.memory, job.starts) == ("", "", "", 1, 0, 0)
    assert job.on == ("vm1", "vm2") and "\n" not in job.reason


def test_nodes_are_read_whole() -> None:
    states = {}
    for name in ("free", "busy", "draining", "down", "gone"):
        found = NODES.nodes((RECORDINGS / f"pbsnodes-{name}.json").read_bytes())
        assert found["wn01"].state is NodeState.IDLE
        states[name] = found["vm10"].state
    assert states == {
        "free": NodeState.IDLE, "busy": NodeState.BUSY, "draining": NodeState.DRAINING, "down": NodeState.AWAY,
        "gone": NodeState.OUT,
    }  # fmt: skip
    assert found["vm10"].reason == "belljar: over"
    for printed in (b"", b"{}", b'{"pbs_server": "x", "nodes": []}', b'{"pbs_server": "x", "nodes": {"a": 1}}'):
        with pytest.raises(ValueError, match="pbsnodes printed"):
            NODES.nodes(printed)


def test_a_job_is_held_by_the_system_moved_and_given_back() -> None:
    """These very commands were carried out by the server of the recordings."""
    job = replace(jobs("jobs")["0.wn01"], queue="batch")
    assert CLIENT.take_back(job) == CLIENT.arrive((job,)) == (("qhold", "-h", "s", "0.wn01"),)
    assert CLIENT.take_back(replace(job, state=JobState.RUNNING))[1] == ("qrerun", "0.wn01")
    assert NODES.create("vm10", job) == (
        ("qmgr", "-c", "create node vm10 queue=belljar,resources_available.ncpus=1,resources_available.mem=307200kb,resources_available.vm_image=worker"),
    )  # fmt: skip
    assert NODES.move(job, ("vm10",), "belljar") == (
        ("qmove", "belljar", "0.wn01"), ("qalter", "-l", "select=1:ncpus=1:mem=300mb:vm_image=worker:host=vm10", "0.wn01"),
        ("qrls", "-h", "s", "0.wn01"),
    )  # fmt: skip
    moved = replace(job, selection="1:ncpus=1:mem=300mb:vm_image=worker:host=vm10")
    unpinned = ("qalter", "-l", "select=1:ncpus=1:mem=300mb:vm_image=worker", "0.wn01")
    assert NODES.unpin(moved) == (unpinned,) and NODES.unpin(job) == ()
    back = (("qmove", "batch", "0.wn01"), ("qrls", "-h", "s", "0.wn01"))
    assert NODES.give_back(moved, "batch", 30) == (unpinned, *back) and NODES.give_back(job, "batch", 30) == back
    assert NODES.give_back(job, "batch", 30, stays_held=True) == back[:1]
    assert NODES.give_back(replace(job, is_held_by_user=True), "batch", 30, stays_held=True) == back
    assert NODES.close("vm10", "its\njob 'has' ended")[:3] == ("pbsnodes", "-o", "-C")
    assert NODES.remove("vm10") == (("qmgr", "-c", "delete node vm10"),)
    assert CLIENT.note(job, 'no\n"image" -W x=y') == ("qalter", "-W", "comment=belljar: no??image? -W x=y", "0.wn01")


def test_each_chunk_is_bound_to_a_machine() -> None:
    assert chunks_of("2:ncpus=1:host=wn01:mem=1gb+ncpus=2+3") == ["ncpus=1:mem=1gb"] * 2 + ["ncpus=2"] + ["ncpus=1"] * 3
    two = jobs("jobs")["1.wn01"]
    for nodes, hosts in ((("vm10", "vm11"), ("vm10", "vm11")), (("vm10",), ("vm10", "vm10"))):  # the second: place=pack
        chunks = "+".join(f"1:ncpus=1:mem=100mb:host={host}" for host in hosts)
        assert NODES.move(two, nodes, "belljar")[1] == ("qalter", "-l", f"select={chunks}", "1.wn01")
    with pytest.raises(ValueError, match="no name of a node"):
        NODES.move(two, ("vm10;x",), "belljar")


def test_a_baits_machines_are_nodes_of_its_list() -> None:
    nodes = load("openpbs").of_bait("wn01", "vms", "bait_wn01", ("10.77.5.2 vm10", "10.77.5.3 vm11")).nodes
    found = nodes.nodes((RECORDINGS / "pbsnodes-free.json").read_bytes())
    assert (found["vm10"].features, found["wn01"].features) == (("bait_wn01",), ())
    machine = nodes.new_machine(found)
    assert (nodes.name_of(machine), nodes.address_of(machine)) == ("vm11", "10.77.5.3")
    assert nodes.name_of(nodes.machine_of("vm10")) == "vm10" and nodes.machine_of("wn01") == ""
    with pytest.raises(ValueError, match="native jobs beside machines"):
        load("openpbs").of_bait("wn01", "vms", "bait_wn01", ("10.77.5.2 vm10",), "cpus=4")
    assert " queue=vms," in nodes.create("vm11", jobs("jobs")["0.wn01"])[0][2]


def test_a_machine_joins_by_the_sites_own_settings() -> None:
    member = Member(
        "vm10", 1, 600 * MIB, (), ("alice:x:1001:1001::/home/alice:/bin/sh", "alice:x:1001:"), "10.77.5.1 wn01"
    )
    text = b"PBS_EXEC=/opt/pbs\nPBS_SERVER=wn01\nPBS_HOME=/var/spool/pbs\nPBS_START_SERVER=1\nPBS_SCP=/bin/scp\n"
    joining = NODES.joining(member, Path("/etc/pbs.conf"), text)
    (conf,) = joining.files
    assert isinstance(conf, PlainFile) and conf.path == b"/etc/pbs.conf"
    said = dict(line.split("=", 1) for line in (conf.data or b"").decode().splitlines())
    assert (said["PBS_SERVER"], said["PBS_START_SERVER"], said["PBS_START_MOM"], said["PBS_MOM_NODE_NAME"]) == (
        "wn01", "0", "1", "vm10",
    )  # fmt: skip
    assert dict(joining.env)[b"PASSWD"].startswith(b"alice:") and b"exit 78" in joining.script
    with pytest.raises(BadOption, match="PBS_SERVER is missing"):
        NODES.joining(member, Path("/etc/pbs.conf"), b"PBS_EXEC=/opt/pbs\n")


def test_torque_is_refused_in_so_many_words() -> None:
    with pytest.raises(BadOption, match="torque: belljar adds no worker nodes to this system"):
        load("torque")
