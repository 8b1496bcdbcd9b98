"""Notifications of Nimbus's workspace pilots (2.x): HTTP by digest, a body of four lines. These pilots are started with a lease's id as
their slot (`-i`). One holds a node and says when it gives it back; it takes no orders, so it starts no machine.

The digest is MD5, signs no body, and there is no TLS: these pilots speak nothing else.
https://github.com/nimbusproject/nimbus (pilot/workspacepilot.py, notifyWithHTTP)
"""

from __future__ import annotations

import asyncio
import re
import time
from calendar import timegm
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager

from belljar.errors import BelljarError
from belljar.host.http import Answer, Limits
from belljar.host.threads import in_thread
from belljar.lease import OLD_PILOT, Cause, Do, Facts, Order, Report, Settings, Tell
from belljar.lease.decisions.case import Case
from belljar.lease.store import Store
from belljar.service.http.digest import Digest
from belljar.service.http.server import Sent, serving
from belljar.service.telling import Tell as TellFunction

ACCOUNT, REALM, PATH = "pilotaccount", "pilotrealm", "/pilot_notification/v01/"
LIMITS = Limits(body=16 << 10, idle=15.0, request=15.0)
NAME = re.compile(r"(r-[0-9a-f]{17})\+\+\+([A-Za-z0-9._-]{1,255})")
ENDS = {"earlyunreserving": Cause.PREEMPTED, "unreserving": Cause.EXPIRED, "killed": Cause.NODE_LOST}
Notice = tuple[str, str, str, bool, str]  # lease, host, event, whether it is an error, text


def read(body: bytes) -> Notice:
    """Without the marks by which such pilots keep a shell from reading it. Raises ValueError."""
    name, state, code, *text = body.decode("utf-8").split("\n")
    match, event = NAME.fullmatch(name), state.removeprefix("pilot-")
    if match is None or event == state or event not in (*ENDS, "reserved", "test"):
        raise ValueError("no notification of a lease's pilot")
    return match[1], match[2], event, int(code) != 0, _words("\n".join(text).replace("\\", "").replace("]eol[", ""))


def report_of(notice: Notice, case: Case, now: float, settings: Settings) -> Report | None:
    """What a pilot of ours would say: a host that was not heard of has the next rank. None: nothing. Raises ValueError."""
    _, host, event, is_error, text = notice
    lease, slots = case.lease, [slot for slot in case.slots if slot.attempt == case.lease.attempt]
    slot = next((slot for slot in slots if slot.facts.host == host), None)
    if event == "reserved" and not is_error:
        moment = float(timegm(time.strptime(text, "%Y-%m-%d-%H-%M-%S")))
        size, share = lease.wanted.size, min(lease.wanted.per_node, lease.wanted.count)
        node = Facts(host, cpus=size.cpus * share, memory=size.memory * share + settings.overhead)
        rank = slot.rank if slot else len(slots)
        return Report(Tell.HELLO, lease.id, lease.attempt, rank, OLD_PILOT + host, 0, moment, facts=node)
    if slot is None or event == "test":
        return None
    who = (lease.id, lease.attempt, slot.rank, OLD_PILOT + host, slot.seq + 1)
    cause = Cause.NODE_LOST if is_error else ENDS[event]
    why = f"its pilot said {event} {text}".rstrip()
    return Report(Tell.ENDED, *who, now, max(0.0, now - slot.zero), cause=cause, why=why)


class Notices:
    """*hear*: write a report down; what its pilot would be told."""

    def __init__(self, settings: Settings, secret: str, store: Store, hear: Callable[[Report], Awaitable[Iterable[Order]]],
                 tell: TellFunction) -> None:  # fmt: skip
        self._settings, self._store, self._hear, self._tell = settings, store, hear, tell
        self._digest, self._one = Digest(ACCOUNT, REALM, secret, PATH), asyncio.Lock()

    def serve(self, where: str) -> AbstractAsyncContextManager[tuple[str, int]]:
        """As `service.http.server.serving`."""
        return serving(where, self._take, lambda _, why: _no(why), setting="lease.legacy_listen", limits=LIMITS)

    async def _take(self, sent: Sent) -> Answer:
        if (sent.method, sent.target) != ("POST", PATH):
            return _no("no notification")
        if self._digest.is_good(sent.header("authorization") or "", now := time.monotonic()):
            return await self._answer(sent.body)
        return Answer(401, b"Unauthorized\n", (("www-authenticate", self._digest.challenge(now)),), "Unauthorized")

    async def _answer(self, body: bytes) -> Answer:
        try:
            lease, host, event, _, text = notice = read(body)
            async with self._one:  # the next rank is the next host's
                case = await in_thread(lambda: self._store.read(lambda book: book.case(lease)))
                report = case and report_of(notice, case, time.time(), self._settings)
                orders = await self._hear(report) if report else ()
        except (ValueError, BelljarError) as exc:
            return _no(str(exc))
        self._tell("old pilot", id=lease, host=host, said=event, why=text)
        is_void = event == "reserved" and (case is None or any(order.do is Do.VOID for order in orders))
        return _no("nobody waits for this pilot") if is_void else Answer(200, b"OK\n", (), "OK")


def _no(why: str) -> Answer:
    return Answer(406, f"NOTOK: {_words(why)}\n".encode(), (), f"NOTOK: {_words(why)}")


def _words(text: str) -> str:
    """One line of ASCII, and no long one."""
    return " ".join(text.encode("ascii", "replace").decode().split())[:200]
