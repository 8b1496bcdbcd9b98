"""Where the agent begins."""

import os
import sys

from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import kernel_events, kill_quietly, read_file, say, write_all
from belljar.agent.loop.loop import Agent
from belljar.agent.wire import KIB, PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


def find_port(name: str) -> str:
    """The device of our virtio-serial port, as soon as its driver has it. No udev is needed."""
    path, events = lookup_port(name), None
    while not path:
        if events is None:
            events = kernel_events()  # then look again: it may have come before we listened
        else:
            events.recv(8192)
        path = lookup_port(name)
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


def serve(fd: int, guest: "Guest", is_port: bool) -> None:
    """Until the channel is gone for good; then nothing of a payload is left."""
    agent = Agent(fd, guest, is_port=is_port)
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    guest.release()


def main(argv: "list[str]") -> int:
    """As the guest's service without arguments, or with `--stdio` where an ssh session carries the frames."""
    if argv not in ([], ["--stdio"]):
        say("usage: agent.py [--stdio]")
        return 2
    guest = Guest()
    fd = stdio() if argv else -1  # forks, and it is the agent that orphans have to come to
    guest.prepare()
    if not argv:  # now: a port's name is there a moment before it can be opened
        fd = os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC)
    serve(fd, guest, is_port=not argv)
    return 1  # a guest's agent is started again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
