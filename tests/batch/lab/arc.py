"""An ARC CE over a Slurm with belljar, in a room over this host's own files, and the pages of both followed there:

python -m tests.batch.lab.arc     # as root, in the room: what is written is gone with it

The REST interface, and who submits to it, have a network of their own: it listens on every address."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.batch.lab.fresh import USER, Node, run, slurm
from tests.batch.lab.gridengine import until
from tests.batch.lab.page import follow
from tests.batch.lab.slurm import PATH

from belljar.image.build import debian

PACKAGES = ("arex", "arcctl-service", "client", "plugins-arcrest", "plugins-needed", "test-utils")
CONF = """\
[common]
x509_host_key = /etc/grid-security/testCA-hostkey.pem
x509_host_cert = /etc/grid-security/testCA-hostcert.pem
[authgroup:zero]
file = /etc/grid-security/testCA.allowed-subjects
[mapping]
map_to_user = zero alice:alice
[lrms]
lrms = slurm
slurm_use_sacct = no
[arex]
sessiondir = /home/arc
runtimedir = /etc/arc/rte
[arex/ws]
[arex/ws/jobs]
allowaccess = zero
[infosys]
[infosys/glue2]
[infosys/cluster]
[queue:batch]
"""
DHPARAM = "/var/spool/arc/jobstatus/dhparam.pem"  # of 4096 bits otherwise: minutes
ENV = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **debian.proxies()}


def command(*words: str) -> None:
    done = subprocess.run(words, env=ENV, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"


@contextmanager
def arex() -> Iterator[Node]:
    """A-REX with certificates of a test authority, and an ordinary user with a proxy."""
    command("apt-get", "update", "-qq")
    command("apt-get", "install", "-qq", "--no-install-recommends", *(f"nordugrid-arc-{name}" for name in PACKAGES))
    Path("/etc/arc.conf").write_text(CONF)
    for folder, mode in (("/home/arc", 0o1777), ("/var/spool/arc/jobstatus", 0o755), ("/etc/arc/rte", 0o755)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder).chmod(mode)
    command("openssl", "dhparam", "-dsaparam", "-out", DHPARAM, "2048")
    Path(DHPARAM).chmod(0o600)
    command("arcctl", "test-ca", "usercert", "-n", USER, "-i", USER, "-f")
    command(
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--init-groups",
        "env",
        f"HOME=/home/{USER}",
        "arcproxy",
        "-c",
        "validityPeriod=2H",
    )
    apart = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up; exec sleep 3000"], env=ENV)
    inside = ("nsenter", f"--net=/proc/{apart.pid}/ns/net")
    try:
        command("/usr/share/arc/arc-arex-start")
        command(*inside, "/usr/share/arc/arc-arex-ws-start")
        until(
            lambda: ":443" in subprocess.run([*inside, "ss", "-ltn"], capture_output=True, text=True).stdout,
            "REST",
            timeout=120,
        )
        yield Node(inside)
    finally:
        apart.kill()
        apart.wait()


def main() -> None:
    os.umask(0o022)
    subprocess.run(["useradd", "--system", "--user-group", "belljar"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    with slurm() as node:
        print("\n".join(follow(Path("docs/batch/slurm.md"), lambda commands, as_user: run(commands, as_user, node))))
        with arex() as grid:
            print(
                "\n".join(follow(Path("docs/batch/arc-ce.md"), lambda commands, as_user: run(commands, as_user, grid)))
            )


if __name__ == "__main__":
    main()
