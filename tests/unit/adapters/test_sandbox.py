"""What harnesses share: whose fault an end was, who runs commands, which image a name is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.adapters.conftest import Machines, outcome

from belljar import api, errors
from belljar.adapters.sandbox import InfrastructureFailure, Sandbox, TaskFailure, Unfit, image_of, size_of
from belljar.model import Cause
from belljar.records import replace

FAULTS = [
    (Cause.NODE_FAULT, InfrastructureFailure),
    (Cause.HOST_OOM, InfrastructureFailure),
    (Cause.GUEST_LOST, InfrastructureFailure),
    (Cause.BOOT_FAILED, InfrastructureFailure),
    (Cause.CANCELLED, InfrastructureFailure),  # by a person or the batch system
    (Cause.FINISHED, TaskFailure),
    (Cause.GUEST_OOM, TaskFailure),
    (Cause.WALLTIME, TaskFailure),
    (Cause.REFUSED, TaskFailure),
]


@pytest.mark.parametrize(("cause", "kind"), FAULTS)
async def test_an_end_is_the_tasks_fault_or_the_infrastructures(
    machines: Machines, cause: Cause, kind: type[Exception]
) -> None:
    sandbox = await Sandbox.create("debian12")
    machines.lose(cause, "this is why")
    with pytest.raises(kind, match=r"this is why \(Look.\)") as caught:
        await sandbox.exec(["true"])
    assert type(caught.value) is kind


async def test_an_image_in_which_nothing_can_wait_is_not_the_tasks_fault(machines: Machines) -> None:
    sandbox = await Sandbox.create("debian12")
    machines.made[0].script = lambda argv: errors.AgentLost("no answer")
    machines.made[0].end = replace(outcome(Cause.FINISHED, "sh: not found"), error="not-found", exit_code=127)
    with pytest.raises(InfrastructureFailure, match="sh: not found"):
        await sandbox.exec(["true"])


async def test_a_machine_that_does_not_answer_and_does_not_end_is_infrastructure(machines: Machines) -> None:
    machines.script = lambda argv: errors.MachineBusy("the supervisor did not answer")
    with pytest.raises(InfrastructureFailure, match="did not answer"):
        await (await Sandbox.create("debian12")).exec(["true"])


NO_START = [
    (errors.ImageUnknown("no such image"), Unfit, "no such image"),
    (errors.NoMemory("none left"), InfrastructureFailure, "none left"),
    (errors.DownloadFailed("stalled"), InfrastructureFailure, "stalled"),
    (api.Failed(api.Completed(outcome(Cause.BOOT_FAILED, "no boot"), b"", b"")), InfrastructureFailure, "no boot"),
    (api.Failed(api.Completed(outcome(Cause.FINISHED, "exit 127"), b"", b"")), Unfit, "exit 127"),
    (TimeoutError(), InfrastructureFailure, "no sandbox within 5 s"),
    (TypeError("colour: unknown"), Unfit, "colour"),
    (OSError("no more processes"), InfrastructureFailure, "no more processes"),
]


@pytest.mark.parametrize(("error", "kind", "words"), NO_START)
async def test_a_start_that_fails_says_whether_to_try_again(
    machines: Machines, error: Exception, kind: type[Exception], words: str
) -> None:
    machines.trouble = error
    with pytest.raises(kind, match=words):
        await Sandbox.create("debian12", within=5)


async def test_refusals_and_time_limits_are_told_as_they_are(machines: Machines) -> None:
    sandbox = await Sandbox.create("debian12")
    for error in (
        api.TimedOut(1, b"so far", b""),
        errors.GuestRefused("a NUL byte"),
        errors.OutputMissing("not there"),
    ):
        machines.made[0].script = lambda argv, error=error: error
        with pytest.raises(type(error)):
            await sandbox.exec(["true"])


async def test_a_command_runs_as_the_guest_knows_its_user(machines: Machines) -> None:
    sandbox = await Sandbox.create("debian12", env={"A": "1", "B": "1"}, cwd="/repo")
    await sandbox.exec(["true"], env={"B": "2"})
    await sandbox.exec(["true"], cwd="/tmp", user="agent")
    await sandbox.exec(["true"], user=1000)
    root, agent, number = machines.made[0].commands
    assert (root["account"].uid, root["cwd"], root["env"], root["leaves"]) == (0, "/repo", {"A": "1", "B": "2"}, True)
    assert agent["cwd"] == "/tmp" and agent["account"] == number["account"]
    assert (agent["account"].gid, agent["account"].home, agent["account"].groups) == (
        1000,
        "/home/agent",
        ((99, "docker"),),
    )
    with pytest.raises(errors.GuestRefused, match="'nobody': not in the guest"):
        await sandbox.exec(["true"], user="nobody")


async def test_one_that_nobody_holds_is_stopped(machines: Machines) -> None:
    sandbox = await Sandbox.create("debian12")
    del sandbox
    assert machines.made[0].is_released


async def test_a_folder_for_the_root_of_the_guest_is_copied_piece_by_piece(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    sandbox = await Sandbox.create("debian12")
    await sandbox.put(str(tmp_path), "/")
    await sandbox.put(str(tmp_path), "/work")
    assert machines.made[0].copies == [("put", f"{tmp_path}/a", "/a"), ("put", str(tmp_path), "/work")]


def test_a_name_is_the_stores_or_a_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(name: str) -> str:
        if name != "debian12":
            raise errors.ImageUnknown(name)
        return "digest"

    monkeypatch.setattr(api, "image_digest", digest)
    as_they_are = ["debian12", "docker://a/b:1", "oci:/images/a:1", "sif:/a.sif", "https://a.org/disk", None]
    assert [image_of(name) for name in as_they_are] == as_they_are
    assert image_of("python:3.13") == "docker://python:3.13"
    assert image_of("swebench/sweb.eval.x86_64.a:latest") == "docker://swebench/sweb.eval.x86_64.a:latest"


def test_sizes_are_rounded_up_and_what_is_not_said_is_left_to_the_settings() -> None:
    assert size_of(1.5, 100, 2) == {"cpus": 2, "memory": 100 << 20, "disk": 2 << 30}
    assert size_of() == {}
