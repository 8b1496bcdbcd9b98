"""What a child under passt's guard tries; run as a program of its own. Prints one line of JSON: attempt, outcome."""

import ctypes
import errno
import json
import os
import resource
import socket
import struct
import sys
import threading

libc = ctypes.CDLL(None, use_errno=True)
NONBLOCK = socket.SOCK_NONBLOCK
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # as passt does
HIGH, LINE = int(sys.argv[1]), int(sys.argv[2])


def call(number: int, *args: object) -> str:
    """The outcome of a system call: its value, or the name of its errno."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in args]
    value = libc.syscall(ctypes.c_long(number), *words)
    return str(value) if value >= 0 else errno.errorcode[ctypes.get_errno()]


def outcome(attempt: object) -> str:
    try:
        return str(attempt())  # type: ignore[operator]
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


def inet(address: str, port: int, family: int = socket.AF_INET) -> bytes:
    return struct.pack("=H", family) + struct.pack("!H4s8x", port, socket.inet_aton(address))


def udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM | NONBLOCK)


def tcp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM | NONBLOCK)


class Message:
    """A struct msghdr with all it points to."""

    def __init__(self, data: bytes, address: bytes = b"", size: int = 16, pieces: int = 1) -> None:
        self.data, self.name = (
            ctypes.create_string_buffer(data, max(len(data), 1)),
            ctypes.create_string_buffer(address, 128),
        )
        step = len(data) // pieces
        places = [
            (ctypes.addressof(self.data) + step * n, step if n + 1 < pieces else len(data) - step * n)
            for n in range(pieces)
        ]
        self.vector = ctypes.create_string_buffer(b"".join(struct.pack("QQ", *one) for one in places))
        name = (ctypes.addressof(self.name), size) if address else (0, 0)
        self.head = struct.pack("QIIQQQQI4x", *name, 0, ctypes.addressof(self.vector), pieces, 0, 0, 0)


def sendmsg(fd: int, message: Message, flags: int = 0) -> str:
    return call(46, fd, message.head, flags)


def sendmmsg(fd: int, *messages: Message) -> str:
    return call(307, fd, b"".join(one.head + bytes(8) for one in messages), len(messages), 0)


def sending(allowed: int, datagrams: int, refused: int) -> dict[str, str]:
    """What passt does: TCP data by sendmsg, datagrams by sendmmsg, echo requests by sendto."""
    stream, plain, connected = tcp(), udp(), udp()
    found = {
        "bind": outcome(lambda: plain.bind(("127.0.0.1", datagrams + 1))), "numbers": str(stream.fileno() < HIGH <= plain.fileno()), "nonblocking": str(not os.get_blocking(plain.fileno())),
        "connect": outcome(lambda: stream.connect(("127.0.0.1", allowed))), "own test": outcome(lambda: stream.bind(("127.0.0.1", allowed))),
        "not allowed": outcome(lambda: tcp().connect(("127.0.0.1", refused))),
    }  # fmt: skip
    stream.setblocking(True)
    here, there = inet("127.0.0.1", datagrams), inet("127.0.0.1", refused)
    found |= {
        "stream": sendmsg(stream.fileno(), Message(b"by stream")),
        "many": sendmmsg(plain.fileno(), Message(b"one", here), Message(b"lost", there), Message(b"t.w.o", here, pieces=3), Message(b"", here)),
        "sendto": outcome(lambda: plain.sendto(b"three", ("127.0.0.1", datagrams))),
        "sendto elsewhere": outcome(lambda: plain.sendto(b"lost", ("127.0.0.1", refused))),
        "connect elsewhere": outcome(lambda: connected.connect(("127.0.0.1", refused))),
        "unconnected": sendmmsg(connected.fileno(), Message(b"lost")),
        "connect there": outcome(lambda: connected.connect(("127.0.0.1", datagrams))),
        "connected": sendmmsg(connected.fileno(), Message(b"four")), "send": outcome(lambda: connected.send(b"five")),
        "connected, and elsewhere": sendmmsg(connected.fileno(), Message(b"lost", there)),
        "large": sendmmsg(plain.fileno(), *[Message(bytes(60000), here) for _ in range(20)]),
    }  # fmt: skip
    return found


def ways_round(port: int) -> dict[str, str]:
    plain, stream, connected = udp(), tcp(), udp()
    one, address = plain.fileno(), inet("127.0.0.1", port)
    to = Message(b"out", address)
    text = ctypes.create_string_buffer(address)
    ring = ctypes.create_string_buffer(256)
    return {
        "sendmsg": sendmsg(one, to), "fast open": sendmsg(stream.fileno(), to, 0x20000000),
        "fast open by sendto": call(44, stream.fileno(), text, 4, 0x20000000, text, 16),
        "fast open to nobody": call(44, stream.fileno(), text, 4, 0x20000000, 0, 0),
        "fast open later": outcome(lambda: stream.setsockopt(6, 30, 1)), "stream by sendmmsg": sendmmsg(stream.fileno(), to),
        "dup": call(32, one), "dup2": call(33, one, 200), "dup3": call(292, one, 200, os.O_CLOEXEC),
        "dup2 with high bits": call(33, (1 << 32) + one, 200), "fcntl": call(72, one, 0, 3), "fcntl cloexec": call(72, one, 1030, 3),
        "dup2 to a high one": str(int(call(33, stream.fileno(), HIGH + 300)) == HIGH + 300),
        "which may not send": sendmsg(HIGH + 300, to), "not by minus one": sendmsg(-1, to),
        "recvmsg of the line": call(47, LINE, Message(b"").head, 0), "recvmmsg of the line": call(299, LINE, Message(b"").head + bytes(8), 1, 0, 0),
        "the line elsewhere": call(33, LINE, 201), "the line sends": sendmsg(LINE, Message(b"frame")),
        "pair": outcome(socket.socketpair), "unix": outcome(lambda: socket.socket(socket.AF_UNIX)),
        "pidfd_getfd": call(438, 0, 0, 0), "ptrace": call(101, 16, 1, 0, 0), "readv": call(310, 1, 0, 0, 0, 0, 0),
        "writev": call(311, 1, 0, 0, 0, 0, 0), "io_uring": call(425, 8, ring), "io_uring_enter": call(426, 1, 0, 0, 0, 0, 0),
        "inet6": outcome(lambda: socket.socket(socket.AF_INET6)), "raw": outcome(lambda: socket.socket(2, 3, 1)),
        "packet": outcome(lambda: socket.socket(17, 3)), "sctp": outcome(lambda: socket.socket(2, 1, 132)),
        "mptcp": outcome(lambda: socket.socket(2, 1, 262)), "udplite": outcome(lambda: socket.socket(2, 2, 136)),
        "seqpacket": outcome(lambda: socket.socket(2, 5)), "netlink of sockets": outcome(lambda: socket.socket(16, 3, 4)),
        "vsock": outcome(lambda: socket.socket(40, 1)), "odd flags": call(41, 2, 2 | 1 << 20, 0),
        "short bind": call(49, stream.fileno(), text, 12), "bind": call(49, stream.fileno(), text, 16), "listen": outcome(lambda: stream.listen()), "accept": outcome(lambda: stream.accept()),
        "source route": outcome(lambda: plain.setsockopt(0, 4, b"\x83\x07\x04\x7f\x00\x00\x01\x00")),
        "device": outcome(lambda: plain.setsockopt(1, 25, b"lo\0")), "interface": outcome(lambda: plain.setsockopt(0, 50, 1 << 24)),
        "unspecified": call(42, connected.fileno(), inet("127.0.0.1", port, 0), 16),
        "to inet6": call(42, one, struct.pack("=HHI16sI", 10, port, 0, bytes(15) + b"\1", 0), 28),
        "unspecified stream": call(42, stream.fileno(), inet("127.0.0.1", port, 0), 16),
        "blocking": outcome(lambda: socket.socket().connect(("127.0.0.1", port))),
    }  # fmt: skip


def harmless() -> dict[str, str]:
    """What passt needs at its start, and what it does that is not done."""
    plain, other = udp(), udp()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    return {
        "netlink": outcome(lambda: netlink.bind((0, 0))), "links": outcome(lambda: netlink.send(struct.pack("IHHIIB3x", 20, 18, 0x301, 1, 0, 0))),
        "heard": str(len(netlink.recv(1 << 16)) > 100), "netlink to others": outcome(lambda: netlink.sendto(bytes(20), (1, 0))),
        "reuse": str(plain.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)),
        "bind": outcome(lambda: plain.bind(("127.0.0.1", 5353))), "name": str(plain.getsockname()), "name of none": str(other.getsockname()),
        "short name": call(51, plain.fileno(), bytes(16), struct.pack("I", 15)), "name to nowhere": call(51, plain.fileno(), 4096, struct.pack("I", 16)),
        "name of a stream": str(tcp().getsockname()),
        "bind again": outcome(lambda: plain.bind(("0.0.0.0", 0))), "bind in inet6": call(49, other.fileno(), struct.pack("=HHI16sI", 10, 1, 0, bytes(16), 0), 28),
        "no core": call(157, 4, 0, 0, 0, 0), "and yet": call(157, 3, 0, 0, 0, 0),
    }  # fmt: skip


def hostile_vectors(port: int) -> dict[str, str]:
    plain = udp()
    one = plain.fileno()
    good = Message(b"x", inet("127.0.0.1", port))
    text = ctypes.addressof(ctypes.create_string_buffer(64))

    def head(name: int = text, size: int = 16, vectors: int = 0, count: int = 0) -> bytes:
        return struct.pack("QIIQQQQI4xQ", name, size, 0, vectors, count, 0, 0, 0, 0)

    return {
        "none": call(307, one, good.head, 0, 0), "null": call(307, one, 0, 1, 0), "kernel": call(307, one, -4096, 1, 0),
        "endless": call(307, one, good.head + bytes(8), 0xFFFFFFFF, 0), "short name": call(307, one, head(size=15), 1, 0),
        "unmapped name": call(307, one, head(4096), 1, 0), "kernel name": call(307, one, head(1 << 63), 1, 0),
        "many pieces": call(307, one, head(vectors=text, count=1 << 60), 1, 0), "unmapped pieces": call(307, one, head(vectors=4096, count=1), 1, 0),
        "huge piece": sendmmsg(one, Message(bytes(65536), inet("127.0.0.1", port))), "no socket": call(307, 0, good.head + bytes(8), 1, 0),
        "no descriptor": call(307, 9999, good.head + bytes(8), 1, 0), "other family": sendmmsg(one, Message(b"x", inet("127.0.0.1", port, 0))),
    }  # fmt: skip


def race(allowed: int, forbidden: int, rounds: int) -> dict[str, str]:
    """One thread sends, another changes the address under it."""
    message = Message(b"x", inet("127.0.0.1", allowed))
    is_over = False

    def flip() -> None:
        while not is_over:
            for port in (forbidden, allowed):
                message.name[2:4] = struct.pack("!H", port)

    flipper = threading.Thread(target=flip)
    flipper.start()
    plain = udp()
    found: dict[str, int] = {}
    for _ in range(rounds):
        how = sendmmsg(plain.fileno(), message)
        found[how] = found.get(how, 0) + 1
    is_over = True
    flipper.join()
    return {how: str(count) for how, count in found.items()}


def answered(address: str, port: int) -> dict[str, str]:
    with tcp() as one:
        how = outcome(lambda: one.connect((address, port)))
        if how != "None":
            return {"connect": how}
        one.setblocking(True)
        one.settimeout(20)
        known = outcome(lambda: len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)))
        return {
            "connect": how,
            "known": known,
            "send": sendmsg(one.fileno(), Message(b"GET\n")),
            "heard": outcome(lambda: one.recv(100)),
        }


def exhausting() -> dict[str, str]:
    """Datagram sockets until there is no number for one; then one goes."""
    held = []
    try:
        while True:
            held.append(udp())
    except OSError as exc:
        why = errno.errorcode[exc.errno or 0]
    number = held.pop(7).detach()
    os.close(number)
    return {
        "at the end": why,
        "all high": str(min(one.fileno() for one in held) >= HIGH),
        "then": str(udp().fileno() == number),
    }


def foreign_abi(kind: str) -> None:
    """sendmmsg by the numbers of x32, connect by those of 32-bit programs: does not come back."""
    if kind == "x32":
        call(0x40000000 + 538, 0, 0, 0)
    else:
        import mmap

        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x66\x01\x00\x00\xcd\x80\xc3")  # mov eax, 362 (connect); int 0x80; ret
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


def main() -> None:
    _, _, _, what, *rest = sys.argv
    words = [int(word) if word.isdigit() else word for word in rest]
    found = {
        "sending": lambda: sending(*words), "ways_round": lambda: ways_round(*words), "harmless": harmless,
        "hostile_vectors": lambda: hostile_vectors(*words), "race": lambda: race(*words), "abi": lambda: foreign_abi(*words),
        "answered": lambda: answered(*words), "exhausting": exhausting,
    }[what]()  # fmt: skip
    print(json.dumps(found))


main()
