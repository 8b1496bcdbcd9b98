"""What a payload may rely on, through the real agent in rehearsal."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest
from tests.contracts.payloads import ECHO, ENV, begin, is_running, payload, python, ran, said, shell, talking
from tests.rehearsal import rehearse

from belljar.agent.wire import WINDOW
from belljar.errors import GuestRefused
from belljar.model import MIB, StdinKind


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    """One agent for all: each test begins a conversation of its own, which ends what the last one left."""
    with rehearse() as connection:
        yield connection


# -- how it ends ---------------------------------------------------------------------------------------------------------


async def test_every_exit_code_arrives(channel: socket) -> None:
    async with talking(channel) as guest:
        for codes in (range(0, 128), range(128, 256)):
            done = await asyncio.gather(*(ran(guest, shell(f"exit {code}")) for code in codes))
            assert [one.code for one in done] == list(codes)
            assert not any(one.status.error for one in done if one.status)


TEN = ("HUP", "INT", "QUIT", "KILL", "TERM", "USR1", "USR2", "ALRM", "PIPE", "XCPU")


@pytest.mark.parametrize("name", TEN)
async def test_death_by_a_signal_is_told_as_that_signal(channel: socket, name: str) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, shell(f"kill -{name} $$", rlimits=(("CORE", 0, 0),)))
    assert done.status is not None
    assert (done.status.exit_code, done.status.signal) == (None, getattr(signal, f"SIG{name}"))


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2", "XCPU"])
async def test_a_signal_from_outside_is_delivered(channel: socket, name: str) -> None:
    async with talking(channel) as guest:
        done = await begin(
            guest, shell(f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.01; done")
        )
        await said(done, b"ready\n")
        await done.process.signal(getattr(signal, f"SIG{name}"))
        assert (await done.process.wait()).exit_code == 9
    assert done.out.endswith(f"got {name}\n".encode())


async def test_a_command_that_is_not_there_is_127(channel: socket) -> None:
    async with talking(channel) as guest:
        for name in (b"no-such-command", b"/no/such/command", b""):
            done = await ran(guest, payload(name))
            assert done.status is not None
            assert (done.code, done.status.error) == (127, "not-found")
            assert name.decode() in done.status.message


async def test_what_cannot_be_executed_is_126(channel: socket, tmp_path: Path) -> None:
    plain, orphan = tmp_path / "plain", tmp_path / "orphan"
    plain.write_text("#!/bin/sh\n")
    orphan.write_text("#!/no/such/interpreter\n")
    orphan.chmod(0o755)
    async with talking(channel) as guest:
        for path in (plain, orphan, tmp_path, plain / "below"):
            done = await ran(guest, payload(os.fsencode(path)))
            assert done.status is not None
            assert (done.code, done.status.error) == (126, "not-executable"), path


async def test_a_payload_may_itself_exit_127(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, shell("exit 127"))
    assert done.status is not None
    assert (done.code, done.status.error) == (127, "")


async def test_a_missing_working_directory_is_named(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, shell("true", cwd=b"/no/such/folder"))
    assert done.status is not None
    assert (done.code, done.status.error) == (125, "no-cwd")
    assert "/no/such/folder" in done.status.message


async def test_nothing_the_payload_started_outlives_it(channel: socket) -> None:
    script = (
        "p=$(mktemp -u) && mkfifo $p; sleep 1000 & echo $!; (setsid sleep 1000 & echo $!);"
        " (setsid sh -c 'sleep 1000 & echo $!; : >$0; wait' $p &) ; : <$p; rm $p"
    )
    async with talking(channel) as guest:
        done = await ran(guest, shell(script))
    pids = [int(word) for word in done.out.split()]
    assert len(pids) == 3
    assert [pid for pid in pids if is_running(pid)] == []


async def test_a_second_process_runs_beside_the_first_and_does_not_end_it(channel: socket) -> None:
    async with talking(channel) as guest:
        first = await begin(guest, shell("echo ready; sleep 1000"))
        await said(first, b"ready\n")
        assert (await ran(guest, shell("exit 4"))).code == 4
        await first.process.signal(signal.SIGKILL)
        assert (await first.process.wait()).signal == signal.SIGKILL


# -- its streams ---------------------------------------------------------------------------------------------------------


async def test_stdout_and_stderr_stay_apart_and_the_last_byte_arrives_before_the_end(channel: socket) -> None:
    code = "import os; [(os.write(1, b'o' * 1000), os.write(2, b'e' * 999)) for _ in range(500)]; os.write(1, b'last')"
    async with talking(channel) as guest:
        done = await ran(guest, python(code))
    assert done.out == b"o" * 500_000 + b"last"
    assert done.err == b"e" * 499_500


async def test_binary_streams_come_back_unchanged_in_bounded_memory(channel: socket) -> None:
    size, block = 48 * MIB, os.urandom(MIB)
    sink, source = Hashing(), Repeating(block, size // len(block))
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"cat"), source, stdout=sink)
    expected = hashlib.sha256()
    for _ in range(size // len(block)):
        expected.update(block)
    assert (done.code, sink.size, sink.digest.digest()) == (0, size, expected.digest())
    assert sink.largest <= WINDOW and source.largest <= WINDOW


class Hashing:
    def __init__(self) -> None:
        self.digest, self.size, self.largest = hashlib.sha256(), 0, 0

    async def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.size += len(data)
        self.largest = max(self.largest, len(data))

    async def close(self) -> None:
        pass


class Repeating:
    def __init__(self, block: bytes, times: int) -> None:
        self.block, self.left, self.largest = memoryview(block), len(block) * times, 0

    async def read(self, limit: int) -> bytes:
        self.largest = max(self.largest, limit)
        at = -self.left % len(self.block)
        data = bytes(self.block[at : at + min(limit, self.left)])
        self.left -= len(data)
        return data


async def test_a_slow_reader_slows_the_payload_and_costs_no_memory(channel: socket) -> None:
    code = "import os; [(os.write(1, b'x' * 65536), os.write(2, b'.')) for _ in range(64)]"
    sink = Valve()
    async with talking(channel) as guest:
        done = await begin(guest, python(code), stdout=sink)
        await sink.reached.wait()
        for _ in range(20):  # time enough to run away
            await ran(guest, shell("true"))
        # The guest may send one window; a pipe and the write that is stuck in it come on top.
        assert len(done.err) * 65536 <= WINDOW + (1 << 17)
        sink.opened.set()
        assert (await done.process.wait()).exit_code == 0
    assert (sink.size, len(done.err)) == (64 * 65536, 64)


class Valve:
    """Takes nothing until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened, self.size = asyncio.Event(), asyncio.Event(), 0

    async def write(self, data: bytes) -> None:
        self.reached.set()
        await self.opened.wait()
        self.size += len(data)

    async def close(self) -> None:
        pass


