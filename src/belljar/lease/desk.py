"""What owners ask of their leases: each request is one transaction, so that two of them never decide by the same sums.

Nothing is started or stopped here. What is written down is seen by the service's next look, which a caller may wake."""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext, suppress
from hashlib import sha256

from belljar.errors import BadRequest, LeaseDenied, MachineBusy, NoSuchKeyPair, NoSuchLease, OverLimit
from belljar.lease import LARGEST_USER_DATA, Instance, KeyPair, Lease, Pairs, Settings, Slot, Tag, Wanted, new_id
from belljar.lease.belongings import owned
from belljar.lease.decisions import policy as policies
from belljar.lease.decisions.advance import drained
from belljar.lease.decisions.case import Case, ended
from belljar.lease.decisions.margins import Queue, fitting, longest
from belljar.lease.decisions.policy import Policy, Sums, decide, policy_of
from belljar.lease.decisions.reports import told_again
from belljar.lease.network import address_of, class_of
from belljar.lease.orders import Do, Order
from belljar.lease.states import Cause, InstanceState, LeaseState, SlotState
from belljar.lease.store import Book, Store
from belljar.model import dumps
from belljar.records import dataclass, replace

L, I = LeaseState, InstanceState  # noqa: E741
MOST = 1000  # machines of one lease
STATES = "`belljar lease status` has the state of each."
LONGEST_TOKEN, LARGEST = 64, 1 << 50  # bytes of memory, or disk; processors: a million
Made = tuple[Lease, list[Instance]]
Also = Callable[[Book, Lease], None]


@dataclass(frozen=True)
class Owner:
    """The client of a request, as authentication found it."""

    name: str
    group: str = ""

    @classmethod
    def of(cls, account: str | int) -> Owner:
        """A user of this host, by name or uid. Raises BadRequest."""
        try:
            found = pwd.getpwnam(account) if isinstance(account, str) else pwd.getpwuid(account)
        except KeyError:
            raise BadRequest(f"{str(account)[:40]}: no such user on this host") from None
        with suppress(KeyError):
            return cls(found.pw_name, grp.getgrgid(found.pw_gid).gr_name)
        return cls(found.pw_name)

    @property
    def rules(self) -> bool:
        """May they ask for others' things? root, and the account of the service."""
        return self.name in ("root", pwd.getpwuid(os.geteuid()).pw_name)


@dataclass(frozen=True)
class Shown:
    """A machine with what belongs to it."""

    instance: Instance
    lease: Lease
    slot: Slot | None = None
    tags: Pairs = ()


