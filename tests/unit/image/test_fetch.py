"""Downloads: from servers that cut off, stall, lie, redirect and never end; resumed by another process."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, get, serving

from belljar.errors import CommandMissing, DownloadFailed, ImageTooLarge
from belljar.host import commands
from belljar.image import Settings
from belljar.image.intake import fetch
from belljar.model import MIB

DATA = os.urandom(300_000)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_file_arrives_whole_and_leaves_no_note(server: Server, folder: Path, settings: Settings) -> None:
    assert get(server.put("/disk", DATA), folder, settings) == DATA
    assert [path.suffix for path in folder.iterdir()] == [".part"]
    assert next(folder.iterdir()).stat().st_mode & 0o777 == 0o600


def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, folder: Path, settings: Settings) -> None:
    url = server.put("/disk", DATA, cut_after=[1000, 70_000, 5])
    assert get(url, folder, settings) == DATA
    assert server.ranges() == ["", "bytes=1000-", "bytes=71000-", "bytes=71005-"]
    assert {condition for _, _, condition in server.requests[1:]} == {'"v1"'}


def test_the_date_stands_in_for_a_missing_or_weak_etag(server: Server, folder: Path, settings: Settings) -> None:
    date = "Wed, 01 Jan 2025 00:00:00 GMT"
    for etag in ("", 'W/"weak"'):
        server.requests.clear()
        url = server.put(f"/disk{len(etag)}", DATA, etag=etag, last_modified=date, cut_after=[1000])
        assert get(url, folder, settings) == DATA
        assert server.requests[1][2] == date


def test_a_server_without_versions_starts_again(server: Server, folder: Path, settings: Settings) -> None:
    url = server.put("/disk", DATA, etag="", cut_after=[1000])
    assert get(url, folder, settings) == DATA
    assert server.ranges() == ["", ""]


def test_a_server_without_ranges_starts_again(server: Server, folder: Path, settings: Settings) -> None:
    assert get(server.put("/disk", DATA, ranges=False, cut_after=[1000]), folder, settings) == DATA


def test_another_process_goes_on_where_the_first_one_died(server: Server, folder: Path, settings: Settings) -> None:
    url = server.put("/disk", DATA, stall_after=1000)
    with pytest.raises(DownloadFailed, match="1000 bytes so far"):
        get(url, folder, replace(settings, stall_timeout=1.0))
    server.files["/disk"].stall_after = None
    assert get(url, folder, settings) == DATA
    assert server.ranges() == ["", "bytes=1000-"]


def test_a_file_that_changed_meanwhile_is_fetched_anew(server: Server, folder: Path, settings: Settings) -> None:
    url = server.put("/disk", DATA, cut_after=[1000, 0, 0, 0, 0])
    with pytest.raises(DownloadFailed):
        get(url, folder, settings)
    server.put("/disk", b"a new version", etag='"v2"')
    assert get(url, folder, settings) == b"a new version"


def kept(url: str, folder: Path, data: bytes, head: bytes) -> None:
    """What a process that died has left."""
    (folder / f"{fetch.key(url)}.part").write_bytes(data)
    (folder / f"{fetch.key(url)}.head").write_bytes(head)


def head_of(etag: str, size: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nETag: {etag}\r\nContent-Length: {size}\r\n\r\n".encode()


def test_a_download_that_was_whole_when_its_process_died_is_not_fetched_again(
    server: Server, folder: Path, settings: Settings
) -> None:
    url = server.put("/disk", DATA)
    kept(url, folder, DATA, head_of('"v1"', len(DATA)))
    assert get(url, folder, settings) == DATA
    assert server.ranges() == [f"bytes={len(DATA)}-"]


def test_a_whole_file_of_another_version_is_fetched_anew(server: Server, folder: Path, settings: Settings) -> None:
    """curl takes an answer without a range for the rest where it is as long as what is here."""
    url = server.put("/disk", DATA, etag='"v2"')
    kept(url, folder, bytes(len(DATA)), head_of('"v1"', len(DATA)))
    assert get(url, folder, settings) == DATA
    assert server.ranges() == [f"bytes={len(DATA)}-", ""]


def test_a_rest_of_another_version_that_a_dead_process_added_is_dropped(
    server: Server, folder: Path, settings: Settings
) -> None:
    """By a server that does not know If-Range."""
    url = server.put("/disk", DATA, etag='"v2"', looks_at_if_range=False)
    kept(url, folder, bytes(1000) + DATA[1000:2000], head_of('"v1"', len(DATA)))
    assert get(url, folder, settings) == DATA
    assert server.ranges() == ["bytes=2000-", ""]


@pytest.mark.parametrize(
    "head", [b"", b'HTTP/1.1 302 Found\r\nETag: "v1"\r\n\r\n', b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 100]
)
def test_a_part_nobody_can_vouch_for_is_dropped(server: Server, folder: Path, settings: Settings, head: bytes) -> None:
    url = server.put("/disk", DATA)
    kept(url, folder, b"garbage", head)
    assert get(url, folder, settings) == DATA
    assert server.ranges() == [""]


def test_a_silent_server_is_given_up(server: Server, folder: Path, settings: Settings) -> None:
    with pytest.raises(DownloadFailed):
        get(server.put("/disk", DATA, stall_after=0), folder, replace(settings, stall_timeout=1.0))


def test_a_server_that_never_answers_is_given_up(server: Server, folder: Path, settings: Settings) -> None:
    import threading

    server.gate = threading.Event()
    with pytest.raises(DownloadFailed):
        get(server.put("/disk", DATA), folder, replace(settings, stall_timeout=1.0))
    server.gate.set()


def test_a_connection_that_breaks_again_and_again_is_given_up(server: Server, folder: Path, settings: Settings) -> None:
    with pytest.raises(DownloadFailed) as caught:
        get(server.put("/disk", DATA, cut_after=[10] + [0] * 50), folder, settings)
    assert "resumed" in caught.value.hint and len(server.requests) < 10


@pytest.mark.parametrize("tells", [True, False])
def test_a_file_that_changes_again_and_again_is_given_up(
    server: Server, folder: Path, settings: Settings, tells: bool
) -> None:
    """Each answer brings bytes, and each next one makes them useless: that is no progress."""
    cuts = [1000 + 10 * number for number in range(200)]
    url = server.put("/disk", DATA, cut_after=cuts, changes=True, looks_at_if_range=tells)
    with pytest.raises(DownloadFailed):
        get(url, folder, settings)
    assert len(server.requests) == fetch.MOST_FAILURES


def test_a_server_without_ranges_that_breaks_off_again_and_again_is_given_up(
    server: Server, folder: Path, settings: Settings
) -> None:
    with pytest.raises(DownloadFailed, match=r"does.* support byte ranges"):
        get(server.put("/disk", DATA, ranges=False, cut_after=[1000] * 200), folder, settings)
    assert len(server.requests) == fetch.MOST_FAILURES


def test_more_than_allowed_is_refused_by_its_announcement(server: Server, folder: Path, settings: Settings) -> None:
    with pytest.raises(ImageTooLarge):
        get(server.put("/disk", DATA, says_length=1 << 60), folder, settings)
    assert list(folder.iterdir()) == []


def test_more_than_allowed_is_refused_though_nothing_was_announced(
    server: Server, folder: Path, settings: Settings
) -> None:
    with pytest.raises(ImageTooLarge):
        get(server.put("/disk", DATA, endless=True), folder, replace(settings, max_size=MIB))
    assert list(folder.iterdir()) == []


def test_a_server_that_sends_less_than_it_says_is_not_believed(
    server: Server, folder: Path, settings: Settings
) -> None:
    with pytest.raises(DownloadFailed):
        get(server.put("/disk", DATA, etag="", says_length=len(DATA) + 1), folder, settings)


def test_without_a_length_the_end_of_the_connection_is_the_end(
    server: Server, folder: Path, settings: Settings
) -> None:
    assert get(server.put("/disk", DATA, chunked=True), folder, settings) == DATA


def test_a_range_from_somewhere_else_is_not_appended(server: Server, folder: Path, settings: Settings) -> None:
    url = server.put("/disk", DATA, wrong_range=True, cut_after=[1000])
    assert get(url, folder, settings) == DATA
    assert server.ranges() == ["", "bytes=1000-", ""]


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
def test_a_refusal_is_passed_on(server: Server, folder: Path, settings: Settings, status: int) -> None:
    with pytest.raises(DownloadFailed, match=str(status)):
        get(server.put("/disk", DATA, status=status), folder, settings)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://host:99999/", "http://\x00/"])
def test_an_address_that_is_none(folder: Path, settings: Settings, url: str) -> None:
    with pytest.raises(DownloadFailed):
        get(url, folder, settings)


def test_a_password_in_an_address_is_not_shown(folder: Path, settings: Settings) -> None:
    with serving() as gone:
        address = gone.address.replace("http://", "http://user:secret@")
    with pytest.raises(DownloadFailed) as caught:
        get(f"{address}/disk", folder, settings)
    assert "secret" not in str(caught.value)


@contextmanager
def answering(*answers: Callable[[bytes], Iterator[bytes]]) -> Iterator[str]:
    """A server that answers one connection after the other with these bytes, and then with the last of them; its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            for number in itertools.count():
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    for data in answers[min(number, len(answers) - 1)](connection.recv(65536)):
                        connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/disk"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


