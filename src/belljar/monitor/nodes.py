"""Other nodes, each by the monitor on it. One that is silent is shown as silent, with since when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from belljar.errors import BadOption
from belljar.host.threads import in_thread
from belljar.monitor.view import Node, Values, view
from belljar.reading import strict_json
from belljar.records import replace

SILENT = 40.0  # seconds without a word; a monitor says something every fifteen
AGAIN = 10.0  # seconds until it is tried again
LARGEST = 32 << 20  # bytes of a part
BROKEN = (OSError, ValueError, HTTPException)


class Remote:
    """The monitor at NAME=URL, or at URL, whose node is called as it says itself. Raises BadOption."""

    def __init__(self, place: str, token: str) -> None:
        name, _, url = place.rpartition("=")
        self._at, self._token, self._is_named = urlsplit(url), token, bool(name)
        if self._at.scheme not in ("http", "https") or not self._at.hostname or self._at.path not in ("", "/"):
            raise BadOption(f"--node {place}: not [NAME=]http[s]://HOST[:PORT]", hint="Such as n1=http://n1:9180.")
        self.node = Node(name or self._at.netloc, {}, why="it has not answered yet")

    async def watch(self, changed: Callable[[], None]) -> None:
        """Without end."""
        loop = asyncio.get_running_loop()

        def hear(part: Values) -> None:
            name = self.node.name if self._is_named else str(part.get("node", self.node.name))
            for machine in part.get("machines", ()):
                machine["node"] = name
            self.node = Node(name, part or self.node.part, time.time())
            changed()

        while True:
            try:
                await in_thread(lambda: self._listen(lambda part: loop.call_soon_threadsafe(hear, part)))
            except BROKEN as exc:
                self.node = replace(
                    self.node, why=(getattr(exc, "strerror", "") or str(exc) or type(exc).__name__)[:200]
                )
            changed()
            await asyncio.sleep(AGAIN)

    def story(self, id: str) -> Values:
        """All about a machine there. Blocks. Raises what `BROKEN` names."""
        connection, answer = self._asked(f"/api/machines/{id}")
        try:
            return dict(json.loads(answer.read(LARGEST)))
        finally:
            connection.close()

    def _listen(self, hear: Callable[[Values], object]) -> None:
        connection, answer = self._asked("/api/node")
        try:
            while line := answer.readline(LARGEST):
                hear(part_of(line) if line.startswith(b"data:") else {})
        finally:
            connection.close()
        raise ConnectionError("its monitor closed the connection")

    def _asked(self, path: str) -> tuple[HTTPConnection, HTTPResponse]:
        """No redirect is followed and no proxy used: the token goes to this host alone."""
        kind = HTTPSConnection if self._at.scheme == "https" else HTTPConnection
        connection = kind(self._at.hostname or "", self._at.port, timeout=SILENT)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            if answer.status != 200:
                why = ": it has another token" if answer.status == 401 else ""
                raise ConnectionError(f"its monitor answers {answer.status} {answer.reason}{why}")
        except BaseException:
            connection.close()
            raise
        return connection, answer


def part_of(line: bytes) -> Values:
    """A part that can be shown. Raises ValueError."""
    try:
        part = dict(strict_json(line[5:])["part"])
        view([Node("", part)], is_trusted=True)
    except (LookupError, TypeError, AttributeError) as exc:
        raise ValueError("what its monitor tells cannot be read: another version?") from exc
    return part
