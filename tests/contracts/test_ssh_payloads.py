"""What a payload may rely on where frames go over a session of a real ssh server: the whole of the agent's own contract."""

import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.contracts import test_payload_contract
from tests.contracts.ssh_server import CAN_RUN, Server, server

from belljar.guest import Guest

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="root starts an sshd in namespaces of its own")


# What these look at is the rehearsing agent's own, which is a process of this host; live tests tell them of real guests.
OF_A_REHEARSAL = {
    "test_a_missing_working_directory_is_named": "a real guest makes it, by every carrier",
    "test_nothing_the_payload_started_outlives_it": "it looks for a process id of the guest among those of this host",
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
    if _name.startswith("test_") and _name not in OF_A_REHEARSAL:
        globals()[_name] = told_again(_test)
