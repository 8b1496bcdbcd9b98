"""Jobs of a real Grid Engine that name the image of a registry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.batch.lab.gridengine_cell import SETTINGS, Cell
from tests.batch.lab.pulls import NAME, SCRIPT, drafts, printed, pulled
from tests.live.container_lab import Hub

pytestmark = pytest.mark.slow
ALLOWED = SETTINGS.replace('"* debian*"', '"* *"')


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    made = Cell("ge-pulls")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def hub(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    inside = ("nsenter", "-t", str(cell.lab.pid), "-n", "--")
    with pulled(cell.site.home("bjalice"), tmp_path_factory.mktemp("hub"), inside) as (hub, _):
        yield hub


def image(hub: Hub) -> tuple[str, ...]:
    return ("-q", "all.q", "-l", f"vm_image={hub.reference(NAME)}:1")


def test_jobs_that_ask_at_once_pull_once_and_run_as_their_user(cell: Cell, hub: Hub) -> None:
    cell.site.configure(f"{ALLOWED}pull = 'site-registries'\nregistries = ['{hub.address}/team']\n")
    cell.install()
    jobs = [cell.submit(SCRIPT, *image(hub)) for _ in range(3)]
    ended = [cell.ended(job, timeout=600) for job in jobs]
    assert [(it.exit, it.out) for it in ended] == [(7, printed(cell.site.home("bjalice")))] * 3, ended
    assert list(hub.fetched(NAME).values()) == [1, 1, 1]
    cell.clean()
    assert drafts(cell.site.node) == []


def test_where_no_job_may_pull_it_is_refused_at_submission_and_on_the_node(cell: Cell, hub: Hub) -> None:
    cell.site.configure(f"{ALLOWED}pull = 'site-registries'\nregistries = ['{hub.address}/team']\n")
    cell.install()
    cell.site.configure(f"{ALLOWED}pull = 'never'\n")  # the node's are newer than what judges at submission
    job = cell.submit(SCRIPT, *image(hub))
    ended = cell.ended(job)
    assert b"a job pulls images from no registry here" in ended.err and ended.out == b"", ended
    cell.install()
    with pytest.raises(AssertionError, match="a job pulls images from no registry here"):
        cell.submit(SCRIPT, *image(hub))
