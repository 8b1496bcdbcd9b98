"""A child that is forked before its payload is known."""

import os

from belljar.agent.guest.system import close_quietly
from belljar.agent.payload.payload import Job, become_payload, report, stand_alone
from belljar.agent.wire import FAILED, KIB, Words, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from belljar.agent.guest.cgroups import Cgroup, Family
    from belljar.agent.guest.guest import Guest
    from belljar.agent.guest.rehearsal import Rehearsal

# An order that asks for nothing.
NOTHING = [b"sss", b"", b"", b"", b"", b"", b"18", b"", b"n", b"0", b"0", b"g", b"/", b"/bin/sh", b"0"]
NOTHING += [b"1", b"CPU", b"-1", b"-1", b"1", b"sh", b"1", b"PATH", b"/bin"]


class Zygote:
    """A child forked before its payload is known, with its session, box and pipes: a template holds one, so that the
    payload of a clone need not wait for a fork. It is told its order by a pipe, and becomes what is asked."""

    def __init__(self, world: "Guest | Rehearsal", box: "Cgroup | Family") -> None:
        self.box = box
        pipes = [os.pipe() for _ in range(3)]
        self.inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        self.trouble, trouble = os.pipe()
        orders, self.orders = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._wait(world, orders, trouble)
        os.close(orders)
        os.close(trouble)

    def _wait(self, world: "Guest | Rehearsal", orders: int, trouble: int) -> "NoReturn":
        """In the child: all is ready but the order."""
        try:
            stand_alone(world, self.box)
            for fd in self.outer + [self.orders]:  # else our own end would keep the payload's stdin open
                os.close(fd)
            Job(Words(NOTHING)).read_rest()  # the pages this writes to are our own from now on
            parts = []
            while True:
                part = os.read(orders, 64 * KIB)
                if not part:
                    break
                parts.append(part)
            if not parts:
                os._exit(0)  # nobody needs us
            words = b"".join(parts).split(b"\0")
            job = Job(Words(words[1:]))
            job.path = words[0]
            files = [self._descriptor(index, kind) for index, kind in enumerate(job.stdio)]
        except BaseException as exc:
            report(trouble, "failed", "%s: %s" % (type(exc).__name__, exc))
            os._exit(FAILED)
        become_payload(job, world, files, trouble)

    def _descriptor(self, index: int, kind: str) -> int:
        if kind == "n":
            return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        if kind == "o":
            return 1  # put in its place just before
        return self.inner[index] if kind == "s" else -1

    def go(self, job: Job) -> None:
        """Hand over the order. Raises OSError when the child is gone: then nothing has happened."""
        data = memoryview(join(job.path, *job.words.words))
        while data:
            data = data[os.write(self.orders, data) :]
        os.close(self.orders)

    def discard(self) -> None:
        """Without an order it ends by itself."""
        for fd in self.inner + self.outer + [self.trouble, self.orders]:
            close_quietly(fd)
