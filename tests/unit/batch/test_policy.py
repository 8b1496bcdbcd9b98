"""The site's rules are judged alike by Python, by Lua and by the hook of OpenPBS; by HTCondor itself in
tests/batch/test_htcondor.py."""

from __future__ import annotations

import grp
import os
import pwd
import re
from pathlib import Path

import pytest
from tests.batch.lab.pbs_module import Refused
from tests.unit.batch import test_slurm_lua
from tests.unit.batch.policy_cases import CASES, Case
from tests.unit.batch.test_openpbs_hooks import Hooks, submit
from tests.unit.batch.test_slurm_lua import SCRIPT, Submission

from belljar.batch.job import judge, policy
from belljar.batch.job.policy import SMALLEST_GUEST, Asker, guest_memory
from belljar.errors import BelljarError
from belljar.model import MIB

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def groups_of(user: str) -> set[str]:
    return {grp.getgrgid(gid).gr_name for gid in os.getgrouplist(user, pwd.getpwnam(user).pw_gid)}


def in_bytes(size: int | None) -> int | None:
    return None if size is None else size * MIB


@every_case
def test_on_the_node(case: Case) -> None:
    said = ""
    try:
        image = policy.image_for(case.image, case.queue, case.settings)
        assert bool(image) is not case.runs_bare
        if image:
            policy.check_allowed(image, Asker(case.user, groups_of(case.user), case.queue), case.settings)
            policy.check_limits(case.cpus, in_bytes(case.memory), in_bytes(case.disk), case.settings, case.gpus)
            if case.memory is not None:
                assert guest_memory(case.memory * MIB, -1, case.settings, 0) >= SMALLEST_GUEST
    except BelljarError as exc:
        said = exc.message
    assert (case.says in said) if case.says else not said


@pytest.mark.skipif(test_slurm_lua.LIBRARY is None, reason="no liblua5.1 on this host")
@every_case
def test_in_slurmctld(case: Case, tmp_path: Path) -> None:
    site = Submission(tmp_path, case.settings)
    if re.fullmatch(r"[\w.-]+", case.image):
        (site.names / case.image).touch()
    sizes = {"min_cpus": case.cpus, "min_mem_per_node": case.memory, "pn_min_tmp_disk": case.disk,
             "tres_per_node": f"gres:gpu:{case.gpus}" if case.gpus else None}  # fmt: skip
    job = {key: value for key, value in sizes.items() if value is not None}
    uid = pwd.getpwnam(case.user).pw_uid
    comment = f"vm={case.image}" if case.image else ""
    result, script, said = site.submit(comment, user_name=case.user, user_id=uid, partition=case.queue, **job)
    assert (result, script != SCRIPT) == ((-1, False) if case.says else (0, not case.runs_bare)), said
    assert (case.says in said) if case.says else not said


@every_case
def test_in_the_hook_of_openpbs(case: Case, tmp_path: Path) -> None:
    hooks = Hooks(tmp_path)
    hooks.settings.update(policy.site_of(case.settings))
    sizes = {"mem": case.memory and f"{case.memory}mb", "vm_disk": case.disk and f"{case.disk}mb", "ncpus": case.cpus,
             "select": f"1:ngpus={case.gpus}" if case.gpus else None}  # fmt: skip
    asked = {"vm_image": case.image, **{key: value for key, value in sizes.items() if value is not None}}
    said = ""
    try:
        submit(hooks, queue=case.queue, user=case.user, **asked)
    except Refused as exc:
        said = str(exc)
    assert (case.says in said) if case.says else not said
    assert hooks.log == []


@pytest.mark.parametrize("name", ["debian12\n", "é", "a\0b", "a b"])
def test_what_no_comment_of_slurm_can_hold_is_no_name_either(name: str, tmp_path: Path) -> None:
    """Nor is it one to PBS."""
    with pytest.raises(judge.Refused):
        judge.check_name(name)
    with pytest.raises(Refused, match="not a name of an image"):
        submit(Hooks(tmp_path), vm_image=name)
