"""In the service: owners' clusters, and the conversations with their machines. What it knows is written down, and a conversation that
was cut off is begun again."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from belljar.errors import BadRequest, BelljarError, NoSuchLease
from belljar.host.threads import in_thread
from belljar.lease import Do, Instance, Lease, Order, Size, Wanted
from belljar.lease.broker import Cluster, Context, Member
from belljar.lease.broker.document import wrongs
from belljar.lease.broker.plan import LARGEST, Node, Refused, Scene, program, read, scene, standing, token
from belljar.lease.desk import Desk, Owner
from belljar.lease.service.channel import Channel
from belljar.lease.service.door import Door
from belljar.lease.store import Book
from belljar.reading import from_json
from belljar.service.telling import Tell

CHUNK = 1 << 16
REFUSED, SILENT = 255, 254  # beside scripts' own exit codes
Facts = dict[str, Any]


class Broker:
    """*door*: by which owners ask for leases."""

    def __init__(self, desk: Desk, channel: Channel, door: Door, site_key: bytes, tell: Tell) -> None:
        self._store, self._desk, self._channel, self._door = desk.store, desk, channel, door
        self._site_key, self._tell = site_key, tell
        self._talks: dict[str, asyncio.Task[None]] = {}  # by machine

    async def answer(self, owner: Owner, asked: Facts) -> Facts:
        """Raises BelljarError, ValueError."""
        act, name = asked.get("act"), str(asked.get("name") or "")
        if act == "up":
            return await self._up(owner, asked)
        clusters = await in_thread(lambda: self._store.read(lambda book: self._clusters(book, owner.name, name)))
        if name and not clusters:
            raise NoSuchLease(f"{owner.name} has no cluster {name[:40]!r}")
        if act == "status":
            return {"clusters": [_shown(there, lease) for there, lease in clusters]}
        if act != "release" or not name:
            raise BadRequest(f"{str(act)[:40]!r} of {name!r}: up, status, or release of a cluster")
        for _, lease in clusters:
            await in_thread(lambda id=lease.id: self._desk.release(owner, id))  # type: ignore[misc]
        return {"ok": True}

    async def _up(self, owner: Owner, asked: Facts) -> Facts:
        cluster: Cluster = from_json(Cluster, asked.get("cluster"))
        for table, (key, what, hint) in wrongs(cluster):
            raise BadRequest(f"{table}.{key}: {what}", hint=hint)
        images = tuple(role.image for role, _ in cluster.seats)
        types = [role.type or cluster.type or next(iter(self._door.types)) for role, _ in cluster.seats]
        if unknown := {*types} - {*self._door.types}:
            raise BadRequest(f"{min(unknown)[:40]}: no such type; there are {', '.join(self._door.types)}")
        sizes = tuple(self._door.types[name] for name in types)
        largest = Size(*map(max, zip(*((size.cpus, size.memory, size.disk) for size in sizes), strict=True)))
        terms = Wanted(images[0], len(images), size=largest, type=types[0], seconds=cluster.time, queue=cluster.queue,
                      network=cluster.network, images=images, sizes=sizes if len({*sizes}) > 1 else ())  # fmt: skip

        def also(book: Book, lease: Lease) -> None:
            if any(other.is_live for _, other in self._clusters(book, owner.name, cluster.name)):
                what = f"{owner.name} has a cluster {cluster.name!r} already"
                raise BadRequest(what, hint="Release it and wait for its end, or change the name in the document.")
            book.put(Context(lease.id, owner.name, cluster))

        lease, _ = await self._door.lease(owner, terms, str(asked.get("public") or ""), also)
        return {"lease": lease.id, "name": cluster.name}

    def _clusters(self, book: Book, owner: str, name: str) -> list[tuple[Scene, Lease]]:
        """That live, or ended a while ago, the oldest first; *name*: the last that was called so, alone."""
        known = [context for context in book.find(Context, owner=owner) if name in ("", context.cluster.name)]
        clusters = [(_scene(book, context), lease) for context in known if (lease := self._lease(book, context))]
        return sorted(clusters, key=lambda pair: pair[1].created)[-1 if name else 0 :]

    def _lease(self, book: Book, context: Context) -> Lease | None:
        """None: it ended long ago."""
        lease, since = book.get(Lease, context.id), time.time() - self._desk.settings.shown
        return lease if lease is not None and (lease.is_live or lease.since > since) else None

    async def look(self) -> None:
        """At every cluster: its next generation is written down, and machines are told what is due."""
        if not await in_thread(lambda: self._store.read(lambda book: book.find(Context))):
            return
        for there in await in_thread(lambda: self._store.write(self._scenes)):
            for node in there.nodes:
                if node.stand == "configuring" and node.instance.id not in self._talks:
                    talk = self._talks[node.instance.id] = asyncio.ensure_future(self._talk(there, node))
                    talk.add_done_callback(partial(self._over, node.instance.id))

    def _over(self, id: str, talk: asyncio.Task[None]) -> None:
        del self._talks[id]
        if not talk.cancelled() and (exc := talk.exception()) is not None:  # the records are away: it is done again
            self._tell("cluster", machine=id, why=exc)

    def _scenes(self, book: Book) -> list[Scene]:
        """For those that live. One that ended long ago is dropped: its data may be secrets."""
        scenes = []
        for context in book.find(Context):
            there, lease = _scene(book, context), self._lease(book, context)
            if lease is None:
                book.drop(Context, context.id)
                for id in there.members:
                    book.drop(Member, id)
            elif lease.is_live:
                scenes.append(there)
                if there.context != context:
                    book.put(there.context)
        return scenes

    async def _talk(self, there: Scene, node: Node) -> None:
        """Until the machine has answered, or its time is over. One whose pilot is away is asked again at a later look."""
        context, id, limit = there.context, node.instance.id, there.context.cluster.limit
        mark, shell = token(self._site_key, context, id, node.plan), Order(Do.STREAM, id, request="/bin/sh")
        try:
            async with (
                asyncio.timeout(limit) as wait,
                self._channel.stream(node.instance.slot, shell) as (reader, writer),
            ):
                writer.write(f"token={mark}\n{program(there, node)}".encode())
                await writer.drain()
                data = b""
                while len(data) <= LARGEST and (more := await reader.read(CHUNK)):
                    data += more
            answer = read(data, mark, node.role.provides)
        except Refused as exc:
            answer = (REFUSED, "the machine", f"its answer is refused: {exc}".encode(), ())
        except (OSError, BelljarError) as exc:
            if not wait.expired():  # networks have timeouts, too
                return self._tell("cluster", id=context.id, machine=id, why=exc)
            answer = (SILENT, "the machine", f"its scripts have not ended after {limit:.0f} s".encode(), ())
        if answer is not None:
            member = Member(id, context.id, context.generation, node.plan, *answer)
            await in_thread(lambda: self._store.write(lambda book: book.put(member)))
            self._tell("cluster", id=context.id, machine=id, name=node.name, code=member.code, script=member.script)


def _scene(book: Book, context: Context) -> Scene:
    members = {member.id: member for member in book.find(Member, context=context.id)}
    return scene(context, book.find(Instance, lease=context.id), members, time.time())


def _shown(there: Scene, lease: Lease) -> Facts:
    state, why = standing(there, time.time()) if lease.is_live else ("ended", f"{lease.state.value}: {lease.why}")
    logs = {id: member.log.decode("utf-8", "replace") for id, member in there.members.items()}
    nodes = [{
        "name": node.name, "role": node.role.name, "machine": node.instance.id, "address": node.address,
        "state": node.stand if node.is_there else node.instance.state.value, "why": node.why or node.instance.why,
        "log": logs.get(node.instance.id, ""),
    } for node in there.nodes]  # fmt: skip
    cluster = {"name": there.context.cluster.name, "lease": lease.id, "generation": there.context.generation}
    return {**cluster, "state": state, "why": why, "nodes": nodes}
