"""The guest's network, by ioctl: no tool of the image is needed."""

import os
import struct

from belljar.agent.guest.system import Refused, write_file
from belljar.agent.wire import U32

RESCAN = "/sys/bus/pci/rescan"


class Card:
    """The guest's one network card."""

    def __init__(self) -> None:
        import _socket as socket
        import fcntl

        self.socket, self.ioctl = socket, fcntl.ioctl
        self.control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self.control.close()

    def name(self) -> str:
        """A clone's card may be one that its template did not have: then the kernel is told to look at the bus anew."""
        for look_anew in (False, True):
            if look_anew and os.path.exists(RESCAN):
                write_file(RESCAN, b"1", flags=0)
            for name in sorted(os.listdir("/sys/class/net")):
                if os.path.exists("/sys/class/net/%s/device" % name):
                    return name
        raise Refused("refused", "the guest has no network card, or its kernel no driver for it")

    def _ask(self, request: int, name: str, value: bytes = b"") -> bytes:
        answer = self.ioctl(self.control, request, struct.pack("16s24s", name.encode(), value))
        return bytes(answer)[16:]

    def _address(self, text: str) -> bytes:
        return struct.pack("=HH4s8x", self.socket.AF_INET, 0, self.socket.inet_aton(text))

    def up(self, name: str) -> None:
        flags = struct.unpack("=H", self._ask(0x8913, name)[:2])[0]  # SIOCGIFFLAGS
        if not flags & 1:
            self._ask(0x8914, name, struct.pack("=H", flags | 1))  # SIOCSIFFLAGS, IFF_UP

    def set_mac(self, name: str, mac: str) -> str:
        """Returns what the kernel says afterwards."""
        octets = bytes(int(octet, 16) for octet in mac.split(":"))
        self._ask(0x8924, name, struct.pack("=H6s", 1, octets))  # SIOCSIFHWADDR, ARPHRD_ETHER
        answer = self._ask(0x8927, name)  # SIOCGIFHWADDR
        return ":".join("%02x" % octet for octet in answer[2:8])

    def configure(self, name: str, address: str, gateway: str) -> None:
        number, _, prefix = address.partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix))) & 0xFFFFFFFF
        self._ask(0x8916, name, self._address(number))  # SIOCSIFADDR
        self._ask(0x891C, name, self._address(self.socket.inet_ntoa(U32.pack(mask))))  # SIOCSIFNETMASK
        self.up(name)
        if gateway:
            anywhere = self._address("0.0.0.0")
            route = struct.pack(
                "@L16s16s16sHhLPhPLLH", 0, anywhere, self._address(gateway), anywhere, 3, 0, 0, 0, 0, 0, 0, 0, 0
            )
            try:
                self.ioctl(self.control, 0x890B, route)  # SIOCADDRT, RTF_UP | RTF_GATEWAY
            except FileExistsError:
                pass
