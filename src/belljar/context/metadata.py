"""The metadata service of one machine: HTTP/1.1 on connections that only this machine can make.

catalog.py has the pages, outputs.py keeps what a guest leaves. Everything a guest sends is untrusted: heads have at most 8 KiB, every
wait has a deadline, and no path in a request is a path of this host.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

from belljar.context import Features, Instance
from belljar.context.catalog import FEATURES, TEXT, Page, find, split
from belljar.context.outputs import Outputs
from belljar.errors import HostError
from belljar.host.files import read_capped
from belljar.host.http import BROKEN, Answer, Limits, Rejected, Request, Talk

LIMITS = Limits(head=8192, body=8192, requests=1000, idle=20.0, request=20.0, stall=20.0)
LONGEST_TARGET, MOST_CONNECTIONS = 2048, 32
FILE_TIMEOUT = 300.0  # seconds for a whole file
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
        """Answer one connection, until the guest closes, is silent for too long, or asks for the end. Raises nothing a guest could
        cause. The socket is non-blocking and stays the caller's to close. *for_everybody*: features and outputs alone, no user
        data and no credentials."""
        self._open += 1
        is_one_too_many = self._open > MOST_CONNECTIONS
        try:
            with suppress(*BROKEN):
                talk = Talk(*await asyncio.open_connection(sock=connection.dup()), LIMITS)
                await talk.serve(partial(self._respond, talk, for_everybody, is_one_too_many), refuse)
        finally:
            self._open -= 1

    def token(self, ttl: bytes) -> bytes:
        """For a session of so many seconds. Raises Rejected."""
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
        """A file that is kept fresh by whoever asked for the machine, as it is now."""
        if self._credentials is None or len(rest) != 1 or not CREDENTIAL.fullmatch(rest[0]):
            return None
        try:
            return Page(read_capped(self._credentials / rest[0], LARGEST_CREDENTIAL))
        except (OSError, HostError):
            return None

    async def _respond(self, talk: Talk, for_everybody: bool, is_one_too_many: bool, request: Request) -> Answer:
        """Answer one request. Raises Rejected."""
        if is_one_too_many:
            raise Rejected(503, "too many connections")
        if len(request.target) > LONGEST_TARGET:
            raise Rejected(414, "the path is too long")
        parts = split(request.target)
        if parts is None:
            raise Rejected(400, "this service has no such path")
        if for_everybody and parts[:1] not in OPEN:
            raise Rejected(404, "not found")
        headers = dict(request.headers)
        if request.method == b"PUT":
            return await self._put(talk, parts, request, headers)
        if request.method not in (b"GET", b"HEAD"):
            raise Rejected(405, "GET, HEAD, and PUT of outputs only")
        if parts[:1] not in OPEN and not self.admits(headers.get(TOKEN)):
            raise Rejected(401, "a valid session token is needed: see IMDSv2")
        page = self.page(parts)
        if page is None:
            raise Rejected(404, "not found")
        await talk.body(request)
        return Answer(200, page.data, (("content-type", page.kind),))

    async def _put(self, talk: Talk, parts: list[str], request: Request, headers: dict[bytes, bytes]) -> Answer:
        if parts == ["latest", "api", "token"]:
            ttl = headers.get(TTL, b"")
            token = self.token(ttl)
            await talk.body(request)
            return Answer(200, token, (("content-type", TEXT), (TTL.decode(), ttl.decode())))
        if parts[:1] != ["joboutputs"]:
            raise Rejected(405, "GET and HEAD only")
        if len(parts) != 2:
            raise Rejected(403, "exactly one name below joboutputs")
        length = headers.get(b"content-length")
        draft = self.outputs.begin(parts[1], None if length is None else int(length))
        try:  # of a file that is rejected, or whose guest goes away, nothing is left
            async with asyncio.timeout(FILE_TIMEOUT):
                async for part in talk.parts():
                    draft.write(part)
            draft.keep()
        finally:
            draft.drop()
        return Answer(201, headers=(("content-type", TEXT),))


def refuse(rejected: Rejected) -> Answer:
    allow = (("allow", "GET, HEAD"),) if rejected.status == 405 else ()
    return Answer(rejected.status, f"{rejected}\n".encode(), (("content-type", TEXT), *allow))
