"""What owners ask of their leases: the same promises on both databases, and none is broken by ten that ask at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from belljar.errors import (
    BadRequest,
    LeaseDenied,
    MachineBusy,
    NoSuchKeyPair,
    NoSuchLease,
    NotPermitted,
    OverLimit,
)
from belljar.lease import (
    Do,
    Facts,
    Instance,
    InstanceState,
    Lease,
    LeaseState,
    Order,
    Report,
    Settings,
    Size,
    Tag,
    Tell,
    Wanted,
)
from belljar.lease.clerk import events, explain, over, usage
from belljar.lease.decisions.advance import advance
from belljar.lease.decisions.case import Seen
from belljar.lease.decisions.margins import Queue
from belljar.lease.decisions.policy import Policy
from belljar.lease.decisions.reports import heard
from belljar.lease.desk import Desk, Owner
from belljar.lease.store import Book, Store
from belljar.model import GIB
from belljar.pool import JobState
from belljar.pool import NamedJob as Job
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
            seen = Seen(self.moment, 0.0, jobs, connected)
            after = advance(case, seen, self.settings).case
            book.save(case, after, self.moment)
            return after.lease.state is not case.lease.state

        while self.store.write(change):
            pass

    def hears(self, report: Report) -> None:
        def change(book: Book) -> None:
            case = book.case(report.lease)
            assert case is not None
            book.save(case, heard(case, report, self.moment, self.settings)[0], self.moment, report)

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


def test_ten_requests_at_once_never_pass_what_may_be_used_in_all(store: Store) -> None:
    site = Site(store, Settings(), Policy("month", users=("*",), total=1, window=30))
    lease, (machine,) = site.desk.run(ADA, WANTED)
    site.starts(lease.id)
    site.moment += 600
    ended = Report(
        Tell.INSTANCE, lease.id, 1, 0, "p0", 2, instance=machine.id, state=InstanceState.TERMINATED, mono=600
    )
    site.hears(ended)  # 1200 of 3600 core-seconds are used
    answers = at_once(lambda number: site.desk.run(ADA, WANTED))
    denied = [str(one) for one in answers if isinstance(one, LeaseDenied)]
    asked = "core-hours: 0.33 used in 30 days + 0.67 reserved + 0.33 asked for = 1.33 of at most 1"
    assert len(denied) == 8 and set(denied) == {f"policy month: {asked}"}
    site.moment += 31 * 86400
    site.desk.policies = lambda: [Policy("month", users=("*",), total=1.01, window=30)]
    assert site.desk.run(ADA, WANTED)[0].state is LeaseState.REQUESTED  # what was used is too long ago to count


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
        with pytest.raises(LeaseDenied, match=first.id):
            site.desk.run(ADA, other)


def test_a_token_counts_after_its_machines_ended_and_is_forgotten_later(site: Site) -> None:
    lease, machines = site.desk.run(ADA, replace(WANTED, token="t"))
    site.desk.terminate(ADA, [machines[0].id])
    again, ended = site.desk.run(ADA, replace(WANTED, token="t"))
    assert again.id == lease.id and ended[0].state is InstanceState.TERMINATED
    site.looks(lease.id)
    site.moment += 100
    site.looks(lease.id)
    assert site.desk.run(ADA, replace(WANTED, token="t"))[0].id == lease.id
    site.moment += site.desk.settings.token_time + 1
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
    assert explain(site.desk, ADA, WANTED)[-1] == ("no policy is for ada", False)


def test_nothing_is_left_of_a_lease_when_what_goes_with_it_is_refused(site: Site) -> None:
    def refuse(book: Book, lease: Lease) -> None:
        assert book.get(Lease, lease.id) == lease
        raise BadRequest("it was a dry run")

    with pytest.raises(BadRequest, match="dry run"):
        site.desk.run(ADA, replace(WANTED, token="t", tags=(("a", "b"),)), refuse)
    kinds = (Lease, Instance, Tag)
    assert site.store.read(lambda book: [book.find(kind) for kind in kinds]) == [[], [], []]


def test_the_way_to_a_decision_ends_at_the_first_limit_that_is_not_met(store: Store) -> None:
    site = Site(store, Settings(), Policy("few", users=("*",), machines=4, request=2))
    assert explain(site.desk, ADA, replace(WANTED, count=2))[-1] == ("its job waits for nodes", True)
    assert site.desk.leases(ADA) == []
    for _ in range(3):
        site.desk.run(ADA, WANTED)
    assert explain(site.desk, ADA, replace(WANTED, count=2)) == [
        ("2 nodes for 1140 s; the default queue gives 86400 s", True),
        ("policy few is for ada", True),
        ("machines of one lease: 2 of at most 2", True),
        ("machines: 3 there + 2 asked for = 5 of at most 4", False),
    ]
    fewer = explain(site.desk, ADA, replace(WANTED, count=2, least=1))  # as `run` would grant it
    assert fewer[2] == ("1 of the 2 machines, and 1 are enough", True) and all(is_met for _, is_met in fewer)
    assert explain(site.desk, ADA, replace(WANTED, count=3, least=2))[-1][1] is False
    assert explain(site.desk, ADA, replace(WANTED, seconds=1)) == [("a lease of 1 s; one has 60 to 1209600 s", False)]


def test_what_was_used_is_told_by_the_pilots_clock_and_agrees_with_what_limits_count(site: Site) -> None:
    lease, (first, last) = site.desk.run(ADA, replace(WANTED, count=2, size=Size(cpus=3, memory=GIB // 2)))
    site.starts(lease.id)
    site.moment += 100
    ended = Report(Tell.INSTANCE, lease.id, 1, 0, "p0", 2, instance=first.id, state=InstanceState.TERMINATED, mono=61.2)
    site.hears(ended)
    one, two = sorted(usage(site.desk, ADA, {})["machines"], key=lambda one: one["ended"] or 0.0, reverse=True)
    assert (one["machine"], one["seconds"], one["ended"]) == (first.id, 62, one["began"] + 61.2)
    facts = {"core_seconds": 186, "gb_seconds": 31, "vm_minutes": 2}
    assert {name: one[name] for name in facts} == facts
    assert (two["machine"], two["ended"], two["seconds"]) == (last.id, None, 100)
    assert site.store.read(lambda book: book.sums("ada")).used == 186
    site.moment += 1000
    assert [found["machine"] for found in usage(site.desk, ADA, {"back": 500})["machines"]] == [last.id]
    root = Owner("root")
    assert len(usage(site.desk, root, {"all": True})["machines"]) == 2
    for asked in ({"all": True}, {"owner": "ada"}):
        with pytest.raises(NotPermitted, match="bob may ask for their own"):
            usage(site.desk, BOB, asked)
    with pytest.raises(NotPermitted):
        over(site.desk, BOB, {})
    with pytest.raises(BadRequest, match="back: 'x': not a number from 0 on"):
        usage(site.desk, ADA, {"back": "x"})
    new = over(site.desk, root, {})
    assert [found["machine"] for found in new["machines"]] == [first.id]
    again = over(site.desk, root, {"after": new["position"]})
    assert again == {"machines": [], "position": new["position"]}
    number, _, wall = new["position"].partition(":")
    for other in (
        f"{int(number) + 5}:{wall}",
        f"{number}:1.0",
        "nonsense",
        "9" * 30 + ":1.0",
    ):  # of records that these are older than, or that are no more
        assert [found["machine"] for found in over(site.desk, root, {"after": other})["machines"]] == [first.id]


def test_a_preemptible_lease_is_in_the_sites_queue_for_them(store: Store) -> None:
    site = Site(store, Settings(queue="normal", preemptible_queue="spare"), Policy("all", users=("*",)))
    asked = replace(WANTED, preemptible=True)
    assert [site.desk.run(ADA, one)[0].wanted.queue for one in (asked, WANTED)] == ["spare", "normal"]
    with pytest.raises(LeaseDenied, match="preemptible leases are in queue spare"):
        site.desk.run(ADA, replace(asked, queue="normal"))
    with pytest.raises(LeaseDenied, match="queue 'spare', of normal"):
        Site(store, site.settings, Policy("all", users=("*",), queues=("normal",))).desk.run(ADA, asked)


def test_a_lease_shows_its_events_to_its_owner(site: Site) -> None:
    lease, (machine,) = site.desk.run(ADA, WANTED)
    found = events(site.desk, ADA, {"lease": lease.id})["events"]
    assert [(one["of"], one["after"]) for one in found] == [(lease.id, "requested"), (machine.id, "queued")]
    rest = events(site.desk, ADA, {"lease": lease.id, "after": found[0]["position"]})["events"]
    assert rest == found[1:]
    with pytest.raises(NoSuchLease):
        events(site.desk, BOB, {"lease": lease.id})


def test_what_cannot_be_asked_for(site: Site) -> None:
    with pytest.raises(OverLimit, match=r"takes \d+ s .* gives 86400 s"):
        site.desk.run(ADA, replace(WANTED, seconds=86400))
    with pytest.raises(OverLimit, match="60 to 1209600 s"):
        site.desk.run(ADA, replace(WANTED, seconds=1))
    with pytest.raises(NoSuchKeyPair, match="'mine'"):
        site.desk.run(ADA, replace(WANTED, key="mine"))
    with pytest.raises(LeaseDenied, match="no preemptible leases"):
        site.desk.run(ADA, replace(WANTED, preemptible=True))
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
    with pytest.raises(MachineBusy, match="is stopping"):
        site.desk.reboot(ADA, [machines[0].id])


def test_a_released_lease_is_released_once(site: Site) -> None:
    lease, _ = site.desk.run(ADA, replace(WANTED, count=2))
    site.starts(lease.id)
    assert site.desk.release(ADA, lease.id).state is LeaseState.DRAINING
    assert site.desk.release(ADA, lease.id).state is LeaseState.DRAINING
    assert states(site) == ["stopping", "stopping"]


def test_an_extension_moves_every_end_and_counts_as_reserved(store: Store) -> None:
    site = Site(store, Settings(), Policy("hours", users=("*",), reserved=1))
    lease, (machine,) = site.desk.run(ADA, WANTED)  # 1200 of 3600 core-seconds
    with pytest.raises(MachineBusy, match="is requested"):
        site.desk.extend(ADA, lease.id, 600)
    site.starts(lease.id)
    before = site.store.read(lambda book: book.case(lease.id))
    assert site.desk.longer(ADA, lease.id, 600) == ("77", 1620)  # 2 + 300 + 1200 + 32 + 30, in whole minutes
    orders = site.desk.extend(ADA, lease.id, 600)
    after = site.store.read(lambda book: book.case(lease.id))
    assert before is not None and after is not None
    go = Order(Do.GO, seconds=after.slots[0].ends - site.moment)
    assert orders == [(after.slots[0].id, go), (after.slots[0].id, Order(Do.EXTEND, machine.id, seconds=1200.0))]
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


def test_ended_machines_are_listed_for_a_while(site: Site) -> None:
    _, machines = site.desk.run(ADA, WANTED)
    site.desk.terminate(ADA, [machines[0].id])
    site.moment += 3599
    assert states(site) == ["terminated"]
    site.moment += 2
    assert states(site) == []


def test_machines_of_a_private_network_have_their_addresses_at_once_and_an_unknown_network_is_refused(
    store: Store,
) -> None:
    site = Site(store, Settings(networks=(("own", "private"),), private_net="10.5.0.0/24"))
    _, machines = site.desk.run(ADA, replace(WANTED, count=2))
    assert [one.address for one in machines] == ["10.5.0.1", "10.5.0.2"]
    with pytest.raises(BadRequest, match="'other': no such class; there are own"):
        site.desk.run(ADA, replace(WANTED, network="other"))
    with pytest.raises(BadRequest, match="254 at most"):
        site.desk.run(ADA, replace(WANTED, count=255))


def test_a_lease_grows_by_machines_like_its_own_that_end_when_it_does_and_shrinks_by_single_ones(store: Store) -> None:
    site = Site(store, Settings(), Policy("few", users=("*",), machines=4))
    lease, (first, second) = site.desk.run(
        ADA, replace(WANTED, count=2, user_data=b"#!", token="t", tags=(("a", "b"),))
    )
    with pytest.raises(MachineBusy, match="requested"):
        site.desk.grow(ADA, lease.id, 1)
    site.starts(lease.id)
    site.moment += 200
    more, machines = site.desk.grow(ADA, lease.id, 2)
    usual = replace(lease.wanted, seconds=more.wanted.seconds, token="")
    assert more.wanted == usual and len(machines) == 2
    now = site.store.read(lambda book: book.get(Lease, lease.id))
    assert now is not None and more.wanted.seconds == min(lease.wanted.seconds, now.ends - site.moment)
    with pytest.raises(LeaseDenied, match="4 there \\+ 1 asked for = 5 of at most 4"):
        site.desk.grow(ADA, lease.id, 1)
    site.desk.terminate(ADA, [second.id, machines[0].id])
    site.hears(Report(Tell.INSTANCE, lease.id, 1, 1, "p1", 2, instance=second.id, state=InstanceState.TERMINATED))
    assert [one.instance.id for one in site.desk.machines(ADA) if one.instance.is_live] == [first.id, machines[1].id]
    site.moment = now.ends - 100
    again, _ = site.desk.grow(ADA, lease.id, 1)
    assert again.wanted.seconds == 100 < lease.wanted.seconds


def test_what_cannot_grow_is_refused(store: Store) -> None:
    site = Site(store, Settings(networks=(("user", "user"), ("private", "private"))))
    alone, cluster = (site.desk.run(ADA, one)[0] for one in (
        replace(WANTED, count=2, network="private"), replace(WANTED, count=2, images=("alma", "debian")),
    ))  # fmt: skip
    for lease in (alone, cluster):
        site.starts(lease.id)
        with pytest.raises(BadRequest, match="cannot grow"):
            site.desk.grow(ADA, lease.id, 1)
        with pytest.raises(NoSuchLease):
            site.desk.grow(BOB, lease.id, 1)
