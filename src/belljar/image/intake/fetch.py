"""Download one file over http or https: streamed, resumed, limited in size and in time.

A download is `<key>.part` beside `<key>.json`, which has the server's name for this version of the file (ETag or date). It is
resumed only for the same version (RFC 9110, If-Range). The caller holds the lock and checks the digest.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import DownloadFailed, DownloadStalled, ImageTooLarge
from belljar.host.files import PRIVATE_FILE, no_space_as_error, read_json, write_all, write_whole
from belljar.host.guard.egress import is_public
from belljar.image import Settings
from belljar.image.progress import Progress
from belljar.records import dataclass

if TYPE_CHECKING:
    import httpx

MOST_REDIRECTS = 5
MOST_FAILURES = 3  # in a row without progress
MOST_RESTARTS = 5  # each one throws away what came before
CONNECT_TIMEOUT = 30.0
SLOWEST = (
    1024  # bytes per second, over `image.stall_timeout`; a server that sends single bytes must not keep us for ever
)


@dataclass
class Part:
    """What there is of a file so far."""

    path: Path
    validator: str = ""  # strong ETag, or Last-Modified
    total: int | None = None
    restarts: int = 0  # how often bytes were thrown away

    @classmethod
    def found(cls, path: Path, url: str) -> Part:
        """What an earlier process left, or an empty part."""
        with suppress(OSError, ValueError):
            note = read_json(path.with_suffix(".json"))
            if note.get("url") == url and isinstance(note.get("validator"), str) and path.is_file():
                return cls(path, note["validator"], note["total"] if isinstance(note.get("total"), int) else None)
        part = cls(path)
        part.restart()
        return part

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def is_whole(self) -> bool:
        return self.total is not None and self.size == self.total

    def restart(self) -> None:
        self.restarts += self.path.exists() and self.size > 0
        with no_space_as_error(self.path):
            self.path.write_bytes(b"")
            self.path.chmod(PRIVATE_FILE)

    def note(self, url: str) -> None:
        note = {"url": url, "validator": self.validator, "total": self.total}
        write_whole(self.path.with_suffix(".json"), json.dumps(note).encode(), mode=PRIVATE_FILE)

    def forget(self) -> None:
        for path in (self.path, self.path.with_suffix(".json")):
            path.unlink(missing_ok=True)


def key(source: str) -> str:
    """The file name under which a source's download and lock are kept."""
    from hashlib import sha256

    return sha256(source.encode()).hexdigest()[:32]


def download(url: str, folder: Path, settings: Settings, progress: Progress, *, is_pinned: bool) -> Path:
    """Get the file whole. Goes on after a broken connection, and after the death of another process, as long as bytes keep
    coming. *is_pinned*: its digest is known, so that a redirect from https to http is no danger. Raises DownloadFailed,
    DownloadStalled (both keep what came; also for less than `SLOWEST`), ImageTooLarge."""
    part = Part.found(folder / f"{key(url)}.part", url)
    with _client(settings) as client:
        failures, most = 0, part.size
        while True:
            try:
                _continue(client, url, part, settings, progress, is_pinned)
                break
            except DownloadStalled:
                raise
            except _Broken as exc:
                failures = failures + 1 if part.size <= most else 0
                most = max(most, part.size)
                if failures >= MOST_FAILURES:
                    raise DownloadFailed(f"{shown(url)}: {exc}") from exc
                if part.restarts >= MOST_RESTARTS:
                    raise DownloadFailed(
                        f"{shown(url)}: it cannot be continued, or changes while it is downloaded:"
                        f" begun anew {part.restarts} times; at last {exc}",
                        hint="Try again when the file stands still on its server, or download it by other means.",
                    ) from exc
    part.path.with_suffix(".json").unlink(missing_ok=True)
    return part.path


@dataclass(frozen=True)
class Answer:
    """A small file, whole."""

    data: bytes
    etag: str


def small_file(
    url: str, largest: int, settings: Settings, *, etag: str = "", public_only: bool = False
) -> Answer | None:
    """A file that fits into memory; None: it is still the one with this *etag*. Within twice `image.stall_timeout`, however
    slowly its bytes come. *public_only*: from no address of this host or of a private network, whatever a name leads to. Raises DownloadFailed, DownloadStalled, ImageTooLarge."""
    deadline = time.monotonic() + settings.stall_timeout
    headers = {"Accept-Encoding": "identity", **({"If-None-Match": etag} if etag else {})}
    with _client(settings) as client:
        for again in reversed(range(MOST_FAILURES)):
            try:
                with _answer(client, url, headers, settings, public_only=public_only) as response:
                    if etag and response.status_code == 304:
                        return None
                    if response.status_code != 200:
                        raise _refused(response, url)
                    data = _whole(response, url, largest, deadline)
                    return Answer(data, _plain(response.headers.get("etag", "")))
            except _Broken as exc:
                if not again or time.monotonic() > deadline:
                    raise DownloadFailed(f"{shown(url)}: {exc}") from exc
    raise AssertionError("the last try ends the loop")


