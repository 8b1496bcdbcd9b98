"""What owners ask of their leases: the same promises on both databases, and none is broken by ten that ask at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from belljar.batch import JobState
from belljar.errors import (
    BadRequest,
    KeyPairExists,
    LeaseDenied,
    LeaseEnded,
    NoSuchKeyPair,
    NoSuchLease,
    OverLimit,
    TokenMismatch,
)
from belljar.lease import (
    AccessKey,
    Do,
    Facts,
    Instance,
    InstanceState,
    KeyPair,
    Lease,
    LeaseState,
    Report,
    Settings,
    Size,
    Tell,
    Wanted,
)
from belljar.lease.advance import advance
from belljar.lease.belongings import Belongings
from belljar.lease.case import Job, Seen
from belljar.lease.desk import Desk, Owner, Queue
from belljar.lease.policy import Policy
from belljar.lease.reports import heard
from belljar.lease.store import Book, Store
from belljar.model import GIB
from belljar.records import replace

ADA, BOB = Owner("ada"), Owner("bob", "staff")
LARGE = Facts("wn1", cpus=8, memory=64 * GIB)
WANTED = Wanted("alma", seconds=600, size=Size(cpus=2))


class Site:
    """A desk, and a service that looks when it is told to."""

    def __init__(self, store: Store, settings: Settings = Settings(), *policies: Policy) -> None:  # noqa: B008
        self.store, self.settings, self.moment = store, settings, 1000.0
        self.policies = list(policies) or [Policy("all", users=("*",))]
        self.desk = Desk(store, settings, lambda: self.policies, lambda name: Queue(86400, 60), lambda: self.moment)

    def looks(self, lease: str, *jobs: Job) -> None:
        def change(book: Book) -> bool:
            case = book.case(lease)
            assert case is not None
            connected = frozenset(one.id for one in case.slots if one.is_live)
            after = advance(case, Seen(self.moment, 0.0, jobs, connected), self.settings).case
            book.save(case, after, self.moment)
            return after.lease.state is not case.lease.state

        while self.store.write(change):
            pass

    def hears(self, report: Report) -> None:
        def change(book: Book) -> None:
            case = book.case_of(report)
            answer = heard(case, report, self.moment, self.settings)
            assert case is not None and answer is not None
            book.save(case, answer.case, self.moment, report)

        self.store.write(change)

    def starts(self, lease: str) -> None:
        """Its job runs, its pilots are there, its machines run."""
        job = Job(f"belljar-{lease}-1", "77", JobState.RUNNING)
        self.looks(lease, job)
        found = self.store.read(lambda book: book.case(lease))
        assert found is not None
        for rank in range(found.lease.wanted.nodes):
            self.hears(Report(Tell.HELLO, lease, 1, rank, f"p{rank}", 0, facts=LARGE))
        self.looks(lease, job)
        for one in found.instances:
            self.hears(
                Report(
                    Tell.INSTANCE, lease, 1, one.index, f"p{one.index}", 1, instance=one.id, state=InstanceState.RUNNING
                )
            )


@pytest.fixture
def site(store: Store) -> Site:
    return Site(store)


def states(site: Site, owner: Owner = ADA) -> list[str]:
    return [one.instance.state.value for one in site.desk.machines(owner)]


def at_once(ask: Callable[[int], object], count: int = 10) -> list[object]:
    """What each got; errors, too."""
    barrier = threading.Barrier(count)

    def one(number: int) -> object:
        barrier.wait(30)
        try:
            return ask(number)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def test_ten_requests_at_once_never_pass_a_limit(store: Store) -> None:
    site = Site(store, Settings(), Policy("few", users=("*",), machines=7))
    answers = at_once(lambda number: site.desk.run(ADA, replace(WANTED, count=2)))
    denied = [one for one in answers if isinstance(one, LeaseDenied)]
    assert len(denied) == 7 and len(site.desk.machines(ADA)) == 6
    assert str(denied[0]) == "policy few: machines: 6 there + 2 asked for = 8 of at most 7"


def test_ten_times_the_same_token_at_once_is_one_lease(site: Site) -> None:
    answers = at_once(lambda number: site.desk.run(ADA, replace(WANTED, count=3, token="t-1")))
    leases = {one[0].id for one in answers}  # type: ignore[index]
    assert len(leases) == 1 and len(site.desk.machines(ADA)) == 3
    assert len({tuple(machine.id for machine in one[1]) for one in answers}) == 1  # type: ignore[index]


def test_a_token_is_its_owners_and_for_one_request_alone(site: Site) -> None:
    first, _ = site.desk.run(ADA, replace(WANTED, token="t"))
    assert site.desk.run(BOB, replace(WANTED, token="t"))[0].id != first.id
    site.moment += 5
    assert site.desk.run(ADA, replace(WANTED, token="t"))[0].id == first.id
    for other in (
        replace(WANTED, token="t", count=2),
        replace(WANTED, token="t", image="b"),
        replace(WANTED, token="t", seconds=601),
    ):
        with pytest.raises(TokenMismatch, match=first.id):
            site.desk.run(ADA, other)


def test_a_token_counts_after_its_machines_ended_and_is_forgotten_later(site: Site) -> None:
    lease, machines = site.desk.run(ADA, replace(WANTED, token="t"))
    site.desk.terminate(ADA, [machines[0].id])
    again, ended = site.desk.run(ADA, replace(WANTED, token="t"))
    assert again.id == lease.id and ended[0].state is InstanceState.TERMINATED
    site.looks(lease.id)
    site.moment += 100
    site.looks(lease.id)
    assert site.store.write(lambda book: book.forget_tokens(site.moment + 1)) == 1
    assert site.desk.run(ADA, replace(WANTED, token="t"))[0].id != lease.id


def test_between_the_least_and_the_most_as_many_as_policy_allows(store: Store) -> None:
    site = Site(store, Settings(), Policy("few", users=("*",), machines=3))
    assert len(site.desk.run(ADA, replace(WANTED, count=5, least=2))[1]) == 3
    with pytest.raises(LeaseDenied, match="3 there"):
        site.desk.run(ADA, replace(WANTED, count=5, least=2))


def test_a_changed_policy_counts_at_once(site: Site) -> None:
    site.desk.run(ADA, WANTED)
    site.policies[:] = [Policy("none", users=("bob",))]
    with pytest.raises(LeaseDenied, match="no policy is for ada"):
        site.desk.run(ADA, WANTED)
    with pytest.raises(LeaseDenied):
        site.desk.may_run(ADA, WANTED)
    assert site.desk.explain(ADA, WANTED) == [("no policy is for ada", False)]


def test_what_cannot_be_asked_for(site: Site) -> None:
    with pytest.raises(OverLimit, match=r"takes \d+ s .* gives 86400 s"):
        site.desk.run(ADA, replace(WANTED, seconds=86400))
    with pytest.raises(OverLimit, match="60 to 1209600 s"):
        site.desk.run(ADA, replace(WANTED, seconds=1))
    with pytest.raises(NoSuchKeyPair, match="'mine'"):
        site.desk.run(ADA, replace(WANTED, key="mine"))
    with pytest.raises(LeaseDenied, match="no spot machines"):
        site.desk.run(ADA, replace(WANTED, bid=1.0))
    for wrong in (replace(WANTED, count=0), replace(WANTED, count=2, least=3), replace(WANTED, user_data=b"x" * 16385)):
        with pytest.raises(BadRequest):
            site.desk.run(ADA, wrong)
    assert site.desk.machines(ADA) == []


def test_whose_it_is_sees_and_ends_it_and_nobody_else(site: Site) -> None:
    lease, machines = site.desk.run(ADA, replace(WANTED, count=2))
    assert site.desk.machines(BOB) == [] and site.desk.leases(BOB) == []
    for ask in (
        lambda: site.desk.terminate(BOB, [machines[0].id]),
        lambda: site.desk.terminate(ADA, [machines[0].id, "i-unknown"]),
        lambda: site.desk.reboot(BOB, [machines[0].id]),
        lambda: site.desk.release(BOB, lease.id),
        lambda: site.desk.extend(BOB, lease.id, 60),
    ):
        with pytest.raises(NoSuchLease):
            ask()  # type: ignore[no-untyped-call]
    assert states(site) == ["queued", "queued"]


def test_one_of_a_waiting_group_ends_at_once_and_the_others_wait_on(site: Site) -> None:
    _, machines = site.desk.run(ADA, replace(WANTED, count=3))
    ((before, after),) = site.desk.terminate(ADA, [machines[1].id])
    assert (before.state, after.state) == (InstanceState.QUEUED, InstanceState.TERMINATED)
    assert site.desk.leases(ADA)[0].state is LeaseState.REQUESTED
    site.desk.terminate(ADA, [machines[0].id, machines[2].id, machines[0].id])
    assert site.desk.leases(ADA)[0].state is LeaseState.DRAINING
    assert site.desk.terminate(ADA, [machines[1].id])[0][1].state is InstanceState.TERMINATED


def test_a_running_machine_stops_and_its_lease_follows(site: Site) -> None:
    lease, machines = site.desk.run(ADA, WANTED)
    site.starts(lease.id)
    assert states(site) == ["running"]
    assert site.desk.reboot(ADA, [machines[0].id]) == [
        (f"{lease.id}.1.0", site.desk.reboot(ADA, [machines[0].id])[0][1])
    ]
    assert site.desk.reboot(ADA, [machines[0].id])[0][1].do is Do.REBOOT
    site.desk.terminate(ADA, [machines[0].id])
    assert states(site) == ["stopping"]
    with pytest.raises(LeaseEnded, match="is stopping"):
        site.desk.reboot(ADA, [machines[0].id])


def test_a_released_lease_is_released_once(site: Site) -> None:
    lease, _ = site.desk.run(ADA, replace(WANTED, count=2))
    site.starts(lease.id)
    assert site.desk.release(ADA, lease.id).state is LeaseState.DRAINING
    assert site.desk.release(ADA, lease.id).state is LeaseState.DRAINING
    assert states(site) == ["stopping", "stopping"]


def test_an_extension_moves_every_end_and_counts_as_reserved(store: Store) -> None:
    site = Site(store, Settings(), Policy("hours", users=("*",), reserved=1))
    lease, _ = site.desk.run(ADA, WANTED)  # 1200 of 3600 core-seconds
    with pytest.raises(LeaseEnded, match="is requested"):
        site.desk.extend(ADA, lease.id, 600)
    site.starts(lease.id)
    before = site.store.read(lambda book: book.case(lease.id))
    assert site.desk.longer(ADA, lease.id, 600) == 1620  # 2 + 300 + 1200 + 32 + 30, in whole minutes
    assert site.desk.extend(ADA, lease.id, 600) == [f"{lease.id}.1.0"]
    after = site.store.read(lambda book: book.case(lease.id))
    assert before is not None and after is not None
    assert after.lease.ends == before.lease.ends + 600 and after.slots[0].ends == before.slots[0].ends + 600
    assert after.instances[0].deadline == before.instances[0].deadline + 600
    assert site.store.read(lambda book: book.sums("ada")).reserved == 2400
    with pytest.raises(LeaseDenied, match=r"0 reserved \+ 1.17 asked for = 1.17 of at most 1"):
        site.desk.extend(ADA, lease.id, 900)


def test_ten_extensions_at_once_never_pass_a_limit(store: Store) -> None:
    site = Site(store, Settings(), Policy("hours", users=("*",), reserved=1))
    lease, _ = site.desk.run(ADA, WANTED)
    site.starts(lease.id)
    answers = at_once(lambda number: site.desk.extend(ADA, lease.id, 300))
    assert sum(isinstance(one, list) for one in answers) == 4  # 1200 + 4 x 600 = 3600
    assert site.store.read(lambda book: book.sums("ada")).reserved == 3600


def test_the_owners_next_machine_takes_an_idle_node_and_skips_the_queue(store: Store) -> None:
    site = Site(store, Settings(linger=300))
    lease, machines = site.desk.run(ADA, replace(WANTED, seconds=7200))
    site.starts(lease.id)
    site.hears(
        Report(Tell.INSTANCE, lease.id, 1, 0, "p0", 2, instance=machines[0].id, state=InstanceState.TERMINATED, mono=9)
    )
    assert site.desk.run(BOB, WANTED)[0].carrier == ""
    assert site.desk.run(ADA, replace(WANTED, size=Size(cpus=16)))[0].carrier == ""
    assert site.desk.run(ADA, replace(WANTED, count=2))[0].carrier == ""
    rider, (guest,) = site.desk.run(ADA, WANTED)
    assert rider.carrier == lease.id and guest.slot == f"{lease.id}.1.0"
    assert site.desk.run(ADA, WANTED)[0].carrier == ""  # that node is taken now
    site.looks(rider.id)
    site.hears(Report(Tell.INSTANCE, lease.id, 1, 0, "p0", 3, instance=guest.id, state=InstanceState.RUNNING, mono=20))
    site.moment += 400
    site.looks(lease.id, Job(f"belljar-{lease.id}-1", "77", JobState.RUNNING))
    found = {one.id: one.state for one in site.store.read(lambda book: book.find(Lease))}
    assert found[lease.id] is LeaseState.ACTIVE and found[rider.id] is LeaseState.ACTIVE
    site.desk.release(ADA, lease.id)  # its guest goes on; so does its node
    site.looks(lease.id, Job(f"belljar-{lease.id}-1", "77", JobState.RUNNING))
    case = site.store.read(lambda book: book.case(lease.id))
    assert case is not None and [one.state.value for one in case.slots] == ["go"] and len(case.guests) == 1
    found_guest = site.store.read(lambda book: book.get(Instance, guest.id))
    assert found_guest is not None and found_guest.state is InstanceState.RUNNING


def test_ended_machines_are_listed_for_a_while(site: Site) -> None:
    _, machines = site.desk.run(ADA, WANTED)
    site.desk.terminate(ADA, [machines[0].id])
    site.moment += 3599
    assert states(site) == ["terminated"]
    site.moment += 2
    assert states(site) == []


# -- belongings --------------------------------------------------------------------------------------------------------

PAIR = KeyPair("key-1", "ada", "mine", "ssh-ed25519 AAAA", "SHA256:x")


def test_key_pairs(site: Site) -> None:
    keys = Belongings(site.store)
    added = at_once(lambda number: keys.add_key_pair(replace(PAIR, id=f"key-{number}")))
    assert sum(isinstance(one, KeyPairExists) for one in added) == 9
    assert [one.name for one in keys.key_pairs("ada")] == ["mine"] and keys.key_pairs("bob") == []
    assert site.desk.run(ADA, replace(WANTED, key="mine"))[0].wanted.key == "mine"
    keys.remove_key_pair("bob", "mine")
    assert len(keys.key_pairs("ada")) == 1
    keys.remove_key_pair("ada", "mine")
    keys.remove_key_pair("ada", "mine")
    assert keys.key_pairs("ada") == []


def test_tags(site: Site) -> None:
    tags = Belongings(site.store)
    _, (one, two) = site.desk.run(ADA, replace(WANTED, count=2, tags=(("Name", "head"),)))
    tags.tag("ada", [one.id], {"role": "nfs", "Name": "first"})
    shown = site.desk.machines(ADA)
    assert [dict(machine.tags) for machine in shown] == [{"Name": "first", "role": "nfs"}, {"Name": "head"}]
    with pytest.raises(NoSuchLease):
        tags.tag("ada", [two.id, "i-none"], {"a": "b"})
    with pytest.raises(NoSuchLease):
        tags.untag("bob", [one.id], {"role": None})
    with pytest.raises(BadRequest, match="50 are the most"):
        tags.tag("ada", [one.id], {str(number): "" for number in range(49)})
    tags.untag("ada", [one.id], {"role": "other", "Name": None})
    assert [(tag.resource, tag.key) for tag in tags.tags("ada")] == sorted([(one.id, "role"), (two.id, "Name")])


def test_consoles_are_cut_and_their_owners_alone(site: Site) -> None:
    kept = Belongings(site.store)
    _, (machine,) = site.desk.run(ADA, WANTED)
    assert kept.console("ada", machine.id).text == b""
    kept.keep_console(machine.id, b"\x00\xff" * 40_000, 5.0)
    assert (len(kept.console("ada", machine.id).text), kept.console("ada", machine.id).at) == (65536, 5.0)
    with pytest.raises(NoSuchLease):
        kept.console("bob", machine.id)


def test_a_revoked_access_key_is_none(site: Site) -> None:
    keys = Belongings(site.store)
    keys.add_access_key(AccessKey("BJ1", "ada", "staff"))
    found = keys.access_key("BJ1")
    assert found is not None and (found.owner, found.group) == ("ada", "staff")
    assert keys.revoke("BJ1") and not keys.revoke("BJ2")
    assert keys.access_key("BJ1") is None and [one.id for one in keys.access_keys("ada")] == ["BJ1"]