class Desk:
    """*policies* and *queue* are asked at each request, so a change of theirs counts at once."""

    def __init__(self, store: Store, settings: Settings, policies: Callable[[], Sequence[Policy]],
                 queue: Callable[[str], Queue] = lambda name: Queue(), now: Callable[[], float] = time.time,
                 least_disk: Callable[[str], int | None] = lambda image: None) -> None:  # fmt: skip
        self.store, self.settings, self.policies, self.queue, self.now = store, settings, policies, queue, now
        self.least_disk = least_disk  # bytes of an image's own disk, where this host knows the image

    # -- new leases ----------------------------------------------------------------------------------------------------

    def run(self, owner: Owner, asked: Wanted, also: Also = lambda book, lease: None) -> Made:
        """Write a lease down, once for each token of an owner. Between `least` and `count` machines, as many as policy allows.
        *also*: what else that transaction writes. Raises LeaseDenied, OverLimit, NoSuchKeyPair, BadRequest."""
        wanted, digest = self.checked(asked), _digest(asked)

        def change(book: Book) -> Made:
            book.lock(f"owner {owner.name}")
            if asked.token and (found := self._by_token(book, owner, asked.token, digest)):
                return found
            lease, instances = self._written(book, owner, self.allowed(book, owner, wanted), digest)
            also(book, lease)
            return lease, instances

        return self.store.write(change)

    def grow(self, owner: Owner, id: str, count: int) -> Made:
        """So many machines more, as a lease of their own that is like this one and has the time that is left to it. Raises what
        `run` does, NoSuchLease, MachineBusy."""
        lease, now = self.store.read(lambda book: case_of(book, owner, id)).lease, self.now()
        if lease.state is not L.ACTIVE or lease.left(now) < 60:
            raise MachineBusy(f"{id} is {lease.state.value}: an active lease with a minute left can grow", hint=STATES)
        wanted = lease.wanted
        if wanted.images or address_of(self.settings, wanted.network, 0):
            what = "a cluster, and machines of a private network, are those that they began with"
            raise BadRequest(f"{id} cannot grow: {what}", hint="Ask for a new lease of the size that is wanted.")
        per_node = max(1, min(wanted.per_node, count))
        more = replace(wanted, count=count, least=0, per_node=per_node, token="")
        return self.run(owner, replace(more, seconds=min(wanted.seconds, lease.left(now))))

    def checked(self, asked: Wanted) -> Wanted:
        """With every default but the time. Raises what no policy decides."""
        settings, count = self.settings, asked.count
        if not (1 <= count <= MOST and 0 <= asked.least <= count and 1 <= asked.per_node <= count):
            numbers = f"{count} machines, {asked.least} at least, {asked.per_node} on a node"
            raise BadRequest(f"{numbers}: 1 to {MOST} can be asked for, and no more at least or on a node")
        most = max((size := asked.size).cpus << 30, size.memory, size.disk)
        if min(size.cpus, size.memory) < 1 or size.disk < 0 or most > LARGEST:
            what = f"{size.cpus} processors, {size.memory} bytes of memory, {size.disk} of disk"
            raise BadRequest(f"{what}: no size of a machine")
        for image, disk in {(asked.image_of(number), asked.size_of(number).disk) for number in range(count)}:
            if 0 < disk < (least := self.least_disk(image) or 0):
                raise BadRequest(f"a root disk of {disk >> 20} MiB: that of {image} has {least >> 20} MiB")
        if (length := len(asked.user_data)) > LARGEST_USER_DATA:
            raise BadRequest(f"user data of {length} bytes: {LARGEST_USER_DATA} are the most")
        if (length := len(asked.token)) > LONGEST_TOKEN:
            raise BadRequest(f"a token of {length} characters: {LONGEST_TOKEN} are the most")
        if asked.seconds and not 60 <= asked.seconds <= settings.longest_time:
            raise OverLimit(f"a lease of {asked.seconds:.0f} s; one has 60 to {settings.longest_time:.0f} s")
        usual = settings.preemptible_queue if asked.preemptible else settings.queue
        if asked.preemptible and (not usual or asked.queue not in ("", usual)):
            where = f"preemptible leases are in queue {usual}" if usual else "this site has no preemptible leases"
            raise LeaseDenied(where, code="Unsupported", hint="Ask without `preemptible`, or for that queue.")
        wanted = replace(asked, queue=asked.queue or usual, account=asked.account or settings.account,
                         network=class_of(settings, asked))  # fmt: skip
        if wanted.seconds:
            fitting(wanted, settings, self.queue(wanted.queue))
        return wanted

    def allowed(self, book: Book, owner: Owner, wanted: Wanted) -> Wanted:
        """With as many machines as policy allows, and a time. Raises LeaseDenied, OverLimit, NoSuchKeyPair, BadRequest."""
        if wanted.key and not book.find(KeyPair, owner=owner.name, name=wanted.key):
            raise NoSuchKeyPair(f"{owner.name} has no key pair {wanted.key!r}")
        policy = policy_of(self.policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(self.now()))
        least = max(1, wanted.least or wanted.count)
        for count in range(wanted.count, least - 1, -1):
            fewer = self.timed(replace(wanted, count=count, per_node=min(wanted.per_node, count)), policy, sums)
            with suppress(LeaseDenied) if count > least else nullcontext():
                decide(fewer, policy, sums)
                return fewer
        raise AssertionError("unreachable")

    def timed(self, wanted: Wanted, policy: Policy, sums: Sums) -> Wanted:
        """Where no time was asked for: the usual one, or the longest that queue and policy give. Raises OverLimit."""
        if wanted.seconds:
            return wanted
        settings, queue = self.settings, self.queue(wanted.queue)
        most = min(settings.longest_time, longest(wanted, settings, queue), policies.longest(wanted, policy, sums))
        wanted = replace(wanted, seconds=max(60.0, min(settings.default_time, most)))
        fitting(wanted, settings, queue)
        return wanted

    def _written(self, book: Book, owner: Owner, wanted: Wanted, digest: str) -> Made:
        now = self.now()
        deadline = now + self.settings.queue_time
        lease = Lease(
            new_id("r"), owner.name, wanted, group=owner.group, created=now, since=now, deadline=deadline, digest=digest
        )
        instances = [
            Instance(new_id("i"), lease.id, index, owner.name, wanted.size_of(index), wanted.seconds, created=now, since=now,
                     address=address_of(self.settings, wanted.network, index))
            for index in range(wanted.count)
        ]  # fmt: skip
        book.save(None, Case(lease, tuple(instances)), now)
        book.put(*(Tag(one.id, key, value, owner.name) for one in instances for key, value in wanted.tags))
        return lease, instances

    def _by_token(self, book: Book, owner: Owner, token: str, digest: str) -> Made | None:
        """What was made for it. Raises LeaseDenied where that was another request."""
        since, leases = self.now() - self.settings.token_time, book.find(Lease, owner=owner.name)
        for lease in (one for one in leases if one.wanted.token == token and (one.is_live or one.since >= since)):
            if lease.digest != digest:
                what = f"token {token!r} was given with another request, which is lease {lease.id}"
                raise LeaseDenied(
                    what, code="IdempotentParameterMismatch", hint="Use a new token for each new request."
                )
            return lease, sorted(book.find(Instance, lease=lease.id), key=lambda one: one.index)
        return None

    # -- what there is -------------------------------------------------------------------------------------------------

    def machines(self, owner: Owner) -> list[Shown]:
        """That live, or ended a while ago, by creation."""

        def look(book: Book) -> list[Shown]:
            machines = book.machines(owner.name, self.now() - self.settings.shown)
            leases = {one.id: one for one in book.find(Lease, owner=owner.name)}
            slots = {
                slot.id: slot for lease in {one.lease for one in machines} for slot in book.find(Slot, lease=lease)
            }
            tags: dict[str, list[tuple[str, str]]] = {}
            for tag in book.find(Tag, owner=owner.name):
                tags.setdefault(tag.resource, []).append((tag.key, tag.value))
            return [Shown(one, leases[one.lease], slots.get(one.slot), tuple(tags.get(one.id, ()))) for one in machines]

        return self.store.read(look)

    def leases(self, owner: Owner) -> list[Lease]:
        """That live, or ended a while ago, by creation."""
        since = self.now() - self.settings.shown
        found = self.store.read(lambda book: book.find(Lease, owner=owner.name))
        return sorted((one for one in found if one.is_live or one.since >= since), key=_age)

    # -- changes -------------------------------------------------------------------------------------------------------

    def terminate(self, owner: Owner, ids: Sequence[str]) -> list[tuple[Instance, Instance]]:
        """Each as it was and as it is now; one that waits in the queue has ended with this, and never shows as pending again. None is
        touched where one is not this owner's: raises NoSuchLease."""

        def change(book: Book) -> list[tuple[Instance, Instance]]:
            known = owned(book, owner.name, ids, Instance)
            after: dict[str, Instance] = {}
            for name in sorted({one.lease for one in known}):
                case = case_of(book, owner, name)
                changed = self._without(case, {*ids})
                book.save(case, changed, self.now())
                after |= {one.id: one for one in changed.instances}
            return [(one, after[one.id]) for one in known]

        return self.store.write(change)

    def _without(self, case: Case, ids: Container[str]) -> Case:
        now = self.now()
        instances = tuple(_stopping(one, now) if one.id in ids and one.is_live else one for one in case.instances)
        case = replace(case, instances=instances)
        # A lease that waits for nothing any more gives its place in the queue back.
        is_left = any(one.is_live and not one.stop for one in instances)
        has_begun = case.lease.state in (L.ACTIVE, L.DRAINING) or not case.lease.is_live
        return case if is_left or has_begun else drained(case, Cause.USER, "", now)

    def release(self, owner: Owner, id: str) -> Lease:
        """The whole lease; one that has ended stays as it is. Raises NoSuchLease."""

        def change(book: Book) -> Lease:
            case = case_of(book, owner, id)
            if not case.lease.is_live or case.lease.state is L.DRAINING:
                return case.lease
            after = self._without(case, {one.id for one in case.instances})
            if after.lease.state is not L.DRAINING:
                after = drained(after, Cause.USER, "", self.now())
            book.save(case, after, self.now())
            return after.lease

        return self.store.write(change)

    def reboot(self, owner: Owner, ids: Sequence[str]) -> list[tuple[str, Order]]:
        """Orders for slots: of all of these machines, or of none. Raises NoSuchLease, MachineBusy."""
        known = self.store.read(lambda book: owned(book, owner.name, ids, Instance))
        for one in known:
            if one.state is not I.RUNNING:
                raise MachineBusy(f"{one.id} is {one.state.value}: only a running machine can be rebooted", hint=STATES)
        return [(one.slot, Order(Do.REBOOT, one.id)) for one in known]

    def longer(self, owner: Owner, id: str, more: float) -> tuple[str, int]:
        """A lease's job, and the limit that it must have (seconds from its start) before `extend` may be asked. Raises what that
        would."""
        after, limit, _ = self.store.read(lambda book: self._extended(book, owner, id, more))
        return after.lease.job, limit

    def extend(self, owner: Owner, id: str, more: float) -> list[tuple[str, Order]]:
        """Each machine of the lease runs so many seconds longer. Returns orders for slots. The batch system's limit is not changed
        here: see `longer`. Raises NoSuchLease, MachineBusy, OverLimit, LeaseDenied."""

        def change(book: Book) -> list[tuple[str, Order]]:
            book.lock(f"owner {owner.name}")
            after, _, before = self._extended(book, owner, id, more)
            book.save(before, after, now := self.now())
            going = [one for one in after.slots if one.state is SlotState.GO]
            return [(slot.id, order) for slot in going for order in told_again(after, slot, now)]

        return self.store.write(change)

    def _extended(self, book: Book, owner: Owner, id: str, more: float) -> tuple[Case, int, Case]:
        case, now = case_of(book, owner, id), self.now()
        lease = case.lease
        if lease.state is not L.ACTIVE:
            raise MachineBusy(f"{id} is {lease.state.value}: only an active lease can be extended", hint=STATES)
        wanted = replace(lease.wanted, seconds=lease.wanted.seconds + more)
        longest = self.settings.longest_time
        if not 0 < more <= longest or wanted.seconds > longest:
            raise OverLimit(f"{id}: {more:.0f} s more, {wanted.seconds:.0f} s in all, of {longest:.0f} s at most")
        found = fitting(wanted, self.settings, self.queue(wanted.queue))
        live = [one for one in case.live if one.cause is None]
        policy = policy_of(self.policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(now))
        # What they have reserved already is part of what is asked for now.
        held = sum(one.size.cpus * -int(-one.seconds // 1) for one in live)
        others = replace(sums, machines=sums.machines - len(live), reserved=sums.reserved - held)
        if live:
            decide(replace(wanted, count=len(live), sizes=tuple(one.size for one in live)), policy, others)

        def later(moment: float | None) -> float | None:
            return None if moment is None else moment + more

        def longer(one: Instance) -> Instance:
            return one if one.cause else replace(one, seconds=one.seconds + more, deadline=later(one.deadline))

        slots = (replace(one, ends=later(one.ends)) if one.state is SlotState.GO else one for one in case.slots)
        after = replace(case.each(longer).but(wanted=wanted, ends=later(lease.ends)), slots=tuple(slots))
        return after, found.walltime, case


def _digest(asked: Wanted) -> str:
    return sha256(dumps(replace(asked, token=""))).hexdigest()


def _stopping(one: Instance, now: float) -> Instance:
    if one.state is I.QUEUED:
        return ended(one, Cause.USER, "", now)
    if one.state is I.STOPPING:
        return replace(one, stop=True)
    return replace(one, state=I.STOPPING, since=now, stop=True, cause=one.cause or Cause.USER)


def case_of(book: Book, owner: Owner, id: str) -> Case:
    case = book.case(id)
    if case is None or case.lease.owner != owner.name:
        raise NoSuchLease(f"{owner.name} has no lease {id[:40]!r}")
    return case


def _age(lease: Lease) -> tuple[float, str]:
    return lease.created, lease.id
