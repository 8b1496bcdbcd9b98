"""Databases of leases: a new one for each test, in a file of SQLite and on a real server of PostgreSQL."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belljar.lease.store import Store, open_store

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a private server: in a folder of its own, on a unix socket, with no port."""
    if not PROGRAMS:
        pytest.fail("postgresql is not installed: scripts/prepare dev")
    folder = Path(tempfile.mkdtemp(prefix="bj-pg-", dir="/var/tmp"))
    as_nobody = os.geteuid() == 0  # the server refuses to run as root
    who = {"user": NOBODY.pw_uid, "group": NOBODY.pw_gid, "extra_groups": []} if as_nobody else {}
    if as_nobody:
        os.chown(folder, NOBODY.pw_uid, NOBODY.pw_gid)
    plain = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    command = [
        PROGRAMS[-1] / "initdb",
        "-D",
        folder / "data",
        "-U",
        "belljar",
        "-A",
        "trust",
        "--no-sync",
        "-E",
        "UTF8",
    ]
    subprocess.run(command, check=True, capture_output=True, env=plain, cwd="/", **who)  # type: ignore[call-overload]
    options = [
        "-c",
        "listen_addresses=",
        "-c",
        f"unix_socket_directories={folder}",
        "-c",
        "fsync=off",
        "-c",
        "max_connections=60",
    ]
    with open(folder / "log", "wb") as log:
        running = subprocess.Popen(
            [PROGRAMS[-1] / "postgres", "-D", folder / "data", *options],
            stdout=log, stderr=log, env=plain, cwd="/", **who,  # type: ignore[call-overload]
        )  # fmt: skip
    try:
        ready = [PROGRAMS[-1] / "pg_isready", "-q", "-h", folder, "-t", "30"]
        for _ in range(300):
            if subprocess.run(ready, check=False).returncode == 0 or running.poll() is not None:
                break
            threading.Event().wait(0.1)
        yield f"postgresql://belljar@/postgres?host={folder}"
    finally:
        running.send_signal(signal.SIGINT)  # end all connections, then the server
        running.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same new database, again and again."""
    address, stores = "", list[Store]()
    if request.param == "postgresql":
        import psycopg

        base = request.getfixturevalue("server")
        name = f"t{os.urandom(6).hex()}"
        with psycopg.connect(base, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        address = base.replace("/postgres?", f"/{name}?")

    def again() -> Store:
        stores.append(open_store(address, tmp_path / "lease"))
        return stores[-1]

    yield again
    for one in stores:
        one.close()


@pytest.fixture
def store(opened: Callable[[], Store]) -> Store:
    return opened()
