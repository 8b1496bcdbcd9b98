"""Streams between the channel and a payload's pipes."""

from __future__ import annotations

import os
import select
from _collections_abc import Callable
from contextlib import suppress

from belljar.agent.loop.channel import Channel
from belljar.agent.wire import CREDIT, DATA, EOF, MAX_CREDIT, MAX_DATA, RESET, WINDOW, WireError


class Flow:
    """Our end of a pipe of the payload. *ended*: called once it is closed."""

    def __init__(self, agent: Channel, number: int, fd: int, ended: Callable[[], None]) -> None:
        self.agent, self.number, self.fd, self.ended = agent, number, fd, ended
        self.credit = WINDOW
        os.set_blocking(fd, False)

    def drop(self) -> None:
        """The payload gets SIGPIPE at its next write, or has read all there is."""
        if self.fd >= 0:
            self.agent.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
            self.ended()


class Outflow(Flow):
    """A pipe of the payload, read as far as the host gives credit."""

    def __init__(
        self, agent: Channel, number: int, fd: int, ended: Callable[[], None], failed: Callable[[], None] | None = None
    ) -> None:
        super().__init__(agent, number, fd, ended)
        self.failed = failed or self.finish  # a terminal fails when its last user is gone
        self.is_last = False  # nobody writes any more: what is in the pipe is all there will be
        self.is_mute = False  # nobody hears it any more
        agent.watch(fd, select.EPOLLIN, self.pump)

    def pump(self, events: int = 0) -> None:
        """One read; until nothing is left once nobody writes any more. None while all is held still: credit may come all the same."""
        while self.fd >= 0 and not self.agent.is_still:
            if not self.is_mute and (not self.credit or self.agent.is_full()):
                self.agent.unwatch(self.fd)
                if self.credit:
                    self.agent.waiting.append(self.resume)
                return
            try:
                data = os.read(self.fd, MAX_DATA if self.is_mute else min(self.credit, MAX_DATA))
            except BlockingIOError:
                if self.is_last:
                    self.finish()
                return
            except OSError:
                return self.failed()
            if not data:
                return self.finish()
            if not self.is_mute:
                self.credit -= len(data)
                self.agent.send(DATA, self.number, data)
            if not self.is_last:
                return

    def resume(self) -> None:
        if self.fd >= 0:
            self.agent.watch(self.fd, select.EPOLLIN, self.pump)
            if self.is_last:
                self.pump()

    def grant(self, amount: int) -> None:
        was_dry, self.credit = not self.credit, self.credit + amount
        if self.credit > MAX_CREDIT:
            raise WireError(f"stream {self.number}: too much credit")
        if was_dry:
            self.resume()

    def mute(self) -> None:
        """Read on, so that its writer does not wait, and send nothing."""
        self.is_mute = True
        self.resume()

    def drain(self) -> None:
        self.is_last = True
        self.pump()

    def finish(self) -> None:
        if self.fd >= 0:
            if not self.is_mute:
                self.agent.send(EOF, self.number)
            self.drop()


class Inflow(Flow):
    """Bytes for a pipe of the payload. What the payload has not read yet costs the host its credit. *say_end*: for what is not over by
    being closed."""

    def __init__(
        self, agent: Channel, number: int, fd: int, ended: Callable[[], None], say_end: Callable[[int], object] | None
    ) -> None:
        super().__init__(agent, number, fd, ended)
        self.say_end = say_end
        self.queue: list[memoryview] = []
        self.owed = 0
        self.is_ended = False

    def feed(self, data: bytes) -> None:
        self.credit -= len(data)
        if self.credit < 0 or self.is_ended:
            raise WireError(f"stream {self.number}: data without credit or after its end")
        if self.fd >= 0 and data:
            self.queue.append(memoryview(data))
            if len(self.queue) == 1:
                self.pump()

    def end(self) -> None:
        self.is_ended = True
        if self.fd >= 0 and not self.queue:
            self.finish()

    def pump(self, events: int = 0) -> None:
        """Write as much as is taken at once. It is given back as credit."""
        try:
            while self.queue:
                written = os.write(self.fd, self.queue[0])
                self.queue[:1] = [self.queue[0][written:]] if written < len(self.queue[0]) else []
                self.owed += written
        except BlockingIOError:
            self.agent.watch(self.fd, select.EPOLLOUT, self.pump)
        except OSError:  # the payload closed its end
            self.agent.send(RESET, self.number)
            return self.drop()
        if self.owed >= WINDOW // 4:
            self.credit += self.owed
            self.agent.send(CREDIT, self.number, self.owed.to_bytes(4))
            self.owed = 0
        if not self.queue:
            self.agent.unwatch(self.fd)
            if self.is_ended:
                self.finish()

    def finish(self) -> None:
        with suppress(OSError):  # nobody is there any more
            if self.say_end is not None:
                self.say_end(self.fd)
        self.drop()

    def drop(self) -> None:
        self.queue.clear()
        super().drop()
