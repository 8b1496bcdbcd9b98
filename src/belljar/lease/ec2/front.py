"""From a request to its answer: who asks, may they so often, what do they ask, and what is it that they get. No socket here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from belljar.lease.desk import Owner
from belljar.lease.ec2 import query, signature
from belljar.lease.ec2.actions import instances, keys, launching, places, tags
from belljar.lease.ec2.call import Call
from belljar.lease.ec2.desk import Desk
from belljar.lease.ec2.keyring import pages_key, secret_of
from belljar.lease.ec2.limits import Buckets
from belljar.lease.ec2.model import model
from belljar.lease.ec2.query import Sent
from belljar.lease.ec2.refusals import Refused, refused
from belljar.records import dataclass

RATE, BURST = 20.0, 200.0  # requests of one access key: a second, at once
WRONG_RATE, WRONG_BURST = 1.0, 50.0  # requests that nobody signed, of one address
# What signs a request, and is no parameter of an action.
ENVELOPE = frozenset({
    "Action", "Version", "AWSAccessKeyId", "Signature", "SignatureVersion", "SignatureMethod", "Timestamp", "Expires", "SecurityToken",
    "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Signature", "X-Amz-Security-Token",
})  # fmt: skip
ACTIONS = launching.ACTIONS | instances.ACTIONS | keys.ACTIONS | places.ACTIONS | tags.ACTIONS


@dataclass(frozen=True)
class Answer:
    """Status, and a body of XML."""

    status: int
    body: bytes
    id: str


class Front:
    """Answers requests about what is at one desk."""

    def __init__(
        self,
        desk: Desk,
        site_key: bytes,
        *,
        clock: Callable[[], float] = time.time,
        tell: Callable[..., None] | None = None,
    ) -> None:
        self._desk, self._site_key, self._clock, self._tell = desk, site_key, clock, tell
        self._pages = pages_key(site_key)
        self._askers, self._strangers = Buckets(RATE, BURST), Buckets(WRONG_RATE, WRONG_BURST)
        self._model = model()

    def answer(self, sent: Sent, peer: str) -> Answer:
        """Every request has one, a mistake of ours too."""
        id = str(uuid.uuid4())
        try:
            return Answer(200, self._answer(sent, peer, id), id)
        except Refused as exc:
            no = exc
        except Exception as exc:
            no = refused(exc) or Refused("InternalError", "An internal error has occurred")
            if no.status >= 500 and self._tell is not None:
                self._tell("failed", request=id, error=type(exc).__name__, why=str(exc))
            elif no.status >= 500:
                raise
        return Answer(no.status, no.xml(id), id)

    def _answer(self, sent: Sent, peer: str, id: str) -> bytes:
        fields = query.fields(sent)
        owner = self._owner(sent, fields, peer)
        action, version = fields.get("Action", ""), fields.get("Version", "")
        if not action or not version:
            raise Refused("MissingParameter", "The request must contain the parameters Action and Version")
        self._model.check_version(version)
        act = ACTIONS.get(action)
        if act is None:
            raise Refused("InvalidAction", f"The action {action[:60]} is not valid for this web service.")
        asked = self._model.read(action, {name: value for name, value in fields.items() if name not in ENVELOPE})
        endpoint = sent.header("host") or ""
        call = Call(self._desk, owner, action, asked, self._pages, endpoint, self._clock())
        found = act(call)
        if action not in CHANGING:
            call.check_dry()
        return self._model.write(action, version, id, found)

    def _owner(self, sent: Sent, fields: dict[str, str], peer: str) -> Owner:
        """Whose request it is. One who sends many that nobody signed is not looked at for a while."""
        now = self._clock()
        if not self._strangers.take(peer, now, cost=0):
            raise Refused(
                "RequestLimitExceeded", "Request limit exceeded: too many requests without a valid signature."
            )
        owners: dict[str, Owner | None] = {}

        def secret(key: str) -> str | None:
            owners[key] = self._desk.owner_of(key)
            return secret_of(self._site_key, key) if owners[key] else None

        try:
            key = signature.signer(sent, fields, secret, now)
        except Refused:
            self._strangers.take(peer, now)
            raise
        if not self._askers.take(key, now):
            raise Refused("RequestLimitExceeded", "Request limit exceeded.")
        owner = owners[key]
        assert owner is not None
        return owner


# These look at DryRun themselves, before they do anything.
CHANGING = frozenset({*launching.ACTIONS, "TerminateInstances", "RebootInstances", "CreateKeyPair", "ImportKeyPair", "DeleteKeyPair", "CreateTags", "DeleteTags"})  # fmt: skip
