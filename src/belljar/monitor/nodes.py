"""Other nodes, each by the monitor on it. One that is silent is shown as silent, with since when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from belljar.errors import BadOption
from belljar.host.threads import in_thread
from belljar.monitor.view import Node, Values, view
from belljar.reading import from_json
from belljar.records import replace

SILENT = 40.0  # seconds without a word; a monitor says something every fifteen
AGAIN = 10.0  # seconds until it is tried again
LARGEST = 32 << 20  # bytes of what it says at once
BROKEN = (OSError, ValueError, HTTPException)


class Remote:
    """The monitor at NAME=URL, or at URL, whose node is called as it says itself. Raises BadOption."""

    def __init__(self, place: str, token: str) -> None:
        self._name, _, url = place.rpartition("=")
        self._at, self._token = urlsplit(url), token
        if self._at.scheme not in ("http", "https") or not self._at.hostname or self._at.path not in ("", "/"):
            raise BadOption(f"--node {place}: not [NAME=]http[s]://HOST[:PORT]", hint="Such as n1=http://n1:9180.")
        self.node = Node(self._name or self._at.netloc, why="it has not answered yet")

    async def watch(self, changed: Callable[[], None]) -> None:
        """Without end."""
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, changed)
        while True:
            await in_thread(lambda: self._listen(tell))
            await asyncio.sleep(AGAIN)

    def story(self, id: str) -> Values:
        """All about a machine there. Blocks. Raises what `BROKEN` names."""
        with self._asked(f"/api/machines/{id}") as answer:
            return dict(json.loads(answer.read(LARGEST)))

    def _listen(self, tell: Callable[[], object]) -> None:
        """Until it is silent, or says what cannot be read."""
        try:
            with self._asked("/api/node") as answer:
                while line := answer.readline(LARGEST):
                    node = node_of(line) if line.startswith(b"data:") else self.node
                    self.node = replace(node, name=self._name or node.name, heard=time.time(), why="")
                    tell()
            raise ConnectionError("its monitor closed the connection")
        except BROKEN as exc:
            why = getattr(exc, "strerror", "") or str(exc) or type(exc).__name__
            self.node = replace(self.node, why=why[:200])
            tell()

    @contextmanager
    def _asked(self, path: str) -> Iterator[HTTPResponse]:
        """No redirect is followed and no proxy used: the token goes to this host alone."""
        kind = HTTPSConnection if self._at.scheme == "https" else HTTPConnection
        with closing(kind(self._at.hostname or "", self._at.port, timeout=SILENT)) as connection:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            with connection.getresponse() as answer:
                if answer.status != 200:
                    why = ": it has another token" if answer.status == 401 else ""
                    raise ConnectionError(f"its monitor answers {answer.status} {answer.reason}{why}")
                yield answer


def node_of(line: bytes) -> Node:
    """One that can be shown. Raises ValueError."""
    try:
        node: Node = from_json(Node, json.loads(line[5:])["node"])
        view([node], is_trusted=True)
        return node
    except (LookupError, RecursionError, TypeError, ValueError) as exc:
        raise ValueError(f"what its monitor says cannot be read, another version? {exc}") from exc