async def test_a_reader_that_goes_away_means_sigpipe(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"yes"), stdout=Gone())
    assert done.status is not None
    assert done.status.signal == signal.SIGPIPE


class Gone:
    async def write(self, data: bytes) -> None:
        raise BrokenPipeError

    async def close(self) -> None:
        pass


async def test_a_payload_need_not_read_its_stdin(channel: socket) -> None:
    async with talking(channel) as guest:
        assert (await ran(guest, payload(b"true"), stdin=bytes(4 * MIB))).code == 0
        done = await ran(guest, payload(b"head", b"-c3"), stdin=b"abcdef" * MIB)
    assert done.out == b"abc"


@pytest.mark.parametrize("kind", [StdinKind.CLOSED, StdinKind.NULL, StdinKind.STREAM])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_descriptor_is_inside_what_it_is_outside(
    channel: socket, tmp_path: Path, kind: StdinKind, number: int
) -> None:
    told = tmp_path / "told"
    code = (
        "import os, stat\n"
        f"try: facts = os.fstat({number})\n"
        "except OSError: kind = 'closed'\n"
        "else: kind = 'stream' if stat.S_ISFIFO(facts.st_mode) else 'null' if facts.st_rdev == os.makedev(1, 3) else '?'\n"
        f"open({str(told)!r}, 'w').write(kind)"
    )
    name = ("stdin", "stdout", "stderr")[number]
    async with talking(channel) as guest:
        await ran(guest, python(code, **{name: kind}), b"" if number == 0 and kind is StdinKind.STREAM else None)
    assert told.read_text() == kind.value


async def test_a_payload_inherits_no_descriptor_of_the_agent(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"/bin/ls", b"/proc/self/fd"))
    assert done.out.split() == [b"0", b"1", b"2", b"3"]  # 3 is the folder itself


# -- its surroundings ----------------------------------------------------------------------------------------------------

ODD = bytes(range(1, 256)).replace(b"=", b"")


async def test_arguments_and_environment_are_the_same_to_the_byte(channel: socket) -> None:
    words = (b"", b" ", b"two\nlines", b"'\"`$(id)\\", ODD, "\N{SNOWMAN}".encode(), b"--", b"-x")
    env = (*ENV, (b"ODD", ODD), (b"EMPTY", b""), (b"NEW\nLINE", b"a\nb"), (b"TWICE", b"1"), (b"TWICE", b"2"))
    code = "import os; os.write(1, open('/proc/self/cmdline', 'rb').read()); os.write(2, open('/proc/self/environ', 'rb').read())"
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"/usr/bin/python3", b"-ISc", code.encode(), *words, env=env))
    assert done.out.split(b"\0")[3:-1] == list(words)
    assert done.err == b"".join(name + b"=" + value + b"\0" for name, value in env)


