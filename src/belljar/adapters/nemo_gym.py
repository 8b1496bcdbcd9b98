"""A sandbox provider of NeMo Gym: `{"belljar": {...}}` as provider config; it is found by its entry point.

A sandbox that cannot be made, or was lost, raises SandboxCreateError. `error_type` of a result is None where the command ran, whatever its
exit code; "timeout"; "sandbox" where the machine was lost through no fault of the task (mask the sample); and "task" where the
task itself ended it. Snapshots and GPUs there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from belljar import api
from belljar.adapters.sandbox import FAULTS, Sandbox, TaskFailure, size_of, text
from belljar.errors import BelljarError, NoSuchMachine

NOT_THE_COMMANDS = 125  # the return code of a result with an `error_type`


class GymSandbox(Sandbox):
    infrastructure = unfit = SandboxCreateError


class BelljarProvider:
    """Implements `SandboxProvider`. Its *options* are those of `belljar.api` that each machine is to have, such as `network`;
    `provider_options` of a spec come before them."""

    name = "belljar"

    def __init__(self, *, user: str | int = "root", default_timeout_s: float | None = 180, **options: Any) -> None:
        self._user, self._timeout, self._options = user, default_timeout_s, options

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        resources = spec.resources
        if resources.gpu:
            raise SandboxCreateError("resources.gpu: a sandbox of belljar has no GPU")
        asked = {
            "image": spec.image, "argv": spec.entrypoint, "env": spec.env, "cwd": spec.workdir, "timeout": spec.ttl_s,
            "within": spec.ready_timeout_s, **size_of(resources.cpu, resources.memory_mib, resources.disk_gib),
        }  # fmt: skip
        given = {name: value for name, value in asked.items() if value}
        options = {"user": self._user, **self._options, **given, **spec.provider_options}
        options["labels"] = {**options.get("labels", {}), **spec.metadata}
        sandbox = await GymSandbox.create(options.pop("image", None), **options)
        return SandboxHandle(sandbox.machine.id, self.name, sandbox)

    async def exec(
        self, handle: SandboxHandle, command: str, *, cwd: str | None = None, env: dict[str, str] | None = None,
        timeout_s: float | None = None, user: str | int | None = None,
    ) -> SandboxExecResult:  # fmt: skip
        limit = self._timeout if timeout_s is None else timeout_s
        try:
            code, out, err = await handle.raw.exec(["sh", "-c", command], cwd=cwd, env=env, timeout=limit, user=user)
        except api.TimedOut as late:
            return SandboxExecResult(text(late.stdout), f"{text(late.stderr)}{late}", NOT_THE_COMMANDS, "timeout")
        except SandboxCreateError as exc:
            return SandboxExecResult(None, str(exc), NOT_THE_COMMANDS, "sandbox")
        except (TaskFailure, BelljarError, ValueError) as exc:
            return SandboxExecResult(None, str(exc), NOT_THE_COMMANDS, "task")
        return SandboxExecResult(out, err, code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await handle.raw.put(str(source_path), target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        await handle.raw.get(source_path, str(target_path))

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            view = handle.raw.machine.view
        except NoSuchMachine:
            return SandboxStatus.UNKNOWN
        if view.ended is None:
            return SandboxStatus.RUNNING if view.alive else SandboxStatus.ERROR
        return SandboxStatus.ERROR if (view.outcome or {}).get("class") in FAULTS else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        await handle.raw.close()

    async def aclose(self) -> None:
        """Nothing is shared between sandboxes; one that nobody holds any more is stopped by itself."""
