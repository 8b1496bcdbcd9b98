"""A real OpenPBS or Torque of one host, brought up from the prefix it was installed to, with a network and a name of its own.

For the tests of pages only, in a room whose files go with it: settings and state are in the usual places.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST, LONGEST = "pbshost", 120.0
HOLDER = f"""set -eu
ip link set lo up; ip link add v0 type veth peer name v1; ip addr add 10.79.0.1/24 dev v0; ip link set v0 up; ip link set v1 up
hostname {HOST}
echo up; exec sleep infinity"""
OF_OPENPBS = """PBS_EXEC={prefix}
PBS_HOME=/var/spool/pbs
PBS_SERVER={host}
PBS_START_SERVER=1
PBS_START_SCHED=1
PBS_START_COMM=1
PBS_START_MOM=1
"""
OF_TORQUE = (
    "create queue batch queue_type=execution", "set queue batch enabled=true", "set queue batch started=true",
    "set server default_queue=batch", "set server scheduling=true", "set server keep_completed=300", "set server job_stat_rate=1",
)  # fmt: skip


@contextmanager
def _host() -> Iterator[tuple[str, ...]]:
    """How one gets there."""
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n10.79.0.1 {HOST}\n")
    words = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", HOLDER]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
        child = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
        try:
            yield ("nsenter", "-t", child, "-n", "-u", "-m", "-p", "--")
        finally:
            holder.kill()


def _run(entry: tuple[str, ...], *words: str | Path) -> str:
    done = subprocess.run(
        [*entry, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}"
    return str(done.stdout)


def _until(entry: tuple[str, ...], what: str, *words: str | Path) -> None:
    deadline = time.monotonic() + LONGEST
    while what not in (said := _said(entry, *words)):
        assert time.monotonic() < deadline, f"no {what!r} in what {words} says: {said}"
        time.sleep(1)


def _said(entry: tuple[str, ...], *words: str | Path) -> str:
    try:
        return _run(entry, *words)
    except AssertionError as exc:
        return str(exc)


@contextmanager
def openpbs(prefix: Path) -> Iterator[tuple[str, ...]]:
    """Its own script makes PBS_HOME and the database, and starts all four daemons."""
    with _host() as entry:
        Path("/etc/pbs.conf").write_text(OF_OPENPBS.format(prefix=prefix, host=HOST))
        _run(entry, "chmod", "4755", prefix / "sbin/pbs_rcp", prefix / "sbin/pbs_iff")
        _run(entry, "install", "-d", "-o", "postgres", "-g", "postgres", "/run/postgresql")  # a room's /run is empty
        _run(entry, prefix / "libexec/pbs_init.d", "start")
        qmgr = prefix / "bin/qmgr"
        for directive in ("set server flatuid=True", "set server job_history_enable=False"):
            _run(entry, qmgr, "-c", directive)
        _until(entry, "state = free", prefix / "bin/pbsnodes", "-a")
        yield entry


@contextmanager
def torque(prefix: Path) -> Iterator[tuple[str, ...]]:
    """One whose home is /var/spool/torque."""
    home, sbin = Path("/var/spool/torque"), prefix / "sbin"
    with _host() as entry:
        (home / "server_name").write_text(f"{HOST}\n")
        (home / "mom_priv/config").write_text(f"$pbsserver {HOST}\n$usecp *:/ /\n")
        _run(entry, sbin / "trqauthd")
        _run(entry, sbin / "pbs_server", "-t", "create", "-f")
        # qterm and qmgr succeed, too, where the server does not listen yet.
        is_gone = "ps -o stat= -C pbs_server | grep -qv Z || echo gone"
        _until(entry, "gone", "sh", "-c", f"{prefix}/bin/qterm -t quick; {is_gone}")
        (home / "server_priv/nodes").write_text(f"{HOST} np=2\n")  # a server that makes its database reads no nodes
        _run(entry, sbin / "pbs_server")
        _until(entry, "set server", prefix / "bin/qmgr", "-c", "print server")
        for directive in OF_TORQUE:
            _until(entry, "it is so", "sh", "-c", f"{prefix}/bin/qmgr -c '{directive}' && echo it is so")
        _run(entry, sbin / "pbs_mom")
        _run(entry, sbin / "pbs_sched")
        _until(entry, "state = free", prefix / "bin/pbsnodes")
        yield entry
