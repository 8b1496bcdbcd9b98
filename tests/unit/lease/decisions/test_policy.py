"""Who may have how much: each denial has its numbers."""

import pytest

from belljar.errors import LeaseDenied
from belljar.lease import Size, Wanted
from belljar.lease.decisions.policy import Policy, Sums, checks, decide, policy_of
from belljar.model import GIB
from belljar.records import replace

STUDENTS = Policy(
    "students", groups=("students",), machines=4, request=2, cores=2, memory=4 * GIB, disk=20 * GIB, time=7200, reserved=10, total=20,
    window=30, images=("alma*",), networks=("", "user"), queues=("", "day"),
)  # fmt: skip
STAFF = Policy("staff", users=("a??",), priority=10)
WANTED = Wanted("alma9", seconds=3600)


def test_the_first_that_fits_counts_by_priority_and_then_by_name() -> None:
    assert policy_of([STUDENTS, STAFF], "ada", "students") is STAFF
    assert policy_of([STUDENTS, STAFF], "bert", "students") is STUDENTS
    twin = replace(STUDENTS, name="all", groups=("*",))
    assert policy_of([STUDENTS, twin], "bert", "students") is twin


def test_whom_no_policy_fits_is_denied() -> None:
    with pytest.raises(LeaseDenied, match=r"no policy is for eve \(group guests\)") as caught:
        policy_of([STUDENTS, STAFF], "eve", "guests")
    assert caught.value.code == "UnauthorizedOperation"
    with pytest.raises(LeaseDenied, match="no policy is for eve"):
        policy_of([replace(STUDENTS, groups=("*",))], "eve", "")


def test_a_policy_without_limits_allows_all() -> None:
    decide(
        replace(WANTED, count=1000, size=Size(512, 10**15, 10**15), seconds=1e9),
        STAFF,
        Sums(10**6, 10**12, 10**12),
    )


def test_a_limit_that_is_just_met_is_met() -> None:
    decide(replace(WANTED, count=2, size=Size(2, 4 * GIB, 20 * GIB), seconds=7200), STUDENTS, Sums(2, 2 * 3600, 0))


def test_each_machine_counts_with_its_own_size_and_the_largest_is_what_one_may_have() -> None:
    mixed = replace(WANTED, count=3, size=Size(4), sizes=(Size(1), Size(4), Size(4)))
    (hours,) = [one.what for one in checks(mixed, STAFF, Sums()) if one.what.startswith("core-hours: 0 reserved")]
    assert hours == "core-hours: 0 reserved + 9 asked for: 9, no limit"
    with pytest.raises(LeaseDenied, match="processors of one machine: 4 of at most 2"):
        decide(mixed, replace(STAFF, cores=2), Sums())


@pytest.mark.parametrize(
    ("wanted", "sums", "why", "code"),
    [
        (replace(WANTED, count=3), Sums(), "machines of one lease: 3 of at most 2", "InstanceLimitExceeded"),
        (WANTED, Sums(machines=4), "machines: 4 there + 1 asked for = 5 of at most 4", "InstanceLimitExceeded"),
        (replace(WANTED, size=Size(cpus=4)), Sums(), "processors of one machine: 4 of at most 2", "VcpuLimitExceeded"),
        (replace(WANTED, size=Size(memory=5 * GIB)), Sums(), "MiB of memory of one machine: 5120 of at most 4096", "InstanceLimitExceeded"),
        (replace(WANTED, size=Size(disk=21 * GIB)), Sums(), "MiB of disk of one machine: 21504 of at most 20480", "InstanceLimitExceeded"),
        (replace(WANTED, seconds=7200.1), Sums(), "seconds of one lease: 7201 of at most 7200", "InstanceLimitExceeded"),
        (WANTED, Sums(reserved=9 * 3600 + 1800), "core-hours: 9.5 reserved + 1 asked for = 10.5 of at most 10", "InstanceLimitExceeded"),
        (WANTED, Sums(used=19 * 3600 + 36), "core-hours: 19.01 used in 30 days + 0 reserved + 1 asked for = 20.01 of at most 20", "InstanceLimitExceeded"),
        (replace(WANTED, image="win"), Sums(), "image 'win', of alma*", "UnauthorizedOperation"),
        (replace(WANTED, queue="night"), Sums(), "queue 'night', of the default, day", "UnauthorizedOperation"),
        (replace(WANTED, network="open"), Sums(), "network 'open', of the default, user", "UnauthorizedOperation"),
    ],
)  # fmt: skip
def test_a_denial_tells_what_is_asked_for_and_the_limit(wanted: Wanted, sums: Sums, why: str, code: str) -> None:
    with pytest.raises(LeaseDenied) as caught:
        decide(wanted, STUDENTS, sums)
    assert (str(caught.value), caught.value.code) == (f"policy students: {why}", code)


def test_many_short_machines_are_not_free() -> None:
    """Sixty of a tenth of a second: each counts as a second."""
    found = [
        one.what for one in checks(replace(WANTED, count=60, seconds=0.1), replace(STUDENTS, reserved=0.01), Sums())
    ]
    assert "core-hours: 0 reserved + 0.02 asked for = 0.02 of at most 0.01" in found


def test_a_window_looks_back_so_many_days() -> None:
    assert STUDENTS.since(100 * 86400.0) == 70 * 86400.0
    assert STAFF.since(5.0) == 0.0
