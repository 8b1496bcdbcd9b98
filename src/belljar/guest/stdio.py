"""This process's own descriptors as sources and sinks, whatever they are: pipe, file, terminal, socket, /dev/null.

They are shared with other processes, so they are never made non-blocking: one daemon thread per stream blocks in their
place. A thread begins with the first byte asked for, and never keeps this process from ending.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from belljar.host.threads import begin_thread

LOOK_AGAIN = 0.1  # seconds
Order = tuple[Callable[[], None], asyncio.Future[None]]


class _Worker:
    """Does one blocking call after the other, in a thread that ends when nobody has the worker any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: SimpleQueue[Order | None] | None = None

    async def do(self, call: Callable[[], None]) -> None:
        """Make the call. Cancelling stops the waiting, not the call."""
        future = asyncio.get_running_loop().create_future()
        if self._orders is None:
            orders: SimpleQueue[Order | None] = SimpleQueue()
            begin_thread(_work, orders, name=self._name)
            self._orders = orders
        self._orders.put((call, future))
        await future

    def __del__(self) -> None:
        if self._orders is not None:
            self._orders.put(None)


def _work(orders: SimpleQueue[Order | None]) -> None:
    """Knows the orders alone, so that it keeps nobody alive while it waits for the next."""
    while (order := orders.get()) is not None:
        _carry_out(*order)
        del order


def _carry_out(call: Callable[[], None], future: asyncio.Future[None]) -> None:
    try:
        call()
        answer = partial(future.set_result, None)
    except BaseException as exc:
        answer = partial(future.set_exception, exc)
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        future.get_loop().call_soon_threadsafe(lambda: None if future.done() else answer())


class FdSource:
    """Reads only what was asked for: the rest stays for whoever is next. The next read gets what a cancelled one took."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._worker = _Worker(f"read {descriptor}")
        self._taken = b""

    async def read(self, limit: int) -> bytes:
        """Up to *limit* bytes; b"" at the end. Raises OSError."""
        if not self._taken:
            await self._worker.do(lambda: self._read(limit))
        data, self._taken = self._taken[:limit], self._taken[limit:]
        return data

    def _read(self, limit: int) -> None:
        if self._taken:
            return
        while True:
            if os.isatty(self._descriptor):
                wait_for_our_turn(self._descriptor)
            try:
                self._taken = os.read(self._descriptor, limit)
                return
            except BlockingIOError:  # somebody else made it non-blocking
                _wait(self._descriptor, select.POLLIN)
            except OSError as exc:
                if exc.errno != errno.EIO or is_in_front(self._descriptor):
                    raise  # otherwise: put into the background since we looked


def wait_for_our_turn(terminal: int) -> None:
    """Return when something was typed for us, or the terminal hung up. What is typed while we are in the background is
    for somebody else; and a payload that does not read must not be stopped because we do."""
    with select.epoll() as typed:
        typed.register(terminal, select.EPOLLIN | select.EPOLLET)
        look_again: float | None = None
        while True:
            typed.poll(look_again)
            is_there = bool(select.select([terminal], [], [], 0)[0])
            if is_there and is_in_front(terminal):
                return
            # Nothing tells when we come to the front. Only while something typed waits for its reader do we look.
            look_again = LOOK_AGAIN if is_there else None


def is_in_front(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True  # not the terminal that controls us: anybody may read it


class FdSink:
    """Returns from `write` once the kernel has every byte."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._worker = _Worker(f"write {descriptor}")

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the reader is gone, another OSError when the bytes cannot be taken."""
        await self._worker.do(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                _wait(self._descriptor, select.POLLOUT)

    async def close(self) -> None:
        """The descriptor is this process's own and stays open."""


def _wait(descriptor: int, events: int) -> None:
    poller = select.poll()
    poller.register(descriptor, events)
    poller.poll()
