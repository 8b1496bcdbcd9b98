"""One download per node: users who do not trust each other, a web server that counts, a pool between them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.test_image_life import Master, master, server
from tests.live.test_users import PLACE, User
from tests.unit.image.http_server import Server

__all__ = ["master", "server"]

PATIENCE = 60.0  # seconds


class Neighbour(User):
    """With this interpreter and its libraries, which an install without extras does not have."""

    def argv(self, *words: str | bytes) -> list[str | bytes]:
        return [sys.executable, "-I", "-m", "belljar", *words]

    def digest(self) -> str:
        (one,) = [str(one["digest"]) for one in self.json("image", "list") if "site" in one["names"]]
        return one


@pytest.fixture
def pool() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("a pool is root's")
    folder = PLACE / f"belljar-test-pool-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def neighbours(pool: Path, master: Master, server: Server) -> Iterator[list[Neighbour]]:
    first = 57_000 + os.getpid() % 2_000 * 2
    made = []
    for uid in (first, first + 1):
        home = PLACE / f"belljar-test-pool-home-{uid}"
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        made.append(Neighbour(uid, Path(), home))
        made[-1].env |= {
            "BELLJAR_IMAGE_SOURCES": server.address, "BELLJAR_IMAGE_TRUST": f"site {master.key}",
            "BELLJAR_IMAGE_POOL": str(pool), "BELLJAR_IMAGE_STALL_TIMEOUT": "30s",
        }  # fmt: skip
    yield made
    for user in made:
        user.close()
        shutil.rmtree(user.home)
        shutil.rmtree(PLACE / f"belljar-{user.uid}", ignore_errors=True)


def blobs(server: Server) -> list[str]:
    return [path for path, *_ in server.requests if path.startswith("/blobs/")]


def test_two_users_whose_first_jobs_come_at_once_download_the_image_once(
    neighbours: list[Neighbour], master: Master, server: Server, pool: Path
) -> None:
    jobs = [user.popen("run", "--image", "site", "--start", "cold", "--", "id", "-u") for user in neighbours]
    ended = [job.communicate(timeout=400) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ended
    assert [out for out, _ in ended] == [f"{user.uid}\n".encode() for user in neighbours]
    assert len(blobs(server)) == len(set(blobs(server))) == 3
    for user in neighbours:
        assert user.digest() == master.digest and user.leftovers() == []
        assert {path.stat().st_uid for path in user.store.rglob("*")} == {user.uid}


def test_what_a_user_has_whose_download_was_killed_is_gone_on_with_by_another(
    neighbours: list[Neighbour], master: Master, server: Server, pool: Path
) -> None:
    one, other = neighbours
    (name,) = [
        path for path, file in server.files.items() if path.startswith("/blobs/") and len(file.data) > 20_000_000
    ]
    disk = server.files[name]
    disk.stall_after = len(disk.data) // 2
    first = one.popen("image", "sync", "site")
    part = until_half(pool / str(one.uid), disk.stall_after)
    second = other.popen("image", "sync", "site")
    assert second.stderr is not None
    assert any(b"Waiting for another user" in line for line in second.stderr)
    assert len([path for path in blobs(server) if path == name]) == 1
    disk.stall_after = None
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, (out, err)
    assert [range for path, range, _ in server.requests if path == name] == ["", f"bytes={part}-"]
    assert other.digest() == master.digest
    assert one("image", "sync", "site").returncode == 0
    assert len([path for path in blobs(server) if path == name]) == 2  # nothing more: the other one has it
    assert one.digest() == master.digest


def test_a_user_who_leaves_wrong_bytes_costs_others_time_and_nothing_else(
    neighbours: list[Neighbour], master: Master, server: Server, pool: Path
) -> None:
    bad, good = neighbours
    own = pool / str(bad.uid)
    own.mkdir()
    for path, file in server.files.items():
        if path.startswith("/blobs/"):
            (own / path.rpartition("/")[2]).write_bytes(bytes(len(file.data)))
    for path in (own, *own.iterdir()):
        os.chown(path, bad.uid, bad.uid)
    done = good("image", "sync", "site")
    assert done.returncode == 0 and good.digest() == master.digest, done.stderr
    assert len(blobs(server)) == 3


def until_half(folder: Path, size: int) -> int:
    deadline = time.monotonic() + PATIENCE
    while not (parts := [path for path in folder.glob("*.part") if path.stat().st_size >= size]):
        assert time.monotonic() < deadline, "no half of it came"
        time.sleep(0.02)
    return parts[0].stat().st_size


def test_root_shares_with_users_too(
    neighbours: list[Neighbour], master: Master, server: Server, pool: Path, tmp_path: Path
) -> None:
    """What a user has brought is there for the site's own store."""
    user = neighbours[0]
    assert user("image", "sync", "site").returncode == 0
    root = Belljar(tmp_path, tmp_path / "store", {name: user.env[name] for name in user.env if "IMAGE" in name})
    done = root("image", "sync", "site")
    assert done.returncode == 0, done.stderr
    assert len(blobs(server)) == 3
    (one,) = root.json("image", "list")
    assert one["digest"] == master.digest
    assert {path.stat().st_uid for path in (tmp_path / "store").rglob("*")} == {0}
