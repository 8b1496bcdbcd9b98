"""The door of the guest room: runs the payload inside, over one byte channel to the agent.

`Conversation` speaks the agent's framed protocol (belljar/agent/wire.py documents it) and offers it as calls
and streams. It knows nothing of QEMU: any connected stream socket will do.
"""

from __future__ import annotations

from collections.abc import Sequence

from belljar.hints import TYPE_CHECKING, Protocol
from belljar.model import Account, FileSystem, Payload, PlainFile, Share, Transfer, Usage, setting
from belljar.records import dataclass

if TYPE_CHECKING:
    import socket

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


class Process(Protocol):
    async def wait(self) -> ExitStatus:
        """Returns when the sinks have every byte and no process of the payload is left. Raises AgentLost."""

    async def signal(self, number: int, *, alone: bool = False) -> None:
        """Signal the payload's process group, or its first process alone. Signalling what ended is success."""

    async def resize(self, rows: int, columns: int) -> None: ...


class Guest(Protocol):
    """A guest whose agent answers."""

    async def greet(self, *, as_heir: bool = False) -> None:
        """Begin a conversation; waits for the agent as long as it takes. Raises AgentTooOld, ProtocolViolation."""

    async def identify(self, identity: Identity) -> IdentityProof: ...
    async def renew_keys(self) -> None:
        """In a clone: replace the ssh host keys that its template made. Raises GuestRefused, AgentLost."""

    async def settle(self) -> frozenset[str]:
        """Make the guest ready to become a template: caches warm, nothing open, nothing secret; the conversation is over then.
        Returns in what its clones can differ from it: "cpus", "memory", "less-memory", "disk", "card"."""

    async def grow(self, cpus: int, *, plugged: int, surplus: int, disk: int) -> tuple[int, int]:
        """In a clone: take into use what its template did not have; all in bytes, *surplus* of them not asked for, *disk* 0: as
        it was. Returns the processors and the bytes of memory there are then. Raises GuestRefused, AgentLost."""

    async def set_clock(self) -> float:
        """Set the guest's clock from ours; returns the skew measured afterwards, in seconds."""

    async def mount(self, share: Share, tag: str, filesystem: FileSystem) -> None:
        """Mount a folder of the host's. Raises GuestRefused."""

    async def find_disks(self, names: Sequence[str]) -> list[str]:
        """The guest's devices (/dev/vdb, ...) of the disks with these serials. Raises GuestRefused."""

    async def mount_scratch(self, device: str, target: str, account: Account) -> None:
        """Mount an ext4 disk, nosuid and nodev, as a folder of this account's own. Raises GuestRefused."""

    async def mount_packed(self, name: str, device: str, inside: str, account: Account, cwd: bytes | None) -> None:
        """Lay a packed folder over what is at *inside*; it can be written to. Raises NoPackedFolders, GuestRefused."""

    async def await_devices(self, ports: Sequence[str], timeout: float) -> list[tuple[str, str]]:
        """(address, driver) in the guest of the device at each of these ports; "" for what was not seen in so many seconds. Raises
        GuestRefused, AgentLost."""

    async def prepare_for(self, filesystem: FileSystem) -> None:
        """Load, before a template is saved, what its clones will need. Raises GuestRefused."""

    async def add_account(self, account: Account) -> None:
        """Make user, group, supplementary groups and home, where they are missing. Idempotent."""

    async def place(self, files: Sequence[PlainFile], account: Account) -> None:
        """Make the account and these files now; what copies need before the payload does. Raises GuestRefused."""

    async def start(self, payload: Payload, streams: Streams) -> Process:
        """Make the payload's small files, then start it. Exec errors come as ExitStatus, not here."""

    async def connect(self, port: int, streams: Streams) -> Process:
        """Connect to a port of the guest's loopback: stdin goes there, what comes back is stdout. It ends when both directions
        have; a signal breaks it off. Raises GuestRefused where nothing listens, AgentLost."""

    async def hold_still(self, process: Process) -> Standstill:
        """Have the guest leave everything as it is, so that it can be frozen: nothing of its payload's streams is on the way then.
        Other calls than `go_on` may fail meanwhile. Raises GuestRefused, AgentLost; `go_on` is right then, too."""

    async def go_on(self, process: Process) -> None:
        """After that, where the guest was not frozen, or runs on all the same."""

    async def take_up(self, standstill: Standstill, streams: Streams) -> Process:
        """In a new conversation with a guest that was frozen: carry on with its payload, at the exact byte. stdin is there from its
        beginning. Raises GuestRefused, AgentLost."""

    def exchange_by(self, disk: ExchangeDisk) -> None:
        """From now on `put` and `get` send the content of large files by this disk."""

    async def put(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        """Copy a host file or folder into the guest, as *account*. Raises InputMissing, GuestRefused."""

    async def get(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        """Copy a guest file or folder to the host. Never writes outside of its place there, whatever the guest sends. Raises
        OutputMissing, GuestRefused, BadOption, NoSpace."""

    async def collect(self, paths: Sequence[str], sink: Sink) -> None:
        """Write these, as root finds them, to *sink* as one tar archive. Raises GuestRefused, AgentLost."""

    async def end_payload(self) -> None:
        """Kill the rest of the payloads, write out and unmount the shares."""

    def close(self) -> None:
        """Stop talking; every waiting call raises AgentLost."""


async def second_client(guest: Guest, connection: socket.socket) -> None:
    """Let a second client talk to the guest, until it closes. Imported when there is one: most machines never have one."""
    from belljar.guest.relay import serve

    await serve(guest, connection)
