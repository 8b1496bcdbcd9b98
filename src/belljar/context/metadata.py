"""The metadata service of one machine: HTTP/1.1 on connections that only this machine can make.

h11 parses, catalog.py has the pages, outputs.py keeps what a guest leaves. Everything a guest sends is untrusted: heads have
at most 8 KiB, every wait has a deadline, and no path in a request is a path of this host.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import h11

from belljar.context import Features, Instance
from belljar.context.catalog import FEATURES, TEXT, Page, find, split
from belljar.context.outputs import Outputs, Rejected
from belljar.errors import HostError
from belljar.host.files import read_capped

LARGEST_HEAD, LONGEST_TARGET = 8192, 2048
CHUNK = 1 << 16
MOST_CONNECTIONS, MOST_REQUESTS = 32, 1000
HEAD_TIMEOUT = 20.0  # seconds for a whole head, and for a silent connection
BODY_TIMEOUT = 300.0  # seconds for a whole file
STALL_TIMEOUT = 20.0  # seconds without a byte of it
SEND_TIMEOUT = 30.0
LINGER, LINGER_BYTES = 2.0, 1 << 20  # what is read and dropped, so that a client that still sends sees the answer
CREDENTIAL, LARGEST_CREDENTIAL = re.compile(r"[a-z0-9_]{1,64}"), 256 << 10
LONGEST_SESSION = 21600  # seconds that a token counts, by IMDSv2
TTL, TOKEN = b"x-aws-ec2-metadata-token-ttl-seconds", b"x-aws-ec2-metadata-token"
OPEN = [[name] for name in (*FEATURES, "joboutputs")]  # what a payload needs


class Service:
    """Answers the connections of one machine."""

    def __init__(
        self, instance: Instance, features: Callable[[], Features], outputs: Outputs, credentials: Path | None = None
    ) -> None:
        self.instance, self.features, self.outputs, self._credentials = instance, features, outputs, credentials
        self._open, self._secret = 0, secrets.token_bytes(32)
        self._needs_token = dict(instance.told).get("http-tokens") == "required"

    async def serve(self, connection: socket.socket, *, for_everybody: bool = False) -> None:
        """See `belljar.context.Metadata`: until the guest closes, is silent for too long, or asks for the end."""
        self._open += 1
        try:
            await _Talk(self, connection, for_everybody).run(is_one_too_many=self._open > MOST_CONNECTIONS)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass
        finally:
            self._open -= 1

    def token(self, ttl: bytes) -> bytes:
        """Of a session of so many seconds. Raises Rejected."""
        if not re.fullmatch(rb"[1-9][0-9]{0,4}", ttl) or int(ttl) > LONGEST_SESSION:
            raise Rejected(400, f"a session has 1 to {LONGEST_SESSION} seconds")
        return self._sealed(b"%d" % (monotonic() + int(ttl)))

    def admits(self, token: bytes | None) -> bool:
        if token is None:
            return not self._needs_token
        until = token.partition(b".")[0]
        return hmac.compare_digest(token, self._sealed(until)) and monotonic() < int(until)

    def _sealed(self, until: bytes) -> bytes:
        return b"%s.%s" % (until, hmac.digest(self._secret, until, "sha256").hex().encode())

    def page(self, parts: list[str]) -> Page | None:
        """What is at this path."""
        if parts[:1] == ["credentials"]:
            return self._credential(parts[1:])
        return find(parts, self.instance, self.features())

    def _credential(self, rest: list[str]) -> Page | None:
        """A file that is kept fresh by who asked for the machine, as it is now."""
        if self._credentials is None or len(rest) != 1 or not CREDENTIAL.fullmatch(rest[0]):
            return None
        try:
            return Page(read_capped(self._credentials / rest[0], LARGEST_CREDENTIAL))
        except (OSError, HostError):
            return None


class _Talk:
    """One connection."""

    def __init__(self, service: Service, connection: socket.socket, for_everybody: bool) -> None:
        self._service, self._socket, self._for_everybody = service, connection, for_everybody
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)

    async def run(self, *, is_one_too_many: bool) -> None:
        for number in range(1, MOST_REQUESTS + 1):
            try:
                async with asyncio.timeout(HEAD_TIMEOUT):
                    event = await self._next(LARGEST_HEAD)
                if not isinstance(event, h11.Request):
                    return
                if is_one_too_many:
                    raise Rejected(503, "too many connections")
                await self._answer(event, is_last=number == MOST_REQUESTS)
            except h11.RemoteProtocolError as exc:
                await self._refuse(Rejected(exc.error_status_hint, "this is no request"))
            except TimeoutError:
                await self._refuse(Rejected(408, "that took too long"))
            except Rejected as rejected:
                await self._refuse(rejected)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return await self._linger()
            self._http.start_next_cycle()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _answer(self, request: h11.Request, *, is_last: bool) -> None:
        """Answer one request. Raises Rejected."""
        if len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers) > LARGEST_HEAD:
            raise Rejected(431, "the head is too large")
        if len(request.target) > LONGEST_TARGET:
            raise Rejected(414, "the path is too long")
        if {b"content-length", b"transfer-encoding"} <= (headers := dict(request.headers)).keys():
            raise Rejected(400, "a content length, and chunks")
        parts = split(request.target)
        if parts is None:
            raise Rejected(400, "the path is none of ours")
        if self._for_everybody and parts[:1] not in OPEN:
            raise Rejected(404, "not found")
        more = [(b"connection", b"close")] if is_last else []
        if request.method == b"PUT":
            return await self._put(parts, headers, more)
        if request.method not in (b"GET", b"HEAD"):
            raise Rejected(405, "GET, HEAD, and PUT of outputs only")
        if parts[:1] not in OPEN and not self._service.admits(headers.get(TOKEN)):
            raise Rejected(401, "a session token is needed that counts: see IMDSv2")
        page = self._service.page(parts)
        if page is None:
            raise Rejected(404, "not found")
        await self._drain()
        await self._reply(200, page.data, page.kind, more, is_head=request.method == b"HEAD")

    async def _put(self, parts: list[str], headers: dict[bytes, bytes], more: list[tuple[bytes, bytes]]) -> None:
        if parts == ["latest", "api", "token"]:
            ttl = headers.get(TTL, b"")
            return await self._reply(200, self._service.token(ttl), TEXT, [*more, (TTL, ttl)])
        if parts[:1] != ["joboutputs"]:
            raise Rejected(405, "GET and HEAD only")
        if len(parts) != 2:
            raise Rejected(403, "exactly one name below joboutputs")
        await self._take(parts[1], headers)
        await self._reply(201, b"", TEXT, more)

    async def _take(self, name: str, headers: dict[bytes, bytes]) -> None:
        """A file of the guest's. Raises Rejected; then, as when the guest goes away, nothing is left of it."""
        length = headers.get(b"content-length")
        draft = self._service.outputs.begin(name, None if length is None else int(length))
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while isinstance(event := await self._part(), h11.Data):
                    draft.write(bytes(event.data))
                if not isinstance(event, h11.EndOfMessage):
                    raise Rejected(400, "the file ended too soon")
            draft.keep()
        finally:
            draft.drop()

    async def _drain(self) -> None:
        """Read and drop the body of a request that needs none."""
        size = 0
        async with asyncio.timeout(STALL_TIMEOUT):
            while isinstance(event := await self._part(), h11.Data):
                size += len(event.data)
                if size > LARGEST_HEAD:
                    raise Rejected(413, "nothing is to be sent here")

    async def _part(self) -> object:
        async with asyncio.timeout(STALL_TIMEOUT):
            return await self._next(CHUNK)

    async def _next(self, most: int) -> object:
        """The next event of the connection."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._loop.sock_recv(self._socket, most))
        return event

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _refuse(self, rejected: Rejected) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self._http.their_state is h11.SEND_BODY and not self._http.they_are_waiting_for_100_continue:
                with suppress(h11.RemoteProtocolError):
                    self._http.next_event()  # a request without a body is over with this
            headers = [(b"connection", b"close")] if self._http.their_state is not h11.DONE else []
            if rejected.status == 405:
                headers.append((b"allow", b"GET, HEAD"))
            await self._reply(rejected.status, f"{rejected}\n".encode(), TEXT, headers)

    async def _reply(
        self, status: int, data: bytes, kind: str, more: list[tuple[bytes, bytes]], *, is_head: bool = False
    ) -> None:
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(data)), *more]
        await self._send(h11.Response(status_code=status, headers=headers))
        if not is_head:
            await self._send(h11.Data(data=data))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if not data:
            return
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                await self._loop.sock_sendall(self._socket, data)
        except TimeoutError as exc:
            raise ConnectionAbortedError("the guest does not read its answer") from exc

    async def _linger(self) -> None:
        """Send no more, and drop what still arrives for a moment."""
        with suppress(OSError, TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            async with asyncio.timeout(LINGER):
                while left > 0 and (data := await self._loop.sock_recv(self._socket, CHUNK)):
                    left -= len(data)
