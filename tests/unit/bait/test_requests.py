"""What the keeper is asked for, for a job: its request, and the settings it follows from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.bait import Settings, settings
from belljar.bait.machines.keeper import account_of, request_for
from belljar.batch import Settings as BatchSettings
from belljar.cli.bait.bait import _judge
from belljar.errors import BadOption, BadSetting
from belljar.model import GIB, MIB, RunPayload, StdinKind, to_json
from belljar.pool import JobState, JobView
from belljar.records import replace

SETTINGS = Settings(name="bait1", images=("worker",), networks=(("open", "br0"),), cycle=0.1)
RUNNING = JobView("7", JobState.RUNNING, owner="root", queue="batch", memory=600 * MIB, on=("bait1",), number="7")
HELD = replace(RUNNING, state=JobState.HELD, on=(), starts=1)


def test_a_machines_request_holds_no_secret_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from belljar.pool import load

    monkeypatch.setenv("BELLJAR_PATHS_STORE", str(tmp_path))
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=head\nNodeName=wn01\n")
    said = replace(SETTINGS, conf=tmp_path / "slurm.conf", key=tmp_path / "key", overhead=100 * MIB)
    job = replace(HELD, uid=0, features=("el9",), nodes=2, cpus=3, memory=1000 * MIB)
    request = request_for(job, "0123456789ab", said, load("slurm"))
    assert (request.id, request.name, request.machine.cpus, request.machine.memory) == (
        "0123456789ab",
        "vm0123456789abx",
        2,
        600 * MIB,
    )
    assert request.machine.network_class == "bridge:br0" and request.machine.image == "worker"
    assert isinstance(request.work, RunPayload) and request.work.payload.stdin is StdinKind.STREAM
    env = dict(request.work.payload.env)
    assert env[b"CONF"] == b"CPUs=2 RealMemory=500 Feature=belljar,bait_bait1,el9" and env[b"PASSWD"].startswith(
        b"root:x:0:0:"
    )
    assert ("alias", "slurm:7") in request.labels  # for `belljar show slurm:7`
    assert b"NodeName" not in request.work.payload.files[0].data  # type: ignore[operator]
    assert env[b"BASELINE"] == b"" and b"BASELINE" in (request.work.payload.script or b"")
    kept = request_for(job, "0123456789ab", replace(said, cache="same-user"), load("slurm"))
    assert isinstance(kept.work, RunPayload) and b"nosuid" in dict(kept.work.payload.env)[b"BASELINE"]
    alone = request_for(replace(job, nodes=1), "0123456789ab", said, load("slurm"))
    envs = [dict(one.work.payload.env) for one in (request, kept, alone) if isinstance(one.work, RunPayload)]
    assert [one[b"ONE_JOB"] for one in envs] == [b"", b"", b"1"]  # of several nodes none ends before the others
    assert "munge.key" not in json.dumps(to_json(request)).replace("/etc/munge/munge.key", "")
    with pytest.raises(BadOption, match="has the uid 5, and 0 on this host"):
        account_of(replace(job, uid=5))
    with pytest.raises(BadOption, match="is not known on this host"):
        account_of(replace(job, owner="nobody-of-this-name"))


def test_the_least_memory_of_a_wrapped_job_is_not_that_of_a_job_whose_machine_comes_beside_its_limit() -> None:
    house: Any = SimpleNamespace(settings=SimpleNamespace(batch=BatchSettings(max_memory=GIB)))
    judge = _judge(house, "worker")
    assert judge(replace(HELD, memory=100 * MIB)) == ""
    assert judge(replace(HELD, memory=2 * GIB)) == "2048 MiB of memory: a job in a machine may have at most 1024 here"


GOOD = '[bait]\nimages = ["worker"]\nnetworks = { open = "br0" }\n'


def test_settings_tell_every_mistake_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "bait.toml"
    file.write_text(GOOD)
    said = settings.load(file)
    assert said.name == os.uname().nodename.partition(".")[0] and said.networks == (("open", "br0"),)
    for text, what in (
        ("", "bait.images: is missing"), ("[bait]\nimage = 1\n", "did you mean images"), (GOOD + 'system = "lsf"\n', "bait.system: wants one of slurm, gridengine; not 'lsf'"),
        (GOOD.replace("br0", "a/b"), "bait.networks: 'a/b' is not the name of a bridge (as in networks = { open"),
        (GOOD + 'system = "gridengine"\nname = "vm.q@wn01"\n', "bait.nodes: is missing"),
        (GOOD + 'name = "a b"\n', f"{file}:4, bait.name: 'a b' cannot be a name"), ("[beit]\n", "no such table"), (GOOD + 'cache = "always"\n', "bait.cache: wants one of never, same-user, same-group; not 'always'"),
        (GOOD + "tries = 0\n", "bait.tries"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(BadSetting) as caught:
            settings.load(file)
        assert what in caught.value.message


def test_a_machine_has_memory_beside_its_jobs(tmp_path: Path) -> None:
    file = tmp_path / "bait.toml"
    file.write_text(GOOD + 'overhead = "0"\n')
    with pytest.raises(BadSetting, match=r"bait\.overhead"):
        settings.load(file)
