"""Hold a program that has loaded all it needs: each machine of a warm image goes on from there, with a job of its own.

    import sys
    sys.path.append("/usr/lib/belljar")
    import belljar_hold

    args = belljar_hold.hold()  # in each machine: the arguments of its job

As a command, `/usr/lib/belljar/belljar-hold PROGRAM ARG...` waits likewise and then becomes PROGRAM, with the job's arguments
behind its own. One file, the standard library of any Python since 3.6; belljar's agent puts it into every guest.
"""

import _socket  # an interpreter without the rest of its library has this one
import os
import struct
import sys
import time

SOCKET = "/run/belljar/hold.sock"


class NotHeld(RuntimeError):
    """The program cannot be held: nothing prepares a warm image here, or another program is held already."""


class Arguments(list):  # type: ignore[type-arg]
    """The job's arguments. `leap`: seconds that have passed outside while the program was held."""

    leap = 0.0


def hold(path: str = SOCKET) -> Arguments:
    """Wait in the warm image, and return in each of its machines: with the job's arguments, environment, working directory, limits,
    user, and standard streams. The generators of `random`, NumPy and OpenSSL are seeded anew. Raises NotHeld."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    began = time.time()
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        line.connect(path)
        words, files = _take(line)
    except OSError as exc:
        text = "a program is held by `belljar image warm`, while that prepares the image, and nowhere else ({})"
        raise NotHeld(text.format(exc.strerror)) from None
    if words[0] != b"job":
        raise NotHeld(os.fsdecode(b" ".join(words)) or "the preparation ended before a job came")
    arguments = _become(words, files)
    _seed()
    arguments.leap = time.time() - began
    return arguments


def _take(line: _socket.socket) -> "tuple[list[bytes], list[int]]":
    """What the agent says, when it does: the order, as words, and the standard streams, as descriptors."""
    data, files = b"", [0][:0]
    while True:
        part, rights, _, _ = line.recvmsg(1 << 16, _socket.CMSG_SPACE(12))
        for _, _, body in rights:
            files += struct.unpack("3i", body)
        if not part:
            line.close()
            return data.split(b"\0"), files
        data += part


def _become(order: "list[bytes]", files: "list[int]") -> Arguments:
    """What the order says. Each list has its length before it."""
    words = iter(order[1:])
    kinds, umask, cwd, uid, gid = (next(words) for _ in range(5))
    groups, limits, argv, env = ([next(words) for _ in range(int(next(words)))] for _ in range(4))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
        if kinds[number : number + 1] == b"c":
            os.close(number)
    if limits:
        import resource

        for at in range(0, len(limits), 3):
            name, soft, hard = limits[at : at + 3]
            resource.setrlimit(getattr(resource, "RLIMIT_" + name.decode()), (int(soft), int(hard)))
    os.umask(int(umask))
    if os.geteuid() == 0:
        os.setgroups([int(group) for group in groups])
        os.setgid(int(gid))
        os.setuid(int(uid))
    os.environb.clear()
    os.environb.update((env[at], env[at + 1]) for at in range(0, len(env), 2))
    os.chdir(cwd)
    return Arguments(os.fsdecode(word) for word in argv)


def _seed() -> None:
    """No two machines draw the same numbers, where a program uses the generators that these modules share."""
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(64), 64.0)


def main(words: "list[str]") -> int:
    """The command. As shells have it, 126 and 127 are programs that cannot be run."""
    if not words:
        sys.stderr.write("usage: belljar-hold PROGRAM ARG...\n")
        return 2
    try:
        os.execvp(words[0], words + hold())
    except NotHeld as exc:
        sys.stderr.write(f"belljar-hold: {exc}\n")
        return 125
    except OSError as exc:
        sys.stderr.write(f"belljar-hold: {words[0]}: {exc.strerror}\n")
        return 127 if exc.errno == 2 else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
