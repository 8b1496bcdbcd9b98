"""Homes that the machines mount from a file server themselves, at the path the node knows them by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster
from tests.live.nfs_server import NfsServer, free_port, nfs_server


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[NfsServer]:
    """Exports the users' homes; the site's settings name it in place of the folder."""
    with nfs_server(cluster.site.top / "nfs", data=cluster.site.homes) as started:
        use(cluster, started.share(str(cluster.site.homes)))
        yield started


def use(cluster: Cluster, share: str) -> None:
    cluster.reconfigure(SETTINGS, machine='network = "user"', network='allow = ["127.0.0.1"]')
    text, folder = cluster.site.config.read_text(), f'shares = ["{cluster.site.homes}:rw"]'
    assert folder in text
    cluster.site.config.write_text(text.replace(folder, f'shares = ["{share}"]'))


def test_a_job_works_in_its_home_on_the_server(cluster: Cluster, server: NfsServer) -> None:
    script = "cat given; echo made >made; stat -f -c %T .; id -u; exit 7"
    given = cluster.site.home("bjalice") / "given"
    given.write_text("from home\n")
    given.chmod(0o644)
    ended = cluster.run(script, VM)
    owner = cluster.site.home("bjalice").stat().st_uid
    assert (ended.exit, ended.out.decode()) == ("7:0", f"from home\nnfs\n{owner}\n"), ended.err
    made = cluster.site.home("bjalice") / "made"
    assert (made.read_text(), made.stat().st_uid) == ("made\n", owner)
    cluster.clean()


def test_a_job_waits_for_a_server_that_is_down_in_the_queue(cluster: Cluster, server: NfsServer) -> None:
    """A try, and then again: its server is named where Slurm shows it."""
    port = free_port()
    use(cluster, f"nfs://127.0.0.1:{port}/homes:{cluster.site.homes}:rw")
    try:
        job = cluster.submit("echo never", VM)
        comment = f"127.0.0.1:{port}"
        cluster.lab.until(lambda: comment in str(cluster.lab.job(job)), f"job {job} names its server", 120)
        cluster.as_user("scancel", job)
        assert b"never" not in cluster.end(job).out
    finally:
        use(cluster, server.share(str(cluster.site.homes)))
    cluster.clean()


def test_the_check_names_an_export_without_a_network(cluster: Cluster, server: NfsServer) -> None:
    try:
        cluster.site.config.write_text(cluster.site.config.read_text().replace('network = "user"', 'network = "none"'))
        said = cluster.belljar("batch", "check", "slurm", check=False).decode()
        assert "batch.shares" in said and "machine.network is none" in said and str(cluster.site.config) in said
        ended = cluster.run("echo never", VM)
        assert ended.exit == "125:0" and b"batch.shares" in ended.err
    finally:
        use(cluster, server.share(str(cluster.site.homes)))
