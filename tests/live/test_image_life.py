"""A site's images on a real node: published, pulled once by jobs that miss them, moved while a machine runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar
from tests.unit.image.http_server import Server, serving

PAYLOAD = ("--", "cat", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Master:
    """A repository with the default image, as `site`."""

    folder: Path
    keys: Path
    line: str  # of `image.sources`

    def publish(self, belljar: Belljar, *words: str) -> None:
        done = belljar("image", "publish", *words, "--to", self.line, "--key", str(self.keys))
        assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Master:
    folder = tmp_path_factory.mktemp("master")
    belljar = Belljar(folder, STORE)
    words = ("--init", "--to", str(folder / "images"), "--key", str(folder / "keys"))
    line = belljar("image", "publish", *words).stdout.decode().strip()
    made = Master(folder / "images", folder / "keys", line)
    made.publish(belljar, "debian12", "--as", "site")
    return made


@pytest.fixture
def server(master: Master) -> Iterator[Server]:
    with serving() as server:
        for path in master.folder.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                server.put(f"/{path.relative_to(master.folder)}", path.read_bytes(), etag=f'"{path.name}"')
        yield server


def node(tmp_path: Path, line: str) -> Belljar:
    return Belljar(tmp_path, tmp_path / "store", {"BELLJAR_IMAGE_SOURCES": line})


def test_jobs_that_miss_an_image_at_once_download_it_once_and_all_run(
    tmp_path: Path, master: Master, server: Server
) -> None:
    belljar = node(tmp_path, f"{server.address}#{master.line.partition('#')[2]}")
    try:
        jobs = [belljar.popen("run", "--image", "site", *PAYLOAD) for _ in range(4)]
        ended = [job.communicate(timeout=200) for job in jobs]
        assert [job.returncode for job in jobs] == [0] * 4, ended
        assert len({out for out, _ in ended}) == 4  # each its own machine
        files = [path for path, *_ in server.requests if path.startswith("/targets/")]
        assert len(files) == len(set(files)) == 3
        count = len(server.requests)
        assert belljar.run("--image", "site", *PAYLOAD).returncode == 0
        assert len(server.requests) == count  # what is here costs no look at the network
        assert belljar.leftovers() == []
    finally:
        belljar.close()


def test_an_update_moves_the_name_and_a_running_job_keeps_its_image(tmp_path: Path, master: Master) -> None:
    belljar = node(tmp_path, master.line)
    try:
        assert belljar.run("--image", "site", *PAYLOAD).returncode == 0
        (before,) = belljar.json("image", "list")
        job = belljar.popen(
            "run", "--image", "site", "--", "sh", "-c", "echo up; read x; cat /etc/hostname", stdin=subprocess.PIPE
        )
        assert job.stdout is not None and job.stdout.readline() == b"up\n"
        other = Belljar(tmp_path / "publisher", tmp_path / "publisher/store")
        (tmp_path / "disk").write_bytes(bytes(510) + b"\x55\xaa" + bytes(1 << 20))
        done = other("image", "import", str(tmp_path / "disk"), "--name", "site", "--firmware", "auto")
        assert done.returncode == 0, done.stderr.decode()
        master.publish(other, "site")
        assert belljar("image", "sync").returncode == 0
        (now,) = [one for one in belljar.json("image", "list") if "site" in one["names"]]
        assert now["digest"] != before["digest"]
        belljar("image", "gc")
        assert belljar("image", "show", before["digest"][:12]).returncode == 0
        out, _ = job.communicate(b"go\n", timeout=60)
        assert job.returncode == 0 and out
        master.publish(Belljar(tmp_path, STORE), "debian12", "--as", "site")  # as it was
        assert belljar("image", "sync").returncode == 0
        (now,) = [one for one in belljar.json("image", "list") if "site" in one["names"]]
        assert now["digest"] == before["digest"]
    finally:
        belljar.close()


def test_a_job_whose_image_is_not_signed_as_the_site_says_does_not_start(tmp_path: Path, master: Master) -> None:
    belljar = node(tmp_path, f"{master.folder}#sha256={'0' * 64}")
    try:
        done = belljar.run("--image", "site", "--", "true")
        assert done.returncode == 125 and b"no version of its root has the digest" in done.stderr
        assert belljar.leftovers() == [] and belljar.json("image", "list") == []
    finally:
        belljar.close()
