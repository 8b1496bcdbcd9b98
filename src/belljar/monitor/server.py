"""The page's server: the view as JSON and as server-sent events, one machine's story, other readers' numbers. It only answers GET.

Without a token a reader gets numbers and causes; with it, names and consoles too. A reader that does not read is dropped: for each
there is one piece under way, never a queue."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar import __version__
from belljar.errors import HostError
from belljar.host.threads import in_thread
from belljar.model import dumps
from belljar.monitor.live import Host
from belljar.monitor.nodes import BROKEN, Remote
from belljar.monitor.view import Values, view
from belljar.service.http.server import counted, place
from belljar.service.senders import Askers, Budget
from belljar.service.streams import first_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PAGE = Path(__file__).parent / "page"
WRONG = Budget(burst=10, rate=0.2)  # wrong tokens of one address
MOST_READERS, MOST_CONNECTIONS = 64, 256
PAUSE = 0.25  # seconds in which changes become one piece
SIGN_OF_LIFE = 15.0  # seconds
STALL = 20.0  # seconds for which a reader may not read
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
Look = Callable[[], dict[str, bytes]]


class Hub:
    """All nodes, and who waits for news of them. *tell*: the story of a machine here, None where nothing is known of it."""

    def __init__(
        self, host: Host, remotes: Sequence[Remote] = (), tell: Callable[[str], Values | None] = lambda id: None
    ) -> None:
        self.host, self.remotes, self.tell, self.readers = host, remotes, tell, 0
        self._changed = asyncio.Event()
        self._made = dict[bool, tuple[asyncio.Event, float, dict[str, bytes]]]()

    async def watch(self) -> None:
        await first_of(self.host.watch(self.ring), *(remote.watch(self.ring) for remote in self.remotes))

    def ring(self) -> None:
        """Something may be another now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def sections(self, *, is_trusted: bool) -> dict[str, bytes]:
        """The view, each section as JSON; made once for all readers."""
        made = self._made.get(is_trusted)
        if made is None or made[0] is not self._changed or time.monotonic() - made[1] > SIGN_OF_LIFE / 2:
            nodes = [*self.host.nodes(), *(remote.node for remote in self.remotes)]
            about = {"node": self.host.node, "version": __version__, "trusted": is_trusted}
            sections = {"about": about, **view(nodes, is_trusted=is_trusted)}
            made = self._changed, time.monotonic(), {name: dumps(section) for name, section in sections.items()}
            self._made[is_trusted] = made
        return made[2]

    def part(self) -> dict[str, bytes]:
        """This host alone, for the monitor of another."""
        return {"part": dumps(self.host.nodes()[0].part)}

    async def pieces(self, look: Look) -> AsyncIterator[bytes]:
        """For one reader: all sections, then those that changed, and now and then a sign of life."""
        sent = dict[str, bytes]()
        while True:
            changed, now = self._changed, look()  # in this order: nothing falls between
            new = {name: text for name, text in now.items() if sent.get(name) != text}
            sent = now
            yield b"data:%s\n\n" % joined(new) if new else b":\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE):
                    await changed.wait()
            await asyncio.sleep(PAUSE)

    async def story(self, id: str, node: str) -> Values | None:
        """Raises what `BROKEN` names."""
        remote = next((remote for remote in self.remotes if remote.node.name == node), None)
        return await in_thread(lambda: remote.story(id) if remote else self.tell(id))


def joined(sections: dict[str, bytes]) -> bytes:
    return b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), text) for name, text in sections.items())


class Events(Response):
    """Pieces for one reader, until it goes or does not read."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, look: Look) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._hub, self._look = hub, look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hub.readers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(TimeoutError, OSError):
                await first_of(self._send(send), self._until_gone(receive))
        finally:
            self._hub.readers -= 1

    async def _send(self, send: Send) -> None:
        async for piece in self._hub.pieces(self._look):
            async with asyncio.timeout(STALL):
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Access:
    """Who has the token."""

    def __init__(self, token: str) -> None:
        self._digest, self._askers = sha256(token.encode()).digest(), Askers(WRONG)

    def __call__(self, request: Request, *, needed: bool = False) -> bool:
        """False without a token, where none is *needed*. Raises HTTPException for a wrong one."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        digest = sha256(token.strip().encode("latin-1", "replace")).digest()
        if kind.lower() == "bearer" and hmac.compare_digest(digest, self._digest):
            return True
        if not kind and not needed:
            return False
        if kind and not self._askers.may_ask(counted(request.client.host if request.client else ""), time.monotonic()):
            raise HTTPException(429, "too many wrong tokens", {"Retry-After": "5"})
        raise HTTPException(401, "this takes the token, and another than was given", {"WWW-Authenticate": "Bearer"})


def app(hub: Hub, access: Access, metrics: CollectorRegistry | None = None) -> ASGIApp:
    """The page, and what it reads. *metrics*: for Prometheus."""
    one_at_a_time = asyncio.Lock()

    async def look(request: Request) -> Response:
        sections = hub.sections(is_trusted=access(request))
        return Response(joined(sections), media_type="application/json")

    async def events(request: Request) -> Response:
        is_trusted = access(request)
        return stream(lambda: hub.sections(is_trusted=is_trusted))

    async def node(request: Request) -> Response:
        access(request, needed=True)
        return stream(hub.part)

    def stream(look: Look) -> Response:
        if hub.readers >= MOST_READERS:
            raise HTTPException(503, f"{MOST_READERS} readers are connected", {"Retry-After": "30"})
        return Events(hub, look)

    async def story(request: Request) -> Response:
        access(request, needed=True)
        try:
            told = await hub.story(request.path_params["id"], request.query_params.get("node", ""))
        except BROKEN as exc:
            raise HTTPException(502, f"its node does not answer: {exc}") from exc
        if told is None:
            raise HTTPException(404, "no machine of this id is known here")
        return JSONResponse(told)

    async def numbers(request: Request) -> Response:
        from prometheus_client.exposition import choose_encoder

        assert metrics is not None
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        async with one_at_a_time:
            return Response(await in_thread(lambda: encode(metrics)), headers={"Content-Type": kind})

    routes: list[BaseRoute] = [
        Route("/api/view", look), Route("/api/events", events), Route("/api/node", node), Route("/api/machines/{id}", story),
        *([Route("/metrics", numbers)] if metrics is not None else []), Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]  # fmt: skip
    return with_headers(Starlette(routes=routes))


def with_headers(inner: ASGIApp) -> ASGIApp:
    """What keeps a browser from doing more than this page needs, on every answer."""
    own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await inner(scope, receive, sent)

    return outer


def listening(where: str) -> socket.socket:
    """At ADDRESS:PORT. Raises BadSetting, HostError."""
    address, port = place(where, "--listen")
    try:
        end = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as exc:
        hint = "Another monitor may run: `ss -ltnp` shows who has the port. --listen gives another."
        raise HostError(f"--listen {where}: {exc.strerror}", hint=hint) from exc
    # The kernel drops a reader that takes nothing for so long, whatever still waits to be sent to it.
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2 * STALL * 1000))
    return end


async def serve(end: socket.socket, application: ASGIApp) -> None:
    """Until it is cancelled."""
    config = uvicorn.Config(
        application, log_config=None, log_level="critical", access_log=False, lifespan="off", server_header=False, proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=16 << 10, ws="none", http="h11", loop="asyncio",
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]  # they are its caller's
    await server.serve([end])
