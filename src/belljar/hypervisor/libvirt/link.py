"""One connection to libvirt's daemon. Each call is a thread of its own with a deadline.

A call that is not answered in time is abandoned, and the connection with it: its socket is shut down, which frees the
thread at once and tells the daemon, when it wakes, to destroy what was started on it (VIR_DOMAIN_START_AUTODESTROY).
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from belljar.errors import BadSetting, CommandMissing, LibvirtLost, LibvirtRefused
from belljar.records import dataclass

T = TypeVar("T")
SOCKETS = re.compile(r"(libvirt|virt[a-z]+d)-sock(-ro|-admin)?$")
KEEPALIVES = 3  # unanswered ones before the connection is given up
TOO_SLOW = (
    "Raise `libvirt.start_timeout` where the host is slow. After QEMU or libvirt was changed, have the daemon ask QEMU before any"
    " job does: `belljar doctor --only libvirt`."
)

DRIVER = re.compile(r"libvirt:(qemu(\+unix)?:///(system|session)(\?[!-~]*)?)")

_opening = threading.Lock()
_events = threading.Lock()
_serving: list[threading.Thread] = []


@dataclass(frozen=True)
class Meant:
    """What a value of `machine.hypervisor` means."""

    uri: str
    is_session: bool


def read_driver(text: str) -> Meant:
    """Raises BadSetting."""
    found = DRIVER.fullmatch(text)
    if found is None:
        why = "libvirt's guests under Xen are not supported" if text.startswith("libvirt:xen") else "no such driver"
        raise BadSetting(
            f"machine.hypervisor = {text!r}: {why}",
            hint="It is `qemu`, `libvirt:qemu:///system` or `libvirt:qemu:///session`: a libvirt of this host.",
        )
    return Meant(found[1], found[3] == "session")


class Overdue(Exception):
    """The deadline of `bounded` passed."""


def bounded(work: Callable[[], T], timeout: float) -> T:
    """The result of *work*, done in a thread. Raises Overdue after *timeout* seconds; the thread is left behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], timeout).done:
        raise Overdue
    return future.result()


def library() -> Any:
    """libvirt's own Python binding, quiet, its events served by a thread from the first use on."""
    libvirt = _binding()
    with _events:
        if not _serving:
            libvirt.registerErrorHandler(lambda context, error: None, None)  # it would write to stderr
            libvirt.virEventRegisterDefaultImpl()
            _serving.append(threading.Thread(target=_serve, args=(libvirt,), daemon=True, name="libvirt events"))
            _serving[0].start()
    return libvirt


def _binding() -> Any:
    """The module beside belljar, or the distribution's, where an installed belljar does not look. Or CommandMissing."""
    import importlib
    import site
    import sys

    with suppress(ImportError):
        return importlib.import_module("libvirt")
    sys.path += [one for one in site.getsitepackages() if one not in sys.path and not one.startswith("/usr/local/")]
    try:
        return importlib.import_module("libvirt")
    except ImportError as exc:
        raise CommandMissing(
            f"libvirt's Python binding is neither beside belljar nor a module of {sys.executable}",
            hint="Install python3-libvirt (`apt`, `dnf`) for the system's Python, or belljar's extra `libvirt` beside it.",
        ) from exc


def _serve(libvirt: Any) -> None:
    while True:
        with suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()


