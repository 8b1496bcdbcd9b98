"""From a request to its answer: who asks, may they so often, what do they ask, and what is it that they get; and this as a part of the
lease service: HTTP/1.1 by TLS, or without it on loopback alone, for private keys and user data pass here."""

from __future__ import annotations

import asyncio
import hmac
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from belljar.host.http import Answer, Limits
from belljar.lease import AccessKey
from belljar.lease.desk import Owner
from belljar.lease.ec2.actions import belongings, instances, places
from belljar.lease.ec2.call import Call
from belljar.lease.ec2.keyring import owner_of, secret_of
from belljar.lease.ec2.model import model
from belljar.lease.ec2.office import Office
from belljar.lease.ec2.refusals import Refused, refused
from belljar.lease.ec2.request import ENVELOPE, LARGEST_BODY, check_signature, fields_of, key_of
from belljar.records import replace
from belljar.service.http.server import Sent, place, serving, tls_by
from belljar.service.senders import Askers, Budget
from belljar.service.telling import Tell

OWNERS = Budget(burst=200, rate=20)  # requests of one access key: at once, a second
STRANGERS = Budget(burst=50, rate=1)  # requests that nobody signed, of one address
NOBODY = "00000000-0000-0000-0000-000000000000"  # the id of what was not a request
LISTEN = "lease.ec2_listen"
LIMITS = Limits(head=64 << 10, body=LARGEST_BODY)  # a GET with user data in its query
THREADS = 4
ACTIONS = instances.ACTIONS | belongings.ACTIONS | places.ACTIONS


class Front:
    """Answers requests about what is at one office."""

    def __init__(self, office: Office, site_key: bytes, tell: Tell, clock: Callable[[], float] = time.time) -> None:
        self._office, self._site_key, self._clock, self._tell = office, site_key, clock, tell
        self._pages = hmac.digest(site_key, b"belljar ec2 pages", "sha256")
        self._owners, self._strangers = Askers(OWNERS), Askers(STRANGERS)
        self._model = model()

    def answer(self, sent: Sent) -> Answer:
        """Every request has one, a mistake of ours too."""
        id = str(uuid.uuid4())
        try:
            return _xml(200, self._answer(sent, id), id)
        except Refused as exc:
            no = exc
        except Exception as exc:
            no = refused(exc) or Refused("InternalError", "An internal error has occurred")
            if no.status >= 500:
                self._tell("failed", request=id, error=type(exc).__name__, why=str(exc))
        return _xml(no.status, no.xml(id), id)

    def _answer(self, sent: Sent, id: str) -> bytes:
        fields = fields_of(sent)
        owner = self._owner(sent, fields)
        action, version = fields.get("Action", ""), fields.get("Version", "")
        if not action or not version:
            raise Refused("MissingParameter", "The request must contain the parameters Action and Version")
        self._model.check_version(version)
        if (act := ACTIONS.get(action)) is None:
            raise Refused("InvalidAction", f"The action {action[:60]} is not valid for this web service.")
        asked = self._model.read(action, {name: value for name, value in fields.items() if name not in ENVELOPE})
        call = Call(self._office, owner, action, asked, self._pages, sent.header("host") or "", self._clock())
        values = act(call)
        if action.startswith(("Describe", "Get")):  # all others look themselves, before they do anything
            call.check_dry()
        return self._model.write(action, version, id, values)

    def _owner(self, sent: Sent, fields: dict[str, str]) -> Owner:
        """Whose request it is. After many requests with bad signatures an address has to wait; where they name a known key, that key at
        that address alone, for the users of a host share one."""
        now, key = self._clock(), key_of(sent, fields)
        owner = owner_of(self._office.leases.store.read(lambda book: book.get(AccessKey, key))) if key else None
        sender = f"{sent.peer} {key}" if owner else sent.peer
        may_try = self._strangers.may_ask(sender, now, cost=0)
        try:
            check_signature(sent, fields, secret_of(self._site_key, key) if owner and may_try else None, now)
        except Refused as exc:
            if self._strangers.may_ask(sender, now):
                raise
            raise Refused("RequestLimitExceeded", "Too many requests without a valid signature.") from exc
        assert owner is not None  # a good signature needs a known key's secret
        if not self._owners.may_ask(key, now):
            raise Refused("RequestLimitExceeded", "Request limit exceeded.")
        return owner


async def front_end(office: Office, site_key: bytes, own_certificate: Path, tell: Tell) -> None:
    """At `lease.ec2_listen`, until cancelled. `wake`, `order` and `console`, a coroutine, are called in this loop.
    Raises BadSetting, HostError, CommandMissing."""
    loop, listen = asyncio.get_running_loop(), office.settings.ec2_listen
    soon: Any = loop.call_soon_threadsafe
    waiting = asyncio.Semaphore(THREADS // 2)  # the other threads are for other requests

    async def console(*of: str) -> None:
        if not waiting.locked():
            async with waiting:
                await office.console(*of)

    sent = lambda *of: asyncio.run_coroutine_threadsafe(console(*of), loop).result()  # noqa: E731
    here = replace(office, wake=partial(soon, office.wake), order=partial(soon, office.order), console=sent)
    site, is_here = office.settings.ec2_certificate, ip_address(place(listen, LISTEN)[0]).is_loopback
    tls = tls_by(Path(site) if site else own_certificate, "lease.ec2_certificate") if site or not is_here else None
    async with served(Front(here, site_key, tell=tell), listen, tls):
        tell("EC2 API", address=f"{'http' if tls is None else 'https'}://{listen}")
        await loop.create_future()


@asynccontextmanager
async def served(front: Front, where: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, int]]:
    """As `service.http.server.serving`, in threads: records are on disks, which may be slow."""
    threads, loop = ThreadPoolExecutor(THREADS, "ec2"), asyncio.get_running_loop()
    try:
        respond = lambda sent: loop.run_in_executor(threads, front.answer, sent)  # noqa: E731
        async with serving(where, respond, no_request, setting=LISTEN, limits=LIMITS, tls=tls) as bound:
            yield bound
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def no_request(status: int, why: str) -> Answer:
    """To what is not a request, or too large for one."""
    code = "RequestEntityTooLarge" if status == 413 else "MalformedHTTPRequest"
    return _xml(status, Refused(code, why).xml(NOBODY), NOBODY)


def _xml(status: int, body: bytes, id: str) -> Answer:
    headers = (("content-type", "text/xml;charset=UTF-8"), ("x-amzn-requestid", id), ("cache-control", "no-store"))
    return Answer(status, body, headers)
