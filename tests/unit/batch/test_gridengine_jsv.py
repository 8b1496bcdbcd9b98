"""The verifier's conversation with the server, line by line as a real server held it."""

from __future__ import annotations

import io

import pytest

from belljar.batch import Settings
from belljar.batch.gridengine.jsv import Verifier, converse, resources
from belljar.model import GIB

SETTINGS = Settings(
    allow=("* debian*", "user:bjbob special", "group:hpc el9", "queue:night old"), max_cpus=4, max_memory=8 * GIB
)


def verifier(settings: Settings = SETTINGS, **more: object) -> Verifier:
    groups = {"bjalice": ("bjalice",), "bjhpc": ("users", "hpc")}
    return Verifier(settings, groups=lambda user: groups.get(user, ()), **more)  # type: ignore[arg-type]


def lines(*params: str, env: tuple[str, ...] = (), user: str = "bjalice") -> list[str]:
    """One job as the server tells it."""
    head = [
        "VERSION 1.0",
        "CONTEXT server",
        "CLIENT qmaster",
        f"USER {user}",
        f"GROUP {user}",
        "JOB_ID 7",
        "CMDNAME x",
        "CMDARGS 0",
    ]
    return [
        "START",
        *(f"PARAM {one}" for one in (*head, *params)),
        *(f"ENV ADD {one}" for one in ("TERM ", *env)),
        "BEGIN",
    ]


def answer(*params: str, one: Verifier | None = None, **more: object) -> list[str]:
    """What is said after BEGIN."""
    one = one or verifier()
    *rest, begin = lines(*params, **more)  # type: ignore[arg-type]
    for line in rest:
        assert one.hear(line) == (["SEND ENV", "STARTED"] if line == "START" else [])
    said = one.hear(begin)
    assert said is not None
    return said


def refusal(*params: str, **more: object) -> str:
    (line,) = answer(*params, **more)
    assert line.startswith("RESULT STATE REJECT belljar: "), line
    return line.removeprefix("RESULT STATE REJECT ")


def test_a_job_without_an_image_is_left_alone() -> None:
    assert answer("l_hard h_rt=3600,mem_free=2G", "pe_name smp", "pe_min 1", "pe_max 64") == ["RESULT STATE ACCEPT"]


def test_an_image_and_its_sizes_go_into_the_environment() -> None:
    said = answer("l_hard vm_image=debian12,arch=lx-amd64,h_rt=3600,mem_free=2G,vm_disk=10G", "r y")
    assert said == [
        "ENV ADD BELLJAR_MEMORY 2G", "ENV ADD BELLJAR_WALL 3600", "ENV ADD BELLJAR_DISK 10G", "ENV ADD BELLJAR_RERUN y",
        "ENV ADD VM_IMAGE debian12", "PARAM l_hard arch=lx-amd64,h_rt=3600,mem_free=2G,vm=1", "RESULT STATE CORRECT",
    ]  # fmt: skip


def test_qrsh_and_qlogin_stay_out_of_queues_with_a_prolog_of_ours() -> None:
    """As 8.1.9 told its verifier of them: it closes a queue with any prolog at the first of these."""
    login = answer("N QLOGIN", "o /dev/null", "e /dev/null", env=("QRSH_PORT bjge:43511",))
    assert login == ["PARAM l_hard vm_interactive=1", "RESULT STATE CORRECT"]
    command = answer("b y", "l_hard h_rt=60", env=("QRSH_PORT bjge:35105", "QRSH_COMMAND hostname"))
    assert command == ["PARAM l_hard h_rt=60,vm_interactive=1", "RESULT STATE CORRECT"]
    assert answer("l_hard vm_interactive=1", env=("QRSH_PORT bjge:1",)) == ["RESULT STATE ACCEPT"]
    again = answer("l_hard vm_interactive=0", env=("QRSH_PORT bjge:1",))
    assert again[0] == "PARAM l_hard vm_interactive=1"
    one = verifier(Settings(default_image="debian12", queue_images=("night=old",)))
    assert answer("l_hard h_rt=60", one=one, env=("QRSH_PORT bjge:1",))[0] == "PARAM l_hard h_rt=60,vm_interactive=1"


@pytest.mark.parametrize("params", [("l_hard vm_image=debian12",), ("l_soft vm_image=debian12",)])
def test_qrsh_with_an_image_is_refused(params: tuple[str, ...]) -> None:
    assert "qsub" in refusal(*params, env=("QRSH_PORT bjge:43511",))


def test_a_soft_request_and_a_variable_name_an_image_too() -> None:
    assert answer("l_soft vm_image=debian12,a=1") == [
        "ENV ADD VM_IMAGE debian12", "PARAM l_hard vm=1", "PARAM l_soft a=1", "RESULT STATE CORRECT"
    ]  # fmt: skip
    assert answer(env=("VM_IMAGE debian12",)) == [
        "ENV MOD VM_IMAGE debian12",
        "PARAM l_hard vm=1",
        "RESULT STATE CORRECT",
    ]
    both = answer("l_hard vm_image=debian12", env=("VM_IMAGE debian11",))
    assert "ENV MOD VM_IMAGE debian12" in both


def test_a_memory_that_counts_for_each_slot_is_marked() -> None:
    said = answer("l_hard vm_image=debian12,mem_free=2G", one=verifier(per_slot=("mem_free",)))
    assert "ENV ADD BELLJAR_MEMORY 2G*" in said


