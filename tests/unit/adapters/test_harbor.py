"""Harbor's environment: what a task asks for, and the names of exceptions by which Harbor tells failures apart."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.adapters.conftest import Machines

from belljar import api, errors
from belljar.model import Cause

NetworkMode = Enum("NetworkMode", ["NO_NETWORK", "PUBLIC", "ALLOWLIST"])


class HealthcheckError(RuntimeError):
    pass


class SandboxBuildFailedError(Exception):
    pass


class BaseEnvironment:
    """What ours uses of Harbor's."""

    hosts = ("pypi.org", "*.pythonhosted.org")

    def __init__(self, *, task: Any, policy: NetworkMode = NetworkMode.PUBLIC, **more: Any) -> None:
        assert not more
        self.task_env_config, self.session_id, self.default_user = task, "trial__env", None
        self.network_policy, self.logger = (
            SimpleNamespace(network_mode=policy, allowed_hosts=self.hosts),
            logging.getLogger(),
        )
        self._effective_cpus, self._effective_memory_mb, self._effective_storage_mb = 2, 1024, 512
        self._validate_definition()

    def _startup_env(self) -> dict[str, str]:
        return {"TASK": "1"}

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return env

    def _resolve_user(self, user: str | int | None) -> str | int | None:
        return user

    def _mount_targets(self, *, writable_only: bool) -> list[str]:
        return ["/logs"]

    async def ensure_dirs(self, folders: list[str]) -> None:
        await self.exec(f"mkdir -p {' '.join(folders)}")

    async def _upload_environment_dir_after_start(self) -> None:
        """Nothing to upload."""


@pytest.fixture
def harbor(framework: Callable[..., None]) -> ModuleType:
    framework(
        "harbor.environments.base", BaseEnvironment=BaseEnvironment, ExecResult=SimpleNamespace,
        HealthcheckError=HealthcheckError, SandboxBuildFailedError=SandboxBuildFailedError,
    )  # fmt: skip
    framework(
        "harbor.environments.capabilities", EnvironmentCapabilities=SimpleNamespace,
        EnvironmentResourceCapabilities=SimpleNamespace,
    )  # fmt: skip
    framework("harbor.models.task.config", NetworkMode=NetworkMode)
    import belljar.adapters.harbor

    return importlib.reload(belljar.adapters.harbor)


def task(image: str | None = "debian12") -> Any:
    return SimpleNamespace(docker_image=image, workdir="/app")


async def test_a_task_becomes_a_machine_and_its_commands_run(
    harbor: ModuleType, machines: Machines, tmp_path: Path
) -> None:
    environment = harbor.BelljarEnvironment(task=task(), start="cold")
    await environment.start(force_build=False)
    asked = machines.made[0].options
    assert (asked["image"], asked["network"], asked["start"], asked["cpus"]) == ("debian12", "user", "cold", 2)
    assert (asked["memory"], asked["disk"], asked["labels"]) == (1 << 30, 512 << 20, {"trial": "trial__env"})
    machines.made[0].script = lambda argv: (4, b"out", b"err")
    done = await environment.exec("x", cwd="/c", env={"A": "1"}, timeout_sec=7, user="agent")
    assert (done.return_code, done.stdout, done.stderr) == (4, "out", "err")
    command = machines.made[0].commands[-1]
    assert command["argv"] == ("bash", "-c", "x") and command["account"].name == "agent"
    assert (command["cwd"], command["env"], command["timeout"]) == ("/c", {"TASK": "1", "A": "1"}, 7)
    await environment.upload_dir(source_dir=tmp_path, target_dir="/in")  # by name, as Harbor does
    await environment.download_file("/out", tmp_path / "out")
    assert [words[0] for words in machines.made[0].copies] == ["put", "get"]
    await environment.stop(delete=False)
    assert machines.made[0].is_left


async def test_failures_have_the_names_that_harbor_knows(harbor: ModuleType, machines: Machines) -> None:
    environment = harbor.BelljarEnvironment(task=task(), policy=NetworkMode.NO_NETWORK)
    for trouble, kind in (
        (errors.ImageUnknown("x"), SandboxBuildFailedError),
        (errors.NoMemory("x"), HealthcheckError),
    ):
        machines.trouble = trouble
        with pytest.raises(kind):
            await environment.start(force_build=False)
    machines.trouble = None
    with pytest.raises(RuntimeError, match="not been started"):
        await environment.exec("x")
    await environment.start(force_build=False)
    assert machines.made[0].options["network"] == "none"
    machines.made[0].script = lambda argv: api.TimedOut(7, b"", b"")
    with pytest.raises(RuntimeError, match="Command timed out after 7 seconds") as caught:
        await environment.exec("x", timeout_sec=7)
    assert not isinstance(caught.value, TimeoutError)
    machines.lose(Cause.GUEST_LOST)
    with pytest.raises(HealthcheckError):
        await environment.exec("x")


def test_a_dockerfile_alone_is_not_enough(harbor: ModuleType) -> None:
    with pytest.raises(ValueError, match="docker_image"):
        harbor.BelljarEnvironment(task=task(None))
    harbor.BelljarEnvironment(task=task(None), image="debian12")


@pytest.mark.parametrize(("hosts", "allow"), [(("pypi.org", "*.org"), ("pypi.org", "*.org")), ((), ("none",))])
async def test_hosts_that_a_task_may_reach_are_the_machines(
    harbor: ModuleType,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    allow: tuple[str, ...],
) -> None:
    monkeypatch.setattr(BaseEnvironment, "hosts", hosts)
    environment = harbor.BelljarEnvironment(task=task(), policy=NetworkMode.ALLOWLIST)
    await environment.start(force_build=False)
    assert (machines.made[0].options["network"], machines.made[0].options["allow"]) == ("user", allow)
    assert environment.capabilities.network_allowlist and not hasattr(environment.capabilities, "gpus")
