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
    words, files = _wait(path)
    if words[0] != b"job":
        raise NotHeld(os.fsdecode(b" ".join(words)) or "the preparation ended before a job came")
    arguments = _become(words, files)
    _seed()
    arguments.leap = time.time() - began
    return arguments


def _wait(path: str) -> "tuple[list[bytes], list[int]]":
    """The order, as words, and the standard streams, as descriptors."""
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        line.connect(path)
        return _take(line)
    except OSError as exc:
        text = "a program is held by `belljar image warm`, while that prepares the image, and nowhere else ({})"
        raise NotHeld(text.format(exc.strerror)) from None


def _take(line: _socket.socket) -> "tuple[list[bytes], list[int]]":
    """What the agent says, when it does."""
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
    """What the order says: its words are read one by one, each list behind its length."""
    words = iter(order[1:])

    def some(each: int = 1) -> "list[list[bytes]]":
        return [[next(words) for _ in range(each)] for _ in range(int(next(words)))]

    kinds, umask, cwd, uid, gid = next(words), int(next(words)), next(words), int(next(words)), int(next(words))
    groups, limits, argv, env = some(), some(3), some(), some(2)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
        if kinds[number : number + 1] == b"c":
            os.close(number)
    if limits:
        import resource

        for name, soft, hard in limits:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name.decode()), (int(soft), int(hard)))
    os.umask(umask)
    if os.geteuid() == 0:
        os.setgroups([int(group) for (group,) in groups])
        os.setgid(gid)
        os.setuid(uid)
    os.environb.clear()
    os.environb.update((name, value) for name, value in env)
    os.chdir(cwd)
    return Arguments(os.fsdecode(word) for (word,) in argv)


def _seed() -> None:
    """No two machines draw the same numbers, where a program uses the generators that these modules share."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
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
