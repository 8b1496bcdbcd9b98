"""What owners ask of their leases: each request is one transaction, so that two of them never decide by the same sums.

Nothing is started or stopped here. What is written down is seen by the service's next look, which a caller may wake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from belljar.errors import BadRequest, LeaseDenied, LeaseEnded, NoSuchKeyPair, NoSuchLease, OverLimit, TokenMismatch
from belljar.lease import (
    LARGEST_USER_DATA,
    LONGEST_TOKEN,
    Do,
    Instance,
    KeyPair,
    Lease,
    Order,
    Settings,
    Slot,
    Tag,
    Token,
    Wanted,
    instance_id,
    lease_id,
)
from belljar.lease.advance import drained, ended
from belljar.lease.case import Case
from belljar.lease.margins import fitting, margins
from belljar.lease.policy import Policy, decide, explain, policy_of
from belljar.lease.states import Cause, InstanceState, LeaseState, SlotState
from belljar.lease.store import Book, Store
from belljar.model import dumps
from belljar.records import dataclass, replace

L, I = LeaseState, InstanceState  # noqa: E741
MOST = 1000  # machines of one lease


@dataclass(frozen=True)
class Owner:
    """Who asks, as whoever let them in has found out."""

    name: str
    group: str = ""


@dataclass(frozen=True)
class Queue:
    """What the batch system lets a job have there."""

    longest: float | None = None  # seconds; None: no limit
    quantum: int = 1  # seconds, in which it counts


@dataclass(frozen=True)
class Shown:
    """A machine with what belongs to it."""

    instance: Instance
    lease: Lease
    slot: Slot | None = None
    tags: tuple[tuple[str, str], ...] = ()


class Desk:
    """*policies* and *queue* are asked at each request, so a change of theirs counts at once."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        policies: Callable[[], Sequence[Policy]],
        queue: Callable[[str], Queue] = lambda name: Queue(),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._settings, self._policies = store, settings, policies
        self._queue, self._now = queue, now

    # -- new leases ----------------------------------------------------------------------------------------------------

    def run(self, owner: Owner, asked: Wanted) -> tuple[Lease, list[Instance]]:
        """Write a lease down, once for each token of an owner. Between `least` and `count` machines, as many as policy allows.
        Raises LeaseDenied, TokenMismatch, OverLimit, NoSuchKeyPair, BadRequest."""
        wanted, digest = self._checked(asked), _digest(asked)

        def change(book: Book) -> tuple[Lease, list[Instance]]:
            book.lock(f"owner {owner.name}")
            if found := _by_token(book, owner, asked.token, digest):
                return found
            allowed = self._allowed(book, owner, wanted)
            return self._written(book, owner, allowed, digest)

        return self._store.write(change)

    def may_run(self, owner: Owner, asked: Wanted) -> None:
        """Raises what `run` would; writes nothing."""
        wanted = self._checked(asked)
        self._store.read(lambda book: self._allowed(book, owner, wanted))

    def explain(self, owner: Owner, asked: Wanted) -> list[tuple[str, bool]]:
        """Every step of the decision, in words, and whether it is met."""
        wanted, policies = self._checked(asked), self._policies()
        try:
            since = policy_of(policies, owner.name, owner.group).since(self._now())
        except LeaseDenied:
            since = 0.0
        sums = self._store.read(lambda book: book.sums(owner.name, since))
        return explain(wanted, policies, owner.name, owner.group, sums)

    def _checked(self, asked: Wanted) -> Wanted:
        settings = self._settings
        if (
            not 1 <= asked.count <= MOST
            or not 0 <= asked.least <= asked.count
            or not 1 <= asked.per_node <= asked.count
        ):
            raise BadRequest(
                f"{asked.least} to {asked.count} machines, {asked.per_node} on a node: 1 to {MOST} can be asked for"
            )
        if len(asked.user_data) > LARGEST_USER_DATA or len(asked.token) > LONGEST_TOKEN:
            raise BadRequest(f"user data has {LARGEST_USER_DATA} bytes at most, a token {LONGEST_TOKEN} characters")
        if not 60 <= asked.seconds <= settings.longest_time:
            raise OverLimit(f"a lease of {asked.seconds:.0f} s; one has 60 to {settings.longest_time:.0f} s")
        if asked.bid is not None and (not settings.spot_queue or asked.bid < settings.min_price):
            raise LeaseDenied(f"a bid of {asked.bid:g}; the least price is {settings.min_price:g}"
                              if settings.spot_queue else "there are no spot machines here", code="Unsupported")  # fmt: skip
        usual = settings.spot_queue if asked.bid is not None else settings.queue
        wanted = replace(
            asked, queue=asked.queue or usual, account=asked.account or settings.account,
            network=asked.network or next((name for name, _ in settings.networks), ""),
            deadline=asked.deadline or self._now() + settings.queue_time,
        )  # fmt: skip
        limits = self._queue(wanted.queue)
        fitting(wanted.seconds, wanted.nodes, settings, limits.longest, quantum=limits.quantum)
        return wanted

    def _allowed(self, book: Book, owner: Owner, wanted: Wanted) -> Wanted:
        """With as many machines as policy allows. Raises LeaseDenied, NoSuchKeyPair."""
        if wanted.key and not book.find(KeyPair, owner=owner.name, name=wanted.key):
            raise NoSuchKeyPair(f"{owner.name} has no key pair {wanted.key!r}")
        policy = policy_of(self._policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(self._now()))
        for count in range(wanted.count, max(1, wanted.least or wanted.count) - 1, -1):
            fewer = replace(wanted, count=count, per_node=min(wanted.per_node, count))
            try:
                decide(fewer, policy, sums)
                return fewer
            except LeaseDenied:
                if count == max(1, wanted.least or wanted.count):
                    raise
        raise AssertionError("unreachable")

    def _written(self, book: Book, owner: Owner, wanted: Wanted, digest: str) -> tuple[Lease, list[Instance]]:
        now = self._now()
        lease = Lease(
            lease_id(), owner.name, wanted, group=owner.group, created=now, since=now, deadline=wanted.deadline
        )
        carrier, places = _riding(book, owner, wanted, now, self._settings)
        instances = [
            Instance(instance_id(), lease.id, index, owner.name, wanted.size, wanted.seconds, created=now, since=now,
                     slot=places[index] if places else "")
            for index in range(wanted.count)
        ]  # fmt: skip
        lease = replace(lease, carrier=carrier)
        book.save(None, Case(lease, tuple(instances)), now)
        book.put(*(Tag(one.id, key, value, owner.name) for one in instances for key, value in wanted.tags))
        if wanted.token:
            book.put(Token(owner.name, wanted.token, digest, lease.id))
        return lease, instances

    # -- what there is -------------------------------------------------------------------------------------------------

    def machines(self, owner: Owner) -> list[Shown]:
        """That live, or ended a while ago, by creation."""

        def look(book: Book) -> list[Shown]:
            machines = book.machines(owner.name, self._now() - self._settings.shown)
            leases = {one.id: one for one in book.find(Lease, owner=owner.name)}
            slots = {
                one.id: one
                for home in {leases[m.lease].carrier or m.lease for m in machines}
                for one in book.find(Slot, lease=home)
            }
            tags: dict[str, list[tuple[str, str]]] = {}
            for tag in book.find(Tag, owner=owner.name):
                tags.setdefault(tag.resource, []).append((tag.key, tag.value))
            return [Shown(one, leases[one.lease], slots.get(one.slot), tuple(tags.get(one.id, ()))) for one in machines]

        return self._store.read(look)

    def leases(self, owner: Owner) -> list[Lease]:
        """That live, or ended a while ago, by creation."""
        since = self._now() - self._settings.shown
        found = self._store.read(lambda book: book.find(Lease, owner=owner.name))
        return sorted(
            (one for one in found if one.is_live or one.since >= since), key=lambda one: (one.created, one.id)
        )

    # -- changes -------------------------------------------------------------------------------------------------------

    def terminate(self, owner: Owner, ids: Iterable[str]) -> list[tuple[Instance, Instance]]:
        """Each as it was and as it is now; one that waits in the queue has ended with this, and never shows as pending again. None is
        touched where one is not this owner's: raises NoSuchLease."""
        wanted = list(dict.fromkeys(ids))

        def change(book: Book) -> list[tuple[Instance, Instance]]:
            known = _of(book, owner, wanted)
            after: dict[str, Instance] = {}
            for name in sorted({one.lease for one in known}):
                case = book.case(name)
                assert case is not None
                changed = self._without(case, set(wanted))
                book.save(case, changed, self._now())
                after |= {one.id: one for one in changed.instances}
            return [(one, after[one.id]) for one in known]

        return self._store.write(change)

    def _without(self, case: Case, ids: set[str]) -> Case:
        now = self._now()
        instances = tuple(_stopping(one, now) if one.id in ids and one.is_live else one for one in case.instances)
        case = replace(case, instances=instances)
        # A lease that waits for nothing any more gives its place in the queue back.
        is_left = any(one.is_live and not one.stop for one in instances)
        has_begun = case.lease.state in (L.ACTIVE, L.DRAINING) or not case.lease.is_live
        return case if is_left or has_begun else drained(case, Cause.USER, "", now)

    def release(self, owner: Owner, id: str) -> Lease:
        """The whole lease; one that has ended stays as it is. Raises NoSuchLease."""

        def change(book: Book) -> Lease:
            case = _case(book, owner, id)
            if not case.lease.is_live or case.lease.state is L.DRAINING:
                return case.lease
            now = self._now()
            stopped = replace(
                case, instances=tuple(_stopping(one, now) if one.is_live else one for one in case.instances)
            )
            after = drained(stopped, Cause.USER, "", now)
            book.save(case, after, now)
            return after.lease

        return self._store.write(change)

    def reboot(self, owner: Owner, ids: Iterable[str]) -> list[tuple[str, Order]]:
        """Orders for slots: of all of these machines, or of none. Raises NoSuchLease, LeaseEnded."""
        known = self._store.read(lambda book: _of(book, owner, list(dict.fromkeys(ids))))
        for one in known:
            if one.state is not I.RUNNING:
                raise LeaseEnded(f"{one.id} is {one.state.value}: only a running machine can be rebooted")
        return [(one.slot, Order(Do.REBOOT, one.id)) for one in known]

    def longer(self, owner: Owner, id: str, more: float) -> int:
        """The limit that a lease's job must have (seconds from its start) before `extend` may be asked. Raises what that would."""
        return self._store.read(lambda book: self._extended(book, owner, id, more)[1])

    def extend(self, owner: Owner, id: str, more: float) -> list[str]:
        """Each machine of the lease runs so many seconds longer. Returns the slots whose pilots are to be told again. The batch
        system's limit is not changed here: see `longer`. Raises NoSuchLease, LeaseEnded, OverLimit, LeaseDenied."""

        def change(book: Book) -> list[str]:
            book.lock(f"owner {owner.name}")
            after, _, before = self._extended(book, owner, id, more)
            book.save(before, after, self._now())
            return [one.id for one in after.slots if one.state is SlotState.GO]

        return self._store.write(change)

    def _extended(self, book: Book, owner: Owner, id: str, more: float) -> tuple[Case, int, Case]:
        case, now = _case(book, owner, id), self._now()
        lease = case.lease
        if lease.state is not L.ACTIVE or lease.carrier:
            on = " on nodes of another lease" if lease.carrier else ""
            raise LeaseEnded(
                f"{id} is {lease.state.value}{on}: only an active lease with a job of its own can be extended"
            )
        wanted = replace(lease.wanted, seconds=lease.wanted.seconds + more)
        if not 0 < more <= self._settings.longest_time or wanted.seconds > self._settings.longest_time:
            raise OverLimit(
                f"{id}: {wanted.seconds:.0f} s in all; a lease has {self._settings.longest_time:.0f} s at most"
            )
        limits = self._queue(wanted.queue)
        found = fitting(wanted.seconds, wanted.nodes, self._settings, limits.longest, quantum=limits.quantum)
        live = [one for one in case.instances if one.is_live]
        policy = policy_of(self._policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(now))
        # What they have reserved already is part of what is asked for now.
        held = sum(one.size.cpus * -int(-one.seconds // 1) for one in live)
        others = replace(sums, machines=sums.machines - len(live), reserved=sums.reserved - held)
        if live:
            decide(replace(wanted, count=len(live)), policy, others)
        after = Case(
            replace(lease, wanted=wanted, ends=lease.ends + more),
            tuple(
                replace(one, seconds=one.seconds + more, deadline=one.deadline and one.deadline + more)
                if one.is_live
                else one
                for one in case.instances
            ),
            tuple(replace(one, ends=one.ends + more) if one.state is SlotState.GO else one for one in case.slots),
            case.guests,
        )
        return after, found.walltime, case


def _digest(asked: Wanted) -> str:
    return sha256(dumps(replace(asked, token="", deadline=0.0))).hexdigest()


def _by_token(book: Book, owner: Owner, token: str, digest: str) -> tuple[Lease, list[Instance]] | None:
    known = book.get(Token, f"{owner.name} {token}") if token else None
    if known is None:
        return None
    if known.digest != digest:
        raise TokenMismatch(f"token {token!r} was given with another request, which is lease {known.lease}")
    lease = book.get(Lease, known.lease)
    if lease is None:
        return None
    return lease, sorted(book.find(Instance, lease=lease.id), key=lambda one: one.index)


def _stopping(one: Instance, now: float) -> Instance:
    if one.state is I.QUEUED:
        return ended(one, Cause.USER, "", now)
    if one.state is I.STOPPING:
        return replace(one, stop=True)
    return replace(one, state=I.STOPPING, since=now, stop=True, cause=one.cause or Cause.USER)


def _case(book: Book, owner: Owner, id: str) -> Case:
    case = book.case(id)
    if case is None or case.lease.owner != owner.name:
        raise NoSuchLease(f"{owner.name} has no lease {id[:40]!r}")
    return case


def _of(book: Book, owner: Owner, ids: Sequence[str]) -> list[Instance]:
    found = []
    for id in ids:
        one = book.get(Instance, id)
        if one is None or one.owner != owner.name:
            raise NoSuchLease(f"{owner.name} has no machine {id[:40]!r}")
        found.append(one)
    return found


def _riding(book: Book, owner: Owner, wanted: Wanted, now: float, settings: Settings) -> tuple[str, list[str]]:
    """The lease of this owner on whose idle nodes there is room and time for all of it, and a node for each machine: it skips the
    batch system's queue. ("", []): there is none."""
    if not settings.linger or wanted.bid is not None or wanted.per_node > 1:
        return "", []
    takes = margins(wanted.seconds, 1, settings).pilot
    for lease in sorted(book.find(Lease, owner=owner.name, live=1), key=lambda one: one.created):
        same = lease.wanted.queue == wanted.queue and lease.wanted.bid is None and not lease.carrier
        if lease.state is not L.ACTIVE or not same:
            continue
        case = book.case(lease.id)
        if case is None or case.lease.state is not L.ACTIVE:
            continue
        busy = {one.slot for one in (*case.instances, *case.guests) if one.is_live}
        fitting_ones = [
            one.id
            for one in case.slots
            if one.state is SlotState.GO and one.id not in busy and one.ends - now >= takes
            and one.facts.cpus >= wanted.size.cpus and one.facts.memory >= wanted.size.memory + settings.overhead
        ]  # fmt: skip
        if len(fitting_ones) >= wanted.count:
            return lease.id, fitting_ones[: wanted.count]
    return "", []
