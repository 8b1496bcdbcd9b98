"""A guest behind an ssh server: how one gets in, what becomes of a connection that breaks, names, accounts and files."""

import asyncio
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.contracts.payloads import ENV, IDENTITY, ME, begin, payload, ran, said, shell
from tests.contracts.ssh_server import CAN_RUN, Server, free_port, new_key, server

from belljar.errors import AgentLost, GuestRefused, NoNfs, NoPackedFolders, OutputMissing, SshRefused
from belljar.guest import Settings, SshKeys
from belljar.guest.fake import Collector
from belljar.guest.ssh import SshGuest
from belljar.guest.ssh_link import Patience
from belljar.model import MIB, Account, FileServer, PlainFile

needs_sshd = pytest.mark.skipif(not CAN_RUN, reason="root starts an sshd in namespaces of its own")
QUICK = Patience(banner=0.2, knock=0.0, login=5.0, refusing=0.3)
USER = Account("jobber", 4711, 4712, "jobbers", groups=((4713, "more"),), home="/run/jobber")
ODD = bytes(range(1, 256)).replace(b"=", b"")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("sshd")) as one:
        yield one


# -- servers that are none, or not yet -----------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def behind(serve: Serve, told: list[str]) -> AsyncIterator[SshGuest]:
    """A guest whose port is answered by *serve*."""
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    place = listening.sockets[0].getsockname()

    async def dial(number: int) -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(line, place)
        except BaseException:
            line.close()
            raise
        return line

    guest = SshGuest(dial, SshKeys(new_key()[0]), Settings(), told.append, QUICK)
    try:
        yield guest
    finally:
        guest.close()
        listening.close()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def says_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-Half\r\n")
    writer.close()


@pytest.mark.parametrize("serve", [closes, resets, hangs, says_half])
async def test_a_server_that_is_not_there_yet_is_waited_for_until_the_callers_deadline(serve: Serve) -> None:
    told: list[str] = []
    async with behind(serve, told) as guest:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await guest.greet()
    assert told and all(line.startswith("not yet: ") for line in told)


async def test_what_is_no_ssh_server_is_refused_and_named() -> None:
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with behind(talks, told := []) as guest:
        with pytest.raises(SshRefused, match="no ssh server"):
            await guest.greet()
    assert told[0].startswith("refused: ")


