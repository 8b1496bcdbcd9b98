"""The agent's end of the channel: frames out, frames in, and the one epoll that all waits are in. What is asked, loop.py does."""

from __future__ import annotations

import errno
import os
import select
from _collections_abc import Callable

from belljar.agent.wire import ERROR, HEADER, KIB, MAX_DATA, MIB, TO_AGENT, Parser, WireError, frame

Usage = tuple[float, float, int]  # processor seconds of the user's and the system's, bytes of memory at most

PAGE = 4 * KIB  # a port gives so much at a time


class Channel:
    """One thread, one epoll. `_take` and `_end_conversation` are for the class that makes a program of it."""

    MOST_OUT = 512 * KIB  # with so much unsent the payloads' pipes are left alone
    MOST_HEARD = 4 * MIB  # with so much unsent the host itself is not heard
    READS = 32  # of the channel, before others have their turn

    def __init__(self, fd: int, is_port: bool) -> None:
        self.fd, self.is_port = fd, is_port
        self.parser = Parser(TO_AGENT)
        self.poll = self.heeded = select.epoll()
        self.ready: dict[int, Callable[[int], None]] = {}
        self.out: list[bytes | memoryview] = []
        self.out_size = 0
        self.waiting: list[Callable[[], None]] = []  # called when the host has taken what was too much
        self.later: list[Callable[[], None]] = []  # done once all that was ready has been looked at
        self.children: dict[int, Callable[[int, Usage], None]] = {}  # by pid: called with its wait status and its use
        self.on_child: Callable[[], None] | None = None  # called after any child has ended
        self.is_over = False
        self.mask = select.EPOLLIN
        os.set_blocking(fd, False)
        self.poll.register(fd, self.mask)
        self.ready[fd] = self._hear

    def _take(self, kind: int, number: int, body: bytes) -> None:
        raise NotImplementedError

    def _end_conversation(self) -> None:
        raise NotImplementedError

    # -- what to wait for

    def watch(self, fd: int, events: int, action: Callable[[int], None]) -> None:
        if fd in self.ready:
            self.poll.modify(fd, events)
        else:
            self.poll.register(fd, events)
        self.ready[fd] = action

    def unwatch(self, fd: int) -> None:
        if self.ready.pop(fd, None) is not None:
            self.poll.unregister(fd)

    @property
    def is_still(self) -> bool:
        """Is nothing heeded but the host?"""
        return self.heeded is not self.poll

    def hold_still(self) -> None:
        """From now on nothing is read, written, reaped or sent of the host's own accord; all that happens waits."""
        if not self.is_still:
            self.heeded = select.epoll()
            self.heeded.register(self.fd, self.mask)

    def go_on(self) -> None:
        """Look after everything again."""
        if self.is_still:
            self.heeded.close()
            self.heeded = self.poll
            self.poll.modify(self.fd, self.mask)

    def look(self) -> None:
        """Wait until something is ready, and do what it asks for. What is ready beside the order to hold still waits, too."""
        for fd, events in self.heeded.poll():
            action = self.ready.get(fd) if fd == self.fd or not self.is_still else None
            if action is not None:
                action(events)
        self.flush()

    # -- speaking

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        self.out.append(frame(kind, number, body))
        self.out_size += HEADER.size + len(body)

    def refuse(self, number: int, kind: str, message: str) -> None:
        text = kind + "\0" + message[:8192].replace("\0", "?")
        self.send(ERROR, number, text.encode("utf-8", "replace"))

    def is_full(self) -> bool:
        return self.out_size >= self.MOST_OUT

    def flush(self) -> None:
        """Write what can be written. Frames go together, for each write wakes the host."""
        while self.out:
            if len(self.out) > 1 and len(self.out[0]) < MAX_DATA // 2:
                self.out[:8] = [b"".join(self.out[:8])]
            try:
                count = os.write(self.fd, self.out[0])
            except BlockingIOError:
                break
            except OSError:
                return self._hung_up()
            self.out_size -= count
            self.out[:1] = [memoryview(self.out[0])[count:]] if count < len(self.out[0]) else []
            if self.out_size < self.MOST_OUT // 2:
                waiting, self.waiting = self.waiting, []
                for resume in waiting:
                    resume()
        self._listen()

    def _listen(self, edge: int = 0) -> None:
        hears = select.EPOLLIN if self.out_size < self.MOST_HEARD else 0
        mask = hears | (select.EPOLLOUT if self.out else 0) | edge
        if mask != self.mask and not self.is_over:
            self.heeded.modify(self.fd, mask)
            self.mask = mask

    # -- hearing

    def _hear(self, events: int) -> None:
        if not events & ~select.EPOLLOUT:
            return
        for _ in range(self.READS):
            try:
                data = os.read(self.fd, PAGE)
            except BlockingIOError:
                return
            except OSError as exc:
                self.is_over = self.is_port and exc.errno in (errno.ENODEV, errno.EIO)
                data = b""
            if not data:
                return self._hung_up()
            self.parser.feed(data)
            self._take_all()
            if len(data) < PAGE or self.out_size > self.MOST_HEARD:
                return

    def _take_all(self) -> None:
        while True:
            try:
                if (received := self.parser.take()) is None:
                    return
                self._take(*received)
            except WireError as exc:
                self.refuse(0, "protocol", str(exc))
                self.parser.forget()
                self._end_conversation()

    def _hung_up(self) -> None:
        """The host closed its end. A port may be opened again; a socket never."""
        self._end_conversation()
        self.parser = Parser(TO_AGENT)
        self.out, self.out_size = [], 0
        self.waiting = []
        if not self.is_port:
            self.is_over = True
        elif not self.is_over:
            self._listen(select.EPOLLET)  # a closed port is "hung up" all the time: wake for changes only
