"""A test may be a coroutine: it runs in a loop of its own, with a limit."""

import asyncio
import inspect

import pytest

LIMIT = 60.0  # seconds; a test that hangs is a failure, not a wait
LONG = (  # files that take longest: begun first, so that no process waits for the last one
    "test_htcondor.py", "test_slurm_lease.py", "test_lease_user_page.py", "test_node_side.py", "test_gridengine_guide.py",
    "test_gridengine_jobs.py", "test_gridengine_faults.py", "test_slurm_control.py", "test_gridengine_control.py",
    "test_faults.py", "test_users.py", "test_image_life.py", "test_executor.py", "test_qemu_clone.py", "test_identity.py",
    "test_libvirt.py", "test_image_boot.py", "test_virtiofs.py", "test_vacuum.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    work = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(work, LIMIT))
    return True
