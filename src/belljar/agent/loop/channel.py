"""The agent's end of the channel: frames out, frames in, and the one epoll that all waits are in. What is asked, loop.py does."""

import errno
import os
import select

from belljar.agent.wire import ERROR, HEADER, KIB, MAX_DATA, MIB, TO_AGENT, Parser, WireError, frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from typing import Callable
else:  # what is below the library's module of this name, and much quicker to import
    from _collections import deque


class Channel:
    """Without a program of its own: `_take` and `_end_conversation` are for the one who makes something of it."""

    MOST_OUT = 512 * KIB  # with so much unsent the payloads' pipes are left alone
    MOST_HEARD = 4 * MIB  # with so much unsent the host itself is not heard
    READS = 32  # of the channel, before others have their turn

    def __init__(self, fd: int, is_port: bool) -> None:
        self.fd, self.is_port = fd, is_port
        self.parser = Parser(TO_AGENT)
        self.poll = select.epoll()
        self.ready = {}  # type: dict[int, Callable[[int], None]]
        self.out = deque()  # type: deque[bytes | memoryview]
        self.out_size = 0
        self.waiting = []  # type: list[Callable[[], None]]
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

    def watch(self, fd: int, events: int, action: "Callable[[int], None]") -> None:
        if fd in self.ready:
            self.poll.modify(fd, events)
        else:
            self.poll.register(fd, events)
        self.ready[fd] = action

    def unwatch(self, fd: int) -> None:
        if self.ready.pop(fd, None) is not None:
            self.poll.unregister(fd)

    # -- speaking

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        self.out.append(frame(kind, number, body))
        self.out_size += HEADER.size + len(body)

    def refuse(self, number: int, kind: str, message: str) -> None:
        text = "%s\0%s" % (kind, message[:8192].replace("\0", "?"))
        self.send(ERROR, number, text.encode("utf-8", "replace"))

    def is_full(self) -> bool:
        return self.out_size >= self.MOST_OUT

    def flush(self) -> None:
        """Write what can be written; small frames go together, for each write wakes the host."""
        try:
            while self.out:
                data = self.out.popleft()
                if self.out and len(data) < MAX_DATA // 2:
                    parts, size = [data], len(data)
                    while self.out and size < MAX_DATA:
                        size += len(self.out[0])
                        parts.append(self.out.popleft())
                    data = b"".join(parts)
                try:
                    count = os.write(self.fd, data)
                except BlockingIOError:
                    count = 0
                self.out_size -= count
                if count < len(data):
                    self.out.appendleft(memoryview(data)[count:])
                    if not count:
                        break
        except OSError:
            return self._hung_up()
        if self.waiting and self.out_size < self.MOST_OUT // 2:
            waiting, self.waiting = self.waiting, []
            for resume in waiting:
                resume()
            if self.out_size:
                return self.flush()
        self._listen()

    def _listen(self, edge: int = 0) -> None:
        hears = select.EPOLLIN if self.out_size < self.MOST_HEARD else 0
        mask = hears | (select.EPOLLOUT if self.out else 0) | edge
        if mask != self.mask and not self.is_over:
            self.poll.modify(self.fd, mask)
            self.mask = mask

    # -- hearing

    def _hear(self, events: int) -> None:
        if not events & ~select.EPOLLOUT:
            return
        for _ in range(self.READS):
            room = self.parser.room()
            try:
                count = os.readv(self.fd, [room])
            except BlockingIOError:
                return
            except OSError as exc:
                if self.is_port and exc.errno in (errno.ENODEV, errno.EIO):
                    self.is_over = True
                count = 0
            if not count:
                return self._hung_up()
            self.parser.filled(count)
            self._take_all()
            if count < 4096 or self.out_size > self.MOST_HEARD:  # a port gives a page at a time
                return

    def _take_all(self) -> None:
        while True:
            try:
                found = self.parser.take()
                if found is None:
                    return
                self._take(*found)
            except WireError as exc:
                self.refuse(0, "protocol", str(exc))
                self.parser.forget()
                self._end_conversation()

    def _hung_up(self) -> None:
        """The host closed its end. A port may be opened again; a socket never."""
        self._end_conversation()
        self.parser = Parser(TO_AGENT)
        self.out.clear()
        self.out_size = 0
        self.waiting = []
        if not self.is_port:
            self.is_over = True
        elif not self.is_over:
            self._listen(select.EPOLLET)  # a closed port is "hung up" for as long as it lasts: only hear of changes
