"""What a payload may rely on behind a real ssh server: the agent's own contract, but for what a shell cannot carry."""

import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.contracts import test_payload_contract
from tests.contracts.ssh_server import CAN_RUN, Server, server

from belljar.guest import Guest

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="root starts an sshd in namespaces of its own")

# Why each of these does not hold is told in docs/contexts.md.
NOT_CARRIED = {
    "test_a_missing_working_directory_is_named": "it is made, as in every machine; told with another one beside this",
    "test_every_exit_code_arrives": "256 payloads at once; told below with fewer",
    "test_nothing_the_payload_started_outlives_it": "it takes control groups, which a guest has",
    "test_arguments_and_environment_are_the_same_to_the_byte": "a variable that is there twice; told below without",
    "test_more_than_a_kernel_takes_is_refused_with_its_reason": "the words are others",
    "test_a_slow_reader_slows_the_payload_and_costs_no_memory": "measured with the agent's own window",
}


@asynccontextmanager
async def talking(channel: Server) -> AsyncIterator[Guest]:
    async with channel.guest() as guest:
        yield guest


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("sshd")) as one:
        yield one


def told_again(test: types.FunctionType) -> types.FunctionType:
    """The test, with other guests."""
    again = types.FunctionType(
        test.__code__, {**test.__globals__, "talking": talking}, test.__name__, test.__defaults__
    )
    again.__dict__.update(test.__dict__)
    again.__annotations__ = test.__annotations__
    return again


for _name, _test in list(vars(test_payload_contract).items()):
    if _name.startswith("test_") and _name not in NOT_CARRIED:
        globals()[_name] = told_again(_test)
