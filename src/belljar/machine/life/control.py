"""The control socket of a live machine: one JSON line asked, one answered; `relay` and `console` then carry bytes.

Only the machine's owner and root are heard. The socket lies in the machine's folder and goes with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import MachineBusy, NoSuchMachine, NotPermitted
from belljar.guest import Guest
from belljar.hints import Any
from belljar.host.files import short_path
from belljar.host.processes import peer_uid
from belljar.journal import read
from belljar.machine import CONTROL, MachineView
from belljar.model import Account, Port, to_json

LONGEST_LINE, ASK_TIMEOUT, BACKLOG = 1 << 16, 10.0, 16
ACCEPT_AGAIN = 1.0  # seconds

Answer = dict[str, Any]
Handler = Callable[[Any, socket.socket], Awaitable[Answer | None]]


class ControlServer:
    """Listens in the machine's folder. The handler returns an answer, or None if it used the connection itself; or
    raises ValueError where the JSON is not a question."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self._folder, self._handler = folder, handler
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with short_path(self._folder) as folder:
                listener.bind(f"{folder}/{CONTROL}")
            os.chmod(self._folder / CONTROL, 0o600)
            listener.listen(BACKLOG)
        except BaseException:  # re-raised: nobody else has the socket to close
            listener.close()
            raise
        self._begin(self._accept(listener))

    async def close(self) -> None:
        """Also where it could not be opened."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # descriptors or memory are short, of which nothing tells the end
                    await asyncio.sleep(ACCEPT_AGAIN)
                else:
                    self._begin(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError, TimeoutError):
            if peer_uid(connection) not in (0, os.geteuid(), os.stat(self._folder).st_uid):
                return
            line = b""
            async with asyncio.timeout(ASK_TIMEOUT):
                while not line.endswith(b"\n") and len(line) <= LONGEST_LINE:
                    if not (data := await loop.sock_recv(connection, 4096)):
                        break
                    line += data
            try:
                answer = await self._handler(json.loads(line), connection)
            except ValueError as exc:
                answer = {"error": f"not a question: {exc}"}
            if answer is not None:
                await say(connection, answer)


async def say(connection: socket.socket, answer: Answer) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(answer).encode() + b"\n")


def connect(folder: Path, *, patience: float | None = ASK_TIMEOUT) -> socket.socket:
    """A connection to the machine's supervisor, which answers within *patience* seconds. Raises NoSuchMachine when it is not there
    any more."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(patience)
        with short_path(folder) as short:
            connection.connect(f"{short}/{CONTROL}")
    except OSError as exc:
        connection.close()
        match exc:
            case FileNotFoundError() | ConnectionRefusedError():
                raise NoSuchMachine(f"{folder.name}: the machine is not running") from exc
            case PermissionError():
                raise NotPermitted(f"{folder.name}: this machine belongs to somebody else") from exc
            case BlockingIOError():
                raise MachineBusy(f"{folder.name}: the supervisor does not accept more connections now") from exc
        raise
    return connection


def ask(connection: socket.socket, do: str, **details: Any) -> Answer:
    """Put one question, wait for its answer. Raises MachineBusy when it is refused, or there is none in time."""
    try:
        connection.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
        with connection.makefile("rb", buffering=0) as answers:  # not one byte more: what follows belongs to the relay
            line = answers.readline(LONGEST_LINE)
    except TimeoutError as exc:
        raise MachineBusy(f"the supervisor did not answer `{do}` within {connection.gettimeout():.0f} s") from exc
    except (ConnectionResetError, BrokenPipeError):
        line = b""
    if not line:
        raise NoSuchMachine("the machine ended, or does not belong to you")
    answer = json.loads(line)
    if "error" in answer:
        raise MachineBusy(str(answer["error"]), hint=answer.get("hint"))
    return dict(answer)


@asynccontextmanager
async def talk(view: MachineView, converse: Callable[[socket.socket], Guest]) -> AsyncIterator[Guest]:
    """A conversation of its own with its guest's agent. Raises NoSuchMachine, MachineBusy."""
    with connect(view.folder) as connection:
        ask(connection, "relay")
        connection.setblocking(False)
        guest = converse(connection)
        try:
            await guest.greet()
            yield guest
        finally:
            guest.close()


def account_of(view: MachineView) -> Account | None:
    """Whose payload the machine runs, as its record tells; None where there is none."""
    from belljar.reading import from_json

    with suppress(KeyError, ValueError):
        return from_json(Account, view.payload["account"])
    return None


def publish(view: MachineView, port: Port) -> Port:
    """Have a port of its guest published, and return where. Raises NoSuchMachine, MachineBusy."""
    with connect(view.folder) as connection:
        return Port(**ask(connection, "publish", port=to_json(port))["port"])


def published(folder: Path) -> list[Port]:
    """The ports that it publishes, or has published while it lived, by its journal."""
    return [Port(**event["port"]) for event in read(folder) if event["event"] == "published"]
