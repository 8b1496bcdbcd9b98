"""A desk in memory: what it is asked is done at once, and time passes when a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from belljar.lease import instance_id, lease_id
from belljar.lease.desk import Owner
from belljar.lease.ec2.desk import Image, Instance, KeyPair, Size, Wanted
from belljar.lease.ec2.refusals import Refused

KEY, OTHER_KEY = "BJAAAAAAAAAAAAAAAAAA", "BJBBBBBBBBBBBBBBBBBB"
SITE_KEY = b"s" * 32
IMAGES = (
    Image("ami-00000000000000001", "debian-12", 1.7e9, note="Debian 12"),
    Image("ami-00000000000000002", "worker", 1.7e9),
)
SIZES = (Size("m1.small", 1, 2048, 10240), Size("m1.large", 2, 8192), Size("t3.micro", 1, 1024))


class FakeDesk:
    region, usual_seconds = "lab", 86400.0

    def __init__(self, now: float = 1.8e9, most: int = 20) -> None:
        self.now, self.most = now, most
        self.owners = {KEY: Owner("alice", "physics"), OTHER_KEY: Owner("bob", "physics")}
        self.machines: dict[str, tuple[str, Instance]] = {}
        self.pairs: dict[tuple[str, str], KeyPair] = {}
        self.wanted: dict[str, Wanted] = {}
        self.rebooted: list[str] = []
        self.console_text = b"Debian GNU/Linux 12 ttyS0\n"

    def owner_of(self, key: str) -> Owner | None:
        return self.owners.get(key)

    def images(self, owner: Owner) -> Sequence[Image]:
        return IMAGES

    def sizes(self, owner: Owner) -> Sequence[Size]:
        return SIZES

    def zones(self) -> Sequence[str]:
        return ("batch", "spare")

    def most_instances(self, owner: Owner) -> int:
        return self.most

    def may_run(self, owner: Owner, wanted: Wanted) -> None:
        living = sum(one.state != "terminated" for one in self.instances(owner))
        if living + wanted.least > self.most:
            raise Refused("InstanceLimitExceeded", f"{living} run, {wanted.least} more would be above {self.most}")

    def run(self, owner: Owner, wanted: Wanted) -> Sequence[Instance]:
        for lease, old in self.wanted.items():
            mine = [one for who, one in self.machines.values() if one.lease == lease and who == owner.name]
            if mine and wanted.token and old.token == wanted.token:
                if old != wanted:
                    raise Refused("IdempotentParameterMismatch", "something else was asked for with this token")
                return mine
        self.may_run(owner, wanted)
        lease = lease_id()
        self.wanted[lease] = wanted
        made = [
            Instance(
                instance_id(), lease, index, "pending", wanted.image.id, wanted.size.name, self.now,
                cpus=wanted.size.cpus, zone=wanted.zone, key_name=wanted.key_name, token=wanted.token,
                is_spot=wanted.bid is not None, tags=(*wanted.tags, ("lease:state", "queued")),
            )
            for index in range(wanted.most)
        ]  # fmt: skip
        self.machines |= {one.id: (owner.name, one) for one in made}
        return made

    def instances(self, owner: Owner) -> Sequence[Instance]:
        found = [one for who, one in self.machines.values() if who == owner.name]
        return sorted(found, key=lambda one: (one.launched, one.lease, one.index))

    def change(self, ids: Iterable[str], **facts: object) -> None:
        for id in list(ids):
            owner, one = self.machines[id]
            self.machines[id] = owner, replace(one, **facts)  # type: ignore[arg-type]

    def boot(self) -> None:
        waiting = [one.id for _, one in self.machines.values() if one.state == "pending"]
        self.change(waiting, state="running", address="10.0.0.7", name="node7.example", ends=self.now + 7200)

    def terminate(self, owner: Owner, ids: Iterable[str]) -> None:
        for id in ids:
            if self.machines[id][1].state != "terminated":
                self.change([id], state="terminated", cause="Client.UserInitiatedShutdown", why="ended by its owner")

    def reboot(self, owner: Owner, ids: Iterable[str]) -> None:
        self.rebooted += ids

    def console(self, owner: Owner, id: str) -> tuple[float, bytes]:
        return self.now, self.console_text

    def user_data(self, owner: Owner, id: str) -> bytes:
        return self.wanted[self.machines[id][1].lease].user_data

    def key_pairs(self, owner: Owner) -> Sequence[KeyPair]:
        return [pair for (who, _), pair in self.pairs.items() if who == owner.name]

    def add_key_pair(self, owner: Owner, pair: KeyPair) -> None:
        self.pairs[owner.name, pair.name] = pair

    def remove_key_pair(self, owner: Owner, name: str) -> None:
        del self.pairs[owner.name, name]

    def tag(self, owner: Owner, ids: Iterable[str], tags: Mapping[str, str]) -> None:
        for id in ids:
            if id in self.machines:
                self.change([id], tags=tuple((dict(self.machines[id][1].tags) | tags).items()))
            for place, pair in self.pairs.items():
                if pair.id == id:
                    self.pairs[place] = replace(pair, tags=tuple((dict(pair.tags) | tags).items()))

    def untag(self, owner: Owner, ids: Iterable[str], tags: Mapping[str, str | None]) -> None:
        for id in ids:
            left = tuple(
                (key, value) for key, value in self.machines[id][1].tags if tags.get(key, "\0") not in (None, value)
            )
            self.change([id], tags=left)
