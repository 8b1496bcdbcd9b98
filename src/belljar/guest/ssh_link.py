"""The connection of an ssh guest: made as often as it takes, trusted by keys both ways, and made anew when it is lost.

Commands sent over it are fixed words of ours and numbers. Whatever comes from a request travels as data.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from belljar.errors import AgentLost, GuestError, GuestRefused, ProtocolViolation, SshMissing, SshRefused
from belljar.guest import Settings, SshKeys
from belljar.guest.process import one_line

if TYPE_CHECKING:
    import asyncssh

    from belljar.guest.ssh_shell import Shell

Dial = Callable[[int], Awaitable[socket.socket]]
IMAGES, OURS = 0, 1  # the doors: the image's own server, and the one belljar left in a template
Tell = Callable[[str], None]

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries: nothing tells us when a server begins to listen
# Seconds for the first try, each time twice as many: what came before a guest's card was up, or its clone ran, is lost.
FIRST_BANNER, CLONES_BANNER = 2.0, 0.2
MOST_TRIES = 3
LEAVING = 5.0  # seconds a server may take to see us go
MOST_OUTPUT = 1 << 20  # bytes a command of ours may say
WINDOW = 1 << 20
MOST_SESSIONS = 8  # of one connection: OpenSSH allows ten
CIPHERS = ("chacha20-poly1305@openssh.com", "aes128-gcm@openssh.com", "aes128-ctr")
KEX = ("curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group14-sha256")


@dataclass(frozen=True)
class Patience:
    """How long a server may take, in seconds."""

    banner: float = 10.0  # to say anything once it accepted us: until a guest's network is up nobody answers
    # After a connection that was closed. Where systemd listens for the server it starts one for each, in vain until there
    # are host keys, and after five in 10 s it never starts one again (`systemd.unit(5)`, StartLimitBurst).
    knock: float = 3.5
    login: float = 60.0  # for the keys' work, which an emulated guest does slowly
    refusing: float = (
        60.0  # one that refuses our key, or shows another, may be about to get it: cloud-init takes its time
    )


class NotYet(Exception):
    """No server answers; one may later."""


class _NoLine(NotYet):
    """Not even QEMU listens yet."""


class _Silent(NotYet):
    """The connection is made, and nothing is said on it."""


class _Gone(Exception):
    """A connection had broken unseen."""


class Refused(Exception):
    """A server answers, and does not let us in, or is not the one we look for."""


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    code: int
    out: bytes
    err: bytes


class Link:
    """One guest's ssh server, by however many connections it takes."""

    def __init__(
        self, dial: Dial, keys: SshKeys, settings: Settings, tell: Tell, patience: Patience | None = None
    ) -> None:
        self._patience = patience or Patience()
        self._dial, self._keys, self._settings, self._tell = dial, keys, settings, tell
        self._connections: dict[asyncssh.SSHClientConnection, int] = {}  # and how many sessions each has
        self._door = OURS if keys.of_clone else IMAGES  # the one that is tried next
        self._banner = min(CLONES_BANNER if keys.of_clone else FIRST_BANNER, self._patience.banner)
        self._as_root: set[asyncssh.SSHClientConnection] = set()
        self._asking = asyncio.Lock()
        self._shell: Shell | None = None
        self._connecting = asyncio.Lock()
        self._trusted: list[Any] = []
        self._last_told = ""
        self._sessions: set[asyncio.Future[None]] = set()
        self.is_closed = False

    # -- getting in --------------------------------------------------------------------------------------------------

    async def open(self, *, patiently: bool) -> asyncssh.SSHClientConnection:
        """The connection; made now where there is none. *patiently*: wait as long as it takes for a server to come up.
        Raises SshRefused, SshMissing, AgentLost."""
        async with self._connecting:
            if self.is_closed:
                raise AgentLost("the conversation with the guest was closed")
            self._connections = {one: count for one, count in self._connections.items() if not one.is_closed()}
            for connection, count in self._connections.items():
                if count < MOST_SESSIONS:
                    return connection
            connection = await self._persist(patiently=patiently)
            self._connections[connection] = 0
            return connection

    async def _persist(self, *, patiently: bool) -> asyncssh.SSHClientConnection:
        loop = asyncio.get_running_loop()
        begin, refused_since, pause = loop.time(), None, FIRST_PAUSE
        while True:
            try:
                connection = await self._try(self._door)
            except (NotYet, Refused) as why:
                is_early = isinstance(why, _NoLine) or (
                    isinstance(why, _Silent) and self._banner < self._patience.banner
                )
                self._banner = min(2 * self._banner, self._patience.banner)
                if self._door == OURS and not is_early:  # the image's own server is there, too, and takes longer
                    self._door = IMAGES
                    self._note(f"not at its second port: {why}")
                    continue
                refused_since = refused_since or loop.time() if isinstance(why, Refused) else None
                is_knock = not isinstance(why, (Refused, _NoLine, _Silent)) and not self._keys.of_clone
                self._note(f"{'refused' if refused_since else 'not yet'}: {why}")
                if refused_since and loop.time() - refused_since > self._patience.refusing:
                    raise SshRefused(
                        f"the guest's ssh server refused for {self._patience.refusing:.0f} s: {why}"
                    ) from why
                if not refused_since and not patiently and loop.time() - begin > self._settings.call_timeout:
                    raise AgentLost(f"the guest's ssh server does not answer any more: {why}") from why
                self._door = OURS if self._keys.of_clone else IMAGES
            else:
                self._note("let in")
                return connection
            await asyncio.sleep(max(pause, self._patience.knock) if is_knock else pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    @property
    def is_by_ours(self) -> bool:
        """Did the last connection come by the server of ours?"""
        return self._door == OURS

    async def move(self) -> str:
        """Go on over the server of ours in the guest, and leave the image's own alone. Returns "" where it lets us in, or
        why not."""
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                connection = await self._try(OURS)
        except (NotYet, Refused) as why:
            return str(why)
        except TimeoutError:
            return f"no answer in {self._settings.call_timeout:g} s"
        before, self._connections, self._shell = list(self._connections), {connection: 0}, None
        await _leave(before)
        return ""

    def _note(self, what: str) -> None:
        if what != self._last_told:
            self._last_told = what
            self._tell(what)

    async def _try(self, door: int) -> asyncssh.SSHClientConnection:
        """One connection. Raises NotYet or Refused."""
        asyncssh = library()
        try:
            line = await self._dial(door)
        except OSError as exc:
            raise _NoLine(f"cannot connect: {exc.strerror or exc}") from exc
        try:
            await _banner(line, self._banner)
            connection = await asyncssh.connect(
                sock=line, username="root" if door == OURS else self._keys.user, **self._options(asyncssh)
            )
            if door == IMAGES and self._keys.user != "root":
                async with asyncio.timeout(self._patience.login):
                    await _become_root(connection, self._keys.user)
        except BaseException as exc:
            line.close()
            if (named := _class_of(asyncssh, exc)) is None:
                raise
            raise named from exc
        if not self._trusted:
            self._trusted = [connection.get_server_host_key()]  # whoever answered first is who we go on talking to
        if door == OURS or self._keys.user == "root":
            self._as_root.add(connection)
        return connection  # type: ignore[no-any-return]

    def _options(self, asyncssh: Any) -> dict[str, Any]:
        if not self._trusted and self._keys.host:
            self._trusted = [asyncssh.import_public_key(key) for key in self._keys.host]
        settings = self._settings
        return {
            "client_keys": [asyncssh.import_private_key(self._keys.private)],
            "known_hosts": (self._trusted, [], []) if self._trusted else None,
            "server_host_key_algs": [key.algorithm.decode() for key in self._trusted] or "default",
            "config": None, "agent_path": None, "host_based_auth": False, "preferred_auth": "publickey",
            "compression_algs": None, "kex_algs": KEX, "encryption_algs": CIPHERS,
            "keepalive_interval": settings.heartbeat,
            "keepalive_count_max": max(int(settings.lost_after / settings.heartbeat), 1),
            "login_timeout": self._patience.login, "connect_timeout": self._patience.login,
        }  # fmt: skip

    @property
    def public(self) -> str:
        """Our key, as a guest knows it."""
        return str(library().import_private_key(self._keys.private).export_public_key().decode().strip())

    def trust(self, public: str) -> None:
        """From now on a server with this key is the guest, too."""
        self._trusted.append(library().import_public_key(public))

    def close(self) -> None:
        """Hang up, for good."""
        self.is_closed = True
        for connection in self._connections:
            connection.abort()

    async def hang_up(self) -> None:
        """Hang up in good order: the server is to notice."""
        self.is_closed = True
        await _leave(self._connections)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def process(self, command: str, **options: Any) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command whose streams are the caller's affair; on a new connection where there is none any more. Raises
        AgentLost, GuestRefused."""
        for _ in range(MOST_TRIES):
            with suppress(_Gone):
                return await self._process(command, options)
        raise AgentLost("the guest's ssh server hangs up at once")

    async def _process(self, command: str, options: dict[str, Any]) -> asyncssh.SSHClientProcess[bytes]:
        connection = await self.open(patiently=False)
        asyncssh = library()
        self._connections[connection] = self._connections.get(connection, 0) + 1
        process, settings = None, {"encoding": None, "window": WINDOW, "request_pty": False, **options}
        if connection not in self._as_root:
            command = f"sudo -n {command}"
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                process = await connection.create_process(command, **settings)
        except TimeoutError as exc:
            raise AgentLost(
                f"the guest's ssh server did not start a command in {self._settings.call_timeout:g} s"
            ) from exc
        except asyncssh.ChannelOpenError as exc:
            if connection.is_closed():
                raise _Gone from exc  # nothing was begun
            raise GuestRefused(f"the guest's ssh server opens no session: {one_line(str(exc))}") from exc
        except (asyncssh.Error, OSError) as exc:
            raise lost(exc) from exc
        finally:
            if process is None:
                self._left(connection)
        leaving = asyncio.ensure_future(process.wait_closed())
        self._sessions.add(leaving)
        leaving.add_done_callback(self._sessions.discard)
        leaving.add_done_callback(lambda _: self._left(connection))
        return process

    def _left(self, connection: asyncssh.SSHClientConnection) -> None:
        if connection in self._connections:
            self._connections[connection] -= 1

    async def run(self, command: str, data: bytes = b"", *, more: float = 0.0) -> Answer:
        """Run a command that may be run twice, with *data* on its standard input, and hear it to its end; on a new
        connection when this one is lost. Raises AgentLost."""
        limit = self._settings.call_timeout + more
        for is_last in (False, True):
            try:
                async with asyncio.timeout(limit):
                    return await self._hear(command, data)
            except TimeoutError as exc:
                raise AgentLost(f"the guest did not do `{command[:60]}` within {limit:.0f} s") from exc
            except AgentLost:
                if is_last or self.is_closed:
                    raise
        raise AssertionError("not reached")

    async def script(self, text: str, *, more: float = 0.0) -> Answer:
        """Run a script of ours as root, which may be run twice. Raises AgentLost."""
        script = text.encode("utf-8", "surrogateescape")
        if self._asking.locked():  # one that takes long is not to hold up others
            return await self.run("sh", script, more=more)
        limit = self._settings.call_timeout + more
        async with self._asking:
            for is_last in (False, True):
                try:
                    async with asyncio.timeout(limit):
                        return await (await self._living_shell()).ask(script)
                except TimeoutError as exc:
                    raise AgentLost(f"the guest did not do a script of ours within {limit:.0f} s") from exc
                except AgentLost:
                    if is_last or self.is_closed:
                        raise
        raise AssertionError("not reached")

    async def _living_shell(self) -> Shell:
        """One whose last script ended."""
        from belljar.guest.ssh_shell import COMMAND, Shell

        if self._shell is None or self._shell.is_over:
            self._shell = Shell(await self.process(COMMAND))
        return self._shell

    async def _hear(self, command: str, data: bytes) -> Answer:
        process = await self.process(command)
        asyncssh = library()
        try:
            if data:
                process.stdin.write(data)
            process.stdin.write_eof()
            out, err = await asyncio.gather(whole(process.stdout), whole(process.stderr))
            await process.wait_closed()
        except (asyncssh.Error, OSError) as exc:
            raise lost(exc) from exc
        finally:
            process.channel.abort()
        if process.exit_status is None and process.exit_signal is None:
            raise AgentLost("the connection to the guest's ssh server broke")
        return Answer(255 if process.exit_status is None else process.exit_status, out, err)


async def _leave(connections: Iterable[asyncssh.SSHClientConnection]) -> None:
    for connection in connections:
        connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING):
                await connection.wait_closed()


async def _become_root(connection: asyncssh.SSHClientConnection, user: str) -> None:
    """Raises Refused where this user may not; then the connection is closed."""
    is_root = False
    try:
        process = await connection.create_process("sudo -n true", encoding=None)
        _, said = await asyncio.gather(whole(process.stdout), whole(process.stderr))
        await process.wait_closed()
        if process.exit_status != 0:
            raise Refused(f"{user} may not do `sudo -n`: {one_line(said.decode(errors='replace'))[:200]}")
        is_root = True
    finally:
        if not is_root:
            connection.abort()


async def whole(reader: Any, most: int = MOST_OUTPUT) -> bytes:
    """What a stream says until its end. Raises ProtocolViolation where that is more."""
    said = bytearray()
    while data := await reader.read(1 << 16):
        said += data
        if len(said) > most:
            raise ProtocolViolation("the guest says more than was asked of it")
    return bytes(said)


async def _banner(line: socket.socket, seconds: float) -> None:
    """Return when the server has begun to speak, and speaks ssh. Nothing is taken from the line."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[None] = loop.create_future()
    line.setblocking(False)
    loop.add_reader(line, _tell, heard)
    try:
        async with asyncio.timeout(seconds):
            await heard
        said = line.recv(4, socket.MSG_PEEK)
    except TimeoutError as exc:
        raise _Silent(f"nobody spoke for {seconds:g} s") from exc
    except OSError as exc:
        raise NotYet(f"connection broken: {exc.strerror}") from exc
    finally:
        loop.remove_reader(line)
    if not said:
        raise NotYet("the connection was closed at once")
    if not b"SSH-".startswith(said):
        raise Refused(f"what answers is no ssh server: it says {said!r}")


def _tell(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)


def _class_of(asyncssh: Any, exc: BaseException) -> Exception | None:
    """What a try that failed means; None where it is no affair of the server's."""
    if isinstance(exc, (NotYet, Refused, GuestError)):
        return exc
    if isinstance(exc, asyncssh.PermissionDenied):
        return Refused("it does not accept belljar's key")
    if isinstance(exc, asyncssh.HostKeyNotVerifiable):
        return Refused("it shows another host key than it was given")
    if isinstance(exc, (asyncssh.KeyExchangeFailed, asyncssh.ProtocolError, asyncssh.ProtocolNotSupported)):
        return Refused(one_line(str(exc))[:200])
    if isinstance(exc, (asyncssh.Error, OSError, TimeoutError)):
        return NotYet(one_line(str(exc))[:200] or type(exc).__name__)
    return None


def lost(exc: BaseException) -> AgentLost:
    return AgentLost(f"the connection to the guest's ssh server broke: {one_line(str(exc))[:200]}")


def library() -> Any:
    """asyncssh, which is an extra. Raises SshMissing."""
    try:
        import asyncssh
    except ImportError as exc:
        raise SshMissing(f"asyncssh cannot be imported: {exc}") from exc
    return asyncssh