OLD, NEW = b"o" * 5000, b"n" * 5000


def begins(_: bytes) -> Iterator[bytes]:
    yield b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 5000\r\n\r\n' + OLD[:1000]


@pytest.mark.parametrize("says", ['ETag: "2"\r\n', "ETag: W/2\r\nLast-Modified: now\r\n", ""])
@pytest.mark.parametrize("size", [5000, 5001])
def test_the_rest_of_another_version_is_not_appended(folder: Path, settings: Settings, says: str, size: int) -> None:
    data = NEW.ljust(size, b"n")

    def goes_on(request: bytes) -> Iterator[bytes]:
        """As servers do that know Range and not If-Range."""
        found = re.search(rb"bytes=(\d+)-", request)
        at = int(found[1]) if found else 0
        first = f"206 Partial Content\r\nContent-Range: bytes {at}-{size - 1}/{size}" if found else "200 OK"
        yield f"HTTP/1.1 {first}\r\n{says}Content-Length: {size - at}\r\n\r\n".encode() + data[at:]

    with answering(begins, goes_on) as url:
        got = get(url, folder, settings)
    if '"2"' in says or size == 5001:
        assert got == data
    else:
        assert len(got) == 5000  # nothing tells the versions apart but a digest


def drips(head: bytes, done: threading.Event) -> Callable[[bytes], Iterator[bytes]]:
    def answer(_: bytes) -> Iterator[bytes]:
        yield head
        while not done.wait(0.02):
            yield b"a"

    return answer


