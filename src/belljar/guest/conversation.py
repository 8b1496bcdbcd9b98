"""Speaks the agent's protocol over one connected socket, and offers it as calls and streams.

The wire itself is told at the top of belljar/agent/wire.py. Everything the guest says is checked here or in process.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence

from belljar.agent import wire
from belljar.errors import AgentLost, AgentTooOld, GuestError, GuestRefused
from belljar.guest import ExchangeDisk, Identity, IdentityProof, Settings, Sink, Standstill, Streams
from belljar.guest.channel import Channel
from belljar.guest.process import Running, read_words, refusal
from belljar.hints import Protocol
from belljar.model import Account, FileSystem, Payload, PlainFile, Share, StdinKind, Transfer

LETTERS = {StdinKind.STREAM: b"s", StdinKind.NULL: b"n", StdinKind.CLOSED: b"c", StdinKind.STDOUT: b"o"}
SKEW_ENOUGH = 0.1  # seconds; when a clock is surely not further off, it is right
CLOCK_TRIES = 5
LAST_NUMBER = (1 << 30) - 1


class Target(Protocol):
    """Whoever is told the frames of one number."""

    @property
    def is_over(self) -> bool: ...
    def receive(self, kind: int, number: int, body: bytes) -> None: ...
    def fail(self, error: GuestError) -> None: ...


class Call:
    """A question that waits for its answer, of so many words; None: it is not read."""

    def __init__(self, number: int, words: int | None) -> None:
        self.number, self._words = number, words
        self.answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.answer.done()

    def receive(self, kind: int, number: int, body: bytes) -> None:
        if kind == wire.REPLY and number == self.number and not self.answer.done():
            self.answer.set_result([] if self._words is None else read_words(body, self._words))
        elif kind == wire.ERROR:
            self.fail(refusal(body))
        else:
            raise wire.WireError(f"frame type {kind} in answer to a call")

    def fail(self, error: GuestError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it is not a mistake when nobody waits any more


class Conversation:
    """One conversation with the agent. A second `greet` begins anew: what ran is killed."""

    def __init__(self, connection: socket.socket, settings: Settings) -> None:
        self._connection, self._settings = connection, settings
        self._targets: dict[int, Target] = {}
        self._number = 0
        self._channel: Channel | None = None
        self._version: asyncio.Future[int] | None = None  # of the protocol that the agent speaks
        self._exchange: ExchangeDisk | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._error: GuestError = AgentLost("the conversation with the guest has not begun")

    # -- begin and end

    async def greet(self, *, as_heir: bool = False) -> None:
        """Begin a conversation; waits for the agent as long as it takes. Raises AgentTooOld, ProtocolViolation."""
        self._lose(AgentLost("another conversation began"))
        loop = asyncio.get_running_loop()
        head = wire.HEIR if as_heir else b""
        opening = wire.greeting(head + os.urandom(wire.NONCE_SIZE - len(head)))
        self._version = loop.create_future()
        self._channel = Channel(self._connection, wire.Parser(wire.TO_HOST, opening), self._receive, self._lose)
        self._channel.send(wire.PAD + opening)
        version = await self._version
        if version != wire.PROTOCOL:
            self._lose(AgentTooOld(f"the guest's agent speaks protocol {version}, belljar speaks {wire.PROTOCOL}"))
            raise self._error
        self._heartbeat = loop.call_later(self._settings.heartbeat, self._beat)

    def close(self) -> None:
        """Stop talking; every waiting call raises AgentLost."""
        self._lose(AgentLost("the conversation with the guest was closed"))

    def _lose(self, error: GuestError) -> None:
        """Everyone who waits learns that nothing more will come."""
        self._error = error
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if self._channel is not None:
            self._channel.close()
        targets, self._targets = self._targets, {}
        for target in targets.values():
            target.fail(error)
        if self._version is not None and not self._version.done():
            self._version.set_exception(error)
            self._version.exception()

    def _beat(self) -> None:
        """A guest that is silent is asked for a sign of life; silent for too long it is lost."""
        loop, settings = asyncio.get_running_loop(), self._settings
        assert self._channel is not None
        silent = loop.time() - self._channel.last_heard
        if silent >= settings.lost_after:
            return self._lose(AgentLost(f"the guest gave no sign of life for {silent:.0f} s"))
        if silent >= settings.heartbeat:
            self._channel.send(wire.frame(wire.PING, 0, bytes(8)))
        left = settings.lost_after - silent
        self._heartbeat = loop.call_later(min(settings.heartbeat, left), self._beat)

    # -- frames

    def open_channel(self) -> Channel:
        """The channel, as long as the conversation goes on. Raises AgentLost."""
        if self._channel is None or not self._channel.is_open:
            raise self._error
        return self._channel

    def next_number(self) -> int:
        """A number for a call that no other call has."""
        self._number = self._number % LAST_NUMBER + 1
        return self._number

    def register(self, number: int, target: Target) -> None:
        """From now on *target* gets the frames of this number, until it is over."""
        self._targets[number] = target

    def _receive(self, kind: int, number: int, body: bytes) -> None:
        assert self._version is not None
        if kind in (wire.GREETING, wire.PONG):
            return
        if (kind == wire.HELLO) is self._version.done():
            raise wire.WireError(f"frame type {kind} where only a hello may come, or none")
        if kind == wire.HELLO:
            try:
                return self._version.set_result(int(body))
            except ValueError as exc:
                raise wire.WireError("a hello without a version") from exc
        if kind == wire.ERROR and not number:
            return self._lose(refusal(body))
        key = number if kind in (wire.REPLY, wire.ERROR, wire.EXIT) else number >> 2
        target = self._targets.get(key)
        if target is None:
            return  # it crossed the end of what it belongs to
        target.receive(kind, number, body)
        if target.is_over and kind in (wire.REPLY, wire.ERROR, wire.EXIT):
            self._targets.pop(key, None)

    async def _call(
        self, name: bytes, *words: bytes, answers: int | None = None, patience: float = 1, more: float = 0.0
    ) -> list[str]:
        """Ask and wait for the answer, of so many words. Raises GuestRefused, AgentLost, ProtocolViolation."""
        channel, call = self.open_channel(), Call(self.next_number(), answers)
        self.register(call.number, call)
        channel.send(request(call.number, name, *words))
        limit = patience * self._settings.call_timeout + more
        try:
            async with asyncio.timeout(limit):
                return await call.answer
        except TimeoutError as exc:
            raise AgentLost(f"the agent did not answer `{name.decode()}` within {limit:.0f} s") from exc
        finally:
            self._targets.pop(call.number, None)

    # -- calls of the agent

    async def identify(self, identity: Identity) -> IdentityProof:
        before = time.time()
        words = (
            identity.hostname, identity.machine_id, identity.nonce, identity.mac, identity.address, identity.gateway,
            identity.dns, identity.entropy.hex(), str(int(before * 1e6)),
        )  # fmt: skip
        answer = await self._call(b"identify", *(word.encode("ascii") for word in words), answers=6)
        after = time.time()
        hostname, machine_id, nonce, mac, sample, clock = answer
        skew = await self._make_sure(*seen_between(before, after, clock))
        return IdentityProof(hostname, machine_id, nonce, mac, sample, skew)

    async def renew_keys(self) -> None:
        """In a clone: replace the ssh host keys that its template made. Raises GuestRefused, AgentLost."""
        await self._call(b"renew_keys", more=wire.Patience.KEYS)

    async def settle(self) -> frozenset[str]:
        """Make the guest ready to become a template: caches warm, nothing open, nothing secret; the conversation is over then.
        Returns in what its clones can differ from it: "cpus", "memory", "less-memory", "disk", "card"."""
        (abilities,) = await self._call(b"settle", answers=1, patience=10)
        self.close()  # the agent has done so too: it waits for the next greeting
        return frozenset(abilities.split())

    async def grow(self, cpus: int, *, plugged: int, surplus: int, disk: int) -> tuple[int, int]:
        """In a clone: take into use what its template did not have; all in bytes, *surplus* of them not asked for, *disk* 0: as
        it was. Returns the processors and the bytes of memory there are then. Raises GuestRefused, AgentLost."""
        words = (b"%d" % number for number in (cpus, plugged, surplus, disk))
        seen, memory = await self._call(b"grow", *words, answers=2, more=wire.Patience.GROW)
        try:
            return int(seen), int(memory)
        except ValueError as exc:
            raise AgentLost("the agent did not tell what the guest has now") from exc

    async def set_clock(self) -> float:
        """Set the guest's clock from ours; returns the skew measured afterwards, in seconds."""
        return await self._make_sure(*await self._step_clock(b"to", time.time()))

    async def _make_sure(self, skew: float, doubt: float) -> float:
        """Step the clock until it is right beyond doubt. An answer that took long says little: then we ask again."""
        for _ in range(CLOCK_TRIES):
            if abs(skew) + doubt <= SKEW_ENOUGH:
                break
            skew, doubt = await self._step_clock(b"by", -skew if abs(skew) > doubt else 0.0)
        return skew

    async def _step_clock(self, how: bytes, seconds: float) -> tuple[float, float]:
        before = time.time()
        (clock,) = await self._call(b"set_clock", how, b"%d" % int(seconds * 1e6), answers=1)
        after = time.time()
        return seen_between(before, after, clock)

    async def mount(self, share: Share, tag: str, filesystem: FileSystem) -> None:
        """Mount a folder of the host's. Raises GuestRefused."""
        known = filesystem.type, tag, share.target, "ro" if share.readonly else "rw"  # all that an older agent reads
        await self._call(b"mount", *map(text, (*known, filesystem.options, filesystem.modules)))

    async def find_disks(self, names: Sequence[str]) -> list[str]:
        """The guest's devices (/dev/vdb, ...) of the disks with these serials. Raises GuestRefused."""
        return await self._call(b"find_disks", *counted([text(name) for name in names]), answers=len(names))

    async def mount_scratch(self, device: str, target: str, account: Account) -> None:
        """Mount an ext4 disk, nosuid and nodev, as a folder of this account's own. Raises GuestRefused."""
        await self._call(b"mount_scratch", text(device), text(target), *account_words(account))

    async def mount_packed(self, name: str, device: str, inside: str, account: Account, cwd: bytes | None) -> None:
        """Lay a packed folder over what is at *inside*; it can be written to. Raises NoPackedFolders, GuestRefused."""
        words = (text(name), text(device), os.fsencode(inside), cwd or b"", *account_words(account))
        await self._call(b"mount_packed", *words, more=wire.Patience.PACKED)

    async def await_devices(self, ports: Sequence[str], timeout: float) -> list[tuple[str, str]]:
        """(address, driver) in the guest of the device at each of these ports; "" for what was not seen in so many seconds. Raises
        GuestRefused, AgentLost."""
        words = (b"%d" % timeout, *counted([text(port) for port in ports]))
        seen = await self._call(b"await_devices", *words, answers=2 * len(ports), more=timeout + wire.Patience.GROW)
        return list(zip(seen[::2], seen[1::2], strict=True))

    async def prepare_for(self, filesystem: FileSystem) -> None:
        """Load, before a template is saved, what its clones will need. Raises GuestRefused."""
        await self._call(b"prepare", text(filesystem.type), text(filesystem.modules), patience=10)

    async def add_account(self, account: Account) -> None:
        """Make user, group, supplementary groups and home, where they are missing. Idempotent."""
        await self._call(b"add_account", *account_words(account))

    async def place(self, files: Sequence[PlainFile], account: Account) -> None:
        """Make the account and these files now; what copies need before the payload does. Raises GuestRefused."""
        await self._call(b"place", *counted(file_words(files), 4), *account_words(account))

    async def start(self, payload: Payload, streams: Streams) -> Running:
        """Make the payload's small files, then start it. Exec errors come as ExitStatus, not here."""
        return await self._begin(b"start", order_of(payload, streams), streams)

    async def hold_still(self, process: Running) -> Standstill:
        """Have the guest leave everything as it is, so that it can be frozen: nothing of its payload's streams is on the way then.
        Other calls than `go_on` may fail meanwhile. Raises GuestRefused, AgentLost; `go_on` has to follow then, too."""
        process.rest(True)
        await self._call(b"hold_still")
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if process.is_over:
            raise GuestRefused("the payload has ended")
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                return await process.standstill()
        except TimeoutError as exc:
            raise GuestRefused("nobody takes what the payload has written") from exc

    async def go_on(self, process: Running) -> None:
        """After that, where the guest was not frozen, or runs on all the same."""
        await self._call(b"go_on")
        self._beat()
        process.rest(False)

    async def take_up(self, standstill: Standstill, streams: Streams) -> Running:
        """In a new conversation with a guest that was frozen: carry on with its payload, at the exact byte. stdin is there from its
        beginning. Raises GuestRefused, AgentLost."""
        self._number = max(self._number, standstill.number)
        return await self._begin(b"take_up", [], streams, standstill)

    async def connect(self, port: int, streams: Streams) -> Running:
        """Connect to a port of the guest's loopback: stdin goes there, what comes back is stdout. It ends when both directions
        have; a signal breaks it off. Raises GuestRefused where nothing listens, AgentLost."""
        return await self._begin(b"connect", [b"%d" % port], streams)

    async def begin_copy(self, order: list[bytes], account: Account, cwd: bytes | None, streams: Streams) -> Running:
        """Start the agent's own tar reader or writer as the user. See files.py."""
        letters = b"".join(b"s" if stream else b"n" for stream in (streams.stdin, streams.stdout, None))
        head = (b"0", b"", b"", letters, b"", order[0], b"", b"", b"%d" % 0o022, cwd or b"", *account_words(account))
        return await self._begin(b"start", [*head, b"0", *counted(order[1:]), b"0"], streams)

    async def _begin(
        self, name: bytes, order: list[bytes], streams: Streams, taken_up: Standstill | None = None
    ) -> Running:
        channel, number = self.open_channel(), taken_up.number if taken_up else self.next_number()
        call = request(number, name, *order)
        if len(call) > wire.MAX_CALL:
            raise GuestRefused(
                f"arguments, environment and small files of {len(call)} bytes are more than a guest can be sent",
                hint="Give the payload its data in a file (`--in`) or on its standard input.",
            )
        channel.send(call)
        process = Running(number, channel, streams, taken_up)
        self.register(number, process)
        await process.started
        return process

    def exchange_by(self, disk: ExchangeDisk) -> None:
        """From now on `put` and `get` send the content of large files by this disk."""
        self._exchange = disk

    async def put(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        """Copy a host file or folder into the guest, as *account*. Raises InputMissing, GuestRefused."""
        from belljar.guest.files import put

        await put(self.begin_copy, item, account, cwd, self._exchange)

    async def get(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        """Copy a guest file or folder to the host. Never writes outside of its place there, whatever the guest sends. Raises
        OutputMissing, GuestRefused, BadOption, NoSpace."""
        from belljar.guest.files import get

        await get(self.begin_copy, item, account, cwd, self._exchange)

    async def collect(self, paths: Sequence[str], sink: Sink) -> None:
        """Write these, as root finds them, to *sink* as one tar archive. Raises GuestRefused, AgentLost."""
        from belljar.guest.files import collect

        await collect(self.begin_copy, paths, sink)

    async def end_payload(self) -> None:
        """Kill the rest of the payloads, write out and unmount the shares."""
        await self._call(b"end_payload")


def request(number: int, name: bytes, *words: bytes) -> bytes:
    """A CALL frame. Raises GuestRefused for words that hold a NUL: no kernel would take them either."""
    body = wire.join(name, *words)
    if body.count(b"\0") != len(words):
        raise GuestRefused("a NUL byte in a name, an argument or the environment")
    return wire.frame(wire.CALL, number, wire.stuffed(body))


def order_of(payload: Payload, streams: Streams) -> list[bytes]:
    """The words of a `start`: see `_start` and `Job` in the agent."""
    letters = b"".join(LETTERS[kind] for kind in (payload.stdin, payload.stdout, payload.stderr))
    window = b"%d %d" % (streams.window or (0, 0)) if payload.terminal else b""
    name = (payload.argv[0] if payload.argv else b"") or b"script"
    script = (b"", b"") if payload.script is None else (name, wire.without_nul(payload.script))
    program = payload.program or b""
    after = b"3" if payload.prepares else b"2" if payload.leaves else b"1" if payload.lingers else b""
    head = (*script, letters, window, b"", program, after, b"%d" % payload.umask, payload.cwd or b"")
    account = account_words(payload.account)
    limits = [word for name, soft, hard in payload.rlimits for word in (text(name), b"%d" % soft, b"%d" % hard)]
    env = [word for pair in payload.env for word in pair]
    files = counted(file_words(payload.files), 4)
    return [*files, *head, *account, *counted(limits, 3), *counted(payload.argv), *counted(env, 2)]


def file_words(files: Sequence[PlainFile]) -> list[bytes]:
    """Small files as words: see `place` in the agent."""
    words = []
    for file in files:
        content = b"d" if file.data is None else b"f" + wire.without_nul(file.data)
        words += [file.path, b"%d" % file.mode, b"u" if file.is_users else b"r", content]
    return words


def account_words(account: Account) -> list[bytes]:
    groups = [word for gid, name in account.groups for word in (b"%d" % gid, text(name))]
    names = (text(account.group), text(account.home), text(account.shell))
    return [text(account.name), b"%d" % account.uid, b"%d" % account.gid, *names, *counted(groups, 2)]


def counted(words: Sequence[bytes], each: int = 1) -> list[bytes]:
    """A list as words: its length, then *each* words per entry."""
    return [b"%d" % (len(words) // each), *words]


def text(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def seen_between(before: float, after: float, clock: str) -> tuple[float, float]:
    """How many seconds off a clock is, whose microseconds were read between two moments of ours, and how far off that may be
    in turn. Raises AgentLost."""
    try:
        return int(clock) / 1e6 - (before + after) / 2, (after - before) / 2
    except (ValueError, OverflowError) as exc:
        raise AgentLost("the agent did not tell the time") from exc
