"""Machines on spare nodes, for a bid: EC2's older way to ask for them. One request for N machines is one lease, and N requests for
one machine each; what becomes of a request is seen from its machine."""

from __future__ import annotations

from collections.abc import Callable

from belljar.lease import Tag
from belljar.lease.clerk import Clerk
from belljar.lease.desk import Shown
from belljar.lease.ec2.actions.instances import OTHER, launched, spot_id, tags, wanted_of
from belljar.lease.ec2.call import Answer, Call
from belljar.lease.ec2.office import image_id
from belljar.lease.ec2.refusals import Refused
from belljar.lease.states import Cause, InstanceState

CANCELLED = "lease:spot-request"  # the tag of a machine that runs on, and whose request was cancelled
CODE = ("sir", "InvalidSpotInstanceRequestID")
PRODUCT, PRODUCTS = "Linux/UNIX", {"Linux/UNIX", "Linux/UNIX (Amazon VPC)"}
OPTIONS = {"SpotPrice": "MaxPrice", "Type": "SpotInstanceType"}  # what RunInstances calls them
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html; by the cause of a machine's end.
WITHOUT_NODE = {
    Cause.USER: ("cancelled", "canceled-before-fulfillment"), Cause.CAPACITY: ("closed", "schedule-expired"),
    Cause.REJECTED: ("failed", "bad-parameters"),
}  # fmt: skip
ENDED = {
    Cause.USER: "instance-terminated-by-user", Cause.GUEST: "instance-terminated-by-user", Cause.EXPIRED: "instance-terminated-by-schedule",
    Cause.SPOT: "instance-terminated-by-price", Cause.PREEMPTED: "instance-terminated-no-capacity",
}  # fmt: skip


def request(call: Call) -> Answer:
    asked, count = call.asked, call.asked.get("InstanceCount", 1)
    if asked.get("ValidFrom", 0.0) > call.now:
        raise Refused("UnsupportedOperation", "ValidFrom: a request counts from now on here")
    options = {OPTIONS.get(name, name): value for name, value in asked.items()}
    # A group comes as a whole, or not at all.
    least = count if "LaunchGroup" in asked else 1
    made = launched(call, wanted_of(call, asked.get("LaunchSpecification") or {}, least, count, options))
    return {"SpotInstanceRequests": [_shown(call, one) for one in made]}


def describe(call: Call) -> Answer:
    found = call.of_ids("SpotInstanceRequestIds", known := _requests(call), *CODE) or known.values()
    answers, ids = [_shown(call, one) for one in found], "SpotInstanceRequestIds"
    return call.listing("SpotInstanceRequests", answers, "CreateTime", "SpotInstanceRequestId", ids=ids)


def _requests(call: Call) -> dict[str, Shown]:
    machines = call.office.machines(call.owner).values()
    return {spot_id(one.instance.id): one for one in machines if one.lease.wanted.bid is not None}


def _shown(call: Call, one: Shown) -> Answer:
    wanted, machine, (state, code) = one.lease.wanted, one.instance, _status(one)
    has_node = machine.state is not InstanceState.QUEUED and bool(machine.slot)
    spec = {
        "ImageId": image_id(wanted.image_of(machine.index)), "InstanceType": wanted.type or OTHER, "KeyName": wanted.key or None,
        "Placement": {"AvailabilityZone": call.office.settings.zone},
    }  # fmt: skip
    return {
        "SpotInstanceRequestId": spot_id(machine.id), "State": state, "Type": "one-time", "SpotPrice": f"{wanted.bid:.6f}",
        "Status": {"Code": code, "Message": machine.why or one.lease.why or code, "UpdateTime": machine.since},
        "InstanceId": machine.id if has_node else None, "LaunchSpecification": spec, "CreateTime": one.lease.created,
        "LaunchedAvailabilityZone": call.office.settings.zone if has_node else None, "ProductDescription": PRODUCT,
        "ValidUntil": one.lease.deadline or None, "InstanceInterruptionBehavior": "terminate", "Tags": tags(one),
    }  # fmt: skip


def _status(one: Shown) -> tuple[str, str]:
    machine = one.instance
    if machine.state is InstanceState.QUEUED:
        return "open", "pending-evaluation" if one.lease.price is None else "capacity-not-available"
    is_cancelled = any(key == CANCELLED for key, _ in one.tags)
    if machine.is_live:
        return ("cancelled", "request-canceled-and-instance-running") if is_cancelled else ("active", "fulfilled")
    cause = machine.cause or Cause.INTERNAL
    if not machine.slot:
        return WITHOUT_NODE.get(cause, ("failed", "system-error"))
    return ("cancelled" if is_cancelled else "closed"), ENDED.get(cause, "system-error")


def cancel(call: Call) -> Answer:
    """Of a machine that runs, the request alone."""
    found: list[Shown] = call.of_ids("SpotInstanceRequestIds", _requests(call), *CODE)
    call.check_dry()
    waiting = [one.instance.id for one in found if one.instance.state is InstanceState.QUEUED]
    running = [one.instance.id for one in found if one.instance.is_live and one.instance.id not in waiting]
    call.office.leases.terminate(call.owner, waiting)
    call.write(lambda book: book.put(*(Tag(one, CANCELLED, "cancelled", call.owner.name) for one in running)))
    call.office.wake()
    after: list[Shown] = call.of_ids("SpotInstanceRequestIds", _requests(call), *CODE)
    states = [{"SpotInstanceRequestId": spot_id(one.instance.id), "State": _status(one)[0]} for one in after]
    return {"CancelledSpotInstanceRequests": states}


def history(call: Call) -> Answer:
    """The same for every type, as a part of the ordinary price; with the one that stood at StartTime."""
    office, asked = call.office, call.asked
    types = call.of_names("InstanceTypes", dict(zip(office.types, office.types, strict=True))) or office.types
    begin, end = asked.get("StartTime", 0.0), asked.get("EndTime", call.now)
    prices = Clerk(office.leases).prices()
    past = (*prices.past, (0.0, prices.least))
    stood = max(at for at, _ in past if at <= begin)
    zone, products = office.settings.zone, asked.get("ProductDescriptions") or PRODUCTS
    is_here = office.settings.spot_queue and PRODUCTS & {*products} and asked.get("AvailabilityZone", zone) == zone
    facts = {"AvailabilityZone": zone, "ProductDescription": PRODUCT}
    rows = [
        {"InstanceType": one, "Timestamp": at or begin, "SpotPrice": f"{price:.6f}", **facts}
        for one in types for at, price in past if is_here and stood <= at <= end
    ]  # fmt: skip
    return call.listing("SpotPriceHistory", rows, "-Timestamp", "InstanceType")


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "RequestSpotInstances": request, "DescribeSpotInstanceRequests": describe, "CancelSpotInstanceRequests": cancel,
    "DescribeSpotPriceHistory": history,
}  # fmt: skip
