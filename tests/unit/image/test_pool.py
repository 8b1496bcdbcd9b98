"""What users of one node leave each other: taken when it has the right bytes, and never believed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.site import Site

from belljar.errors import ImageMismatch, NoSpace
from belljar.host.locks import lock_of_anybody
from belljar.image import Settings, fetch, pool
from belljar.image.index import Part
from belljar.image.pool import Pool, complaint
from belljar.image.progress import Silent
from belljar.image.publish import read_index

DATA = os.urandom(100_000)
DIGEST = sha256(DATA).hexdigest()
URL = f"http://example.org/blobs/{DIGEST}"
KEY = fetch.key(URL)
NEIGHBOUR = "54321"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "pool" / NEIGHBOUR).mkdir(parents=True)
    return tmp_path / "pool"


@pytest.fixture
def ours(place: Path, settings: Settings) -> Pool:
    return Pool(place, replace(settings, stall_timeout=0.2, lock_timeout=2.0), os.geteuid())


def note(**changes: object) -> str:
    return json.dumps({"url": URL, "validator": '"v1"', "total": len(DATA), **changes})


def leave(place: Path, data: bytes, said: str) -> None:
    """A neighbour's download that broke off."""
    (place / NEIGHBOUR / f"{KEY}.part").write_bytes(data)
    (place / NEIGHBOUR / f"{KEY}.json").write_text(said)


# -- a whole file ----------------------------------------------------------------------------------------------------------


def test_a_neighbours_file_is_copied_and_its_copy_is_ours(place: Path, ours: Pool, tmp_path: Path) -> None:
    (place / NEIGHBOUR / DIGEST).write_bytes(DATA)
    assert ours.take(DIGEST, len(DATA), tmp_path / "copy", Silent())
    assert (tmp_path / "copy").read_bytes() == DATA
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["wrong bytes", "too short", "too long", "link", "pipe", "folder", "folder is a link"])
def test_what_a_neighbour_has_is_not_believed(place: Path, ours: Pool, tmp_path: Path, what: str) -> None:
    bad = place / NEIGHBOUR / DIGEST
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / DIGEST).write_bytes(DATA)
    match what:
        case "wrong bytes":
            bad.write_bytes(bytes(len(DATA)))
        case "too short":
            bad.write_bytes(DATA[:-1])
        case "too long":
            bad.write_bytes(DATA + b"x")
        case "link":
            bad.symlink_to(tmp_path / "elsewhere" / DIGEST)
        case "pipe":
            os.mkfifo(bad)
        case "folder":
            bad.mkdir()
        case _:
            (place / NEIGHBOUR).rmdir()
            (place / NEIGHBOUR).symlink_to(tmp_path / "elsewhere")
    assert not ours.take(DIGEST, len(DATA), tmp_path / "copy", Silent())
    assert not (tmp_path / "copy").exists()


def test_the_good_one_is_found_among_bad_ones(place: Path, ours: Pool, tmp_path: Path) -> None:
    for name, data in (("50000", b"x"), ("60000", DATA), ("70000", bytes(len(DATA)))):
        (place / name).mkdir()
        (place / name / DIGEST).write_bytes(data)
    assert ours.take(DIGEST, len(DATA), tmp_path / "copy", Silent())


# -- a part ----------------------------------------------------------------------------------------------------------------


def test_a_download_goes_on_where_a_neighbours_stopped(place: Path, ours: Pool) -> None:
    leave(place, DATA[:60_000], note())
    assert ours.prepare() == ours.own and ours.go_on(KEY, URL, len(DATA))
    part = fetch.Part.found(ours.own / f"{KEY}.part", URL)
    assert (part.size, part.validator, part.total) == (60_000, '"v1"', len(DATA))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DATA, note()),  # no part
        (DATA[:9], "no json"),
        (DATA[:9], "[]"),
        (DATA[:9], note(url="http://example.org/other")),
        (DATA[:9], note(validator='"v1"\r\nHost: x')),
        (DATA[:9], note(validator=7)),
        (DATA[:9], note(validator=None)),
        (DATA[:9], "[" * 100_000),
    ],
    ids=["whole", "no json", "list", "other address", "header", "number", "no version", "nested"],
)
def test_a_part_that_is_no_use_is_left_alone(place: Path, ours: Pool, data: bytes, said: str) -> None:
    leave(place, data, said)
    ours.prepare()
    assert not ours.go_on(KEY, URL, len(DATA)) and list(ours.own.iterdir()) == []