async def test_a_port_nobody_listens_on_is_not_yet() -> None:
    async def dial(number: int) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    told: list[str] = []
    guest = SshGuest(dial, SshKeys(new_key()[0]), Settings(), told.append, QUICK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await guest.greet()
    assert told == ["not yet: cannot connect: Connection refused"]


@needs_sshd
async def test_a_server_that_does_not_know_our_key_is_refused_after_some_time(there: Server) -> None:
    stranger = replace(there, keys=replace(there.keys, private=new_key()[0]), told=[])
    with pytest.raises(SshRefused, match="does not accept"):
        async with stranger.guest(QUICK):
            pass
    assert stranger.told[-1] == "refused: it does not accept belljar's key"


@needs_sshd
async def test_a_server_with_another_host_key_is_not_the_guest(there: Server) -> None:
    other = replace(there, keys=replace(there.keys, host=(new_key()[1],)), told=[])
    with pytest.raises(SshRefused, match="another host key"):
        async with other.guest(QUICK):
            pass


@needs_sshd
async def test_a_user_who_may_not_become_root_is_refused_and_named(there: Server) -> None:
    visitor = replace(there, keys=replace(there.keys, user="visitor"), told=[])
    with pytest.raises(SshRefused, match=r"visitor may not do `sudo -n`: .*sudo: "):
        async with visitor.guest(QUICK):
            pass
    assert visitor.told[-1].startswith("refused: visitor may not do")


@needs_sshd
async def test_a_server_that_gets_our_key_late_lets_us_in(there: Server) -> None:
    authorized = there.folder / "authorized"
    known = authorized.read_text()
    authorized.write_text("")
    refused = asyncio.Event()
    late = replace(there, told=Heard("refused: it does not accept belljar's key", refused))
    try:
        greeting = asyncio.ensure_future(asyncio.wait_for(enter(late), 30))
        await asyncio.wait_for(refused.wait(), 30)
    finally:
        authorized.write_text(known)
    await greeting
    assert late.told[-1] == "let in"


class Heard(list[str]):
    """Sets an event when it gets a certain line."""

    def __init__(self, line: str, heard: asyncio.Event) -> None:
        super().__init__()
        self._line, self._heard = line, heard

    def append(self, line: str) -> None:
        super().append(line)
        if line == self._line:
            self._heard.set()


async def enter(there: Server) -> None:
    async with there.guest():
        pass


async def test_a_server_whose_connections_close_is_not_knocked_at_again_at_once() -> None:
    knocks: list[float] = []

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(asyncio.get_running_loop().time())
        writer.close()

    async with behind(knocked, []) as guest:
        guest.link._patience = replace(QUICK, knock=0.4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.1):
                await guest.greet()
    assert 2 <= len(knocks) <= 3
    assert all(later - one >= 0.4 for one, later in pairwise(knocks))


async def test_a_clone_is_tried_at_its_second_port_and_then_at_the_first() -> None:
    tried: list[int] = []

    async def dial(number: int) -> socket.socket:
        tried.append(number)
        if len(tried) == 1:
            raise FileNotFoundError(2, "No such file or directory")  # QEMU does not listen yet
        here, there = socket.socketpair()
        here.setblocking(False)
        there.close()
        return here

    told: list[str] = []
    guest = SshGuest(dial, SshKeys(new_key()[0], of_clone=True), Settings(), told.append, QUICK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await guest.greet()
    assert tried[:4] == [1, 1, 0, 1] and "not at its second port: the connection was closed at once" in told


@needs_sshd
async def test_a_guest_that_becomes_a_template_has_a_server_of_ours_which_its_clones_are_reached_by(
    tmp_path: Path,
) -> None:
    with server(tmp_path) as there:
        async with there.guest() as guest:
            await guest.settle()
        clone = replace(there, keys=replace(there.keys, of_clone=True), port=free_port(), told=[])
        async with clone.guest() as guest:  # nobody listens at its first port
            assert (await ran(guest, shell("exit 6"))).code == 6
        assert clone.told == ["let in"]


# -- connections that break ----------------------------------------------------------------------------------------------


def cut(there: Server) -> None:
    for line in there.lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
    there.lines.clear()


@needs_sshd
async def test_a_command_after_a_broken_connection_goes_over_a_new_one(there: Server) -> None:
    async with there.guest() as guest:
        cut(there)
        assert await guest.set_clock() < 0.1


@needs_sshd
async def test_output_that_may_be_missing_is_never_taken_for_whole(there: Server, tmp_path: Path) -> None:
    async with there.guest() as guest:
        done = await begin(guest, shell("echo $$; echo begun; sleep 1000"))
        await said(done, b"begun")
        cut(there)
        with pytest.raises(AgentLost, match="missing"):
            await done.process.wait()
        assert (await ran(guest, shell(f"kill -0 {int(done.out.split()[0])}"))).code != 0  # it was killed
        assert (await ran(guest, shell("exit 4"))).code == 4


@needs_sshd
async def test_a_runner_that_is_killed_is_a_lost_guest_and_no_exit_code(there: Server) -> None:
    async with there.guest() as guest:
        script = "p=$(cut -d' ' -f4 /proc/$PPID/stat); for s in $(pgrep -f 'ssh/[0-9]*/run'); do kill -9 $s; done; sleep 1000"
        with pytest.raises(AgentLost):
            await asyncio.wait_for((await begin(guest, shell(script))).process.wait(), 60)


# -- payloads ------------------------------------------------------------------------------------------------------------


@needs_sshd
async def test_exit_codes_and_signals_are_told_apart(there: Server) -> None:
    async with there.guest() as guest:
        codes = (0, 1, 125, 126, 127, 128, 130, 137, 143, 255)
        done = await asyncio.gather(*(ran(guest, shell(f"exit {code}")) for code in codes))
        assert [(one.status.exit_code, one.status.signal) for one in done if one.status] == [
            (code, None) for code in codes
        ]


@needs_sshd
@pytest.mark.parametrize("waiter", ["bash", "time", "busybox", "sh"])
async def test_a_guest_without_perl_tells_them_apart_as_far_as_it_can(there: Server, waiter: str) -> None:
    async with there.guest() as guest:
        guest.means = replace(guest.means, waiter=waiter)
        ends = {"exit 3": (3, None), "kill -9 $$": (None, 9), "kill -INT $$": (None, 2), "exit 137": (137, None)}
        if waiter == "sh":  # nobody can, with a shell's own status
            ends["exit 137"] = (None, 9)
        for script, end in ends.items():
            done = await ran(guest, shell(script))
            assert done.status is not None
            assert (done.status.exit_code, done.status.signal) == end, script


@needs_sshd
@pytest.mark.parametrize("dropper", ["/usr/bin/setpriv", "/usr/sbin/chroot", "/bin/su"])
async def test_a_payload_is_its_account(there: Server, dropper: str) -> None:
    async with there.guest() as guest:
        guest.means = replace(guest.means, dropper=dropper)
        asked = replace(
            shell("id -un; id -u; id -g; id -G; pwd; umask; ulimit -n; ulimit -Hn"), account=USER, cwd=None, umask=0o027
        )
        done = await ran(guest, replace(asked, rlimits=(("NOFILE", 100, 200),)))
    assert done.out.split() == [b"jobber", b"4711", b"4712", b"4712", b"4713", b"/run/jobber", b"0027", b"100", b"200"]


@needs_sshd
async def test_arguments_and_environment_are_the_same_to_the_byte(there: Server) -> None:
    words = (b"", b" ", b"two\nlines", b"'\"`$(id)\\", ODD, "\N{SNOWMAN}".encode(), b"--", b"-x")
    env = (*ENV, (b"ODD", ODD), (b"EMPTY", b""), (b"NEW\nLINE", b"a\nb"))
    async with there.guest() as guest:
        done = await ran(guest, payload(b"/bin/cat", b"/proc/self/environ", env=env))
        assert done.out == b"".join(name + b"=" + value + b"\0" for name, value in env)
        done = await ran(guest, payload(b"/bin/sh", b"-c", b"cat /proc/$$/cmdline; :", *words))
        assert done.out.split(b"\0")[3:-1] == list(words)


@needs_sshd
async def test_what_no_kernel_takes_is_refused(there: Server) -> None:
    async with there.guest() as guest:
        for words in ((b"a\0b",), (b"x" * 131072,), (b"x" * 100_000,) * 30):
            with pytest.raises(GuestRefused):
                await guest.start(payload(b"/bin/true", *words), (await begin(guest, shell("true"))).process._streams)  # type: ignore[attr-defined]


@needs_sshd
async def test_what_left_the_payloads_group_does_not_keep_its_end_from_being_told(there: Server) -> None:
    async with there.guest() as guest:
        done = await asyncio.wait_for(ran(guest, shell("setsid sleep 1000 & echo here")), 60)
        assert (done.out, done.code) == (b"here\n", 0)


@needs_sshd
async def test_the_working_directory_is_there_and_what_is_none_is_named(there: Server) -> None:
    async with there.guest() as guest:
        place = b"/run/outside's own/" + ODD[128:150]
        done = await ran(guest, replace(shell("pwd; stat -c %u ."), account=USER, cwd=place))
        assert done.out == place + b"\n4711\n"
        done = await ran(guest, shell("true", cwd=b"/etc/passwd"))
        assert done.status is not None
        assert (done.code, done.status.error) == (125, "no-cwd") and "/etc/passwd" in done.status.message


@needs_sshd
async def test_small_files_are_made_before_the_payload(there: Server) -> None:
    files = (
        PlainFile(b"/run/places/one/value", b"7\0\n", 0o640, is_users=False),
        PlainFile(b"/run/jobber/own/deep", ODD, 0o600), PlainFile(b"/run/places/empty", None, 0o711),
    )  # fmt: skip
    async with there.guest() as guest:
        asked = shell(
            "stat -c '%a %u' /run/places/one/value /run/jobber/own /run/jobber/own/deep /run/places/empty; cat /run/jobber/own/deep"
        )
        done = await ran(guest, replace(asked, account=USER, files=files, cwd=None))
    assert done.out == b"640 0\n755 4711\n600 4711\n711 4711\n" + ODD


# -- who it is -----------------------------------------------------------------------------------------------------------


@needs_sshd
async def test_a_guest_proves_its_identity_and_shows_a_new_host_key(tmp_path: Path) -> None:
    with server(tmp_path) as there:
        async with there.guest() as guest:
            proof = await guest.identify(IDENTITY)
            assert (proof.hostname, proof.machine_id, proof.nonce) == (
                IDENTITY.hostname,
                IDENTITY.machine_id,
                IDENTITY.nonce,
            )
            assert len(bytes.fromhex(proof.sample)) == 32 and abs(proof.clock_skew) < 0.1
            done = await ran(guest, shell("hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id"))
            assert done.out.decode().replace("-", "").split() == ["belljar0123456789ab", "a1" * 16, "b2" * 16]
            assert (await guest.identify(IDENTITY)).sample != proof.sample
            cut(there)
            assert (await ran(guest, shell("exit 5"))).code == 5
        with pytest.raises(SshRefused, match="another host key"):  # the old one is not shown any more
            async with there.guest(QUICK):
                pass


@needs_sshd
async def test_what_is_not_carried_is_said(there: Server) -> None:
    async with there.guest() as guest:
        with pytest.raises(NoNfs):
            await guest.mount_nfs(FileServer("10.0.2.2", 2049, "/x"), "/mnt", readonly=True)
        with pytest.raises(NoPackedFolders):
            await guest.mount_packed("packed0", "/dev/vdb", "x", ME, None)


# -- files ---------------------------------------------------------------------------------------------------------------


@needs_sshd
@pytest.mark.parametrize("gnu", [True, False])
async def test_a_tree_goes_in_and_comes_out_as_it_was(there: Server, tmp_path: Path, gnu: bool) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "r").write_bytes(os.urandom(3 * MIB))
    (tree / "below/a\nb").write_bytes(b"x")
    (tree / "below/link").symlink_to("../r")
    os.link(tree / "r", tree / "hard")
    (tree / "holes").touch()
    os.truncate(tree / "holes", 8 * MIB)
    fd = os.open(tree / "holes", os.O_WRONLY)
    os.pwrite(fd, b"middle", 5 * MIB)
    os.close(fd)
    (tree / "below").chmod(0o750)
    os.utime(tree / "r", (1, 1_000_000_000))
    async with there.guest() as guest:
        guest.means = replace(guest.means, gnu_tar=gnu)
        await guest.put(str(tree), "inside", USER, None, skip=("below/link",))
        await guest.get("inside", str(tmp_path / "back"), USER, None)
        owner = await ran(guest, shell("stat -c %u /run/jobber/inside/r"))
        await guest.put(str(tree / "r"), "inside/below", USER, None)  # a file into a folder
        await guest.get("inside/below/r", str(tmp_path / "one"), USER, None)
    back = tmp_path / "back"
    assert owner.out == b"4711\n"
    for name in ("r", "hard", "holes", "below/a\nb"):
        assert (back / name).read_bytes() == (tree / name).read_bytes(), name
    assert not (back / "below/link").exists()
    assert (back / "r").stat().st_ino == (back / "hard").stat().st_ino
    assert (back / "r").stat().st_mtime == 1_000_000_000
    assert stat.S_IMODE((back / "below").stat().st_mode) == 0o750
    assert (tmp_path / "one").read_bytes() == (tree / "r").read_bytes()


@needs_sshd
async def test_copies_that_cannot_be_made_are_named(there: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    async with there.guest() as guest:
        with pytest.raises(OutputMissing, match="nothing-here"):
            await guest.get("nothing-here", str(tmp_path / "back"), USER, None)
        with pytest.raises(GuestRefused, match=r"[Pp]ermission denied"):
            await guest.put(str(tmp_path / "file"), "/root/x", USER, None)
        with pytest.raises(GuestRefused):
            await guest.get("/etc/shadow", str(tmp_path / "back"), USER, None)
    assert not (tmp_path / "back").exists()


@needs_sshd
async def test_only_what_changed_comes_out(there: Server, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/old").write_text("old")
    async with there.guest() as guest:
        await guest.put(str(tmp_path / "tree"), "/run/changing", ME, None)
        await asyncio.sleep(0.02)
        await ran(guest, shell("echo new > /run/changing/new"))
        await guest.get("/run/changing", str(tmp_path / "back"), ME, None, changed_only=True)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["new"]


@needs_sshd
async def test_chosen_folders_are_collected_as_they_are(there: Server) -> None:
    import io
    import tarfile

    sink = Collector()
    async with there.guest() as guest:
        await ran(guest, shell("mkdir -p /run/kept; echo x > /run/kept/log"))
        await guest.collect(["/run/kept", "/no/such"], sink)
    with tarfile.open(fileobj=io.BytesIO(sink.data)) as archive:
        assert [name.removeprefix("./") for name in archive.getnames()] == ["run/kept", "run/kept/log"]


@needs_sshd
async def test_the_end_of_a_payload_ends_what_runs(there: Server) -> None:
    async with there.guest() as guest:
        done = await begin(guest, shell("trap '' TERM; echo up; while :; do sleep 1; done"))
        await said(done, b"up")
        await guest.end_payload()
        status = await done.process.wait()
    assert status.signal == signal.SIGKILL