def version(url: str, settings: Settings) -> str:
    """What the server calls the version that it has now; "" where it does not say. Raises DownloadFailed, DownloadStalled."""
    try:
        with _client(settings) as client, _answer(client, url, {"Accept-Encoding": "identity"}, settings) as response:
            if response.status_code != 200:
                raise _refused(response, url)
            return _version(response.headers)
    except _Broken as exc:
        raise DownloadFailed(f"{shown(url)}: {exc}") from exc


def _whole(response: httpx.Response, url: str, largest: int, deadline: float) -> bytes:
    announced = _number(response.headers.get("content-length"))
    pieces, size = [], announced or 0
    if size <= largest:
        size = 0
        for chunk in response.iter_raw():
            pieces.append(chunk)
            size += len(chunk)
            if size > largest:
                break
            if time.monotonic() > deadline:
                raise DownloadStalled(f"{shown(url)}: not whole in time ({size} bytes so far)")
    if size > largest:
        raise ImageTooLarge(f"{shown(url)}: {size} bytes or more, the limit is {largest}", hint=_NO_INDEX)
    if announced is not None and size != announced:
        raise _Broken(f"{size} bytes came, {announced} were announced")
    return b"".join(pieces)


_NO_INDEX = "That is not an index of images: check `image.sources`."


class _Broken(Exception):
    """The connection broke: try again at once."""


def _continue(
    client: httpx.Client, url: str, part: Part, settings: Settings, progress: Progress, is_pinned: bool
) -> None:
    """One connection: ask for what is missing and write it to the part."""
    headers = {"Accept-Encoding": "identity"}
    if part.size and part.validator:
        headers |= {"Range": f"bytes={part.size}-", "If-Range": part.validator}
    progress.step(f"Downloading {shown(url)}" + (f" from byte {part.size}" if "Range" in headers else ""))
    with _answer(client, url, headers, settings, part, is_pinned=is_pinned) as response:
        if response.status_code == 416 and part.is_whole:
            return
        _begin(response, url, part, settings)
        _receive(response, part, settings, progress)
    if part.total is not None and part.size != part.total:
        raise _Broken(f"{part.size} bytes came, {part.total} were announced")


@contextmanager
def _answer(
    client: httpx.Client, url: str, headers: dict[str, str], settings: Settings, part: Part | None = None, *,
    is_pinned: bool = False, public_only: bool = False,
) -> Iterator[httpx.Response]:  # fmt: skip
    """The answer of the server that has the file, or the rest of a *part*. What httpx raises, here and inside, is one of our
    errors."""
    import httpx

    try:
        with _followed(client, url, headers, is_pinned, settings.stall_timeout, public_only) as response:
            yield response
    except httpx.TimeoutException as exc:
        so_far = f" ({part.size} bytes so far)" if part else ""
        raise DownloadStalled(f"{shown(url)}: no byte for {settings.stall_timeout:g} s{so_far}") from exc
    except httpx.TransportError as exc:
        raise _Broken(str(exc) or type(exc).__name__) from exc
    except (httpx.InvalidURL, UnicodeError) as exc:  # also of a host that cannot be a name
        raise DownloadFailed(f"{shown(url)}: {exc}") from exc


def _refused(response: httpx.Response, url: str) -> DownloadFailed:
    return DownloadFailed(f"{shown(url)}: the server says {response.status_code} {response.reason_phrase}".rstrip())


@contextmanager
def _followed(
    client: httpx.Client, url: str, headers: dict[str, str], is_pinned: bool, patience: float, public_only: bool = False
) -> Iterator[httpx.Response]:
    """The answer after at most five redirects; each head comes within twice *patience*. A server of the whole internet sends
    nobody to what only this host or its site reaches: no question is put there."""
    address, came_from = url, shown(url) if public_only else ""
    for _ in range(MOST_REDIRECTS + 1):
        with ExitStack() as stack:
            too_late = f"{shown(url)}: the server has not answered in {2 * patience:g} s"
            with _Hurry(2 * patience, too_late, came_from) as hurry:
                request = client.build_request("GET", address, headers=headers, extensions={"trace": hurry.see})
                response = client.send(request, stream=True)
                stack.callback(response.close)
            if not response.has_redirect_location:
                yield response
                return
            came_from = came_from or (shown(url) if hurry.saw_public else "")
            target = response.url.join(response.headers["location"])
        if target.scheme not in ("http", "https"):
            raise DownloadFailed(f"{shown(url)}: redirected to {target.scheme}, which belljar does not follow")
        if response.url.scheme == "https" and target.scheme == "http" and not is_pinned:
            raise DownloadFailed(
                f"{shown(url)}: redirected from https to http",
                hint="Name an address that stays https; for an image its digest (--sha256) will do.",
            )
        address = str(target)
    raise DownloadFailed(f"{shown(url)}: more than {MOST_REDIRECTS} redirects")


