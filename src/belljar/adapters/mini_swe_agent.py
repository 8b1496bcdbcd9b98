"""An environment of mini-swe-agent: `environment_class: belljar.adapters.mini_swe_agent.BelljarEnvironment` in its
configuration.

A command that takes too long is the task's affair: `exception_info` tells it to the model. A machine that is lost ends the
agent by an exception, whose name is the run's exit status: `InfrastructureFailure` (leave the sample out), `TaskFailure`.
"""

from __future__ import annotations

import os
from typing import Any

from minisweagent.environments.docker import DockerEnvironment, DockerEnvironmentConfig

from belljar import api
from belljar.adapters.sandbox import Sandbox, blocking, text
from belljar.errors import BelljarError


class Config(DockerEnvironmentConfig):  # type: ignore[misc]
    """Docker's, of which `container_timeout` is the machine's longest life. *options* are those of `belljar.api`."""

    image: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it


class BelljarEnvironment(DockerEnvironment):  # type: ignore[misc]
    """One machine, until `cleanup`, or as long as this is held."""

    _sandbox: Sandbox | None = None

    def __init__(self, *, config_class: type = Config, **kwargs: Any) -> None:
        super().__init__(config_class=config_class, **kwargs)

    def _start_container(self) -> None:
        asked = self.config
        env = {name: os.environ[name] for name in asked.forward_env if name in os.environ}
        usual = {"env": {**env, **asked.env}, "cwd": asked.cwd, "timeout": asked.container_timeout}
        self._sandbox = blocking(Sandbox.create(asked.image, **{**usual, **asked.options}))

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Raises Submitted, InfrastructureFailure, TaskFailure."""
        if self._sandbox is None:
            raise RuntimeError("the environment was cleaned up")
        words = ["sh", "-c", 'exec "$@" 2>&1', "sh", *self.config.interpreter, action.get("command", "")]
        limit = timeout or self.config.timeout
        try:
            code, out, err = blocking(self._sandbox.exec(words, cwd=cwd or None, timeout=limit))
            output: dict[str, Any] = {"output": out + err, "returncode": code, "exception_info": ""}
        except (api.TimedOut, BelljarError, ValueError) as exc:
            output = {
                "output": text(exc.stdout) if isinstance(exc, api.TimedOut) else "",
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {exc}",
                "extra": {"exception_type": type(exc).__name__, "exception": str(exc)},
            }
        self._check_finished(output)
        return output

    def cleanup(self) -> None:
        """Return when the machine is gone."""
        if self._sandbox is not None:
            blocking(self._sandbox.close())
            self._sandbox = None

    def __del__(self) -> None:
        """What nobody holds any more is stopped by itself."""