def test_where_a_queue_has_an_image_every_job_brings_its_sizes() -> None:
    one = verifier(Settings(queue_images=("night=old",)))
    assert answer("l_hard h_rt=60", one=one) == ["ENV ADD BELLJAR_WALL 60", "RESULT STATE CORRECT"]
    assert answer(one=one) == ["RESULT STATE ACCEPT"]


@pytest.mark.parametrize(
    ("params", "user", "word"),
    [
        (("l_hard vm_image=../../x",), "bjalice", "not a name of an image"),
        (("l_hard vm_image=$(id)",), "bjalice", "not a name of an image"),
        (("l_hard vm_image=" + "a" * 200,), "bjalice", "not a name of an image"),
        (("l_hard vm_image=ü\x1b[31m",), "bjalice", "not a name of an image"),
        (("l_hard vm_image=special",), "bjalice", "not allowed for bjalice"),
        (("l_hard vm_image=el9",), "bjalice", "Allowed are: debian*"),
        (("l_hard vm_image=old", "q_hard all.q"), "bjalice", "in queue all.q"),
        (("l_hard vm_image=debian12", "pe_name smp", "pe_min 8", "pe_max 8"), "bjalice", "8 cpus"),
        (("l_hard vm_image=debian12,mem_free=16G",), "bjalice", "MiB of memory"),
        (("l_hard vm_image=debian12,gpu=1",), "bjalice", "a machine has no GPU"),
        (("l_hard vm_image=debian12,ngpus",), "bjalice", "a machine has no GPU"),
        (("l_hard vm_image=debian12,mem_free=100M",), "bjalice", "needs at least"),
        (("l_hard vm_image=debian12,h_vmem=500M",), "bjalice", "needs at least"),
    ],
)
def test_what_the_site_does_not_give_is_refused_with_a_sentence(params: tuple[str, ...], user: str, word: str) -> None:
    said = refusal(*params, user=user)
    assert word in said and said.isprintable()


def test_rules_for_users_groups_and_queues() -> None:
    assert answer("l_hard vm_image=special", user="bjbob")[-1] == "RESULT STATE CORRECT"
    assert answer("l_hard vm_image=el9", user="bjhpc")[-1] == "RESULT STATE CORRECT"
    assert answer("l_hard vm_image=old", "q_hard night")[-1] == "RESULT STATE CORRECT"
    assert answer("l_hard vm_image=old", "q_hard night@host")[-1] == "RESULT STATE CORRECT"
    assert "not allowed" in refusal("l_hard vm_image=old", "q_hard night,all.q")


def test_an_unknown_image_is_refused_where_the_host_can_know() -> None:
    said = refusal("l_hard vm_image=debian13", one=verifier(images=lambda: ("debian12", "el9")))
    assert "debian13" in said and "There are: debian12, el9." in said
    assert answer("l_hard vm_image=debian13", one=verifier(images=lambda: None))[-1] == "RESULT STATE CORRECT"


@pytest.mark.parametrize(
    "injected",
    [
        ["PARAM l_hard vm_image=debian12", "PARAM USER root"],
        ["PARAM l_hard vm_image=debian12", "START", "PARAM USER bjbob"],
        ["PARAM l_hard vm_image=debian12", "b"],
        ["PARAM l_hard a=1", "RESULT STATE ACCEPT"],
        ["ENV ADD VM_IMAGE debian12", "ENV ADD VM_IMAGE special"],
    ],
)
def test_a_line_break_in_a_value_cannot_speak_for_the_server(injected: list[str]) -> None:
    *before, begin = lines()
    one = verifier()
    for line in before:
        one.hear(line)
    for line in injected:
        assert one.hear(line) == []
    said = one.hear(begin)
    assert said is not None and len(said) == 1 and said[0].startswith("RESULT STATE REJECT") and "line break" in said[0]
    assert answer("l_hard vm_image=debian12", one=one)[-1] == "RESULT STATE CORRECT", "the next job is its own"


def test_a_begin_of_the_users_ends_the_job_there_and_nothing_is_said_twice() -> None:
    one = verifier()
    for line in lines("l_hard vm_image=special"):
        one.hear(line)
    assert one.hear("PARAM N x") == [] and one.hear("BEGIN") == []


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_time_of_many_digits_is_the_servers_to_refuse(digits: int) -> None:
    said = answer(f"l_hard vm_image=debian12,h_rt={'9' * digits}:0:0")
    assert said[-1] == "RESULT STATE CORRECT" and not any("BELLJAR_WALL" in line for line in said)


def test_a_mistake_of_the_sites_refuses_nobody() -> None:
    said = answer("l_hard vm_image=debian12", one=verifier(Settings(allow=("nonsense",))))
    assert said[0].startswith("LOG WARNING belljar: batch.allow") and said[1] == "RESULT STATE ACCEPT"


def test_the_conversation_over_bytes() -> None:
    text = "\n".join([*lines("l_hard vm_image=debian12"), *lines("N \udcff"), "QUIT", "START"]) + "\n"
    out = io.BytesIO()
    converse(verifier(), io.BytesIO(text.encode("utf-8", "surrogateescape")), out)
    said = out.getvalue().decode().splitlines()
    assert said.count("STARTED") == 2 and said[-1] == "RESULT STATE ACCEPT"
    converse(verifier(), io.BytesIO(b""), out)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), ("a=1,b,c=x=y", {"a": "1", "b": "TRUE", "c": "x=y"}), (",,a=", {"a": ""})],
)
def test_resources(text: str, found: dict[str, str]) -> None:
    assert resources(text) == found
