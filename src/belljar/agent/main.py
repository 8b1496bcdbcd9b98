"""Where the agent begins: as the guest's service, or as an ordinary process of the host in a rehearsal."""

import os
import sys

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Family
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import Refused, kernel_events, kill_quietly, libc, now, read_file, say, write_all
from belljar.agent.loop.loop import Agent
from belljar.agent.wire import KIB, PORT, Words, hello_of, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Callable

    from belljar.agent.roles import Late, Work, World  # noqa: F401
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


class Rehearsal:
    """An ordinary process on the host: the payload really runs, everything else is only said to have happened. Implements `World`."""

    quiet = 0.0

    def __init__(self) -> None:
        self.boot_nonce = os.urandom(16).hex().encode("ascii")
        self.folders = []  # type: list[str]
        self.kept = {}  # type: dict[bytes, int]
        self.calls = {
            b"identify": self.identify, b"set_clock": lambda words: now(), b"prepare": lambda words: b"", b"renew_keys": lambda words: b"",
            b"mount": self.mount,
        }  # type: dict[bytes, Callable[[Words], bytes]]  # fmt: skip
        self.errands = {}  # type: dict[bytes, Callable[[Words], tuple[int, Late, Work]]]

    def prepare(self) -> None:
        libc().adopt_orphans()

    def describe(self) -> bytes:
        return hello_of(self.boot_nonce, "rehearsal", False)

    def identify(self, words: Words) -> bytes:
        name, machine_id, nonce, mac = words.next(), words.next(), words.next(), words.next()
        return join(name, machine_id, nonce, mac, os.urandom(32).hex().encode("ascii"), now())

    def mount(self, words: Words) -> bytes:
        raise Refused("no-9p", "a rehearsal mounts nothing")

    def growth(self) -> bytes:
        return b""

    def add_account(self, account: Account) -> None:
        account.check()

    def new_folder(self, account: Account) -> bytes:
        import tempfile

        self.folders.append(tempfile.mkdtemp(prefix="belljar-rehearsal-"))
        return self.folders[-1].encode()

    def box(self) -> Family:
        return Family()

    def warm(self, fork: "Callable[[], None]") -> None:
        fork()

    def has_remote(self) -> bool:
        return False

    def release(self) -> None:
        import shutil

        while self.folders:
            shutil.rmtree(self.folders.pop(), ignore_errors=True)

    def make_place(self, path: bytes, account: Account) -> None:
        pass

    def after_payload(self) -> None:
        pass

    def give(self, what: "int | bytes", account: Account, group: "int | None" = None) -> None:
        pass

    def leave_agent(self) -> None:
        pass

    def become(self, account: Account) -> None:
        pass

    def forget_mounts(self) -> None:
        pass


def find_port(name: str) -> str:
    """The device of our virtio-serial port, as soon as its driver has it. No udev is needed."""
    path = lookup_port(name)
    events = None if path else kernel_events()
    while not path:
        path = lookup_port(name)  # again: it may have come before we listened
        if not path:
            assert events is not None
            events.recv(8192)
    return path


def lookup_port(name: str) -> str:
    folder = "/sys/class/virtio-ports"
    for entry in os.listdir(folder) if os.path.isdir(folder) else ():
        is_ours = read_file("%s/%s/name" % (folder, entry), 256).strip() == name.encode("ascii")
        if is_ours and os.path.exists("/dev/" + entry):
            return "/dev/" + entry
    return ""


def stdio() -> int:
    """A socket for what comes by our standard streams, which may be pipes: one descriptor for both ways, as a port is. Two other
    processes carry, our parent and its other child; none of our own, which may be killed with a payload's."""
    import _socket

    ours, theirs = _socket.socketpair()
    if os.fork():
        ours.close()
        try:
            if os.fork():
                os.close(0)
                carry(theirs.fileno(), 1)
            else:
                os.close(1)
                carry(0, theirs.fileno())
                theirs.shutdown(_socket.SHUT_WR)
        finally:
            os._exit(0)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)
    theirs.close()
    return ours.detach()


def carry(source: int, target: int) -> None:
    """All that comes, to its end."""
    data = os.read(source, 64 * KIB)
    while data:
        write_all(target, data)
        data = os.read(source, 64 * KIB)


def main(argv: "list[str]") -> int:
    """As the guest's service without arguments, or with `--stdio` where a session of the host's carries the frames;
    `--rehearse FD` as an ordinary process over an open socket."""
    if argv[:1] == ["--rehearse"] and len(argv) == 2:
        fd, world = int(argv[1]), Rehearsal()  # type: int, World
        os.set_inheritable(fd, False)
        world.prepare()
    elif not argv or argv == ["--stdio"]:
        world = Guest()
        fd = stdio() if argv else -1  # forks, and it is the agent that orphans have to come to
        world.prepare()
        if not argv:  # now: a port's name is there a moment before it can be opened
            fd = os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC)
    else:
        say("usage: agent.py [--stdio | --rehearse FD]")
        return 2
    agent = Agent(fd, world, is_port=not argv)
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    if not world.has_remote():
        world.release()
    return 0 if argv[:1] == ["--rehearse"] else 1  # a guest's agent is started again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
