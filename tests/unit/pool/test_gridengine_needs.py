"""What `belljar bait check` says of a cell where something is missing."""

from __future__ import annotations

import pytest

from belljar.errors import CommandFailed
from belljar.pool import load

BAIT = "qname vm.q\npe_list smp\nprolog root@/etc/gridengine/bait \\\n $job_id $ja_task_id\n"
GOOD = {
    ("qconf", "-sm"): "root\nsgeadmin\n", ("qconf", "-sq", "vm.q@wn01"): BAIT, ("qconf", "-sq", "belljar"): "prolog NONE\npe_list make smp\n",
    ("qconf", "-sp", "smp"): "pe_name smp\nallocation_rule $pe_slots\n",
    ("getent", "ahostsv4", "vm9"): "10.9.9.9 STREAM vm9\n", ("getent", "hosts", "10.9.9.9"): "10.9.9.9 vm9.site vm9\n",
}  # fmt: skip
NODES = load("gridengine").of_bait("vm.q@wn01", "belljar", "f", ("10.9.9.9 vm9",))


def wrong(answers: dict[tuple[str, ...], str]) -> dict[str, str]:
    def ask(*argv: str) -> str:
        if argv not in answers:
            raise CommandFailed(f"{argv[0]}: exit 1")
        return answers[argv]

    found = list(NODES.needs(ask, "", ("vm.q@wn01",), "belljar", "f", ()))
    assert all(finding.remedy for finding in found if not finding.is_good) and len(found) == 5
    return {finding.name: finding.text for finding in found if finding.text}


def test_a_cell_that_has_everything_is_good() -> None:
    assert wrong(GOOD) == {}


@pytest.mark.parametrize(
    ("question", "answer", "what", "why"),
    [
        (
            ("qconf", "-sp", "smp"),
            "allocation_rule $round_robin\n",
            "parallel environments",
            "smp: its allocation_rule is $round_robin: a job of it wants several machines, and would never start",
        ),
        (
            ("qconf", "-sq", "belljar"),
            "prolog NONE\npe_list make\n",
            "parallel environments",
            "smp: the queue belljar does not have it, and a job of it would never start",
        ),
        (("qconf", "-sm"), "sgeadmin\n", "root manages the cell", "root is not a manager"),
        (("qconf", "-sq", "vm.q@wn01"), "", "bait vm.q@wn01 parallel environments", "qconf: exit 1"),
        (("qconf", "-sq", "vm.q@wn01"), "prolog NONE\n", "bait vm.q@wn01", "its prolog is NONE"),
        (("qconf", "-sq", "vm.q@wn01"), "prolog root@/x $job_id\n", "bait vm.q@wn01", "is not told job and task"),
        (("qconf", "-sq", "belljar"), BAIT, "queue belljar", "its prolog is root@"),
        (
            ("getent", "ahostsv4", "vm9"),
            "10.9.9.8 STREAM vm9\n",
            "names of machines",
            "not known by name and address: vm9",
        ),
        (("getent", "hosts", "10.9.9.9"), "10.9.9.9 other\n", "names of machines", "vm9"),
        (("getent", "hosts", "10.9.9.9"), "", "names of machines", "vm9"),
    ],
)
def test_each_thing_that_is_missing_is_named(question: tuple[str, ...], answer: str, what: str, why: str) -> None:
    answers = {**GOOD, question: answer} if answer else {key: value for key, value in GOOD.items() if key != question}
    found = wrong(answers)
    assert " ".join(found) == what and why in " ".join(found.values())
