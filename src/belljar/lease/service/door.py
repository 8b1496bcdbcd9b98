"""What owners on this host ask, by a unix socket: the kernel says who they are. One line of JSON asked, one answered; after a `connect`
bytes follow, to the machine's ssh server."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from belljar.errors import BadRequest, BelljarError, HostError, KeyPairExists, MachineBusy, NoSuchLease
from belljar.host.processes import peer_uid
from belljar.host.streams import pump
from belljar.host.threads import in_thread
from belljar.lease import Do, Instance, InstanceState, KeyPair, Order, Size, Wanted, belongings, new_id
from belljar.lease.clerk import ACTS, explain, number
from belljar.lease.desk import Also, Desk, Made, Owner, Shown
from belljar.lease.service.daemon import Daemon
from belljar.lease.service.jobs import Jobs
from belljar.model import dumps, to_json
from belljar.reading import from_json, strict_json
from belljar.records import replace
from belljar.service.streams import first_of

LONGEST_LINE = 1 << 17
ASK = 20.0  # seconds for a question
MOST = 256  # connections at a time; of one user an eighth
KEY_KINDS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521",
             "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")  # fmt: skip
QUEUE = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_.,@:+-]{,99}|")

Answer = dict[str, Any]
Act = Callable[[Owner, Answer], Answer]


class Door:
    """*types*: sizes by name, the first is the default. *keys*: what is asked of access keys."""

    def __init__(self, desk: Desk, daemon: Daemon, jobs: Jobs, types: dict[str, Size], keys: Act) -> None:
        self._desk, self._channel, self._jobs, self.types = desk, daemon.channel, jobs, types
        self._wake, self._news = daemon.wake, daemon.news
        self._callers: list[int] = []  # the uid of each
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # of those who extend a lease
        reads: dict[str, Act] = {name: partial(act, desk) for name, act in ACTS.items()}
        reads |= {"status": self._status, "explain": self._explain, "keys": keys}
        self.acts: dict[str, Callable[[Owner, Answer], Awaitable[Answer]]] = {
            "run": self._run, "release": self._release, "extend": self._extend, "grow": self._grow,
            "console": self._console, "reboot": self._reboot, **{name: self._read(act) for name, act in reads.items()},
        }  # fmt: skip

    async def serve(self, path: Path) -> asyncio.Server:
        """Anybody may knock; each sees what is theirs. Raises HostError."""
        try:
            os.makedirs(path.parent, 0o755, exist_ok=True)
            server = await asyncio.start_unix_server(self._take, path, limit=LONGEST_LINE, backlog=MOST)
            os.chmod(path, 0o666)
        except OSError as exc:
            raise HostError(f"{path}: {exc.strerror or exc}", hint="Correct `lease.door`.") from exc
        return server

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        self._callers.append(uid)
        try:
            if len(self._callers) <= MOST and self._callers.count(uid) <= MOST // 8:
                await self._serve(uid, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._callers.remove(uid)
            writer.close()

    async def _serve(self, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK):
                line = await reader.readline()
            asked = strict_json(line)
            owner, do = Owner.of(uid), str(asked.get("do", "")) if isinstance(asked, dict) else ""
            if do == "connect":
                return await self._connect(owner, asked, reader, writer)
            if do not in self.acts:
                raise BadRequest(f"{do[:40]!r}: nothing that can be asked here")
            seconds = min(number(asked, "wait"), ASK) if asked.get("act", do) == "status" else 0
            look = partial(self.acts[do], owner, asked)
            answer = await (self._news.held(look, asked.get("tag"), seconds) if seconds else look())
        except BelljarError as exc:
            answer = {"error": type(exc).__name__, "message": exc.message, "hint": exc.hint}
        except ValueError as exc:
            answer = {"error": "BadRequest", "message": str(exc)[:400], "hint": BadRequest.hint}
        writer.write(dumps(answer) + b"\n")
        async with asyncio.timeout(ASK):
            await writer.drain()

    # -- what is asked -------------------------------------------------------------------------------------------------

    async def _run(self, owner: Owner, asked: Answer) -> Answer:
        lease, instances = await self.lease(owner, _said(asked), str(asked.get("public") or ""))
        return {"lease": lease, "instances": instances}

    async def lease(self, owner: Owner, asked: Wanted, public: str, also: Also = lambda book, lease: None) -> Made:
        """*public*: the owner's key, a line of authorized_keys. *also*: what is written down with a new one."""
        terms = self._wanted(asked)
        if public:
            terms = replace(terms, key=await in_thread(lambda: self._key(owner, public)))
        lease, instances = await in_thread(lambda: self._desk.run(owner, terms, also))
        self._wake()
        return lease, instances

    async def _grow(self, owner: Owner, asked: Answer) -> Answer:
        lease, count = str(asked.get("id", "")), int(number(asked, "count"))
        more, instances = await in_thread(lambda: self._desk.grow(owner, lease, count))
        self._wake()
        return {"lease": more, "instances": instances}

    def _explain(self, owner: Owner, asked: Answer) -> Answer:
        lines = explain(self._desk, owner, self._wanted(_said(asked)))
        return {"steps": [{"what": what, "met": is_met} for what, is_met in lines]}

    def _wanted(self, terms: Wanted) -> Wanted:
        """What is 0 of the size is as usual. Raises BadRequest."""
        settings = self._desk.settings
        for image in (terms.image, *terms.images):
            if not any(fnmatchcase(image, pattern) for pattern in settings.images):
                known = ", ".join(settings.images)
                raise BadRequest(f"{image[:80]}: not among the images that may be leased: {known}")
        if terms.account or terms.key or terms.tags or terms.metadata:
            raise BadRequest("metadata, account, key, tags: the site or a client of EC2 gives them")
        if not QUEUE.fullmatch(terms.queue):
            raise BadRequest(f"queue {terms.queue[:40]!r}: no queue is called so")
        type = terms.type or next(iter(self.types))
        if type not in self.types:
            raise BadRequest(f"{type}: no such type; there are {', '.join(self.types)}")
        usual, asked = self.types[type], terms.size
        size = Size(asked.cpus or usual.cpus, asked.memory or usual.memory, asked.disk or usual.disk)
        return replace(terms, size=size, type=type if size == usual and not terms.sizes else "")

    def _read(self, act: Act) -> Callable[[Owner, Answer], Awaitable[Answer]]:
        return lambda owner, asked: in_thread(lambda: act(owner, asked))

    def _key(self, owner: Owner, public: str) -> str:
        """The name of the key pair with this key, made where there is none."""
        words = public.split()
        if len(words) < 2 or words[0] not in KEY_KINDS or len(public) > 8192 or "\n" in public.strip():
            raise BadRequest(f"{public[:40]!r}: not a public key", hint="As in ~/.ssh/id_ed25519.pub.")
        digest = sha256(" ".join(words[:2]).encode()).hexdigest()
        name = f"ssh-{digest[:16]}"
        pair = KeyPair(new_id("key"), owner.name, name, " ".join(words[:2]), digest, words[0], time.time())
        with suppress(KeyPairExists):
            self._desk.store.write(lambda book: belongings.add_key_pair(book, pair, {}))
        return name

    def _status(self, owner: Owner, asked: Answer) -> Answer:
        leases, machines = self._desk.leases(owner), self._desk.machines(owner)
        if id := str(asked.get("lease") or ""):
            leases = [lease for lease in leases if lease.id == id]
            machines = [machine for machine in machines if machine.lease.id == id]
            if not leases:
                raise NoSuchLease(f"{owner.name} has no lease {id[:40]!r}")
        return {"leases": leases, "machines": [_shown(machine) for machine in machines]}

    async def _release(self, owner: Owner, asked: Answer) -> Answer:
        id = str(asked.get("id", ""))
        is_machine = id.startswith("i-")
        await in_thread(lambda: self._desk.terminate(owner, [id]) if is_machine else self._desk.release(owner, id))
        self._wake()
        return {"ok": True}

    async def _reboot(self, owner: Owner, asked: Answer) -> Answer:
        for slot, order in await in_thread(lambda: self._desk.reboot(owner, [str(asked.get("id", ""))])):
            if not self._channel.order(slot, order):
                raise HostError(f"{order.instance}: its pilot is not connected", hint="Try again.")
        return {"ok": True}

    async def _extend(self, owner: Owner, asked: Answer) -> Answer:
        lease, more = str(asked.get("id", "")), float(number(asked, "seconds"))
        async with self._turns.setdefault(lease, asyncio.Lock()):  # one after the other
            job, limit = await in_thread(lambda: self._desk.longer(owner, lease, more))
            await self._jobs.extend(job, limit)
            for slot, order in await in_thread(lambda: self._desk.extend(owner, lease, more)):
                self._channel.order(slot, order)
        return {"ok": True}

    async def _console(self, owner: Owner, asked: Answer) -> Answer:
        """The last of it: a machine that has a pilot is asked for more."""
        machine = await self._machine(owner, str(asked.get("id", "")))
        if machine.is_live:
            await self._channel.console(machine.slot, machine.id)
        kept = partial(belongings.console, owner=owner.name, id=machine.id)
        console = await in_thread(lambda: self._desk.store.read(kept))
        return {"text": console.text.decode("latin-1"), "time": console.at}

    async def _connect(self, owner: Owner, asked: Answer, reader: asyncio.StreamReader,
                       writer: asyncio.StreamWriter) -> None:  # fmt: skip
        """Bytes to and from the machine's ssh server."""
        machine = await self._machine(owner, str(asked.get("id", "")))
        if (state := machine.state) is not InstanceState.RUNNING:
            raise MachineBusy(f"{machine.id} is {state.value}", hint="`belljar lease status` tells when it runs.")
        async with self._channel.stream(machine.slot, Order(Do.STREAM, machine.id)) as (far_reader, far_writer):
            writer.write(b'{"ok":true}\n')
            await first_of(pump(reader, far_writer), pump(far_reader, writer))  # one direction's end is the session's

    async def _machine(self, owner: Owner, id: str) -> Instance:
        """By its id, or that of a lease with one machine that lives."""
        machines = [shown.instance for shown in await in_thread(lambda: self._desk.machines(owner))]
        chosen = [machine for machine in machines if machine.id == id or (machine.lease == id and machine.is_live)]
        if not chosen:
            raise NoSuchLease(f"{owner.name} has no machine {id[:40]!r}")
        if len(chosen) > 1:
            ids = ", ".join(machine.id for machine in chosen)
            raise BadRequest(f"{id} has {len(chosen)} machines", hint=f"One of {ids}.")
        return chosen[0]


def _said(asked: Answer) -> Wanted:
    """Size and time are 0 where nothing is said. Raises ValueError."""
    given = asked.get("wanted")
    usual = {"size": to_json(Size(0, 0, 0)), "seconds": 0.0}
    terms: Wanted = from_json(Wanted, usual | given if isinstance(given, dict) else given)
    if terms.images or terms.sizes:
        raise BadRequest("images, sizes: machines of a lease are alike", hint="A cluster's need not be.")
    return terms


def _shown(machine: Shown) -> Answer:
    host = machine.slot.facts.host if machine.slot is not None else ""
    return {**to_json(machine.instance), "host": host, "image": machine.lease.wanted.image_of(machine.instance.index)}
