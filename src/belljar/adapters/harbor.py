"""An environment of Harbor: `--env belljar.adapters.harbor:BelljarEnvironment` (before Harbor 0.26 `--environment-import-path`),
with options of `belljar.api` by `--ek NAME=VALUE`.

It takes prebuilt images (`docker_image` of the task, or `--ek image=REF`) and builds no Dockerfile. Harbor tells failures
apart by the names of exceptions: a machine that could not be started or was lost through no fault of the task raises its
HealthcheckError (tried again, not graded, no valid reward), what no second try mends its SandboxBuildFailedError. Several
containers, GPUs, snapshots and changes of the network there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, HealthcheckError, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode

from belljar import api
from belljar.adapters.sandbox import Sandbox, size_of


class HarborSandbox(Sandbox):
    infrastructure, unfit = HealthcheckError, SandboxBuildFailedError


class BelljarEnvironment(BaseEnvironment):  # type: ignore[misc, unused-ignore]
    """One machine for one trial."""

    def __init__(self, *args: Any, image: str | None = None, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in api.Options.__annotations__}
        self._image, self._given = image, given
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "belljar"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True, network_allowlist=True, network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True, network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
        )  # fmt: skip

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        if not (self._image or self.task_env_config.docker_image):
            raise ValueError(
                "belljar builds no Dockerfile: set docker_image in [environment] of task.toml, or `--ek image=REF`"
            )

    async def start(self, force_build: bool) -> None:
        task, storage = self.task_env_config, self._effective_storage_mb
        sizes = size_of(self._effective_cpus, self._effective_memory_mb, storage and storage / 1024)
        usual = {"env": self._startup_env(), "cwd": task.workdir, "labels": {"trial": self.session_id}}
        options = {**usual, **network_of(self.network_policy), **sizes, **self._given}
        self._sandbox = await HarborSandbox.create(self._image or task.docker_image, **options)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """A machine that is stopped is gone, whatever *delete* is."""
        if self._sandbox is not None:
            await self._sandbox.close()

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment has not been started")
        return self._sandbox

    async def exec(
        self, command: str, cwd: str | None = None, env: dict[str, str] | None = None, timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:  # fmt: skip
        env, user = self._merge_env(env), self._resolve_user(user)
        words = ["bash", "-c", command]
        try:
            code, out, err = await self.sandbox.exec(words, cwd=cwd, env=env, timeout=timeout_sec, user=user)
        except api.TimedOut as late:  # no TimeoutError: Harbor would take that for one of its own phases'
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from late
        return ExecResult(stdout=out, stderr=err, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.sandbox.put(str(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.sandbox.put(str(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.sandbox.get(source_path, str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.sandbox.get(source_dir, str(target_dir))


def network_of(policy: Any) -> dict[str, Any]:
    """Options of a machine that reaches what Harbor's policy lets it."""
    if policy.network_mode is NetworkMode.NO_NETWORK:
        return {"network": "none"}
    if policy.network_mode is NetworkMode.PUBLIC:
        return {"network": "user"}
    return {"network": "user", "allow": tuple(policy.allowed_hosts) or ("none",)}