class _Hurry:
    """Ends a connection on which no whole head of an answer came in time, even where each byte of it came in time. *came_from*:
    the address that leads here, where it may lead to public ones only."""

    def __init__(self, seconds: float, complaint: str, came_from: str = "") -> None:
        import threading

        self._complaint, self._is_over = complaint, False
        self._came_from, self.saw_public = came_from, False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def see(self, event: str, facts: dict[str, Any]) -> None:
        """httpcore tells what it does: https://www.encode.io/httpcore/extensions/#trace"""
        if event == "connection.connect_tcp.complete":
            connection = facts["return_value"].get_extra_info("socket")
            self._sockets.append(connection)
            peer = connection.getpeername()[0]
            self.saw_public = is_public(peer)
            if self._came_from and not self.saw_public:
                connection.close()
                raise DownloadFailed(
                    f"{self._came_from}: leads to {peer}, which is an address of this host or of a private network",
                    hint="Name the address itself where that is meant.",
                )

    def __enter__(self) -> _Hurry:
        self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        if self._is_over and isinstance(error, Exception):
            raise DownloadStalled(self._complaint) from error

    def _end(self) -> None:
        self._is_over = True
        for connection in self._sockets:
            with suppress(OSError):
                # Not that of SSLSocket, which takes itself apart while another thread reads.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _begin(response: httpx.Response, url: str, part: Part, settings: Settings) -> None:
    """Read the head of the answer: does it continue the part, or begin another file?"""
    status, headers = response.status_code, response.headers
    if status == 416:
        part.restart()
        raise _Broken("the server has less of the file than we do")
    if status not in (200, 206):
        raise _refused(response, url)
    version = _version(headers)
    if status == 206:
        start, total = _content_range(headers.get("content-range", ""))
        if start != part.size:
            part.restart()
            raise _Broken(f"the server sent bytes from {start} on")
        if part.size and not _is_same(part, version, total):
            part.restart()  # many a server does not look at If-Range
            raise _Broken("the file changed on the server")
    else:
        total = _number(headers.get("content-length"))
        part.restart()
        part.validator = ""
    if (total or 0) > settings.max_size:
        part.forget()
        raise ImageTooLarge(f"{shown(url)}: {total} bytes, the limit is {settings.max_size}")
    part.validator = version or part.validator  # an answer with a part may leave it out
    part.total = total
    part.note(url)


def _version(headers: httpx.Headers) -> str:
    """What the server calls this version of the file: a strong ETag, or its date; "" where it says neither."""
    etag = _plain(headers.get("etag", ""))
    return etag if etag.startswith('"') else _plain(headers.get("last-modified", ""))


def _plain(value: str) -> str:
    """A header's value that can be sent back; "" for what cannot."""
    return value if value.isascii() and value.isprintable() else ""


def _is_same(part: Part, version: str, total: int | None) -> bool:
    """Can what the server sends now be the rest of what we have?"""
    is_comparable = version and part.validator.startswith('"') == version.startswith('"')
    same_size = None in (total, part.total) or total == part.total
    return same_size and (not is_comparable or version == part.validator)


def _receive(response: httpx.Response, part: Part, settings: Settings, progress: Progress) -> None:
    # Every chunk is written at once: what is not written when the connection breaks has to be sent again.
    size = seen = part.size
    since = time.monotonic()
    with no_space_as_error(part.path), open(part.path, "ab", buffering=0) as file:
        for chunk in response.iter_raw():
            size += len(chunk)
            if (passed := time.monotonic() - since) > settings.stall_timeout:
                if size - seen < SLOWEST * passed:
                    write_all(file.fileno(), chunk)
                    raise DownloadStalled(
                        f"{shown(str(response.url))}: {size - seen} bytes in {passed:.0f} s ({size} bytes so far)"
                    )
                since, seen = time.monotonic(), size
            if size > settings.max_size:
                part.forget()
                raise ImageTooLarge(f"{shown(str(response.url))}: more than {settings.max_size} bytes")
            write_all(file.fileno(), chunk)
            progress.amount(size, part.total)


def _content_range(text: str) -> tuple[int, int | None]:
    """(first byte, size of the whole) of `bytes 100-199/200`; (-1, None) when it says something else."""
    unit, _, rest = text.partition(" ")
    span, _, whole = rest.partition("/")
    first = _number(span.partition("-")[0])
    return (-1, None) if unit != "bytes" or first is None else (first, _number(whole))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else None


def _client(settings: Settings) -> httpx.Client:
    import ssl

    import httpx

    timeout = httpx.Timeout(settings.stall_timeout, connect=min(CONNECT_TIMEOUT, settings.stall_timeout))
    # A connection for each answer: of one that is used again, `_Hurry` would not know.
    limits = httpx.Limits(max_keepalive_connections=0)
    trust = ssl.create_default_context()  # this host's certificates, not those that come with httpx
    return httpx.Client(verify=trust, timeout=timeout, limits=limits, follow_redirects=False)


def shown(url: str) -> str:
    """The address without its password."""
    from urllib.parse import urlsplit, urlunsplit

    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise DownloadFailed(f"{url!r}: {exc}") from exc
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
