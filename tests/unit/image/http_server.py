"""A small HTTP server on the loopback that misbehaves as it is told: one script of answers per path."""

from __future__ import annotations

import re
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from belljar.image import Settings
from belljar.image.intake import fetch
from belljar.image.progress import Progress


@dataclass
class Served:
    """A file and how it is served. Each trick is a plain switch, so that a test names what it is about."""

    data: bytes = b""
    etag: str = '"v1"'
    last_modified: str = ""
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)  # the n-th answer breaks off after so many bytes
    stall_after: int | None = None  # then silence until the server is closed
    says_length: int | None = None  # what Content-Length claims
    chunked: bool = False  # no length at all
    status: int = 200
    redirect: str = ""
    wrong_range: bool = False
    endless: bool = False
    drip: float = 0.0  # one byte each so many seconds
    changes: bool = False  # another version at each request
    looks_at_if_range: bool = True
    content_type: str = ""
    login: str = ""  # user:password that an answer takes


class Server:
    """Files by path, and the requests that came: (path, Range, If-Range)."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.logins: list[str] = []  # the header Authorization of each request
        self.closing = threading.Event()
        self.asked = threading.Event()  # set at each request
        self.gate: threading.Event | None = None  # answers wait for it
        self.address = ""

    def put(self, path: str, data: bytes = b"", **tricks: object) -> str:
        self.files[path] = Served(data, **tricks)  # type: ignore[arg-type]
        return f"{self.address}{path}"

    def ranges(self) -> list[str]:
        return [range_ for _, range_, _ in self.requests]


@contextmanager
def serving(host: str = "127.0.0.1", port: int = 0, certificate: Path | None = None) -> Iterator[Server]:
    """*certificate*: with its key; then by https."""
    server = Server()
    http = ThreadingHTTPServer((host, port), _handler(server))
    http.daemon_threads = True
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True)
    server.address = f"http{'s' if certificate else ''}://{host}:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        http.shutdown()
        thread.join()
        http.server_close()


def _basic(login: str) -> str:
    return f"Basic {b64encode(login.encode()).decode()}"


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            server.requests.append((self.path, self.headers.get("Range", ""), self.headers.get("If-Range", "")))
            server.logins.append(self.headers.get("Authorization", ""))
            server.asked.set()
            if server.gate:
                server.gate.wait(20)
            self.close_connection = True
            served = server.files.get(self.path)
            if served is None:
                self.send_error(404)
            elif served.redirect:
                self.send_response(302)
                self.send_header("Location", served.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif served.login and self.headers.get("Authorization") != _basic(served.login):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="here"')
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif served.status != 200:
                self.send_error(served.status)
            elif served.etag and self.headers.get("If-None-Match") == served.etag:
                self.send_response(304)
                self.end_headers()
            else:
                self._send(served, self._start(served))

        def do_HEAD(self) -> None:
            self.do_GET()

        def _start(self, served: Served) -> int:
            """Where the answer begins; 0 when the range is not honoured."""
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if served.changes:
                served.etag = f'"v{len(server.requests)}"'
            same = self.headers.get("If-Range") in (served.etag, served.last_modified) or not served.looks_at_if_range
            return int(wanted[1]) if wanted and served.ranges and same else 0

        def _send(self, served: Served, start: int) -> None:
            size, data = len(served.data), served.data[start:]
            if start and start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                shown = start + 1 if served.wrong_range else start
                self.send_header("Content-Range", f"bytes {shown}-{size - 1}/{size}")
            if served.content_type:
                self.send_header("Content-Type", served.content_type)
            if served.etag:
                self.send_header("ETag", served.etag)
            if served.last_modified:
                self.send_header("Last-Modified", served.last_modified)
            length = len(data) if served.says_length is None else served.says_length
            if not served.chunked and not served.endless:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "GET":
                self._body(served, data)

        def _body(self, served: Served, data: bytes) -> None:
            write: Callable[[bytes], object] = self.wfile.write
            try:
                if served.cut_after:
                    write(data[: served.cut_after.pop(0)])
                elif served.stall_after is not None:
                    write(data[: served.stall_after])
                    server.closing.wait(120)
                elif served.drip:
                    for byte in data:
                        write(bytes([byte]))
                        server.closing.wait(served.drip)
                else:
                    write(data)
                    while served.endless and not server.closing.is_set():
                        write(data)
            except OSError:
                pass

    return Handler


def get(url: str, folder: Path, settings: Settings) -> bytes:
    """The file at this address, downloaded."""
    return fetch.download(url, folder, settings, Progress()).read_bytes()
