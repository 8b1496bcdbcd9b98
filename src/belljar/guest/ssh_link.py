"""Getting into a guest by its own ssh server: as often as it takes, trusted by fresh keys both ways, as root.

Commands sent over the connection are fixed words of ours. Whatever else a guest is given travels as data.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from belljar.errors import AgentLost, GuestError, GuestRefused, ProtocolViolation, SshMissing, SshRefused
from belljar.guest import SshKeys
from belljar.guest.process import one_line
from belljar.records import dataclass

if TYPE_CHECKING:
    import asyncssh

Dial = Callable[[], Awaitable[socket.socket]]
Tell = Callable[[str], None]

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries
FIRST_BANNER = 2.0  # seconds for the first try, each time twice as many: what came before a guest's card was up is lost
LEAVING = 5.0  # seconds a server may take to see us go
MOST_OUTPUT = 1 << 20  # bytes a command of ours may say
WINDOW = 1 << 20
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
    # One that refuses our key, or shows another, may be about to get it: cloud-init takes its time.
    refusing: float = 60.0


class NotYet(Exception):
    """No server answers; one may later."""


class _Unheard(NotYet):
    """No connection, or one on which nothing is said: no server has noticed us."""


class Refused(Exception):
    """A server answers, and does not let us in, or is not the one we look for."""


class Link:
    """One guest's ssh server, and the one connection to it."""

    def __init__(self, dial: Dial, keys: SshKeys, tell: Tell, heartbeat: float, patience: Patience) -> None:
        self._dial, self._keys, self._tell, self._heartbeat, self._patience = dial, keys, tell, heartbeat, patience
        self._banner = min(FIRST_BANNER, patience.banner)
        self._last_told = ""
        self._connection: asyncssh.SSHClientConnection | None = None

    async def open(self, probe: str) -> bytes:
        """Log in, however long it takes, and run the script *probe* as root. Raises SshRefused, SshMissing."""
        loop = asyncio.get_running_loop()
        refused_since, pause = None, FIRST_PAUSE
        while True:
            try:
                said = await self._try(probe.encode())
            except (NotYet, Refused) as why:
                self._banner = min(2 * self._banner, self._patience.banner)
                refused_since = refused_since or loop.time() if isinstance(why, Refused) else None
                is_knock = not isinstance(why, (Refused, _Unheard))
                self._note(f"{'refused' if refused_since else 'not yet'}: {why}")
                if refused_since and loop.time() - refused_since > self._patience.refusing:
                    raise SshRefused(
                        f"the guest's ssh server refused for {self._patience.refusing:.0f} s: {why}"
                    ) from why
            else:
                self._note("let in")
                return said
            # Nothing outside of a guest tells when its server begins to listen: QEMU takes the connection in any case.
            await asyncio.sleep(max(pause, self._patience.knock) if is_knock else pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def _note(self, what: str) -> None:
        if what != self._last_told:
            self._last_told = what
            self._tell(what)

    async def _try(self, probe: bytes) -> bytes:
        """One connection, which stays if root's shell can be had by it. Raises NotYet or Refused."""
        asyncssh = library()
        try:
            line = await self._dial()
        except OSError as exc:
            raise _Unheard(f"cannot connect: {exc.strerror or exc}") from exc
        try:
            await _banner(line, self._banner)
            connection = await asyncssh.connect(sock=line, username=self._keys.user, **self._options(asyncssh))
            self._connection = connection
            return await self._first_words(probe)
        except BaseException as exc:
            self.close()
            line.close()
            if (named := _class_of(asyncssh, exc)) is None:
                raise
            raise named from exc

    async def _first_words(self, probe: bytes) -> bytes:
        async with asyncio.timeout(self._patience.login):
            code, out, err = await self.run("sh", probe)
        if code:
            why = one_line(err.decode(errors="replace")).strip()[:200] or f"a shell ended with {code}"
            raise Refused(why if self._keys.user == "root" else f"{self._keys.user} may not do `sudo -n`: {why}")
        return out

    def _options(self, asyncssh: Any) -> dict[str, Any]:
        trusted = [asyncssh.import_public_key(self._keys.host_public)] if self._keys.host_public else []
        return {
            "client_keys": [asyncssh.import_private_key(self._keys.private)],
            "known_hosts": (trusted, [], []) if trusted else None,
            "server_host_key_algs": [key.algorithm.decode() for key in trusted] or "default",
            "config": None, "agent_path": None, "host_based_auth": False, "preferred_auth": "publickey",
            "compression_algs": None, "kex_algs": KEX, "encryption_algs": CIPHERS,
            "keepalive_interval": self._heartbeat, "keepalive_count_max": 12,
            "login_timeout": self._patience.login, "connect_timeout": self._patience.login,
        }  # fmt: skip

    async def process(self, command: str, **options: Any) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command as root, whose streams are the caller's affair. Raises AgentLost, GuestRefused."""
        asyncssh = library()
        if self._connection is None:
            raise AgentLost("the conversation with the guest was closed")
        prefix = "" if self._keys.user == "root" else "sudo -n "
        settings = {"encoding": None, "window": WINDOW, "request_pty": False, **options}
        try:
            return await self._connection.create_process(f"{prefix}{command}", **settings)
        except asyncssh.ChannelOpenError as exc:
            raise GuestRefused(f"the guest's ssh server opens no session: {one_line(str(exc))}") from exc
        except (asyncssh.Error, OSError) as exc:
            raise lost(exc) from exc

    async def run(self, command: str, data: bytes) -> tuple[int, bytes, bytes]:
        """Run a command as root with *data* as its stdin: its code, stdout, stderr. Raises AgentLost, GuestRefused."""
        process = await self.process(command)
        asyncssh = library()
        try:
            with suppress(BrokenPipeError):  # it has ended already: what it said is still to be read
                process.stdin.write(data)
                process.stdin.write_eof()
            out, err = await asyncio.gather(_whole(process.stdout), _whole(process.stderr))
            await process.wait_closed()
        except (asyncssh.Error, OSError) as exc:
            raise lost(exc) from exc
        finally:
            process.channel.abort()
        if process.exit_status is None and process.exit_signal is None:
            raise AgentLost("the connection to the guest's ssh server broke")
        return 255 if process.exit_status is None else process.exit_status, out, err

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def leave(self) -> None:
        """Hang up in good order: the server is to notice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            try:
                async with asyncio.timeout(LEAVING):
                    await connection.wait_closed()
            except TimeoutError:
                connection.abort()


async def _whole(reader: Any) -> bytes:
    """What a stream says until its end. Raises ProtocolViolation where that is more."""
    said = bytearray()
    while data := await reader.read(1 << 16):
        said += data
        if len(said) > MOST_OUTPUT:
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
        raise _Unheard(f"nobody spoke for {seconds:g} s") from exc
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
    if isinstance(exc, AgentLost):
        return NotYet(exc.message)
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


def fresh_keys(user: str) -> SshKeys:
    """See `belljar.guest.ssh_keys`."""
    ours, hosts = (library().generate_private_key("ssh-ed25519") for _ in range(2))
    public, host_public = (key.export_public_key().decode().strip() for key in (ours, hosts))
    private, host_private = (key.export_private_key().decode() for key in (ours, hosts))
    return SshKeys(private, user, public, host_private, host_public, _of_dropbear(hosts))


def _of_dropbear(key: Any) -> bytes:
    """The key's kind, then its private and its public half (dropbear's ed25519.c, buf_put_ed25519_priv_key)."""
    private = key.export_private_key("pkcs8-der")[-32:]
    public = key.public_data[-32:]
    return b"".join(len(part).to_bytes(4, "big") + part for part in (b"ssh-ed25519", private + public))
