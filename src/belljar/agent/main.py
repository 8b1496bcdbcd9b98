"""Where the agent begins."""

from __future__ import annotations

import _signal as signal
import os
import sys

from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import kernel_events, kill_quietly, read_file, say
from belljar.agent.loop.loop import Agent
from belljar.agent.wire import PORT


def find_port(name: str) -> str:
    """The device of our virtio-serial port, as soon as its driver has it. No udev is needed."""
    folder, events = "/sys/class/virtio-ports", kernel_events()
    while True:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            is_ours = read_file(f"{folder}/{entry}/name", 256).strip() == name.encode("ascii")
            if is_ours and os.path.exists("/dev/" + entry):
                return "/dev/" + entry
        events.recv(8192)


def serve(fd: int, guest: Guest, is_port: bool) -> None:
    """Until the channel is gone for good; then nothing of a payload is left."""
    agent = Agent(fd, guest, is_port=is_port)
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    guest.release()


def main(argv: list[str]) -> int:
    """As the guest's service."""
    if argv:
        say("usage: agent.pyc")
        return 2
    guest = Guest()
    guest.prepare()
    serve(os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC), guest, is_port=True)
    return 1  # a guest's agent is started again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