def test_what_we_have_of_it_ourselves_stays_when_it_is_more(place: Path, ours: Pool) -> None:
    leave(place, DATA[:9], note())
    ours.prepare()
    (ours.own / f"{KEY}.part").write_bytes(DATA[:10])
    assert not ours.go_on(KEY, URL, len(DATA))
    assert (ours.own / f"{KEY}.part").read_bytes() == DATA[:10]


# -- turns -----------------------------------------------------------------------------------------------------------------


def test_who_holds_the_lock_and_shows_nothing_is_waited_for_briefly(place: Path, ours: Pool) -> None:
    held = lock_of_anybody(place / f"{DIGEST}.lock")
    assert held is not None and lock_of_anybody(place / f"{DIGEST}.lock") is None
    begin = time.monotonic()
    with ours.turn(DIGEST, len(DATA), Silent()):
        assert 0.2 <= time.monotonic() - begin < 2
    held.release()
    with ours.turn(DIGEST, len(DATA), Silent()):
        assert lock_of_anybody(place / f"{DIGEST}.lock") is None


HOLD = """
import sys, time
from pathlib import Path
from belljar.host.locks import lock_of_anybody
lock, part = lock_of_anybody(Path(sys.argv[1])), Path(sys.argv[2])
print("held", flush=True)
with open(part, "ab", buffering=0) as file:
    for _ in range(50):
        file.write(b"x")
        time.sleep(0.05)
"""


