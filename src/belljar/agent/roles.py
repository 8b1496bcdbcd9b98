"""What the parts of the agent ask of each other, so that none has to know its user. For type checkers alone: nothing of it
travels into a guest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from belljar.agent.guest.accounts import Account
from belljar.agent.wire import Words

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


class World(Protocol):
    """Where the agent runs: a guest; in tests also a process of the host."""

    quiet: float  # seconds between the last thing that settling does and its answer
    kept: dict[bytes, int]  # files of payloads that are there, empty and open
    calls: dict[bytes, Callable[[Words], bytes]]  # by name: what is answered at once
    errands: dict[
        bytes, Callable[[Words], tuple[int, Late, Work]]
    ]  # what may block: most seconds, else the refusal, the work

    def prepare(self) -> None:
        """Once per boot, before the first conversation."""

    def describe(self) -> bytes:
        """The words of a HELLO."""

    def growth(self) -> bytes:
        """In what a clone of this guest can be another."""

    def add_account(self, account: Account) -> None: ...
    def make_place(self, path: bytes, account: Account) -> None:
        """The working directory, with those above it, the payload's own where they are missing: outside it is there."""

    def new_folder(self, account: Account) -> bytes:
        """An empty folder of this account's own."""

    def give(self, what: int | bytes, account: Account, group: int | None = None) -> None:
        """Make a pipe, a terminal or a folder the user's own, so that /dev/stdout and /dev/tty can be opened by name."""

    def box(self) -> Box: ...
    def after_payload(self) -> None:
        """Beside the hot path: the next payload's box."""

    def leave_agent(self) -> None:
        """In the child: as easy prey for the OOM killer as anybody."""

    def become(self, account: Account) -> None:
        """In the child: from the agent to the user."""

    def warm(self, fork: Callable[[], None]) -> None:
        """Go once through what every clone will do, so that a template holds it ready; *fork* makes the next payload's
        process."""

    def has_remote(self) -> bool:
        """May `release` block?"""

    def release(self) -> None:
        """Unmount what was mounted, write everything out. Raises Refused where a server did not take all of what was written."""

    def forget_mounts(self) -> None: ...
