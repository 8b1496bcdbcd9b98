"""Where the agent begins: as the guest's service, or as an ordinary process in a rehearsal."""

import os
import sys

from belljar.agent.guest.guest import Guest
from belljar.agent.guest.rehearsal import Rehearsal
from belljar.agent.guest.system import kernel_events, kill_quietly, read_file, say
from belljar.agent.loop.loop import Agent
from belljar.agent.wire import PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


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


def main(argv: "list[str]") -> int:
    """As the guest's service without arguments; `--rehearse FD` as an ordinary process over an open socket."""
    if argv[:1] == ["--rehearse"] and len(argv) == 2:
        fd, world = int(argv[1]), Rehearsal()  # type: int, Guest | Rehearsal
        os.set_inheritable(fd, False)
        world.prepare()
    elif not argv:
        world = Guest()
        world.prepare()  # first: a port's name is there a moment before it can be opened
        fd = os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC)
    else:
        say("usage: agent.py [--rehearse FD]")
        return 2
    agent = Agent(fd, world, is_port=isinstance(world, Guest))
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    if not world.has_remote():
        world.release()
    return 0 if isinstance(world, Rehearsal) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
