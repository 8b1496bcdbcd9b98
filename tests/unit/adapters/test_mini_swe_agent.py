"""mini-swe-agent's environment: what it tells the model, what ends the agent."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.unit.adapters.conftest import Machines

from belljar import api, errors
from belljar.adapters.sandbox import InfrastructureFailure, TaskFailure
from belljar.model import Cause


class Submitted(Exception):
    pass


class Config:
    """What ours uses of Docker's."""

    def __init__(self, **given: Any) -> None:
        usual = {"cwd": "/", "env": {}, "forward_env": [], "timeout": 30, "container_timeout": "2h"}
        vars(self).update({**usual, "interpreter": ["bash", "-lc"], **given})


class DockerEnvironment:
    def __init__(self, *, config_class: type, **kwargs: Any) -> None:
        self.config = config_class(**kwargs)
        self._start_container()

    def _start_container(self) -> None:
        raise AssertionError("docker is not asked")

    def _check_finished(self, output: dict[str, Any]) -> None:
        if output["output"].startswith("COMPLETE") and output["returncode"] == 0:
            raise Submitted


@pytest.fixture
def mini(framework: Callable[..., None]) -> ModuleType:
    framework("minisweagent.environments.docker", DockerEnvironment=DockerEnvironment, DockerEnvironmentConfig=Config)
    import belljar.adapters.mini_swe_agent

    return importlib.reload(belljar.adapters.mini_swe_agent)


def test_a_command_and_its_end(mini: ModuleType, machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    environment = mini.BelljarEnvironment(
        image="debian12", cwd="/testbed", env={"A": "1"}, forward_env=["TOKEN", "MISSING"]
    )
    machines.made[0].script = lambda argv: (2, b"both", b"")
    assert environment.execute({"command": "ls"}) == {"output": "both", "returncode": 2, "exception_info": ""}
    command = machines.made[0].commands[0]
    assert command["argv"][-3:] == ("bash", "-lc", "ls") and command["env"] == {"TOKEN": "secret", "A": "1"}
    assert (command["cwd"], command["timeout"]) == ("/testbed", 30)
    assert machines.made[0].options["timeout"] == "2h"
    environment.cleanup()
    environment.cleanup()
    assert machines.made[0].is_left


def test_what_takes_too_long_is_told_to_the_model(mini: ModuleType, machines: Machines) -> None:
    environment = mini.BelljarEnvironment(image="debian12", timeout=5)
    machines.made[0].script = lambda argv: api.TimedOut(5, b"half", b"")
    told = environment.execute({"command": "sleep 100"})
    assert (told["output"], told["returncode"], told["extra"]["exception_type"]) == ("half", -1, "TimedOut")
    assert "not finished after 5 s" in told["exception_info"]
    machines.made[0].script = lambda argv: errors.GuestRefused("a NUL byte")
    assert environment.execute({"command": "a\0b"})["returncode"] == -1


def test_a_task_that_is_submitted_ends_the_agent(mini: ModuleType, machines: Machines) -> None:
    environment = mini.BelljarEnvironment(image="debian12")
    machines.made[0].script = lambda argv: (0, b"COMPLETE", b"")
    with pytest.raises(Submitted):
        environment.execute({"command": "x"})


@pytest.mark.parametrize(("cause", "kind"), [(Cause.NODE_FAULT, InfrastructureFailure), (Cause.WALLTIME, TaskFailure)])
def test_a_machine_that_is_lost_ends_the_agent(
    mini: ModuleType, machines: Machines, cause: Cause, kind: type[Exception]
) -> None:
    environment = mini.BelljarEnvironment(image="debian12")
    machines.lose(cause)
    with pytest.raises(kind):
        environment.execute({"command": "x"})
