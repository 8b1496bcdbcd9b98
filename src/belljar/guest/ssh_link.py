"""The connection of an ssh guest: made as often as it takes, trusted by keys both ways, and made anew when it is lost.

Commands sent over it are fixed words of ours and numbers. Whatever comes from a request travels as data.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from belljar.errors import AgentLost, GuestError, GuestRefused, ProtocolViolation, SshMissing, SshRefused
from belljar.guest import Settings, SshKeys
from belljar.guest.process import one_line

if TYPE_CHECKING:
    import asyncssh

Dial = Callable[[], Awaitable[socket.socket]]
Tell = Callable[[str], None]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0  # seconds between two tries: nothing tells us when a server begins to listen
MOST_TRIES = 3
MOST_OUTPUT = 1 << 20  # bytes a command of ours may say
WINDOW = 1 << 20
MOST_SESSIONS = 8  # of one connection: OpenSSH allows ten
CIPHERS = ("chacha20-poly1305@openssh.com", "aes128-gcm@openssh.com", "aes128-ctr")
KEX = ("curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group14-sha256")


@dataclass(frozen=True)
class Patience:
    """How long a server may take, in seconds."""

    banner: float = 10.0  # to say anything once it accepted us: until a guest's network is up nobody answers
    login: float = 60.0  # for the keys' work, which an emulated guest does slowly
    refusing: float = (
        60.0  # one that refuses our key, or shows another, may be about to get it: cloud-init takes its time
    )


class NotYet(Exception):
    """No server answers; one may later."""


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
        self._connecting = asyncio.Lock()
        self._trusted: list[Any] = []
        self._last_told = ""
        self._sessions: set[asyncio.Future[None]] = set()
        self.is_closed = False
        self.prefix = "" if keys.user == "root" else "sudo -n "

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
                connection = await self._try()
            except NotYet as why:
                refused_since = None
                self._note(f"not yet: {why}")
                if not patiently and loop.time() - begin > self._settings.call_timeout:
                    raise AgentLost(f"the guest's ssh server does not answer any more: {why}") from why
            except Refused as why:
                refused_since = loop.time() if refused_since is None else refused_since
                self._note(f"refused: {why}")
                if loop.time() - refused_since > self._patience.refusing:
                    raise SshRefused(
                        f"the guest's ssh server refused for {self._patience.refusing:.0f} s: {why}"
                    ) from why
            else:
                self._note("let in")
                return connection
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def _note(self, what: str) -> None:
        if what != self._last_told:
            self._last_told = what
            self._tell(what)

    async def _try(self) -> asyncssh.SSHClientConnection:
        """One connection. Raises NotYet or Refused."""
        asyncssh = library()
        try:
            line = await self._dial()
        except OSError as exc:
            raise NotYet(f"cannot connect: {exc.strerror or exc}") from exc
        try:
            await _banner(line, self._patience.banner)
            connection = await asyncssh.connect(sock=line, **self._options(asyncssh))
        except BaseException as exc:
            line.close()
            if (named := _class_of(asyncssh, exc)) is None:
                raise
            raise named from exc
        if not self._trusted:
            self._trusted = [connection.get_server_host_key()]  # whoever answered first is who we go on talking to
        return connection  # type: ignore[no-any-return]

    def _options(self, asyncssh: Any) -> dict[str, Any]:
        if not self._trusted and self._keys.host:
            self._trusted = [asyncssh.import_public_key(key) for key in self._keys.host]
        settings = self._settings
        return {
            "username": self._keys.user,
            "client_keys": [asyncssh.import_private_key(self._keys.private)],
            "known_hosts": (self._trusted, [], []) if self._trusted else None,
            "server_host_key_algs": [key.algorithm.decode() for key in self._trusted] or "default",
            "config": None, "agent_path": None, "host_based_auth": False, "preferred_auth": "publickey",
            "compression_algs": None, "kex_algs": KEX, "encryption_algs": CIPHERS,
            "keepalive_interval": settings.heartbeat,
            "keepalive_count_max": max(int(settings.lost_after / settings.heartbeat), 1),
            "login_timeout": self._patience.login, "connect_timeout": self._patience.login,
        }  # fmt: skip

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
        for connection in self._connections:
            connection.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await connection.wait_closed()

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
        process = None
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                process = await connection.create_process(
                    self.prefix + command, encoding=None, window=WINDOW, **{"request_pty": False, **options}
                )
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
        """Run a script of ours as root."""
        return await self.run("sh", text.encode("utf-8", "surrogateescape"), more=more)

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
        raise NotYet(f"nobody spoke for {seconds:g} s") from exc
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
