"""A system that announces a job's end may do so again when the job has ended: that does not kill the process that tells how."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.jobs.paper_node import request_for

from belljar.guest import Streams
from belljar.jobs.attend import attend


@pytest.mark.parametrize("fails", [False, True])
def test_an_announcement_after_the_end_is_not_heard(fails: bool) -> None:
    async def keep(*_: Any, **__: Any) -> str:
        await asyncio.sleep(0)
        if fails:
            raise RuntimeError("lost")
        return "outcome"

    runtime: Any = SimpleNamespace(supervisor=lambda: SimpleNamespace(keep=keep))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            request = request_for("0123456789ab", "gridengine:7")
            attend(runtime, request, Streams(None, None, None), notice=(int(signal.SIGUSR2), 60.0))
            code = 0 if fails else 7
        except RuntimeError:
            code = 7 if fails else 0
        finally:
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
