"""Programs that use sandboxes by the frameworks' own doors. Each runs where its framework is installed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


def of_the_page(key: str) -> dict[str, Any]:
    """The configuration that the page shows."""
    import yaml

    page = Path(__file__).parents[2].joinpath("docs/operate/sandboxes.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    return next(block for block in blocks if key in block)


def gym() -> None:
    """NeMo Gym's public API, asynchronous and not, and its own environment for mini-swe-agent on top of that."""
    asyncio.run(gym_asynchronous())
    gym_in_turn()
    gym_of_its_agent()


async def gym_asynchronous() -> None:
    from nemo_gym.sandbox import (
        AsyncSandbox,
        SandboxCreateError,
        SandboxSpec,
        SandboxStatus,
        list_providers,
        resolve_provider_config,
    )

    assert "belljar" in list_providers()
    spec = SandboxSpec(
        image="debian12", workdir="/work", env={"A": "1"}, files={"/work/deep/in.txt": "some seed\n"}, ttl_s=600,
        resources={"cpu": 1, "memory_mib": 400}, metadata={"task": "one"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, "here")
        async with AsyncSandbox(resolve_provider_config("sandbox", of_the_page("sandbox")), spec) as sandbox:
            await sandbox.start()
            result = await sandbox.exec("echo $A $B; pwd; cat deep/in.txt; echo no >&2; exit 3", env={"B": "2"})
            assert (result.return_code, result.error_type) == (3, None), result
            assert (result.stdout, result.stderr) == ("1 2\n/work\nsome seed\n", "no\n"), result
            here.write_bytes(bytes(range(256)) * 1000)  # noqa: ASYNC240
            await sandbox.upload(here, "/new/folder/file")
            await sandbox.download("/new/folder/file", Path(folder, "back/file"))
            assert Path(folder, "back/file").read_bytes() == here.read_bytes()  # noqa: ASYNC240
            late = await sandbox.exec("echo part; sleep 100", timeout_s=1)
            assert (late.error_type, late.stdout) == ("timeout", "part\n"), late
            assert (await sandbox.exec("id -un", user="nobody")).stdout == "nobody\n"
            assert await sandbox.status() is SandboxStatus.RUNNING
            pid = sandbox._handle.raw.machine.view.pid
            os.kill(pid, signal.SIGKILL)
            assert (await sandbox.exec("true")).error_type == "sandbox"
            assert await sandbox.status() is SandboxStatus.ERROR
        assert await sandbox.status() is SandboxStatus.STOPPED
    try:
        await AsyncSandbox({"belljar": {}}, SandboxSpec(image="oci:/no/such/folder")).start()
    except SandboxCreateError as exc:
        print(exc)
    else:
        raise AssertionError("an image that is not there")
    for moment in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8):
        sandbox = AsyncSandbox({"belljar": {}}, spec)
        starting = asyncio.ensure_future(sandbox.start())
        await asyncio.wait({starting}, timeout=moment)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await sandbox.stop()


def gym_in_turn() -> None:
    from nemo_gym.sandbox import Sandbox, SandboxSpec

    with Sandbox({"belljar": {"image": "debian12"}}, SandboxSpec()) as sandbox:
        sandbox.start()
        assert sandbox.exec("echo hello").stdout == "hello\n"


def gym_of_its_agent() -> None:
    from responses_api_agents.mini_swe_agent_2.sandbox_environment import MiniSWESandboxEnvironment

    with MiniSWESandboxEnvironment(image="debian12", provider={"belljar": {}}, cwd="/testbed") as environment:
        assert environment.execute({"command": "pwd; false"}) == {
            "output": "/testbed\n", "returncode": 1, "exception_info": "",
        }  # fmt: skip


def mini() -> None:
    """mini-swe-agent's default agent, with its model for tests."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments import get_environment
    from minisweagent.models.test_models import DeterministicModel, make_output

    def run(*commands: str, environment: Any, **options: Any) -> tuple[dict[str, Any], str]:
        steps = [make_output("", [{"command": command}]) for command in commands]
        model = DeterministicModel(outputs=steps)
        agent = DefaultAgent(model, environment, system_template="{{machine}}", instance_template="{{task}}", **options)
        return agent.run("a task"), "\n".join(str(message["content"]) for message in agent.messages)

    config = {**of_the_page("environment")["environment"], "env": {"A": "1"}}
    environment = get_environment(config)
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat fix"
    told, said = run("echo $A >fix; pwd; false", "echo half; sleep 1000", submit, environment=environment)
    assert (told["exit_status"], told["submission"]) == ("Submitted", "1\n"), told
    assert "<returncode>1</returncode>\n<output>\n/testbed\n" in said and "not finished after 20 s" in said, said
    os.kill(environment._sandbox.machine.view.pid, signal.SIGKILL)
    try:
        run("true", environment=environment)
    except RuntimeError as exc:
        assert type(exc).__name__ == "InfrastructureFailure", exc
    else:
        raise AssertionError("a machine that is gone")
    environment.cleanup()


def openenv() -> None:
    """The echo that `openenv init` makes. Its server runs in the guest by this host's Python, which is shared with it."""
    from belljar.adapters.openenv import BelljarProvider
    from belljar.model import Share

    venv = Path(sys.argv[2]).parent
    (site,) = venv.glob("lib/*/site-packages")
    command = ["/py/lib64/ld-linux-x86-64.so.2", "--library-path", "/py/lib/x86_64-linux-gnu", "/py/bin/python3"]
    command += ["-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", "8000"]
    shares = (Share("/usr", "/py"), Share(str(site), "/site"), Share("/env/echo_test", "/app"))
    options = {"shares": shares, "memory": "1G", "cpus": 2, "cwd": "/app", "context": "ramdisk"}
    provider = BelljarProvider(command=command, ready_timeout_s=900, **options)
    asyncio.run(openenv_client(provider))


async def openenv_client(provider: Any) -> None:
    sys.path.append("/env")
    from echo_test import EchoTestAction, EchoTestEnv

    variables = {"PYTHONHOME": "/py", "PYTHONPATH": "/app:/site"}
    client = await EchoTestEnv.from_docker_image("debian12", provider=provider, env_vars=variables)
    try:
        assert (await client.reset()).observation.echoed_message == "Echo Test environment ready!"
        for message in ("Hello", "two"):
            result = await client.step(EchoTestAction(message=message))
            assert (result.observation.echoed_message, result.observation.message_length) == (message, len(message))
    finally:
        await client.close()


if __name__ == "__main__":
    {"gym": gym, "mini": mini, "openenv": openenv}[sys.argv[1]]()
    print("all as expected")
