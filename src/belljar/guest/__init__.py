"""The door of the guest room: runs the payload inside, over one byte channel to the agent.

A `Guest` is a `Conversation`: it speaks the agent's framed protocol (belljar/agent/wire.py documents it) and offers it as
calls and streams. It knows nothing of QEMU: any connected stream socket will do. A `Process` is what runs there.
"""

from __future__ import annotations

from belljar.hints import TYPE_CHECKING, Any, Protocol
from belljar.model import Usage, setting
from belljar.records import dataclass

if TYPE_CHECKING:
    import socket

    from belljar.guest.conversation import Conversation
    from belljar.guest.process import Running

    Guest = Conversation
    Process = Running
else:  # whoever begins a conversation imports it
    Guest = Process = Any

OTHER_SHARE = "Share it another way (`SRC` alone, or `KIND:SRC`), use `--in` and `--out`, or another image."


@dataclass(frozen=True)
class Settings:
    """`[guest]` in the settings files."""

    heartbeat: float = setting(10.0, "the agent is asked for a sign of life this often", unit="seconds")
    lost_after: float = setting(120.0, "a guest that gave no sign of life for this long is lost", unit="seconds")
    call_timeout: float = setting(60.0, "longest time the agent may take for one small request", unit="seconds")


@dataclass(frozen=True)
class Identity:
    """The names, addresses and secrets that a guest is given."""

    hostname: str
    machine_id: str  # 32 hexadecimal digits
    nonce: str  # 32 hexadecimal digits, also in /run/belljar/nonce and behind boot_id
    entropy: bytes  # 64 fresh bytes for the kernel's pool
    mac: str = ""  # "" where there is no card
    address: str = ""  # "10.0.2.15/24"; "" leaves the card down
    gateway: str = ""
    dns: str = ""


@dataclass(frozen=True)
class IdentityProof:
    """What the guest then is, read back by the agent from the kernel, not echoed."""

    hostname: str
    machine_id: str
    nonce: str
    mac: str
    sample: str  # 32 bytes from getrandom after reseeding, hexadecimal
    clock_skew: float  # seconds, guest minus host, by the middle of the round trip


@dataclass(frozen=True)
class ExitStatus:
    """How the payload ended, as waitpid saw it inside."""

    exit_code: int | None
    signal: int | None
    core_dumped: bool
    usage: Usage
    oom_killed: bool  # it was killed, and the guest's kernel has killed something of the payload for lack of memory
    error: str = ""  # "not-found" | "not-executable" | "no-cwd" | ...: exec failed; exit_code is then 127, 126 or 125
    message: str = ""  # what the agent says about the error

    @property
    def words(self) -> str:
        """How the payload ended; its name goes before."""
        if self.error:
            return f"could not be started: {self.message or self.error}"
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return f"ended with exit code {self.exit_code}"


@dataclass(frozen=True)
class ExchangeDisk:
    """A disk that carries the content of large files, both ways."""

    path: str  # on the host: a raw image, which QEMU has open
    serial: bytes  # by which the guest finds it


class Source(Protocol):
    """Where bytes for the guest come from."""

    async def read(self, limit: int) -> bytes:
        """Up to *limit* bytes; b"" at the end."""


class Sink(Protocol):
    """Where bytes from the guest go."""

    async def write(self, data: bytes) -> None:
        """Returns once the bytes are taken; that is what gives the guest credit to send more.
        Raises BrokenPipeError when the reader is gone: the payload then gets SIGPIPE at its next write."""

    async def close(self) -> None: ...


class BytesSource:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, limit: int) -> bytes:
        part, self._data = self._data[:limit], self._data[limit:]
        return part


class BytesSink:
    """A sink that keeps all of it, or its first *most* bytes."""

    def __init__(self, most: int | None = None) -> None:
        self.data, self._most = bytearray(), most

    async def write(self, data: bytes) -> None:
        self.data += data if self._most is None else data[: self._most - len(self.data)]

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Streams:
    """A payload's standard streams, on the host's side. None: not carried (null, closed, a terminal's stderr)."""

    stdin: Source | None
    stdout: Sink | None
    stderr: Sink | None
    window: tuple[int, int] | None = None  # rows, columns of a terminal at the start


@dataclass(frozen=True)
class Standstill:
    """A payload that is held still, and how many bytes of its streams have gone where they belong."""

    number: int  # by which it is taken up
    stdin: int = 0
    stdout: int = 0
    stderr: int = 0


async def second_client(guest: Guest, connection: socket.socket) -> None:
    """Let a second client talk to the guest, until one of them goes. Most machines never have one. The connection stays its owner's."""
    from belljar.guest.relay import Relay

    relay = Relay(guest, connection)
    try:
        await relay.over
    finally:
        relay.close()