@pytest.mark.parametrize("where", ["head", "body"])
@pytest.mark.parametrize("how", ["download", "small"])
def test_a_server_that_drips_is_given_up(folder: Path, settings: Settings, where: str, how: str) -> None:
    done, brief = threading.Event(), replace(settings, stall_timeout=1.0)
    head = b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 1000000\r\n\r\n" if where == "body" else b"X: ")
    with answering(drips(head, done)) as url:
        with pytest.raises(DownloadFailed, match=r"too slow|timed out"):
            if how == "download":
                get(url, folder, brief)
            else:
                fetch.small_file(url, MIB, patience=brief.stall_timeout)
        done.set()


@pytest.mark.parametrize("version", [b'ETag: "\xe9"', b'ETag: "\xe2\x98\x83"', b"Last-Modified: \xff\xfe"])
def test_a_version_that_cannot_be_sent_back_is_none(folder: Path, settings: Settings, version: bytes) -> None:
    def whole(request: bytes) -> Iterator[bytes]:
        assert b"If-Range" not in request and b"If-None-Match" not in request
        yield b"HTTP/1.1 200 OK\r\n" + version + b"\r\nContent-Length: 5000\r\n\r\n" + NEW

    def broken(request: bytes) -> Iterator[bytes]:
        yield next(whole(request))[:-1000]

    with answering(broken, whole) as url:
        assert get(url, folder, settings) == NEW


def test_a_disk_that_is_full_is_named(server: Server, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from belljar.image import Settings; from belljar.image.intake import fetch;"
        "from belljar.image.progress import Progress;"
        "fetch.download(sys.argv[1], Path(sys.argv[2]), Settings(), Progress())"
    )
    words = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k none "$4" && exec "$1" -c "$2" "$3" "$4"', "sh"]
    url = server.put("/disk", DATA)
    argv = [*words, sys.executable, script, url, str(tmp_path)]
    died = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "NoSpace" in died.stderr.splitlines()[-1]


def test_without_curl_it_is_named(
    server: Server, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "which", lambda name: None if name == "curl" else f"/usr/bin/{name}")
    with pytest.raises(CommandMissing, match="curl"):
        get(server.put("/disk", DATA), folder, settings)


def test_nothing_of_an_address_stands_on_the_command_line(server: Server, folder: Path, settings: Settings) -> None:
    """Others on this host see that of every process."""
    server.gate = threading.Event()
    url = server.put("/disk", DATA).replace("http://", "http://user:secret@")
    done = threading.Thread(target=get, args=(url, folder, settings))
    done.start()
    assert server.asked.wait(10)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    server.gate.set()
    done.join(10)
    assert any(b"--dump-header" in line for line in lines) and not any(b"user:secret" in line for line in lines)
