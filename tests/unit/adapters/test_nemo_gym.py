"""NeMo Gym's provider: what its spec asks for, what its results say."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.unit.adapters.conftest import Machines

from belljar import api, errors
from belljar.model import Cause


class CreateError(RuntimeError):
    pass


class Handle(NamedTuple):
    sandbox_id: str
    provider_name: str
    raw: Any


class Result(NamedTuple):
    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None


Status = Enum("Status", ["STARTING", "RUNNING", "STOPPED", "ERROR", "UNKNOWN"])


@pytest.fixture
def gym(framework: Callable[..., None]) -> ModuleType:
    framework(
        "nemo_gym.sandbox.providers.base", SandboxCreateError=CreateError, SandboxHandle=Handle, SandboxExecResult=Result,
        SandboxSpec=SimpleNamespace, SandboxStatus=Status,
    )  # fmt: skip
    import belljar.adapters.nemo_gym

    return importlib.reload(belljar.adapters.nemo_gym)


def spec(**fields: Any) -> Any:
    resources = SimpleNamespace(
        **{"cpu": None, "memory_mib": None, "disk_gib": None, "gpu": None, **fields.pop("resources", {})}
    )
    usual: dict[str, Any] = {
        "image": None, "ttl_s": None, "ready_timeout_s": None, "workdir": None, "env": {}, "metadata": {}, "entrypoint": None,
        "provider_options": {},
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **fields, "resources": resources})


async def test_a_spec_becomes_a_machine(gym: ModuleType, machines: Machines) -> None:
    provider = gym.BelljarProvider(network="user", image="debian12")
    handle = await provider.create(
        spec(
            ttl_s=60, workdir="/w", env={"A": "1"}, metadata={"task": "7"}, entrypoint=["serve"],
            resources={"cpu": 0.5, "memory_mib": 512}, provider_options={"network": "none"},
        )
    )  # fmt: skip
    asked = machines.made[0].options
    assert handle.sandbox_id == machines.made[0].id and handle.provider_name == "belljar"
    assert (asked["argv"], asked["image"], asked["timeout"], asked["network"]) == (("serve",), "debian12", 60, "none")
    assert (asked["cpus"], asked["memory"], asked["labels"], asked["cwd"]) == (1, 512 << 20, {"task": "7"}, "/w")


async def test_a_spec_comes_before_the_provider_and_its_options_before_both(
    gym: ModuleType, machines: Machines
) -> None:
    provider = gym.BelljarProvider(image="usual", memory="1G", cwd="/usual")
    asked = spec(image="debian12", workdir="/asked", provider_options={"timeout": 5, "cwd": "/first", "memory": "2G"})
    await provider.create(asked)
    options = machines.made[0].options
    assert (options["image"], options["cwd"], options["timeout"], options["memory"]) == ("debian12", "/first", 5, "2G")


async def test_what_cannot_be_made_is_a_create_error(gym: ModuleType, machines: Machines) -> None:
    provider = gym.BelljarProvider()
    with pytest.raises(CreateError, match="GPU"):
        await provider.create(spec(resources={"gpu": 1}))
    for trouble in (errors.ImageUnknown("no such image"), errors.NoMemory("none left"), TimeoutError()):
        machines.trouble = trouble
        with pytest.raises(CreateError):
            await provider.create(spec())


async def test_results_tell_commands_time_limits_and_faults_apart(gym: ModuleType, machines: Machines) -> None:
    provider = gym.BelljarProvider()
    handle = await provider.create(spec())
    machine = machines.made[0]
    machine.script = lambda argv: (3, b"\xff", b"no")
    assert await provider.exec(handle, "x") == Result("�", "no", 3)
    assert machine.commands[0]["argv"] == ("sh", "-c", "x") and machine.commands[0]["timeout"] == 180
    machine.script = lambda argv: api.TimedOut(2, b"part", b"")
    assert await provider.exec(handle, "x", timeout_s=2) == Result("part", "not finished after 2 s", 125, "timeout")
    assert (await provider.exec(handle, "x", user="nobody")).error_type == "task"
    assert await provider.status(handle) is Status.RUNNING
    machines.lose(Cause.HOST_OOM, "killed")
    assert (await provider.exec(handle, "x")).error_type == "sandbox"
    assert await provider.status(handle) is Status.ERROR
    machines.lose(Cause.REFUSED, "the payload powered the guest off")
    assert (await provider.exec(handle, "x")).error_type == "task"
    assert await provider.status(handle) is Status.STOPPED


async def test_files_go_up_and_down_and_close_ends_it(gym: ModuleType, machines: Machines, tmp_path: Path) -> None:
    provider = gym.BelljarProvider()
    handle = await provider.create(spec())
    await provider.upload_file(handle, tmp_path / "up", "/in/up")
    await provider.download_file(handle, "/in/up", tmp_path / "new/down")
    await provider.close(handle)
    await provider.aclose()
    assert [words[0] for words in machines.made[0].copies] == ["put", "get"] and (tmp_path / "new").is_dir()
    assert machines.made[0].is_left