async def test_a_mebibyte_of_arguments_and_environment_passes(channel: socket) -> None:
    words = tuple(bytes([128 + number]) * 100_000 for number in range(11))
    env = (*ENV, *((b"V%d" % number, ODD * 400) for number in range(8)))
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"/bin/sh", b"-c", b'printf %s "$@" | sha256sum', b"sh", *words, env=env))
    assert done.out.split()[0].decode() == hashlib.sha256(b"".join(words)).hexdigest()


async def test_more_than_a_kernel_takes_is_refused_with_its_reason(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"/bin/true", *(b"x" * 100_000 for _ in range(40))))
        assert done.status is not None
        assert (done.code, done.status.message) == (126, "/bin/true: Argument list too long")
        with pytest.raises(GuestRefused, match="more than a guest can be sent"):
            await ran(guest, payload(b"true", *(b"x" * 100_000 for _ in range(200))))
        assert (await ran(guest, payload(b"true"))).code == 0


async def test_folder_umask_and_limits_are_as_outside(channel: socket, tmp_path: Path) -> None:
    limits = (("NOFILE", 77, 88), ("CORE", 0, 0), ("FSIZE", 1 << 20, -1))
    asked = shell(
        "pwd; umask; ulimit -n; ulimit -Hn; ulimit -c; ulimit -f",
        cwd=os.fsencode(tmp_path),
        umask=0o027,
        rlimits=limits,
    )
    async with talking(channel) as guest:
        done = await ran(guest, asked)
    assert done.out.decode().split() == [str(tmp_path), "0027", "77", "88", "0", "2048"]


async def test_signals_are_at_their_defaults_and_not_blocked(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"/bin/grep", b"-E", b"^Sig(Blk|Ign)", b"/proc/self/status"))
    # 32 and 33 are glibc's own: no program can set them, and posix_spawn (of make, say) leaves them ignored.
    assert {int(line.split()[1], 16) & ~(3 << 31) for line in done.out.splitlines()} == {0}


async def test_a_payload_leads_a_session_of_its_own(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, python("import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))"))
    assert done.out == b"True\n"


async def test_the_payloads_own_path_is_searched(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "first/mine").write_text("not executable")
    (tmp_path / "second/mine").write_text("echo no interpreter line $1")
    (tmp_path / "second/mine").chmod(0o755)
    path = os.fsencode(f"/no/such:{tmp_path}/first:{tmp_path}/second")
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"mine", b"here", env=((b"PATH", path),)))
        missing = await ran(guest, payload(b"mine", env=((b"PATH", b"/no/such"),)))
    assert (done.code, done.out, missing.code) == (0, b"no interpreter line here\n", 127)


@pytest.mark.parametrize("padding", [0, 3 * MIB])
async def test_a_script_is_copied_in_and_run_by_its_own_first_line(channel: socket, padding: int) -> None:
    script = b'#!/bin/sh\necho "$1"; basename "$0"; stat -c %a "$0"; exit 6\n#' + b"\xff" * padding
    async with talking(channel) as guest:
        done = await ran(guest, payload(b"../some/job.sh", b"a b", script=script))
    assert (done.out, done.code) == (b"a b\njob.sh\n700\n", 6)


async def test_a_script_without_a_first_line_is_for_sh_and_a_program_is_a_program(channel: socket) -> None:
    async with talking(channel) as guest:
        plain = await ran(guest, payload(b"job", b"x", script=b"echo plain $1\n"))
        binary = await ran(guest, payload(b"echo", b"x", script=ECHO))
    assert (plain.out, binary.out) == (b"plain x\n", b"x\n")


# -- a terminal ----------------------------------------------------------------------------------------------------------


async def test_a_terminal_has_a_size_and_hears_of_a_new_one(channel: socket) -> None:
    script = "trap 'stty size; exit 0' WINCH; tty -s && stty size && echo ready; while :; do sleep 0.01; done"
    async with talking(channel) as guest:
        done = await begin(guest, shell(script, terminal=True), Keys(), window=(33, 111))
        await said(done, b"ready")
        await done.process.resize(44, 132)
        assert (await done.process.wait()).exit_code == 0
    assert done.out.replace(b"\r", b"").split(b"\n")[0:3] == [b"33 111", b"ready", b"44 132"]


async def test_control_c_on_a_terminal_interrupts(channel: socket) -> None:
    keys = Keys()
    async with talking(channel) as guest:
        done = await begin(guest, shell("echo ready; exec sleep 1000", terminal=True), keys)
        await said(done, b"ready")
        keys.pressed.put_nowait(b"\3")
        assert (await done.process.wait()).signal == signal.SIGINT


class Keys:
    """What a person types, when the test says so."""

    def __init__(self) -> None:
        self.pressed: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self, limit: int) -> bytes:
        return await self.pressed.get()


async def test_the_end_of_stdin_reaches_a_terminal(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await ran(guest, shell("stty -echo; echo ready; cat; echo end", terminal=True), b"line\n")
    assert done.code == 0
    assert done.out.replace(b"\r", b"").endswith(b"line\nend\n")
