"""The page's server: the view as JSON and as server-sent events, one machine's story, other readers' numbers. It only answers GET.

Without a token a reader gets numbers and causes; with it, names and consoles too. A reader that does not read is dropped: for each
there is one piece under way, never a queue."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from belljar import __version__
from belljar.host.threads import in_thread
from belljar.model import dumps
from belljar.monitor.live import Host
from belljar.monitor.nodes import BROKEN, Remote
from belljar.monitor.view import Values, view
from belljar.service.http.server import counted, listener
from belljar.service.senders import Askers, Budget
from belljar.service.streams import at_most, first_of

PAGE = Path(__file__).parent / "page"
WRONG = Budget(burst=10, rate=0.2)  # wrong tokens of one address
MOST_READERS, MOST_CONNECTIONS = 64, 256
PAUSE = 0.25  # seconds in which changes become one piece
SIGN_OF_LIFE = 15.0  # seconds
STALL = 20.0  # seconds for which a reader may not read
HEAD = 10.0  # seconds for the head of a request
HEADERS = {  # what keeps a browser from doing more than this page needs; each connection is for one request
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Connection": "close",
}  # fmt: skip


class Hub:
    """All nodes, and who waits for news of them."""

    def __init__(self, host: Host, remotes: Sequence[Remote] = ()) -> None:
        self.host, self.remotes, self.readers = host, remotes, 0
        self._changed, self._views = asyncio.Event(), dict[bool, Values]()

    async def watch(self) -> None:
        await first_of(self.host.watch(self.ring), *(remote.watch(self.ring) for remote in self.remotes))

    def ring(self) -> None:
        """Wake all readers: something may have changed."""
        self._changed.set()
        self._changed, self._views = asyncio.Event(), {}

    def sections(self, *, is_trusted: bool) -> Values:
        """The view; made once for all readers."""
        if is_trusted not in self._views:
            nodes = [*self.host.nodes(), *(remote.node for remote in self.remotes)]
            about = {"node": self.host.name, "version": __version__, "trusted": is_trusted}
            self._views[is_trusted] = {"about": about, **view(nodes, is_trusted=is_trusted)}
        return self._views[is_trusted]

    async def pieces(self, look: Callable[[], Values]) -> AsyncIterator[bytes]:
        """For one reader, until it goes: all sections, then those that changed, and now and then a sign of life."""
        sent = Values()
        self.readers += 1
        try:
            while True:
                changed, sections = self._changed, look()  # in this order: nothing falls between
                new = {name: section for name, section in sections.items() if sent.get(name) != section}
                sent = sections
                yield b"data:%s\n\n" % dumps(new) if new else b":\n\n"
                await at_most(SIGN_OF_LIFE, changed.wait())
                await asyncio.sleep(PAUSE)
        finally:
            self.readers -= 1


class Access:
    """Who has the token."""

    def __init__(self, token: str) -> None:
        self._token, self._askers = token.encode(), Askers(WRONG)

    def __call__(self, request: Request, *, needed: bool = False) -> bool:
        """False without a token, where none is *needed*. Raises HTTPException for a wrong one."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._token):
            return True
        if not kind and not needed:
            return False
        if kind and not self._askers.may_ask(counted(request.client.host if request.client else ""), time.monotonic()):
            raise HTTPException(429, "too many wrong tokens", {"Retry-After": "5"})
        raise HTTPException(401, "this takes the token, and another than was given", {"WWW-Authenticate": "Bearer"})


def app(hub: Hub, access: Access, tell: Callable[[str], Values | None], metrics: CollectorRegistry) -> ASGIApp:
    """The page, and what it reads. *tell*: the story of a machine here, None where nothing is known of it. *metrics*: for Prometheus."""

    async def look(request: Request) -> Response:
        return as_json(hub.sections(is_trusted=access(request)))

    async def events(request: Request) -> Response:
        is_trusted = access(request)
        return stream(lambda: hub.sections(is_trusted=is_trusted))

    async def node(request: Request) -> Response:
        """This host alone, for the monitor of another."""
        access(request, needed=True)
        return stream(lambda: {"node": hub.host.nodes()[0]})

    def stream(look: Callable[[], Values]) -> Response:
        if hub.readers >= MOST_READERS:
            raise HTTPException(503, f"{MOST_READERS} readers are connected", {"Retry-After": "30"})
        return StreamingResponse(hub.pieces(look), media_type="text/event-stream")

    async def story(request: Request) -> Response:
        access(request, needed=True)
        id, name = request.path_params["id"], request.query_params.get("node", "")
        telling = next((remote.story for remote in hub.remotes if remote.node.name == name), tell)
        try:
            async with hub.host.turn if telling is tell else nullcontext():
                answer = await in_thread(lambda: telling(id))
        except BROKEN as exc:
            raise HTTPException(502, f"its node does not answer: {exc}") from exc
        if answer is None:
            raise HTTPException(404, "no machine of this id is known here")
        return as_json(answer)

    async def numbers(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        async with hub.host.turn:
            return Response(await in_thread(lambda: encode(metrics)), headers={"Content-Type": kind})

    api = {
        "/api/view": look,
        "/api/events": events,
        "/api/node": node,
        "/api/machines/{id}": story,
        "/metrics": numbers,
    }
    routes = [Route(path, answer) for path, answer in api.items()]
    return Starlette(routes=[*routes, Mount("/", StaticFiles(directory=PAGE, html=True))])


def as_json(value: Values) -> Response:
    return Response(dumps(value), media_type="application/json")


def listening(where: str) -> socket.socket:
    """At ADDRESS:PORT. The kernel drops a reader that takes nothing for so long. Raises BadSetting, HostError."""
    hint = "Another monitor may run: `ss -ltnp` shows who has the port. --listen gives another."
    end = listener(where, "--listen", hint)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL * 1000))
    return end


class Prompt(H11Protocol):
    """Drops a client that does not send the head of its request in time. uvicorn has no such deadline."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD, lambda: self.cycle or transport.abort())  # type: ignore[func-returns-value]


async def serve(end: socket.socket, application: ASGIApp) -> None:
    """Until it is cancelled."""
    config = uvicorn.Config(
        application, log_config=None, log_level="critical", access_log=False, lifespan="off", server_header=False, proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=16 << 10, ws="none", http=Prompt, loop="asyncio",
        headers=[*HEADERS.items()],
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]  # they are its caller's
    await server.serve([end])