def ends() -> dict[int, socket.socket]:
    """Our connections to daemons of libvirt, by inode, as duplicates: their numbers are nobody else's."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                line = socket.socket(fileno=os.dup(int(name)))
                inode = os.fstat(line.fileno()).st_ino
                if inode not in found and _is_to_libvirt(line):
                    found[inode] = line
                else:
                    line.close()
    return found


def _is_to_libvirt(line: socket.socket) -> bool:
    with suppress(OSError):
        peer = line.getpeername() if line.family == socket.AF_UNIX else ""
        return isinstance(peer, str) and SOCKETS.search(peer) is not None
    return False


class Link:
    """An open connection. `lost` says why it is of no use any more; "" while it is."""

    def __init__(self, connection: Any, end: socket.socket | None, timeout: float) -> None:
        self.connection = connection
        self.lost = ""
        self._end, self._timeout = end, timeout
        self._listeners: list[Callable[[str], None]] = []

    def call(self, what: str, work: Callable[[Any], T], timeout: float | None = None) -> T:
        """What *work* makes of the connection; a *timeout* of its own is that of a start. Raises LibvirtLost when the daemon
        is gone or not in time, LibvirtRefused when it answers that it will not."""
        libvirt, limit = library(), self._timeout if timeout is None else timeout
        if self.lost:
            raise LibvirtLost(f"libvirt's daemon cannot be asked for {what}: {self.lost}")
        try:
            return bounded(lambda: work(self.connection), limit)
        except Overdue:
            setting, hint = ("timeout", None) if timeout is None else ("start_timeout", TOO_SLOW)
            self.abandon(f"did not answer within {limit:g} s (`libvirt.{setting}`) when asked for {what}")
            raise LibvirtLost(f"libvirt's daemon {self.lost}", hint=hint) from None
        except libvirt.libvirtError as exc:
            said = words_of(exc)
            if self.lost or is_loss(libvirt, exc):
                self.abandon(said)
                raise LibvirtLost(f"libvirt's daemon was lost when asked for {what}: {said}") from exc
            raise LibvirtRefused(f"libvirt refused {what}: {said}") from exc

    def on_loss(self, listener: Callable[[str], None]) -> None:
        """*listener* is called once, from any thread, when the daemon ends the connection or falls silent."""
        self._listeners.append(listener)
        if self.lost:
            listener(self.lost)

    def abandon(self, why: str = "the connection is closed") -> None:
        """Never use it again. The daemon destroys what was started on it; nothing here waits for that."""
        self.lost = self.lost or why
        if self._end is not None:
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            self._end.close()

    def watch(self) -> None:
        """Hear of the daemon's end, and let libvirt itself notice its silence."""
        interval = max(int(self._timeout / KEEPALIVES), 1)
        self.call("its close event", lambda it: it.registerCloseCallback(self._closed, None))
        self.call("keepalives", lambda it: it.setKeepAlive(interval, KEEPALIVES))

    def _closed(self, connection: Any, reason: int, opaque: Any) -> None:
        """From libvirt's event thread."""
        was_ours = bool(self.lost)
        self.lost = self.lost or ("it does not answer keepalives" if reason == 2 else "it ended the connection")
        if not was_ours:
            for listener in self._listeners:
                listener(self.lost)


def open_link(uri: str, timeout: float) -> Link:
    """A connection to the daemon of *uri*, which is on this host. Raises LibvirtLost, LibvirtRefused, CommandMissing."""
    libvirt = library()
    with _opening:
        before = ends()
        try:
            connection = bounded(lambda: libvirt.open(uri), timeout)
        except Overdue:
            _drop_new(before)
            raise LibvirtLost(f"libvirt's daemon did not open {uri} within {timeout:g} s (`libvirt.timeout`)") from None
        except libvirt.libvirtError as exc:
            _drop_new(before)
            said = words_of(exc)
            if is_loss(libvirt, exc):
                raise LibvirtLost(f"libvirt's daemon cannot be reached at {uri}: {said}") from exc
            raise LibvirtRefused(f"libvirt does not open {uri}: {said}") from exc
        after = ends()
        new = [after.pop(inode) for inode in set(after) - set(before)]
        for end in (*before.values(), *after.values(), *new[1:]):
            end.close()
    link = Link(connection, new[0] if new else None, timeout)
    try:
        link.watch()
    except BaseException:
        link.abandon()
        raise
    return link


def _drop_new(before: dict[int, socket.socket]) -> None:
    """Shut down what was opened since."""
    for inode, end in ends().items():
        if inode not in before:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        end.close()
    for end in before.values():
        end.close()


def is_loss(libvirt: Any, error: Any) -> bool:
    """Is it the way to the daemon that failed, and not what was asked for?"""
    return error.get_error_domain() in (libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE) or error.get_error_code() in (
        libvirt.VIR_ERR_NO_CONNECT,
        libvirt.VIR_ERR_RPC,
    )


def words_of(error: Any) -> str:
    """libvirt's message, in one line of a sane length."""
    return " ".join(str(error.get_error_message() or error).split())[:1000]
