"""The metadata service of one machine: HTTP/1.1 on connections that are the machine's by the way they came.

Parsing is h11's; what is known is in catalog.py; what a guest leaves goes into outputs.py. Everything a guest sends is
untrusted: heads have at most 8 KiB, every wait has a deadline, and nothing it asks for is a path of this host.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h11

from belljar.context import Features, TokenMode
from belljar.context.catalog import FEATURES, TEXT, Instance, Page, find, is_ec2, split
from belljar.context.outputs import Outputs, Rejected
from belljar.errors import HostError
from belljar.host.files import read_capped

LARGEST_HEAD, LONGEST_TARGET = 8192, 2048
CHUNK = 1 << 16
MOST_CONNECTIONS, MOST_REQUESTS = 32, 1000
HEAD_TIMEOUT = 20.0  # seconds for a whole head, and for a connection that says nothing
BODY_TIMEOUT = 300.0  # for a whole file
STALL_TIMEOUT = 20.0  # without a byte of it
SEND_TIMEOUT = 30.0
LINGER, LINGER_BYTES = 2.0, 1 << 20  # what is read and dropped, so that a client that still sends sees the answer
LONGEST_TTL = 21600  # seconds a token lives
CREDENTIAL, LARGEST_CREDENTIAL = re.compile(r"[a-z0-9_]{1,64}"), 256 << 10
OPEN = [[name] for name in (*FEATURES, "joboutputs")]  # what a payload needs
TOKEN, TTL = b"x-aws-ec2-metadata-token", b"x-aws-ec2-metadata-token-ttl-seconds"


class Service:
    """Answers the connections of one machine."""

    def __init__(
        self,
        instance: Instance,
        features: Callable[[], Features],
        outputs: Outputs,
        *,
        credentials: Path | None = None,
        tokens: TokenMode = TokenMode.OPTIONAL,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance, self.features, self.outputs, self._credentials = instance, features, outputs, credentials
        self._mode, self._now, self._key = tokens, now, os.urandom(32)
        self._open = 0

    async def serve(self, connection: socket.socket, *, for_everybody: bool = False) -> None:
        """Answer until the guest closes, is silent for too long, or asks for the end. Raises nothing a guest could cause.
        The socket is non-blocking and stays the caller's to close. *for_everybody*: nothing that is the guest's root's alone."""
        self._open += 1
        try:
            await _Talk(self, connection, for_everybody).run(is_one_too_many=self._open > MOST_CONNECTIONS)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass
        finally:
            self._open -= 1

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

    def new_token(self, headers: dict[bytes, bytes]) -> str:
        """Raises Rejected."""
        if b"x-forwarded-for" in headers:
            raise Rejected(403, "no token for others")
        text = headers.get(TTL, b"")
        if not (text.isdigit() and len(text) < 6 and 1 <= int(text) <= LONGEST_TTL):
            raise Rejected(400, f"{TTL.decode()}: from 1 to {LONGEST_TTL}")
        end = int(self._now() + int(text)).to_bytes(8, "big")
        return base64.urlsafe_b64encode(end + self._mark(end)).decode()

    def check_token(self, headers: dict[bytes, bytes]) -> None:
        """Raises Rejected for a wrong token, and for none where one is required."""
        given = headers.get(TOKEN)
        if given is None:
            if self._mode is TokenMode.REQUIRED:
                raise Rejected(401, "a token is required")
            return
        with suppress(ValueError):
            data = base64.b64decode(given, b"-_", validate=True)
            end = data[:8]
            if hmac.compare_digest(data[8:], self._mark(end)) and int.from_bytes(end, "big") >= self._now():
                return
        raise Rejected(401, "the token is not valid, or not any more")

    def _mark(self, end: bytes) -> bytes:
        return hmac.digest(self._key, end, "sha256")[:24]


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
        parts = split(request.target)
        if parts is None:
            raise Rejected(400, "the path is none of ours")
        if self._for_everybody and parts[:1] not in OPEN:
            raise Rejected(404, "not found")
        headers = dict(request.headers)
        more = [(b"connection", b"close")] if is_last else []
        if request.method == b"PUT":
            return await self._put(parts, headers, more)
        if request.method not in (b"GET", b"HEAD"):
            raise Rejected(405, "GET, HEAD, and PUT of outputs and tokens only")
        if is_ec2(parts):
            self._service.check_token(headers)
        page = self._service.page(parts)
        if page is None:
            raise Rejected(404, "not found")
        await self._drain()
        await self._reply(200, page.data, page.kind, more, is_head=request.method == b"HEAD")

    async def _put(self, parts: list[str], headers: dict[bytes, bytes], more: list[tuple[bytes, bytes]]) -> None:
        if parts == ["latest", "api", "token"]:
            token = self._service.new_token(headers)
            await self._drain()
            return await self._reply(200, token.encode(), TEXT, [(TTL, headers[TTL]), *more])
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
        """Read the body that came with a request for which it means nothing."""
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
        """No more is sent; what still comes is dropped for a moment."""
        with suppress(OSError, TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            async with asyncio.timeout(LINGER):
                while left > 0 and (data := await self._loop.sock_recv(self._socket, CHUNK)):
                    left -= len(data)
