"""What owners on this host ask, by a unix socket: the kernel says who they are. One line of JSON asked, one answered; after a `connect`
bytes follow, to the machine's ssh server.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from belljar.errors import BadRequest, BelljarError, HostError, LeaseEnded, NoSuchLease
from belljar.host.threads import in_thread
from belljar.lease import Do, Instance, KeyPair, Order, Size, Wanted, key_id
from belljar.lease.belongings import Belongings
from belljar.lease.desk import Desk, Owner, Shown
from belljar.lease.service.channel import Channel
from belljar.lease.service.jobs import Jobs
from belljar.lease.states import InstanceState
from belljar.lease.store import Store
from belljar.model import dumps, to_json
from belljar.reading import from_json, strict_json
from belljar.records import dataclass

LONGEST_LINE = 1 << 17
ASK = 20.0  # seconds for a question
MOST = 256  # connections at a time; of one user an eighth
CHUNK = 1 << 16
KEY_KINDS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521",
             "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")  # fmt: skip

Answer = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """For a new lease."""

    image: str
    count: int = 1
    least: int = 0
    per_node: int = 1
    cpus: int = 0  # 0, and so memory and disk: as the type has it
    memory: int = 0
    disk: int = 0
    type: str = ""
    seconds: float = 0.0
    queue: str = ""
    network: str = ""
    public: str = ""  # the asker's key: a line of authorized_keys
    user_data: bytes = b""
    token: str = ""


class Door:
    """*orders*: to pilots, by the channel. *types*: sizes by name, the first is the default. *wake*: something was asked."""

    def __init__(
        self, desk: Desk, store: Store, channel: Channel, jobs: Jobs, types: dict[str, Size], usual: float,
        may_lease: Callable[[str], bool], wake: Callable[[], None], keys: Callable[[Owner, Answer], Answer],
    ) -> None:  # fmt: skip
        self._desk, self._belongings, self._store, self._channel = desk, Belongings(store), store, channel
        self._jobs, self._types, self._usual, self._may_lease, self._wake = jobs, types, usual, may_lease, wake
        self._callers: dict[int, int] = {}
        self._acts: dict[str, Callable[[Owner, Answer], Awaitable[Answer]]] = {
            "run": self._run, "status": self._status, "release": self._release, "extend": self._extend,
            "console": self._console,
            "keys": lambda owner, asked: in_thread(lambda: to_json(keys(owner, asked))),
        }  # fmt: skip

    async def serve(self, path: Path) -> asyncio.Server:
        """Anybody may knock; each sees what is theirs. Raises HostError."""
        try:
            os.makedirs(path.parent, 0o755, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(path)
            server = await asyncio.start_unix_server(self._take, path, limit=LONGEST_LINE, backlog=MOST)
            os.chmod(path, 0o666)
        except OSError as exc:
            raise HostError(f"{path}: {exc.strerror or exc}", hint="Correct `lease.door`.") from exc
        return server

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = _peer(writer.get_extra_info("socket"))
        self._callers[uid] = self._callers.get(uid, 0) + 1
        try:
            if sum(self._callers.values()) <= MOST and self._callers[uid] <= MOST // 8:
                await self._serve(uid, reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._callers[uid] -= 1
            if not self._callers[uid]:
                del self._callers[uid]
            with suppress(OSError):
                writer.close()

    async def _serve(self, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(ASK):
                    line = await reader.readline()
                asked = strict_json(line)
                owner, do = _owner(uid), str(asked.get("do", "")) if isinstance(asked, dict) else ""
                if do == "connect":
                    await self._connect(owner, asked, reader, writer, stack)
                    return
                if do not in self._acts:
                    raise BadRequest(f"{do[:40]!r}: nothing that can be asked here")
                answer = await self._acts[do](owner, asked)
            except BelljarError as exc:
                answer = {"error": type(exc).__name__, "message": exc.message, "hint": exc.hint}
            except ValueError as exc:
                answer = {"error": "BadRequest", "message": str(exc)[:400], "hint": ""}
            writer.write(dumps(answer) + b"\n")
            async with asyncio.timeout(ASK):
                await writer.drain()

    # -- what is asked -------------------------------------------------------------------------------------------------

    async def _run(self, owner: Owner, asked: Answer) -> Answer:
        said: Asked = from_json(Asked, asked.get("wanted"))
        if not self._may_lease(said.image):
            raise BadRequest(f"{said.image}: not among the images that may be leased (`lease.images`)")
        if said.type and said.type not in self._types:
            raise BadRequest(f"{said.type}: no such type; there are {', '.join(self._types)}")
        type = said.type or next(iter(self._types))
        usual = self._types[type]
        size = Size(said.cpus or usual.cpus, said.memory or usual.memory, said.disk or usual.disk)
        key = await in_thread(lambda: self._key(owner, said.public)) if said.public else ""
        wanted = Wanted(
            said.image, said.count, said.least, size, type if size == usual else "", said.seconds or self._usual,
            said.queue, network=said.network, key=key, user_data=said.user_data, token=said.token, per_node=said.per_node,
        )  # fmt: skip
        lease, instances = await in_thread(lambda: self._desk.run(owner, wanted))
        self._wake()
        return {"lease": to_json(lease), "instances": to_json(instances)}

    def _key(self, owner: Owner, public: str) -> str:
        """The name of the key pair with this key, made where there is none."""
        words = public.split()
        if len(words) < 2 or words[0] not in KEY_KINDS or len(public) > 8192 or "\n" in public.strip():
            raise BadRequest(f"{public[:40]!r}: not a public key", hint="As in ~/.ssh/id_ed25519.pub.")
        digest = sha256(" ".join(words[:2]).encode()).hexdigest()
        name = f"ssh-{digest[:16]}"
        if not any(one.name == name for one in self._belongings.key_pairs(owner.name)):
            pair = KeyPair(key_id(), owner.name, name, " ".join(words[:2]), digest, words[0], time.time())
            self._belongings.add_key_pair(pair)
        return name

    async def _status(self, owner: Owner, asked: Answer) -> Answer:
        leases = await in_thread(lambda: self._desk.leases(owner))
        machines = await in_thread(lambda: self._desk.machines(owner))
        if wanted := str(asked.get("lease") or ""):
            leases = [one for one in leases if one.id == wanted]
            machines = [one for one in machines if one.lease.id == wanted]
            if not leases:
                raise NoSuchLease(f"{owner.name} has no lease {wanted[:40]!r}")
        return {"leases": to_json(leases), "machines": [_shown(one) for one in machines]}

    async def _release(self, owner: Owner, asked: Answer) -> Answer:
        id = str(asked.get("id", ""))
        if id.startswith("i-"):
            await in_thread(lambda: self._desk.terminate(owner, [id]))
        else:
            await in_thread(lambda: self._desk.release(owner, id))
        self._wake()
        return {"ok": True}

    async def _extend(self, owner: Owner, asked: Answer) -> Answer:
        more = asked.get("seconds")
        if not isinstance(more, (int, float)) or isinstance(more, bool):
            raise BadRequest("seconds: not a number")
        lease = str(asked.get("id", ""))
        limit = await in_thread(lambda: self._desk.longer(owner, lease, float(more)))
        job = next((one.job for one in await in_thread(lambda: self._desk.leases(owner)) if one.id == lease), "")
        await self._jobs.extend(job, limit)
        slots = await in_thread(lambda: self._desk.extend(owner, lease, float(more)))
        now = time.time()
        for shown in await in_thread(lambda: self._desk.machines(owner)):
            one = shown.instance
            if one.slot in slots and shown.slot is not None:
                self._channel.order(one.slot, Order(Do.GO, seconds=max(1.0, shown.slot.ends - now)))
                self._channel.order(one.slot, Order(Do.EXTEND, one.id, seconds=one.seconds))
        return {"ok": True}

    async def _console(self, owner: Owner, asked: Answer) -> Answer:
        """What is kept of it; a running machine is asked for more, for the next time."""
        one = await self._machine(owner, str(asked.get("id", "")))
        self._channel.order(one.slot, Order(Do.CONSOLE, one.id))
        await asyncio.sleep(0.5)
        found = await in_thread(lambda: self._belongings.console(owner.name, one.id))
        return {"text": found.text.decode("latin-1"), "time": found.at}

    async def _connect(
        self, owner: Owner, asked: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stack: AsyncExitStack
    ) -> None:  # fmt: skip
        """Bytes to and from the machine's ssh server."""
        one = await self._machine(owner, str(asked.get("id", "")))
        if one.state is not InstanceState.RUNNING:
            raise LeaseEnded(f"{one.id} is {one.state.value}", hint="`belljar lease status` tells when it runs.")
        there = self._channel.stream(one.slot, Order(Do.STREAM, one.id))
        far_reader, far_writer, early = await stack.enter_async_context(there)
        writer.write(b'{"ok":true}\n' + early)
        await _both(_pump(reader, far_writer), _pump(far_reader, writer))

    async def _machine(self, owner: Owner, id: str) -> Instance:
        """By its id, or that of a lease with one machine that lives."""
        machines = [one.instance for one in await in_thread(lambda: self._desk.machines(owner))]
        found = [one for one in machines if one.id == id] or [
            one for one in machines if one.lease == id and one.is_live
        ]
        if not found:
            raise NoSuchLease(f"{owner.name} has no machine {id[:40]!r}")
        if len(found) > 1:
            raise BadRequest(f"{id} has {len(found)} machines", hint=f"One of {', '.join(one.id for one in found)}.")
        return found[0]


def _shown(one: Shown) -> Answer:
    host = one.slot.facts.host if one.slot is not None else ""
    return {**to_json(one.instance), "host": host, "image": one.lease.wanted.image}


def _owner(uid: int) -> Owner:
    """Raises BadRequest."""
    try:
        who = pwd.getpwuid(uid)
    except KeyError:
        raise BadRequest(f"uid {uid} has no account here") from None
    try:
        group = grp.getgrgid(who.pw_gid).gr_name
    except KeyError:
        group = ""
    return Owner(who.pw_name, group)


def _peer(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


async def _both(*pumps: Any) -> None:
    """Until one direction ends: an ssh session is over then."""
    tasks = [asyncio.ensure_future(one) for one in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
