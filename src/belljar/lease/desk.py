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
            user = pwd.getpwnam(account) if isinstance(account, str) else pwd.getpwuid(account)
        except KeyError:
            raise BadRequest(f"{str(account)[:40]}: no such user on this host") from None
        with suppress(KeyError):
            return cls(user.pw_name, grp.getgrgid(user.pw_gid).gr_name)
        return cls(user.pw_name)

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
        terms, digest = self.checked(asked), sha256(dumps(replace(asked, token=""))).hexdigest()

        def change(book: Book) -> Made:
            book.lock(f"owner {owner.name}")
            if asked.token and (made := self._by_token(book, owner, asked.token, digest)):
                return made
            lease, instances = self._written(book, owner, self.allowed(book, owner, terms), digest)
            also(book, lease)
            return lease, instances

        return self.store.write(change)

    def grow(self, owner: Owner, id: str, count: int) -> Made:
        """So many machines more, as a lease of their own that is like this one and has the time that is left to it. Raises what
        `run` does, NoSuchLease, MachineBusy."""
        lease, now = self.store.read(lambda book: case_of(book, owner, id)).lease, self.now()
        if lease.state is not L.ACTIVE or lease.left(now) < 60:
            raise MachineBusy(f"{id} is {lease.state.value}: an active lease with a minute left can grow", hint=STATES)
        terms = lease.wanted
        if terms.images or address_of(self.settings, terms.network, 0):
            what = "a cluster, and machines of a private network, are those that they began with"
            raise BadRequest(f"{id} cannot grow: {what}", hint="Ask for a new lease of the size that is wanted.")
        per_node = max(1, min(terms.per_node, count))
        more = replace(terms, count=count, least=0, per_node=per_node, token="")
        return self.run(owner, replace(more, seconds=min(terms.seconds, lease.left(now))))

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
        terms = replace(asked, queue=asked.queue or usual, account=asked.account or settings.account,
                         network=class_of(settings, asked))  # fmt: skip
        if terms.seconds:
            fitting(terms, settings, self.queue(terms.queue))
        return terms

    def allowed(self, book: Book, owner: Owner, terms: Wanted) -> Wanted:
        """With as many machines as policy allows, and a time. Raises LeaseDenied, OverLimit, NoSuchKeyPair, BadRequest."""
        if terms.key and not book.find(KeyPair, owner=owner.name, name=terms.key):
            raise NoSuchKeyPair(f"{owner.name} has no key pair {terms.key!r}")
        policy = policy_of(self.policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(self.now()))
        least = max(1, terms.least or terms.count)
        for count in range(terms.count, least - 1, -1):
            fewer = self.timed(replace(terms, count=count, per_node=min(terms.per_node, count)), policy, sums)
            with suppress(LeaseDenied) if count > least else nullcontext():
                decide(fewer, policy, sums)
                return fewer
        raise AssertionError("unreachable")

    def timed(self, terms: Wanted, policy: Policy, sums: Sums) -> Wanted:
        """Where no time was asked for: the usual one, or the longest that queue and policy give. Raises OverLimit."""
        if terms.seconds:
            return terms
        settings, queue = self.settings, self.queue(terms.queue)
        most = min(settings.longest_time, longest(terms, settings, queue), policies.longest(terms, policy, sums))
        terms = replace(terms, seconds=max(60.0, min(settings.default_time, most)))
        fitting(terms, settings, queue)
        return terms

    def _written(self, book: Book, owner: Owner, terms: Wanted, digest: str) -> Made:
        now = self.now()
        lease = Lease(new_id("r"), owner.name, terms, group=owner.group, created=now, since=now, digest=digest,
                      deadline=now + self.settings.queue_time)  # fmt: skip
        instances = [
            Instance(new_id("i"), lease.id, index, owner.name, terms.size_of(index), terms.seconds, created=now, since=now,
                     address=address_of(self.settings, terms.network, index))
            for index in range(terms.count)
        ]  # fmt: skip
        book.save(None, Case(lease, tuple(instances)), now)
        book.put(*(Tag(machine.id, key, value, owner.name) for machine in instances for key, value in terms.tags))
        return lease, instances

    def _by_token(self, book: Book, owner: Owner, token: str, digest: str) -> Made | None:
        """What was made for it. Raises LeaseDenied where that was another request."""
        since = self.now() - self.settings.token_time
        leases = (lease for lease in book.find(Lease, owner=owner.name) if lease.is_live or lease.since >= since)
        for lease in (lease for lease in leases if lease.wanted.token == token):
            if lease.digest != digest:
                what = f"token {token!r} was given with another request, which is lease {lease.id}"
                raise LeaseDenied(
                    what, code="IdempotentParameterMismatch", hint="Use a new token for each new request."
                )
            return lease, sorted(book.find(Instance, lease=lease.id), key=lambda machine: machine.index)
        return None

    # -- what there is -------------------------------------------------------------------------------------------------

    def machines(self, owner: Owner) -> list[Shown]:
        """That live, or ended a while ago, by creation."""

        def look(book: Book) -> list[Shown]:
            machines = book.machines(owner.name, self.now() - self.settings.shown)
            leases = {lease.id: lease for lease in book.find(Lease, owner=owner.name)}
            ids = {machine.lease for machine in machines}
            slots = {slot.id: slot for id in ids for slot in book.find(Slot, lease=id)}
            tags: dict[str, list[tuple[str, str]]] = {}
            for tag in book.find(Tag, owner=owner.name):
                tags.setdefault(tag.resource, []).append((tag.key, tag.value))
            return [
                Shown(machine, leases[machine.lease], slots.get(machine.slot), tuple(tags.get(machine.id, ())))
                for machine in machines
            ]

        return self.store.read(look)

    def leases(self, owner: Owner) -> list[Lease]:
        """That live, or ended a while ago, by creation."""
        since = self.now() - self.settings.shown
        leases = self.store.read(lambda book: book.find(Lease, owner=owner.name))
        recent = (lease for lease in leases if lease.is_live or lease.since >= since)
        return sorted(recent, key=lambda lease: (lease.created, lease.id))

    # -- changes -------------------------------------------------------------------------------------------------------

    def terminate(self, owner: Owner, ids: Sequence[str]) -> list[tuple[Instance, Instance]]:
        """Each as it was and as it is now; one that waits in the queue has ended with this, and never shows as pending again. None is
        touched where one is not this owner's: raises NoSuchLease."""

        def change(book: Book) -> list[tuple[Instance, Instance]]:
            known = owned(book, owner.name, ids, Instance)
            after: dict[str, Instance] = {}
            for name in sorted({machine.lease for machine in known}):
                case = case_of(book, owner, name)
                changed = self._without(case, {*ids})
                book.save(case, changed, self.now())
                after |= {machine.id: machine for machine in changed.instances}
            return [(machine, after[machine.id]) for machine in known]

        return self.store.write(change)

    def _without(self, case: Case, ids: Container[str]) -> Case:
        now = self.now()
        case = case.each(lambda machine: _stopping(machine, now) if machine.id in ids else machine)
        # A lease that waits for nothing any more gives its place in the queue back.
        is_left = any(not machine.stop for machine in case.live)
        has_begun = case.lease.state in (L.ACTIVE, L.DRAINING) or not case.lease.is_live
        return case if is_left or has_begun else drained(case, Cause.USER, "", now)

    def release(self, owner: Owner, id: str) -> Lease:
        """The whole lease; one that has ended stays as it is. Raises NoSuchLease."""

        def change(book: Book) -> Lease:
            case = case_of(book, owner, id)
            if not case.lease.is_live or case.lease.state is L.DRAINING:
                return case.lease
            after = self._without(case, {machine.id for machine in case.instances})
            if after.lease.state is not L.DRAINING:
                after = drained(after, Cause.USER, "", self.now())
            book.save(case, after, self.now())
            return after.lease

        return self.store.write(change)

    def reboot(self, owner: Owner, ids: Sequence[str]) -> list[tuple[str, Order]]:
        """Orders for slots: of all of these machines, or of none. Raises NoSuchLease, MachineBusy."""
        known = self.store.read(lambda book: owned(book, owner.name, ids, Instance))
        if busy := next((machine for machine in known if machine.state is not I.RUNNING), None):
            raise MachineBusy(f"{busy.id} is {busy.state.value}: only a running machine can be rebooted", hint=STATES)
        return [(machine.slot, Order(Do.REBOOT, machine.id)) for machine in known]

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
            going = [slot for slot in after.slots if slot.state is SlotState.GO]
            return [(slot.id, order) for slot in going for order in told_again(after, slot, now)]

        return self.store.write(change)

    def _extended(self, book: Book, owner: Owner, id: str, more: float) -> tuple[Case, int, Case]:
        case, now = case_of(book, owner, id), self.now()
        lease = case.lease
        if lease.state is not L.ACTIVE:
            raise MachineBusy(f"{id} is {lease.state.value}: only an active lease can be extended", hint=STATES)
        terms = replace(lease.wanted, seconds=lease.wanted.seconds + more)
        longest = self.settings.longest_time
        if not 0 < more <= longest or terms.seconds > longest:
            raise OverLimit(f"{id}: {more:.0f} s more, {terms.seconds:.0f} s in all, of {longest:.0f} s at most")
        times = fitting(terms, self.settings, self.queue(terms.queue))
        live = [machine for machine in case.live if machine.cause is None]
        policy = policy_of(self.policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(now))
        # What they have reserved already is part of what is asked for now.
        held = sum(machine.size.cpus * -int(-machine.seconds // 1) for machine in live)
        others = replace(sums, machines=sums.machines - len(live), reserved=sums.reserved - held)
        if live:
            decide(replace(terms, count=len(live), sizes=tuple(machine.size for machine in live)), policy, others)

        def later(moment: float | None) -> float | None:
            return None if moment is None else moment + more

        def longer(machine: Instance) -> Instance:
            end = later(machine.deadline)
            return machine if machine.cause else replace(machine, seconds=machine.seconds + more, deadline=end)

        slots = (replace(slot, ends=later(slot.ends)) if slot.state is SlotState.GO else slot for slot in case.slots)
        after = replace(case.each(longer).but(wanted=terms, ends=later(lease.ends)), slots=tuple(slots))
        return after, times.walltime, case


def _stopping(machine: Instance, now: float) -> Instance:
    if machine.state is I.QUEUED:
        return ended(machine, Cause.USER, "", now)
    if machine.state is I.STOPPING:
        return replace(machine, stop=True)
    return replace(machine, state=I.STOPPING, since=now, stop=True, cause=machine.cause or Cause.USER)


def case_of(book: Book, owner: Owner, id: str) -> Case:
    case = book.case(id)
    if case is None or case.lease.owner != owner.name:
        raise NoSuchLease(f"{owner.name} has no lease {id[:40]!r}")
    return case
