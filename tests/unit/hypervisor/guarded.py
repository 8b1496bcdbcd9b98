"""What a child under guard tries; run as a program of its own. Prints one line of JSON per attempt: name, outcome."""

import ctypes
import errno
import json
import os
import socket
import struct
import sys
import threading

libc = ctypes.CDLL(None, use_errno=True)


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


def connect(address: str, port: int) -> str:
    with socket.socket() as one:
        one.setblocking(False)
        return outcome(lambda: one.connect((address, port)))


def udp(address: str, port: int, data: bytes = b"hello") -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        return outcome(lambda: one.sendto(data, (address, port)))


def ask(is_connected: bool, address: str, data: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        if is_connected:
            one.connect((address, 53))
            return one.send(bytes.fromhex(data))
        return one.sendto(bytes.fromhex(data), (address, 53))


def ask_again(address: str, *queries: str) -> dict[str, str]:
    """By one socket; what comes for each, and from whom it would be for slirp."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for number, data in enumerate(queries):
            sent = call(44, one.fileno(), bytes.fromhex(data), len(data) // 2, 0, inet(address, 53), 16)
            sender, size = ctypes.create_string_buffer(128), ctypes.c_int(128)
            answer = ctypes.create_string_buffer(1000)
            length = libc.recvfrom(
                one.fileno(), answer, 1000, socket.MSG_DONTWAIT if number != 2 else 0, sender, ctypes.byref(size)
            )
            place = f"{socket.inet_ntoa(sender.raw[4:8])}:{int.from_bytes(sender.raw[2:4], 'big')}"
            found[str(number)] = f"{sent} {place} {answer.raw[:length].hex()}"
    return found


def raw_connect(address: bytes, size: int, kind: int = socket.SOCK_STREAM) -> str:
    with socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK) as one:
        return call(42, one.fileno(), address, size)


def hostile_addresses(port: int) -> dict[str, str]:
    good = inet("127.0.0.1", port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as one:
        return {
            "short": raw_connect(good, 15), "empty": raw_connect(good, 0), "negative": raw_connect(good, -1),
            "huge": raw_connect(good, 1 << 31), "high bits": raw_connect(good + bytes(112), (1 << 32) + 16),
            "null": call(42, one.fileno(), 0, 16), "kernel": call(42, one.fileno(), -4096, 16),
            "unmapped": call(42, one.fileno(), 4096, 16), "no socket": call(42, 0, good, 16),
            "no descriptor": call(42, 9999, good, 16), "unspecified": raw_connect(inet("127.0.0.1", port, 0), 16),
            "unspecified datagram": raw_connect(inet("127.0.0.1", port, 0), 16, socket.SOCK_DGRAM),
            "ipv6": raw_connect(struct.pack("=HHI16sI", socket.AF_INET6, 1, 0, bytes(15) + b"\1", 0), 28),
            "unix": raw_connect(struct.pack("=H", socket.AF_UNIX) + b"\0abstract-name-of-a-service", 28),
        }  # fmt: skip


def hostile_calls(port: int) -> dict[str, str]:
    plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stream = socket.socket()
    address = inet("127.0.0.1", port)
    text = ctypes.create_string_buffer(address)
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(text), 4))
    header = ctypes.create_string_buffer(
        struct.pack("QIIQQQQI4x", ctypes.addressof(text), 16, 0, ctypes.addressof(vector), 1, 0, 0, 0)
    )
    return {
        "sendmsg": call(46, plain.fileno(), header, 0), "sendmmsg": call(307, plain.fileno(), header, 1, 0),
        "fast open": call(44, stream.fileno(), text, 4, 0x20000000, text, 16),
        "unspecified sendto": call(44, plain.fileno(), text, 4, 0, inet("127.0.0.1", port, 0), 16),
        "jumbo": call(44, plain.fileno(), text, 1 << 40, 0, text, 16),
        "bind": outcome(lambda: plain.bind(("0.0.0.0", 0))), "listen": outcome(lambda: stream.listen()),
        "source route": outcome(lambda: stream.setsockopt(0, 4, b"\x83\x07\x04\x7f\x00\x00\x01\x00")),
        "blocking": outcome(lambda: stream.connect(("127.0.0.1", port))),
        "inet6 socket": outcome(lambda: socket.socket(socket.AF_INET6)), "sctp": outcome(lambda: socket.socket(2, 1, 132)),
        "mptcp": outcome(lambda: socket.socket(2, 1, 262)), "netlink": outcome(lambda: socket.socket(16, 3)),
        "packet": outcome(lambda: socket.socket(17, 3)), "seqpacket": outcome(lambda: socket.socket(2, 5)),
        "udplite": outcome(lambda: socket.socket(2, 2, 136)), "io_uring": call(425, 8, 0), "ptrace": call(101, 16, 1, 0, 0),
        "pidfd_getfd": call(438, 0, 0, 0), "close_range": call(436, 100, 200, 0),
    }  # fmt: skip


def seals(number: int, port: int) -> dict[str, str]:
    """The inherited socket may be used, and nothing can take its number."""
    mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    held = socket.socket(fileno=os.dup(number))
    found = {
        "speaks": outcome(lambda: held.sendmsg([b"x"])), "speaks by its number": outcome(lambda: _sendmsg(number)),
        "close": call(3, number), "still there": outcome(lambda: os.fstat(number).st_ino > 0),
        "dup2": call(33, mine.fileno(), number), "dup3": call(292, mine.fileno(), number, os.O_CLOEXEC),
        "dup2 with high bits": call(33, mine.fileno(), (1 << 32) + number),
    }  # fmt: skip
    return found


def _sendmsg(number: int) -> str:
    text = ctypes.create_string_buffer(b"y")
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(text), 1))
    return call(46, number, struct.pack("QIIQQQQI4x", 0, 0, 0, ctypes.addressof(vector), 1, 0, 0, 0), 0)


def race(allowed: int, forbidden: int, rounds: int) -> dict[str, str]:
    """One thread connects, another changes the address under it."""
    address = ctypes.create_string_buffer(inet("127.0.0.1", allowed), 16)
    is_over = False

    def flip() -> None:
        while not is_over:
            for port in (forbidden, allowed):
                address[2:4] = struct.pack("!H", port)

    flipper = threading.Thread(target=flip)
    flipper.start()
    reached: dict[str, int] = {}
    for _ in range(rounds):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as one:
            how = call(42, one.fileno(), address, 16)
            reached[how] = reached.get(how, 0) + 1
    is_over = True
    flipper.join()
    return {how: str(count) for how, count in reached.items()}


def foreign_abi(kind: str) -> None:
    """connect by the numbers of x32 or of 32-bit programs: does not come back."""
    if kind == "x32":
        call(0x40000000 + 42, 0, 0, 0)
    else:
        import mmap

        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x66\x01\x00\x00\xcd\x80\xc3")  # mov eax, 362 (connect); int 0x80; ret
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


def answered(address: str, port: int) -> dict[str, str]:
    with socket.socket() as one:
        one.setblocking(False)
        how = outcome(lambda: one.connect((address, port)))
        if how != "None":
            return {"connect": how}
        is_open = outcome(lambda: os.get_blocking(one.fileno()))
        one.setblocking(True)
        one.settimeout(20)
        send = call(44, one.fileno(), b"GET\n", 4, 0, 0, 0)
        return {"connect": how, "blocking": is_open, "send": send, "heard": outcome(lambda: one.recv(100))}


def many(kind: str, address: str, port: int, count: int) -> dict[str, str]:
    import time

    begin = time.monotonic()
    for _ in range(count):
        connect(address, port) if kind == "connect" else udp(address, port)
    return {"per_second": str(round(count / (time.monotonic() - begin)))}


def main() -> None:
    what, *rest = sys.argv[1:]
    words = [int(word) if word.isdigit() else word for word in rest]
    found = {
        "connect": lambda: {"connect": connect(*words)}, "udp": lambda: {"udp": udp(*words)},
        "query": lambda: {
            "plain": outcome(lambda: ask(False, *rest)), "connected": outcome(lambda: ask(True, *rest)),
        },
        "ask_again": lambda: ask_again(*rest),
        "hostile_addresses": lambda: hostile_addresses(*words), "hostile_calls": lambda: hostile_calls(*words),
        "seals": lambda: seals(*words), "race": lambda: race(*words), "abi": lambda: foreign_abi(*words),
        "answered": lambda: answered(*words), "many": lambda: many(*words),
    }[what]()  # fmt: skip
    print(json.dumps(found))


main()
