"""What an access point of HTCondor refuses at submit, judged by HTCondor's own library: the cases that hold everywhere."""

from __future__ import annotations

import json
import re

import pytest
from tests.batch.lab.condor import PACKAGES
from tests.roots import Room, root
from tests.unit.batch.policy_cases import CASES, Case

from belljar.batch import Settings
from belljar.batch.htcondor.rules import requirements

pytestmark = pytest.mark.timeout(1800)
EVALUATE = """
import json, sys
import classad2
for attributes, requirements in json.load(sys.stdin):
    ad, refused = classad2.ClassAd(attributes), []
    for name, (expression, sentence) in requirements.items():
        ad[name], ad["Why"] = classad2.ExprTree(expression), classad2.ExprTree(sentence)
        if ad.eval(name) not in (True, 1):
            refused.append((name, str(ad.eval(name)), ad.eval("Why")))
    print(json.dumps(refused))
"""
NEWLINE = Case("name of an image", image="debian12\n")
REFUSED_BY = (  # the first whose words are said
    ("name of an image", "BelljarImage"), ("not allowed", "BelljarImage"), ("a job pulls", "BelljarImage"), ("needs at least", "BelljarMemory"),
    ("GPU", "BelljarKind"), ("cpus", "BelljarMostCpus"), ("MiB of memory", "BelljarMostMemory"), ("MiB of disk", "BelljarMostDisk"),
)  # fmt: skip


def ad_of(case: Case) -> dict[str, object]:
    asked = {
        "VmImage": case.image or None,
        "RequestMemory": case.memory or 4096,
        "VmDisk": case.disk,
        "RequestGPUs": case.gpus,
    }
    if case.memory is None and case.site.get("max_memory"):
        asked["RequestMemory"] = 1024
    known = {"JobUniverse": 5, "Owner": case.user, "AcctGroup": case.queue, "RequestCpus": case.cpus}
    return {**known, **{name: value for name, value in asked.items() if value is not None}}


def test_at_an_access_point_of_htcondor() -> None:
    cases = [*CASES, NEWLINE]
    work = json.dumps([(ad_of(case), requirements(case.settings)) for case in cases]).encode()
    with Room(root("trixie", PACKAGES)) as room:
        lines = room.run("python3", "-c", EVALUATE, stdin=work).stdout.splitlines()
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        refused = json.loads(line)
        if not case.says or case.on_the_node:
            assert refused == [], case
            continue
        wanted = next(name for words, name in REFUSED_BY if words in case.says)
        assert [(name, value in ("False", "0")) for name, value, _ in refused] == [(wanted, True)], case
        (number,) = re.findall(r"(?:most|least) ([0-9]+)", case.says) or ("",)
        assert number in refused[0][2], case


CONTAINER, BARE = {"WantContainer": True}, Settings()
GIVEN = Settings(default_image="debian12")


def test_which_kinds_of_jobs_an_access_point_refuses_a_machine() -> None:
    """DAGMan's own job is of the scheduler universe: where the site gives every job an image, it goes on as ever."""
    asked = {"VmImage": "debian12"}
    cases: list[tuple[dict[str, object], Settings, bool]] = [
        ({"JobUniverse": 5, **asked}, BARE, True), ({"JobUniverse": 5}, GIVEN, True),
        ({"JobUniverse": 7, **asked}, BARE, False), ({"JobUniverse": 7}, GIVEN, True), ({"JobUniverse": 12}, GIVEN, True),
        ({"JobUniverse": 5, **CONTAINER}, BARE, True), ({"JobUniverse": 5, **CONTAINER}, GIVEN, False),
        ({"JobUniverse": 5, "WantDocker": True, **asked}, BARE, False), ({"JobUniverse": 5, "WantDocker": False, **asked}, BARE, True),
        ({"JobUniverse": 7, "RequestGPUs": 1}, GIVEN, True), ({"JobUniverse": 5, "RequestGPUs": 1}, GIVEN, False),
    ]  # fmt: skip
    work = json.dumps([(ad, {"BelljarKind": requirements(settings)["BelljarKind"]}) for ad, settings, _ in cases])
    with Room(root("trixie", PACKAGES)) as room:
        lines = room.run("python3", "-c", EVALUATE, stdin=work.encode()).stdout.splitlines()
    assert [json.loads(line) == [] for line in lines] == [is_good for _, _, is_good in cases]
