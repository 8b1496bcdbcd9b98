"""Cloud nodes that slurmctld's host has made on other hosts, which it reaches by ssh: OpenSSH's own server and client, with a key made here.
The hosts are one, with a belljar each; a dead one is an address at which nothing answers."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.batch.lab.pool import read
from tests.batch.lab.site import Site
from tests.batch.lab.slurm import install
from tests.batch.lab.worker import PATIENCE, Installed, until
from tests.batch.test_slurm_cloud import Clouds
from tests.live.net_lab import Lab, ip

pytestmark = pytest.mark.slow

HOSTS = {"wn01": "10.99.0.2", "wn02": "10.99.0.3", "dead": "10.99.0.250"}
SSHD = """ListenAddress 10.99.0.2:22
ListenAddress 10.99.0.3:22
HostKey {0}/host
AuthorizedKeysFile {0}/client.pub
PidFile none
UsePAM no
PasswordAuthentication no
StrictModes no
"""
SSH = """IdentityFile {0}/client
UserKnownHostsFile {0}/known
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Clouds]:
    install({"sshd": "openssh-server", "ssh": "openssh-client"})
    net, site = Lab(), Site("placed")
    made = Clouds(net, site, tmp_path, waits=True)
    try:
        made.slurm.up()
        with an_ssh_server(net, tmp_path):
            yield made
    finally:
        made.close()
        site.close()
        net.close()


@contextmanager
def an_ssh_server(net: Lab, folder: Path) -> Iterator[None]:
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"{address} {key}\n" for address in HOSTS.values()))
    names = "".join(f"Host {name}\nHostName {address}\n" for name, address in HOSTS.items())
    (folder / "ssh").write_text(names + "Host *\n" + SSH.format(folder))
    (folder / "sshd").write_text(SSHD.format(folder))
    for name in ("wn01", "wn02"):
        ip("-n", net.host, "addr", "add", f"{HOSTS[name]}/32", "dev", "br0")
    # What is sent to it goes out and is never heard of again: no answer, and no word that there is none.
    ip("-n", net.host, "neigh", "add", HOSTS["dead"], "lladdr", "02:00:00:00:00:fe", "dev", "br0", "nud", "permanent")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    program = str(shutil.which("sshd", path="/usr/sbin"))
    with open(folder / "sshd.log", "wb") as log:
        server = subprocess.Popen(
            [*net.inside(net.host, program), "-D", "-e", "-f", str(folder / "sshd")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: b"listening on 10.99.0.3" in read(folder / "sshd.log"), "sshd to listen")
        yield
    finally:
        server.terminate()
        server.wait(30)


def test_nodes_are_placed_on_two_hosts_by_ssh_and_not_on_a_dead_one(worker: Clouds, tmp_path: Path) -> None:
    second = Installed(worker.site, tmp_path / "second")
    second.env["BELLJAR_NETWORK_BRIDGE_ADDRESSES"] = "10.99.0.41-10.99.0.60/24"
    hosts = {"wn01": worker.belljar, "wn02": second}
    settings = worker.file.read_text()
    (tmp_path / "hosts.toml").write_text(settings)
    for name, host in hosts.items():
        own = {"SLURM_CONF": str(worker.slurm.lab.conf), **host.env}
        words = [f"{key}={value}" for key, value in own.items() if key.startswith(("BELLJAR_", "SLURM_", "PATH"))]
        line = shlex.join(["exec", "env", *words, host.program])
        worker.script(
            tmp_path / f"belljar-{name}",
            f'#!/bin/sh\necho "${{SSH_CONNECTION##* }} $@" >> {tmp_path}/asked-{name}\n{line} "$@" --file {tmp_path}/hosts.toml\n',
        )
    reach = [
        "ssh",
        "-F",
        f"{tmp_path}/ssh",
        "-oBatchMode=yes",
        "-oConnectTimeout=2",
        "{host}",
        f"{tmp_path}/belljar-{{host}}",
    ]
    placement = 'placement = ["cloud1 -> dead wn01", "cloud2 -> wn02 wn01"]'
    worker.file.write_text(f"{settings}\n{placement}\nreach = {json.dumps(reach)}\n")
    job = worker.slurm.submit("srun hostname | sort", "--partition=cloud", "--nodes=2", "--ntasks-per-node=1")
    log = tmp_path / "resume.log"
    until(lambda: all(host.domains() for host in hosts.values()), f"a machine on each\n{read(log)!r}", PATIENCE)
    words = worker.argv(
        "node", "list", "--file", str(worker.file), "--state", str(tmp_path / "cloud"), "--format", "json"
    )
    env = {**worker.belljar.env, "SLURM_CONF": str(worker.slurm.lab.conf)}
    listed = subprocess.run(words, env=env, capture_output=True, timeout=60, check=False)
    assert json.loads(listed.stdout or b"{}").get("hosts") == {"cloud1": "wn01", "cloud2": "wn02"}, listed.stderr
    dead = "belljar: dead does not answer: no answer of `belljar node list`: ssh: connect to host 10.99.0.250 port 22: Connection timed out"
    assert listed.stderr.decode().splitlines() == [dead]
    assert worker.slurm.lab.ended(job, PATIENCE)["ExitCode"] == "0:0", worker.slurm.lab.tail()
    assert worker.written(f"{job}.out") == "cloud1\ncloud2\n"
    assert read(log).decode().splitlines().count(dead) == 1
    for host in hosts.values():
        until(lambda host=host: host.leftovers() == [], f"the machines to end\n{worker.slurm.lab.tail()}", PATIENCE)
    for name, node in (("wn01", "cloud1"), ("wn02", "cloud2")):
        asked = read(tmp_path / f"asked-{name}").decode().splitlines()
        assert [line.split(" --")[0] for line in asked if " resume " in line] == [f"22 node resume {node}"]
    second.close()
