"""The desk that is fulfilled by what is written down of leases (`lease.desk`, `lease.belongings`): their words become EC2's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256

from belljar import lease
from belljar.lease import Settings
from belljar.lease.belongings import Belongings
from belljar.lease.desk import Desk as Leases
from belljar.lease.desk import Owner, Shown
from belljar.lease.ec2.actions.instances import moment
from belljar.lease.ec2.desk import Image, Instance, KeyPair, Size, Wanted
from belljar.lease.policy import Policy, policy_of
from belljar.lease.states import EC2
from belljar.model import MIB
from belljar.records import dataclass

WILD = "*?["
OTHER = "custom"  # the type of machines whose size is no type's


@dataclass(frozen=True)
class Service:
    """What of the service is called when something is asked. Both may be called in any thread."""

    wake: Callable[[], object]
    order: Callable[[str, lease.Order], object]  # to the pilot of a slot
    images: Callable[[], Iterable[str]] = tuple  # names that are known on this host, beside those of `lease.images`


class Office:
    """A `belljar.lease.ec2.desk.Desk`. *types*: the first is the default."""

    def __init__(
        self, leases: Leases, belongings: Belongings, settings: Settings, types: Mapping[str, lease.Size],
        policies: Callable[[], Sequence[Policy]], service: Service,
    ) -> None:  # fmt: skip
        self._leases, self._belongings, self._settings = leases, belongings, settings
        self._types, self._policies, self._service = types, policies, service
        self.region, self.usual_seconds = settings.zone, settings.default_time

    def owner_of(self, key: str) -> Owner | None:
        found = self._belongings.access_key(key)
        return Owner(found.owner, found.group) if found is not None else None

    # -- what there is to choose from ----------------------------------------------------------------------------------

    def images(self, owner: Owner) -> Sequence[Image]:
        patterns = self._settings.images
        plain = [one for one in patterns if not any(char in one for char in WILD)]
        known = [one for one in self._service.images() if any(fnmatchcase(one, pattern) for pattern in patterns)]
        return [Image(image_id(name), name) for name in dict.fromkeys([*plain, *known])]

    def sizes(self, owner: Owner) -> Sequence[Size]:
        return [Size(name, one.cpus, one.memory // MIB, one.disk // MIB) for name, one in self._types.items()]

    def zones(self) -> Sequence[str]:
        return (self._settings.zone,)

    def most_instances(self, owner: Owner) -> int:
        return policy_of(self._policies(), owner.name, owner.group).machines

    # -- instances -----------------------------------------------------------------------------------------------------

    def may_run(self, owner: Owner, wanted: Wanted) -> None:
        self._leases.may_run(owner, self._asked(wanted))

    def run(self, owner: Owner, wanted: Wanted) -> Sequence[Instance]:
        made, instances = self._leases.run(owner, self._asked(wanted))
        self._service.wake()
        return [self._shown(Shown(one, made, None, wanted.tags)) for one in instances]

    def _asked(self, wanted: Wanted) -> lease.Wanted:
        return lease.Wanted(
            wanted.image.name, wanted.most, wanted.least, self._types[wanted.size.name], wanted.size.name, wanted.seconds,
            key=wanted.key_name, user_data=wanted.user_data, tags=wanted.tags, token=wanted.token, bid=wanted.bid,
            deadline=wanted.deadline,
        )  # fmt: skip

    def instances(self, owner: Owner) -> Sequence[Instance]:
        return [self._shown(one) for one in self._leases.machines(owner)]

    def _shown(self, shown: Shown) -> Instance:
        one, of = shown.instance, shown.lease
        state = EC2[one.state][1]
        cause, why = (one.cause.value if one.cause else ""), one.why or of.why
        if state == "pending":
            cause = "pending"  # as EC2 has it; why it waits is the batch system's to say
        return Instance(
            one.id, of.id, one.index, state, image_id(of.wanted.image), of.wanted.type or OTHER, of.created,
            cpus=one.size.cpus, zone=self._settings.zone, key_name=of.wanted.key, token=of.wanted.token, address=one.address,
            cause=cause, why=why, ends=one.deadline or None, is_spot=of.wanted.bid is not None,
            tags=(*shown.tags, *_standing(shown)),
        )  # fmt: skip

    def terminate(self, owner: Owner, ids: Iterable[str]) -> None:
        self._leases.terminate(owner, ids)
        self._service.wake()

    def reboot(self, owner: Owner, ids: Iterable[str]) -> None:
        for slot, order in self._leases.reboot(owner, ids):
            self._service.order(slot, order)

    def console(self, owner: Owner, id: str) -> tuple[float, bytes]:
        """A machine that runs is asked for more, for the next time."""
        shown = self._machine(owner, id)
        if shown.slot is not None and shown.instance.is_live:
            self._service.order(shown.slot.id, lease.Order(lease.Do.CONSOLE, id))
        found = self._belongings.console(owner.name, id)
        return found.at, found.text

    def user_data(self, owner: Owner, id: str) -> bytes:
        return self._machine(owner, id).lease.wanted.user_data

    def _machine(self, owner: Owner, id: str) -> Shown:
        return next(one for one in self._leases.machines(owner) if one.instance.id == id)

    # -- key pairs and tags --------------------------------------------------------------------------------------------

    def key_pairs(self, owner: Owner) -> Sequence[KeyPair]:
        tags: dict[str, list[tuple[str, str]]] = {}
        for tag in self._belongings.tags(owner.name):
            tags.setdefault(tag.resource, []).append((tag.key, tag.value))
        return [
            KeyPair(one.id, one.name, one.public, one.fingerprint, one.created, tuple(tags.get(one.id, ())))
            for one in self._belongings.key_pairs(owner.name)
        ]

    def add_key_pair(self, owner: Owner, pair: KeyPair) -> None:
        kept = lease.KeyPair(
            pair.id, owner.name, pair.name, pair.public, pair.fingerprint, pair.public.split()[0], pair.created
        )
        self._belongings.add_key_pair(kept)
        if pair.tags:
            self._belongings.tag(owner.name, [pair.id], dict(pair.tags))

    def remove_key_pair(self, owner: Owner, name: str) -> None:
        for one in self.key_pairs(owner):
            if one.name == name:
                self._belongings.untag(owner.name, [one.id], dict.fromkeys(key for key, _ in one.tags))
        self._belongings.remove_key_pair(owner.name, name)

    def tag(self, owner: Owner, ids: Iterable[str], tags: Mapping[str, str]) -> None:
        self._belongings.tag(owner.name, ids, tags)

    def untag(self, owner: Owner, ids: Iterable[str], tags: Mapping[str, str | None]) -> None:
        self._belongings.untag(owner.name, ids, tags)


def image_id(name: str) -> str:
    """Always the same for a name: images have no other."""
    return f"ami-{sha256(name.encode()).hexdigest()[:17]}"


def _standing(shown: Shown) -> Iterable[tuple[str, str]]:
    """How its lease stands, as tags that no owner sets."""
    of = shown.lease
    facts = {
        "state": of.state.value, "lrm-job": of.job, "node": shown.slot.facts.host if shown.slot else "",
        "estimated-start": moment(of.expected) if of.expected else "", "ends-at": moment(of.ends) if of.ends else "",
    }  # fmt: skip
    return [(f"lease:{name}", value) for name, value in facts.items() if value]
