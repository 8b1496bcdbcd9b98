"""A test may be a coroutine: it runs in a loop of its own, with a limit."""

import asyncio
import inspect

import pytest

LIMIT = 60.0  # seconds; a test that hangs is a failure, not a wait
LONG = (  # files that take longest: begun first, so that no process waits for the last one; jobs and live tests in turn
    "test_htcondor.py", "test_users.py", "test_slurm_lease.py", "test_faults.py", "test_lease_user_page.py",
    "test_gridengine_guide.py", "test_virtiofs.py", "test_slurm_control.py", "test_workshop.py", "test_gridengine_jobs.py",
    "test_qemu_clone.py", "test_gridengine_faults.py", "test_image_life.py", "test_gridengine_control.py", "test_executor.py",
    "test_slurm_jobs.py", "test_image_boot.py", "test_slurm_site.py", "test_sharing.py", "test_slurm_guide.py",
    "test_libvirt_session.py", "test_gridengine_native.py", "test_contract.py", "test_node_side.py", "test_bad_input.py",
    "test_gridengine_storms.py", "test_verbs.py", "test_slurm_lock.py", "test_data.py", "test_gridengine_lease.py",
    "test_libvirt.py", "test_slurm_pool.py", "test_vacuum_machines.py", "test_slurm_native.py", "test_networks.py",
    "test_slurm_storms.py", "test_identity.py", "test_gridengine_pool.py", "test_checkpoints.py", "test_vacuum.py",
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
