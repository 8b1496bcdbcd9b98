"""What the parts of the agent ask of each other, so that none has to know its user. For type checkers alone: nothing of it
travels into a guest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Work = Callable[[], "bytes | None"]
Late = tuple[str, str]  # how a call is refused that took too long: kind and message


class Reactor(Protocol):
    """One thread, one epoll: what is waited for, and what the host is told."""

    later: deque[Callable[[], None]]  # done once all that was ready has been looked at
    waiting: list[Callable[[], None]]  # called when the host has taken what was too much
    children: dict[int, Callable[[int, Any], None]]  # by pid: called with how it ended, and with what it used
    on_child: Callable[[], None] | None  # called after any child has ended

    def watch(self, fd: int, events: int, action: Callable[[int], None]) -> None: ...
    def unwatch(self, fd: int) -> None: ...
    def send(self, kind: int, number: int, body: bytes = b"") -> None: ...
    def refuse(self, number: int, kind: str, message: str) -> None: ...
    def is_full(self) -> bool: ...


class Box(Protocol):
    """What keeps a payload's processes together."""

    is_patient: bool  # what is left may end by itself

    def join(self) -> None:
        """In the child."""

    def clear(self, reactor: Reactor, pid: int, then: Callable[[], None]) -> None:
        """Kill all that is left, unless patient; call *then* once nothing is."""

    def hurry(self, reactor: Reactor) -> None:
        """No patience any more."""

    def has_oom_kill(self) -> bool: ...
    def discard(self) -> None: ...
