"""A test may be a coroutine: it runs in a loop of its own, with a limit."""

import asyncio
import inspect

import pytest

LIMIT = 60.0  # seconds; a test that hangs is a failure, not a wait


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    work = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(work, LIMIT))
    return True
