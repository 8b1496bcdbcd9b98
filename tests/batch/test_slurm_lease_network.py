"""The network between a lease's machines, on a real Slurm, with real guests and packets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite

# What a machine finds: each place's first word, or what went wrong. Its own server answers with its hostname.
SERVE = """
import socket, threading
server = socket.create_server(("0.0.0.0", 7000), backlog=50)
print("up", flush=True)
while True:
    one = server.accept()[0]
    one.sendall(socket.gethostname().encode())
    one.close()
"""
TRY = """
import json, socket, sys
found = {}
for place in sys.argv[1:]:
    try:
        with socket.create_connection((place, 7000), timeout=20) as one:
            found[place] = one.recv(100).decode()
    except OSError as exc:
        found[place] = exc.strerror or str(exc)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    with LeaseSite(nodes=3).running() as site:
        yield site


def start(site: LeaseSite, *words: str) -> tuple[str, list[str]]:
    """A lease with a server on each of its machines: its id and theirs."""
    lease = site.run(IMAGE, "--time", "1h", "--network", "private", *words)
    site.until(lambda: site.is_running(lease), "its machines run")
    machines = [str(one["id"]) for one in site.status(lease)[1]]
    for machine in machines:
        serving = site.belljar.popen(
            "lease", "ssh", "--door", str(site.folder / "door"), "-i", str(site.folder / "id"), machine, "--",
            f"exec python3 -c {shlex.quote(SERVE)}",
        )  # fmt: skip
        assert serving.stdout and serving.stderr
        assert serving.stdout.readline() == b"up\n", f"{serving.stderr.read().decode()}\n{site.story()}"
    return lease, machines


def tries(site: LeaseSite, machine: str, *places: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(site.ssh(machine, f"python3 -c {shlex.quote(TRY)} {' '.join(places)}"))
    return found


@pytest.mark.slow
def test_machines_of_one_lease_find_each_other_by_name_and_those_of_another_find_nobody(site: LeaseSite) -> None:
    """Two of them share a node, the third is on another."""
    lease, (one, two, three) = start(site, "-n", "3", "--per-node", "2")
    machines = site.status(lease)[1]
    assert [machine["address"] for machine in machines] == ["10.98.0.1", "10.98.0.2", "10.98.0.3"]
    assert len({machine["host"] for machine in machines}) == 2
    assert tries(site, one, "node2", "10.98.0.2", "node1") == {"node2": "node2", "10.98.0.2": "node2", "node1": "node1"}
    assert tries(site, two, "node3", "node1") == {"node3": "node3", "node1": "node1"}
    assert tries(site, three, "node1", "node2") == {"node1": "node1", "node2": "node2"}
    other, (stranger,) = start(site)
    found = tries(site, stranger, "10.98.0.1", "10.98.0.2")
    assert found == {"10.98.0.1": "node1", "10.98.0.2": "No route to host"}  # the first is itself
    for name in (lease, other):
        site("release", name)
    site.until_nothing_is_left()
    assert list((site.belljar.run_folder / "networks").iterdir()) == []
