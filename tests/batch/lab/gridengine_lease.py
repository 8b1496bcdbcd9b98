"""A site that leases machines by Grid Engine: one node or two, each with a network and a name of its own, a service that runs as an
ordinary account, and pilots that therefore do. Users' folders are on each node, as `paths.node` has it."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from tests.batch.lab.gridengine import ENV, GridEngine, until
from tests.batch.lab.lease import Leasing
from tests.batch.lab.site import Site
from tests.live.conftest import STORE

SERVICE, SECOND = "bjbob", "bjge2"
ADDRESS, OTHER = "10.78.0.1", "10.78.0.2"
EACH = "each"  # a parallel environment of one slot on each node
# $1 host name. A network of its own, in the first node's mounts: their files are the cell's, as by NFS.
NODE = 'set -eu; ip link set lo up; hostname "$1"; echo up; exec sleep infinity'


class Cell(GridEngine):
    """`second`: the process that holds the second node's namespaces."""

    def __init__(self, site: Site, nodes: int) -> None:
        self.second: subprocess.Popen[bytes] | None = None
        super().__init__(site)
        self._add("-Ap", f"pe_name {EACH}\nslots 99\nuser_lists NONE\nxuser_lists NONE\nstart_proc_args NONE\nstop_proc_args NONE\n"
                  "allocation_rule 1\ncontrol_slaves TRUE\njob_is_first_task FALSE\nurgency_slots min\naccounting_summary TRUE\nqsort_args NONE\n")  # fmt: skip
        self.set_queue(pe_list=f"smp,{EACH}")
        if nodes > 1:
            try:
                self._add_node()
            except BaseException:
                self.close()
                raise

    def _add_node(self) -> None:
        with open(self.top / "hosts", "a") as hosts:
            hosts.write(f"{OTHER} {SECOND} {SECOND}.lab\n")
        apart = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "bash", "-c", NODE, "node", SECOND]
        words = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "--", *apart]
        self.second = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENV)
        assert self.second.stdout is not None and self.second.stdout.readline() == b"up\n", "no second node"
        there = ["nsenter", "-t", str(self.second.pid), "-n", "--"]
        for line in (f"ip link add v2 type veth peer name v3 netns {self.second.pid}", "ip link set v2 up",
                     f"ip route add {OTHER}/32 dev v2 src {ADDRESS}"):  # fmt: skip
            self.run(*line.split())
        for line in (
            f"ip addr add {OTHER}/32 dev v3",
            "ip link set v3 up",
            f"ip route add {ADDRESS}/32 dev v3 src {OTHER}",
        ):
            subprocess.run([*there, *line.split()], check=True)
        self.config("-ah", SECOND)
        names = "load_scaling complex_values user_lists xuser_lists projects xprojects usage_scaling report_variables"
        self._add("-Ae", f"hostname {SECOND}\n" + "".join(f"{name} NONE\n" for name in names.split()))
        self.config("-aattr", "hostgroup", "hostlist", SECOND, "@allhosts")
        node = ["nsenter", "-t", str(self.second.pid), "-n", "-u", "-m", "--wd=/", "--", "sge_execd"]
        subprocess.run(node, env=ENV, check=True, timeout=30, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: self.run("qstat", "-f").stdout.decode().count(" lx-amd64      \n") == 2, "two nodes to be open")

    def processes(self) -> list[int]:
        found = super().processes()
        if self.second is not None and self.second.poll() is None:
            mine = os.readlink(f"/proc/{self.second.pid}/ns/net")
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and os.readlink(entry / "ns/net") == mine:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def close(self) -> None:
        super().close()
        if self.second is not None:
            self.second.kill()
            self.second.wait()
            if self.second.stdout:
                self.second.stdout.close()
            self.second = None


class GridSite(Leasing):
    """Owners are others than the account of the service and its pilots."""

    def __init__(self, name: str, nodes: int = 1, more: str = "") -> None:
        environment = f'environment = "{EACH}"\n' if nodes > 1 else ""
        super().__init__(f'system = "gridengine"\n{environment}{more}', address=ADDRESS)
        self.door = self.folder / "doors/door"
        self.site = Site(f"lease-{name}")
        try:
            self.cell = Cell(self.site, nodes)
        except BaseException:
            self.site.close()
            raise

    def begin(self) -> None:
        """The cell is up. The service's folders are its own; its account has its folder on each node, as docs/operate/lease/operation.md says."""
        who = pwd.getpwnam(SERVICE)
        own = str(self.site.node / str(who.pw_uid))
        subprocess.run(["install", "-d", "-m", "700", "-o", str(who.pw_uid), own], check=True)
        for part in ("jobs", "state", "doors"):
            (self.folder / part).mkdir(mode=0o755 if part == "doors" else 0o700)
            os.chown(self.folder / part, who.pw_uid, who.pw_gid)

    def command(self) -> tuple[dict[str, str], str]:
        return {"BELLJAR_PATHS_NODE": str(self.site.node), "BELLJAR_PATHS_SITE_STORE": str(STORE)}, str(
            self.site.belljar
        )

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [*self.cell._entry(SERVICE), str(self.folder / "belljar"), *words]
        with open(self.log, "ab") as log:
            return subprocess.Popen(argv, env=self.cell._env(SERVICE, {}), stdout=log, stderr=log)

    def jobs(self) -> list[str]:
        rows = self.cell.run("qstat", "-u", "*").stdout.decode().splitlines()[2:]
        return sorted({row.split()[0] for row in rows})

    def left(self) -> list[str]:
        return self.site.leftovers()

    def reap(self) -> None:
        """As its timer, or the next machine, does."""
        argv = [*self.cell._entry(SERVICE), str(self.folder / "belljar"), "reap"]
        subprocess.run(argv, env=self.cell._env(SERVICE, {}), check=True, stdout=subprocess.DEVNULL)

    def story(self) -> str:
        return super().story() + self.cell.run("qstat", "-f", "-u", "*").stdout.decode()

    def close(self) -> None:
        self.end_service()
        self.cell.close()
        super().close()
        self.site.close()
