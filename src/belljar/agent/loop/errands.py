"""Work that may block, and is done in a child."""

import os
import select
import time

from belljar.agent.guest.system import Refused, kill_quietly
from belljar.agent.wire import REPLY

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Callable

    from belljar.agent.loop.loop import Agent
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


class Errand:
    """Work that may block, in a child: whoever asked for it is answered when it is done, or out of time."""

    def __init__(
        self,
        agent: "Agent",
        numbers: "list[int]",
        seconds: int,
        late: "tuple[str, str]",
        work: "Callable[[], bytes | None]",
    ) -> None:
        self.agent, self.numbers, self.late = agent, numbers, late
        self.deadline = time.monotonic() + seconds
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.set_wakeup_fd(-1)
            os._exit(self._run(writing, work))
        os.close(writing)
        agent.errands.append(self)
        agent.watch(self.reading, select.EPOLLIN, self._done)
        signal.alarm(max(1, seconds))

    @staticmethod
    def _run(writing: int, work: "Callable[[], bytes | None]") -> int:
        try:
            said = b"done\0" + (work() or b"")
        except Refused as exc:
            said = ("%s\0%s" % (exc.kind, exc.message[:2000])).encode("utf-8", "replace")
        except BaseException as exc:
            said = ("refused\0%s: %s" % (type(exc).__name__, exc)).encode("utf-8", "replace")[:2000]
        os.write(writing, said)
        return 0

    def _done(self, events: int) -> None:
        said = os.read(self.reading, 4096)
        self._close()
        kind, _, message = said.decode("utf-8", "replace").partition("\0")
        for number in self.numbers:
            if kind == "done":
                self.agent.send(REPLY, number, message.encode("utf-8"))
            else:
                self.agent.refuse(number, kind or "refused", message or "a child of the agent was killed")

    def look_at_the_clock(self) -> None:
        """Out of time: the answer is given without the child, which may be where no signal reaches it."""
        if time.monotonic() < self.deadline:
            return
        self.abandon()
        for number in self.numbers:
            self.agent.refuse(number, *self.late)

    def _close(self) -> None:
        self.agent.unwatch(self.reading)
        os.close(self.reading)
        self.agent.errands.remove(self)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        kill_quietly(self.pid, signal.SIGKILL)
        self._close()
