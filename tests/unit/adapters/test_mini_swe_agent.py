"""mini-swe-agent's environment: what it tells the model, what ends the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.adapters.conftest import Machines

from belljar import api, errors
from belljar.adapters.mini_swe_agent import BelljarEnvironment
from belljar.adapters.sandbox import InfrastructureFailure, TaskFailure
from belljar.model import Cause


class Submitted(Exception):
    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = messages


@pytest.fixture(autouse=True)
def mini(framework: Callable[..., None]) -> None:
    framework("minisweagent.exceptions", Submitted=Submitted)


def test_a_command_and_its_end(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    environment = BelljarEnvironment(image="debian12", cwd="/testbed", env={"A": "1"}, forward_env=["TOKEN", "MISSING"])
    machines.made[0].script = lambda argv: (2, b"both", b"")
    assert environment.execute({"command": "ls"}) == {"output": "both", "returncode": 2, "exception_info": ""}
    command = machines.made[0].commands[0]
    assert command["argv"][-3:] == ("bash", "-lc", "ls") and command["env"] == {"TOKEN": "secret", "A": "1"}
    assert (command["cwd"], command["timeout"]) == ("/testbed", 30)
    assert environment.get_template_vars(more=1)["more"] == 1
    told = environment.serialize()["info"]["config"]
    assert told["environment_type"] == "belljar.adapters.mini_swe_agent.BelljarEnvironment"
    assert told["environment"]["cwd"] == "/testbed"
    environment.cleanup()
    environment.cleanup()
    assert machines.made[0].is_left


def test_what_takes_too_long_is_told_to_the_model(machines: Machines) -> None:
    environment = BelljarEnvironment(image="debian12", timeout=5)
    machines.made[0].script = lambda argv: api.TimedOut(5, b"half", b"")
    told = environment.execute({"command": "sleep 100"})
    assert (told["output"], told["returncode"], told["extra"]["exception_type"]) == ("half", -1, "TimedOut")
    assert "not finished after 5 s" in told["exception_info"]
    machines.made[0].script = lambda argv: errors.GuestRefused("a NUL byte")
    assert environment.execute({"command": "a\0b"})["returncode"] == -1


def test_a_task_is_submitted_by_its_first_line(machines: Machines) -> None:
    environment = BelljarEnvironment(image="debian12")
    machines.made[0].script = lambda argv: (0, b"\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\ndiff\nmore\n", b"")
    with pytest.raises(Submitted) as caught:
        environment.execute({"command": "x"})
    assert caught.value.messages[0]["extra"] == {"exit_status": "Submitted", "submission": "diff\nmore\n"}
    machines.made[0].script = lambda argv: (1, b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", b"")
    assert environment.execute({"command": "x"})["returncode"] == 1


@pytest.mark.parametrize(("cause", "kind"), [(Cause.NODE_FAULT, InfrastructureFailure), (Cause.WALLTIME, TaskFailure)])
def test_a_machine_that_is_lost_ends_the_agent(machines: Machines, cause: Cause, kind: type[Exception]) -> None:
    environment = BelljarEnvironment(image="debian12")
    machines.lose(cause)
    with pytest.raises(kind):
        environment.execute({"command": "x"})
