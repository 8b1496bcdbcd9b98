"""Requests for machines on spare nodes, as boto3 makes them, follows them and takes them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lease.ec2.clients import code, wired
from tests.unit.lease.ec2.house import IMAGE, OTHER_KEY, House

from belljar.lease import Cause, Event, InstanceState
from belljar.lease.decisions.spot import PRICES

SPEC = {"ImageId": "debian-12", "InstanceType": "m1.large"}
REQUEST = {"SpotPrice": "0.5", "InstanceCount": 2, "LaunchSpecification": SPEC}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "lease")
    yield made
    made.store.close()


def states(ec2: Any, *ids: str) -> list[tuple[str, str]]:
    found = ec2.describe_spot_instance_requests(**({"SpotInstanceRequestIds": ids} if ids else {}))
    return [(one["State"], one["Status"]["Code"]) for one in found["SpotInstanceRequests"]]


def test_requests_are_followed_to_their_machines(house: House) -> None:
    ec2 = wired(house)
    tags = [{"ResourceType": "spot-instances-request", "Tags": [{"Key": "Name", "Value": "s"}]}]
    made = ec2.request_spot_instances(**REQUEST, ClientToken="t", TagSpecifications=tags)["SpotInstanceRequests"]
    again = ec2.request_spot_instances(**REQUEST, ClientToken="t", TagSpecifications=tags)["SpotInstanceRequests"]
    ids = [one["SpotInstanceRequestId"] for one in made]
    assert [one["SpotInstanceRequestId"] for one in again] == ids and len(house.machines) == 2
    (wanted,) = house.wanted
    assert (wanted.bid, wanted.count, wanted.least, wanted.type, wanted.tags) == (
        0.5,
        2,
        1,
        "m1.large",
        (("Name", "s"),),
    )
    assert states(ec2, *ids) == [("open", "pending-evaluation")] * 2
    assert made[0]["LaunchSpecification"]["ImageId"] == IMAGE and "InstanceId" not in made[0]
    house.boot()
    ec2.get_waiter("spot_instance_request_fulfilled").wait(SpotInstanceRequestIds=ids)
    for filters in (
        {"launch.instance-type": "m1.l*"},
        {"state": "active"},
        {"tag:Name": "s"},
        {"status-code": "fulfilled"},
        {"type": "one-time"},
    ):
        given = [{"Name": name, "Values": [value]} for name, value in filters.items()]
        found = ec2.describe_spot_instance_requests(Filters=given)["SpotInstanceRequests"]
        assert [one["SpotInstanceRequestId"] for one in found] == sorted(ids), filters
    (machine,) = ec2.describe_instances(InstanceIds=[found[0]["InstanceId"]])["Reservations"][0]["Instances"]
    assert (machine["InstanceLifecycle"], machine["SpotInstanceRequestId"]) == (
        "spot",
        found[0]["SpotInstanceRequestId"],
    )


def test_a_request_that_waits_is_cancelled_and_a_machine_that_runs_goes_on(house: House) -> None:
    ec2 = wired(house)
    running = [one["SpotInstanceRequestId"] for one in ec2.request_spot_instances(**REQUEST)["SpotInstanceRequests"]]
    house.boot()
    waiting = [one["SpotInstanceRequestId"] for one in ec2.request_spot_instances(**REQUEST)["SpotInstanceRequests"]]
    asked = {"SpotInstanceRequestIds": [running[0], waiting[0]]}
    assert code(ec2.cancel_spot_instance_requests, **asked, DryRun=True) == "DryRunOperation"
    cancelled = ec2.cancel_spot_instance_requests(**asked)["CancelledSpotInstanceRequests"]
    assert [one["State"] for one in cancelled] == ["cancelled"] * 2
    assert states(ec2, running[0]) == [("cancelled", "request-canceled-and-instance-running")]
    assert states(ec2, waiting[0]) == [("cancelled", "canceled-before-fulfillment")]
    assert states(ec2, running[1]) == [("active", "fulfilled")]
    assert states(ec2, waiting[1]) == [("open", "pending-evaluation")]
    ids = [one.id for one in house.machines if one.state is InstanceState.RUNNING]
    assert len(ids) == 2
    ec2.delete_tags(Resources=ids)
    assert states(ec2, running[0]) == [("cancelled", "request-canceled-and-instance-running")]


def test_prices_as_they_were(house: House) -> None:
    ec2, begun = wired(house), int(house.now) - 1000
    for at, price in ((100, 0.4), (500, 0.2)):
        house.store.write(lambda book, at=at, price=price: book.add(Event(PRICES, "price", "", str(price), begun + at)))  # type: ignore[misc]

    def told(**asked: Any) -> list[tuple[int, str]]:
        found = ec2.describe_spot_price_history(InstanceTypes=["m1.small"], **asked)["SpotPriceHistory"]
        return [(int(one["Timestamp"].timestamp()) - begun, one["SpotPrice"]) for one in found]

    assert told() == [(500, "0.200000"), (100, "0.400000"), (-begun, "0.100000")]
    assert told(StartTime=begun + 200, EndTime=begun + 300) == [(100, "0.400000")]
    assert told(StartTime=begun + 900) == [(500, "0.200000")]
    assert told(ProductDescriptions=["Windows"]) == []
    assert told(ProductDescriptions=["Linux/UNIX (Amazon VPC)"]) == told(ProductDescriptions=["Linux/UNIX"]) == told()
    assert told(StartTime=begun) == [(500, "0.200000"), (100, "0.400000"), (0, "0.100000")]
    pages = ec2.get_paginator("describe_spot_price_history").paginate(PaginationConfig={"PageSize": 5})
    assert [len(page["SpotPriceHistory"]) for page in pages] == [5, 5, 2]


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.SPOT, "instance-terminated-by-price"), (Cause.PREEMPTED, "instance-terminated-no-capacity"),
        (Cause.USER, "instance-terminated-by-user"), (Cause.EXPIRED, "instance-terminated-by-schedule"), (Cause.BOOT, "system-error"),
    ],
)  # fmt: skip
def test_an_end_says_why(house: House, cause: Cause, expected: str) -> None:
    ec2 = wired(house)
    ec2.request_spot_instances(SpotPrice="0.5", LaunchSpecification=SPEC)
    house.boot()
    house.change(*(one.id for one in house.machines), state=InstanceState.TERMINATED, cause=cause, ended=house.now)
    assert states(ec2) == [("closed", expected)]
    assert ec2.describe_instances()["Reservations"][0]["Instances"][0]["StateReason"]["Code"] == cause.value


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"Type": "persistent"}, "UnsupportedOperation"), ({"InstanceInterruptionBehavior": "stop"}, "UnsupportedOperation"),
        ({"SpotPrice": "cheap"}, "InvalidParameterValue"), ({"SpotPrice": "0.01"}, "SpotMaxPriceTooLow"), ({"InstanceCount": 0}, "InvalidParameterValue"),
        ({"ValidFrom": 4e9}, "UnsupportedOperation"), ({"LaunchSpecification": {}}, "MissingParameter"), ({"InstanceCount": 99, "LaunchGroup": "g"}, "InstanceLimitExceeded"),
        ({"LaunchSpecification": SPEC | {"KernelId": "aki-1"}}, "UnsupportedOperation"), ({"DryRun": True}, "DryRunOperation"),
        ({"ValidUntil": 1.5e9}, "InvalidParameterValue"), ({"ValidUntil": 1.5e9, "ValidFrom": 1.6e9, "DryRun": True}, "InvalidParameterValue"),
    ],
)  # fmt: skip
def test_what_cannot_be_bid_for_is_refused(house: House, asked: dict[str, Any], expected: str) -> None:
    assert code(wired(house).request_spot_instances, **REQUEST | asked) == expected
    assert not house.machines


def test_a_request_that_is_sent_again_after_its_time_is_the_same_one(house: House) -> None:
    ec2, asked = wired(house), REQUEST | {"ClientToken": "t", "ValidUntil": house.now + 60}
    made = ec2.request_spot_instances(**asked)["SpotInstanceRequests"]
    house.now += 61
    again = ec2.request_spot_instances(**asked)["SpotInstanceRequests"]
    assert [one["SpotInstanceRequestId"] for one in again] == [one["SpotInstanceRequestId"] for one in made]
    assert code(ec2.request_spot_instances, **asked | {"ClientToken": "u"}) == "InvalidParameterValue"


def test_requests_of_others_are_not_there(house: House) -> None:
    (one,) = wired(house).request_spot_instances(SpotPrice="0.5", LaunchSpecification=SPEC)["SpotInstanceRequests"]
    bob = wired(house, OTHER_KEY)
    for ask in (bob.describe_spot_instance_requests, bob.cancel_spot_instance_requests):
        for id in (one["SpotInstanceRequestId"], "sir-0123456789abcdef0"):
            assert code(ask, SpotInstanceRequestIds=[id]) == "InvalidSpotInstanceRequestID.NotFound"
    assert states(bob) == []


def test_a_request_whose_machine_has_as_many_tags_as_may_be_is_cancelled(house: House) -> None:
    ec2 = wired(house)
    made = [one["SpotInstanceRequestId"] for one in ec2.request_spot_instances(**REQUEST)["SpotInstanceRequests"]]
    house.boot()
    (one, _), tags = house.machines, [{"Key": f"k{number}", "Value": ""} for number in range(50)]
    ec2.create_tags(Resources=[one.id], Tags=tags)
    more = {"Resources": [one.id], "Tags": [{"Key": "more", "Value": ""}]}
    assert code(ec2.create_tags, **more) == code(ec2.create_tags, **more, DryRun=True) == "TagLimitExceeded"
    mine = f"sir-{one.id.removeprefix('i-')}"
    assert mine in made
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[mine])
    assert states(ec2, mine) == [("cancelled", "request-canceled-and-instance-running")]
    ec2.create_tags(Resources=[one.id], Tags=tags)  # the service's own does not count
