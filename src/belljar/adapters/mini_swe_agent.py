"""An environment of mini-swe-agent: `environment_class: belljar.adapters.mini_swe_agent.BelljarEnvironment` in its
configuration.

A command that takes too long is the task's affair: `exception_info` tells it to the model. A machine that is lost ends the
agent by an exception, whose name is the run's exit status: `InfrastructureFailure` (leave the sample out), `TaskFailure`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from belljar import api
from belljar.adapters.sandbox import Sandbox, blocking, text
from belljar.errors import BelljarError

SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass
class Config:
    """Fields have the names that mini-swe-agent's own environments give them; *options* are those of `belljar.api`."""

    image: str | None = None
    cwd: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    forward_env: list[str] = field(default_factory=list)
    timeout: int = 30
    container_timeout: str = "2h"  # the machine's longest life
    interpreter: list[str] = field(default_factory=lambda: ["bash", "-lc"])
    options: dict[str, Any] = field(default_factory=dict)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return asdict(self)


class BelljarEnvironment:
    """One machine, until `cleanup`, or as long as this is held."""

    def __init__(self, *, config_class: type = Config, **kwargs: Any) -> None:
        self.config = config_class(**kwargs)
        env = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        usual = {"env": {**env, **self.config.env}, "cwd": self.config.cwd, "timeout": self.config.container_timeout}
        creating = Sandbox.create(self.config.image, **{**usual, **self.config.options})
        self._sandbox: Sandbox | None = blocking(creating)

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

    def _check_finished(self, output: dict[str, Any]) -> None:
        from minisweagent.exceptions import Submitted

        first, _, rest = output["output"].lstrip().partition("\n")
        if first.strip() == SUBMITTED and output["returncode"] == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        system, node, release, version, machine = os.uname()
        host = {"system": system, "node": node, "release": release, "version": version, "machine": machine}
        return {**self.config.model_dump(), **host, **kwargs}

    def serialize(self) -> dict[str, Any]:
        kind = type(self)
        config = {"environment": self.config.model_dump(), "environment_type": f"{kind.__module__}.{kind.__name__}"}
        return {"info": {"config": config}}

    def cleanup(self) -> None:
        """Return when the machine is gone."""
        if self._sandbox is not None:
            blocking(self._sandbox.close())
            self._sandbox = None
