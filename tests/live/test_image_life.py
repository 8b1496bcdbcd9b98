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
    """A master store with the default image, as `debian12` and `site`."""

    folder: Path
    key_file: Path
    key: str
    digest: str

    def publish(self, belljar: Belljar, *words: str) -> None:
        done = belljar("image", "publish", *words, "--to", str(self.folder), "--key", str(self.key_file))
        assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Master:
    folder = tmp_path_factory.mktemp("master")
    belljar = Belljar(folder, STORE)
    key = belljar("image", "key", str(folder / "key")).stdout.decode().strip()
    (digest,) = [one["digest"] for one in belljar.json("image", "list") if "debian12" in one["names"]]
    made = Master(folder / "images", folder / "key", key, digest)
    made.publish(belljar, "debian12")
    made.publish(belljar, "debian12", "--as", "site")
    return made


@pytest.fixture
def server(master: Master) -> Iterator[Server]:
    with serving() as server:
        for path in master.folder.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                server.put(f"/{path.relative_to(master.folder)}", path.read_bytes(), etag=f'"{path.name}"')
        yield server


def node(tmp_path: Path, master: Master, source: str) -> Belljar:
    settings = {"BELLJAR_IMAGE_SOURCES": source, "BELLJAR_IMAGE_TRUST": f"debian*|site {master.key}"}
    return Belljar(tmp_path, tmp_path / "store", settings)


def test_jobs_that_miss_an_image_at_once_download_it_once_and_all_run(
    tmp_path: Path, master: Master, server: Server
) -> None:
    belljar = node(tmp_path, master, server.address)
    try:
        jobs = [belljar.popen("run", "--image", "site", *PAYLOAD) for _ in range(4)]
        ended = [job.communicate(timeout=200) for job in jobs]
        assert [job.returncode for job in jobs] == [0] * 4, ended
        assert len({out for out, _ in ended}) == 4  # each its own machine
        blobs = [path for path, *_ in server.requests if path.startswith("/blobs/")]
        assert len(blobs) == len(set(blobs)) == 3
        count = len(server.requests)
        assert belljar.run("--image", "site", *PAYLOAD).returncode == 0
        assert len(server.requests) == count  # what is here costs no look at the network
        assert belljar.leftovers() == []
    finally:
        belljar.close()


def test_an_update_moves_the_name_and_a_running_job_keeps_its_image(tmp_path: Path, master: Master) -> None:
    belljar = node(tmp_path, master, str(master.folder))
    try:
        assert belljar.run("--image", "site", *PAYLOAD).returncode == 0
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
        assert now["digest"] != master.digest
        belljar("image", "gc")
        assert belljar("image", "show", master.digest[:12]).returncode == 0
        out, _ = job.communicate(b"go\n", timeout=60)
        assert job.returncode == 0 and out
        master.publish(Belljar(tmp_path, STORE), "debian12", "--as", "site")  # as it was
        assert belljar("image", "sync").returncode == 0
        (now,) = [one for one in belljar.json("image", "list") if "site" in one["names"]]
        assert now["digest"] == master.digest
    finally:
        belljar.close()


def test_a_job_whose_image_nobody_may_publish_does_not_start(tmp_path: Path, master: Master) -> None:
    belljar = node(tmp_path, master, str(master.folder))
    belljar.env["BELLJAR_IMAGE_TRUST"] = f"debian* {master.key}"
    try:
        done = belljar.run("--image", "site", "--", "true")
        assert done.returncode == 125 and b"nobody may publish the name 'site'" in done.stderr
        assert belljar.leftovers() == [] and belljar.json("image", "list") == []
    finally:
        belljar.close()