def test_who_makes_progress_is_waited_for_and_no_longer_than_it_lives(place: Path, settings: Settings) -> None:
    ours = Pool(place, replace(settings, stall_timeout=1.0), os.geteuid())
    words = [str(place / f"{DIGEST}.lock"), str(place / NEIGHBOUR / f"{KEY}.part")]
    with subprocess.Popen([sys.executable, "-c", HOLD, *words], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with ours.turn(DIGEST, len(DATA), Silent()):
            assert (place / NEIGHBOUR / f"{KEY}.part").stat().st_size == 50
            assert lock_of_anybody(place / f"{DIGEST}.lock") is None


@pytest.mark.parametrize("what", ["pipe", "folder", "link"])
def test_something_else_in_the_locks_place_keeps_nobody_from_downloading(place: Path, ours: Pool, what: str) -> None:
    lock = place / f"{DIGEST}.lock"
    {"pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir, "link": lambda: lock.symlink_to("/etc/passwd")}[what]()
    with ours.turn(DIGEST, len(DATA), Silent()):
        pass


def test_a_folder_with_our_name_that_is_not_ours_is_not_used(place: Path, settings: Settings) -> None:
    stranger = Pool(place, settings, int(NEIGHBOUR))  # the folder is ours, so not that user's
    assert (stranger.prepare() is None) == (os.geteuid() != int(NEIGHBOUR))


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1755, 0o1770])
def test_a_folder_in_which_others_could_exchange_files_is_no_pool(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert "mode 1777" in complaint(tmp_path)
    (tmp_path / "link").symlink_to("/tmp")
    assert complaint(tmp_path / "link") and complaint(tmp_path / "none")


# -- what is old -----------------------------------------------------------------------------------------------------------


def test_what_is_old_goes_with_the_next_download_and_with_gc(
    place: Path, ours: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.prepare()
    for name in ("old", "new"):
        (ours.own / name).write_bytes(b"x")
    os.utime(ours.own / "old", (1, 1))
    (tmp_path / "whole").write_bytes(DATA)
    assert ours.keep(tmp_path / "whole", DIGEST).read_bytes() == DATA
    assert sorted(path.name for path in ours.own.iterdir()) == sorted(["new", DIGEST])
    monkeypatch.setattr(pool, "complaint", lambda folder: "")
    later = time.time() + 8 * 86400
    settings = Settings(pool=place)
    found = list(pool.sweep(settings, now=later, dry_run=True))
    assert {path.name for path in found} >= {"new", DIGEST} and (ours.own / "new").exists()
    assert set(pool.sweep(settings, now=later, dry_run=False)) == set(found) and not (ours.own / "new").exists()


# -- all of it -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pooled(site: Site, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The node of a site, its user in a pool."""
    monkeypatch.setattr(pool, "complaint", lambda folder: "")

    def make(address: str) -> Any:
        return site.trusting(source=address, pool=place)

    return make


def part_of(site: Site) -> Part:
    return read_index(site.folder).entries["base"].statement.parts["disk.qcow2"]


def disks(server: Server, part: Part) -> list[str]:
    return [range for path, range, _ in server.requests if path.endswith(part.blob)]


def test_what_is_downloaded_stays_for_the_neighbours(site: Site, server: Server, pooled: Any, place: Path) -> None:
    site.put("base", os.urandom(1 << 16))
    node = pooled(site.serve(server))
    node.ensure("base")
    kept = place / str(os.geteuid()) / part_of(site).blob
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o755
    assert node.verify(node.resolve("base")) == []
    assert [path for path in node.work_folder("downloads").iterdir() if path.suffix != ".lock"] == []


def test_what_a_neighbour_has_is_not_downloaded(site: Site, server: Server, pooled: Any, place: Path) -> None:
    site.put("base", os.urandom(1 << 16))
    node = pooled(site.serve(server))
    for blob in site.blobs():
        (place / NEIGHBOUR / blob.name).write_bytes(blob.read_bytes())
    node.ensure("base")
    assert not [path for path, *_ in server.requests if "/blobs/" in path]
    assert node.verify(node.resolve("base")) == []
    assert [path for path in node.work_folder("downloads").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("is_right", [True, False])
def test_a_neighbours_part_is_gone_on_with_and_a_wrong_one_costs_a_second_download(
    site: Site, server: Server, pooled: Any, place: Path, is_right: bool
) -> None:
    site.put("base", os.urandom(1 << 16))
    address = site.serve(server)
    part, url = part_of(site), f"{address}/blobs/{part_of(site).blob}"
    served = server.files[f"/images/blobs/{part.blob}"]
    half = part.blob_size // 2
    (place / NEIGHBOUR / f"{fetch.key(url)}.part").write_bytes(served.data[:half] if is_right else bytes(half))
    (place / NEIGHBOUR / f"{fetch.key(url)}.json").write_text(note(url=url, validator=served.etag))
    node = pooled(address)
    node.ensure("base")
    assert disks(server, part) == [f"bytes={half}-", *([] if is_right else [""])]
    assert node.verify(node.resolve("base")) == []


def test_a_source_that_sends_wrong_bytes_is_refused_with_a_pool_too(
    site: Site, server: Server, pooled: Any, place: Path
) -> None:
    site.put("base", os.urandom(1 << 16))
    address, part = site.serve(server), part_of(site)
    server.files[f"/images/blobs/{part.blob}"].data = bytes(part.blob_size)
    with pytest.raises(ImageMismatch):
        pooled(address).ensure("base")
    assert len(disks(server, part)) == 1
    assert not (place / str(os.geteuid()) / part.blob).exists()


def test_a_source_with_a_password_has_no_part_in_it(site: Site, server: Server, pooled: Any, place: Path) -> None:
    """The password would be in a note that others read."""
    site.put("base", b"1")
    address = site.serve(server).replace("http://", "http://me:secret@")
    pooled(address).ensure("base")
    assert [path.name for path in place.iterdir()] == [NEIGHBOUR]


def test_a_pool_that_is_none_is_told_and_does_without(site: Site, server: Server, place: Path, capsys: Any) -> None:
    site.put("base", b"1")
    place.chmod(0o755)
    node = site.trusting(source=site.serve(server), pool=place)
    node.ensure("base")
    assert "must be a folder of root's with mode 1777" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == [NEIGHBOUR]


def test_a_pool_that_is_full_does_not_keep_the_image_away(
    site: Site, server: Server, pooled: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    site.put("base", os.urandom(1 << 16))
    node, real = pooled(site.serve(server)), fetch.download

    def download(url: str, folder: Path, *words: Any, **options: Any) -> Path:
        if place in folder.parents:
            raise NoSpace(f"{folder}: full")
        return real(url, folder, *words, **options)

    monkeypatch.setattr(fetch, "download", download)
    node.ensure("base")
    assert "no space left in the pool" in capsys.readouterr().err
    assert node.verify(node.resolve("base")) == []
