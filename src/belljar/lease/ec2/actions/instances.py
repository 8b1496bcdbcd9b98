"""Instances, as they are: described, ended, rebooted, looked at. Launching them is in `launching`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from belljar.lease import LARGEST_CONSOLE
from belljar.lease.ec2.call import Call, shown
from belljar.lease.ec2.desk import STATES, Instance
from belljar.lease.ec2.filters import TAG, select
from belljar.lease.ec2.refusals import Refused

ENDED = ("shutting-down", "terminated")
Answer = Mapping[str, Any]


def _optional(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


FILTERS: dict[str, Callable[[Instance], Any]] = {
    "instance-state-name": lambda one: (one.state,),
    "instance-state-code": lambda one: (str(STATES[one.state]),),
    "instance-id": lambda one: (one.id,),
    "image-id": lambda one: (one.image,),
    "instance-type": lambda one: (one.size,),
    "key-name": lambda one: _optional(one.key_name),
    "reservation-id": lambda one: (one.lease,),
    "client-token": lambda one: _optional(one.token),
    "launch-time": lambda one: (moment(one.launched),),
    "launch-index": lambda one: (str(one.index),),
    "availability-zone": lambda one: _optional(one.zone),
    "private-ip-address": lambda one: _optional(one.address),
    "ip-address": lambda one: _optional(one.address),
    "dns-name": lambda one: _optional(one.name),
    "private-dns-name": lambda one: _optional(one.name),
    "instance-lifecycle": lambda one: ("spot",) if one.is_spot else (),
    "state-reason-code": lambda one: _optional(one.cause),
    "tag-key": lambda one: tuple(key for key, _ in one.tags),
    "tag-value": lambda one: tuple(value for _, value in one.tags),
    TAG: lambda one: one.tags,
}


def moment(when: float) -> str:
    return datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def state(name: str) -> Answer:
    return {"Code": STATES[name], "Name": name}


def order(one: Instance) -> list[Any]:
    return [one.launched, one.lease, one.index]


def named(call: Call) -> list[Instance]:
    """The instances that an action names. Raises Refused where one is not there, or none is named."""
    known = {one.id: one for one in call.desk.instances(call.owner)}
    found: list[Instance] = call.of_ids("InstanceIds", known, "i", "InvalidInstanceID")
    if not found:
        raise Refused("MissingParameter", "The request must contain the parameter InstanceId")
    return found


def chosen(call: Call) -> list[Instance]:
    """Those that a describing action is about, in their order."""
    found = call.desk.instances(call.owner)
    if call.asked.get("InstanceIds"):
        known = {one.id: one for one in found}
        found = call.of_ids("InstanceIds", known, "i", "InvalidInstanceID")
    return sorted(select(found, call.filters(), FILTERS), key=order)


def describe(call: Call) -> Answer:
    page, after = call.page(chosen(call), order, ids="InstanceIds")
    leases = ((lease, list(group)) for lease, group in groupby(page, lambda one: one.lease))
    return {"Reservations": [reservation(call, lease, found) for lease, found in leases], "NextToken": after}


def reservation(call: Call, lease: str, found: Iterable[Instance]) -> Answer:
    return {"ReservationId": lease, "OwnerId": call.owner.name, "Instances": [instance(one) for one in found]}


def instance(one: Instance) -> Answer:
    facts: dict[str, Any] = {
        "InstanceId": one.id, "ImageId": one.image, "InstanceType": one.size, "State": state(one.state),
        "AmiLaunchIndex": one.index, "LaunchTime": one.launched, "Architecture": "x86_64", "Monitoring": {"State": "disabled"},
        "Placement": {"AvailabilityZone": one.zone, "GroupName": "", "Tenancy": "default"},
        "PrivateDnsName": one.name, "PublicDnsName": one.name, "StateTransitionReason": one.why,
        "RootDeviceType": "instance-store", "RootDeviceName": "/dev/vda", "VirtualizationType": "hvm", "EbsOptimized": False,
        "ClientToken": one.token, "CpuOptions": {"CoreCount": one.cpus, "ThreadsPerCore": 1}, "Tags": shown(one.tags),
    }  # fmt: skip
    optional = {
        "KeyName": one.key_name, "PrivateIpAddress": one.address, "PublicIpAddress": one.address,
        "InstanceLifecycle": "spot" if one.is_spot else "",
        "StateReason": {"Code": one.cause, "Message": one.why or one.cause} if one.cause else None,
    }  # fmt: skip
    return facts | {name: value for name, value in optional.items() if value}


def describe_status(call: Call) -> Answer:
    with_all = call.asked.get("IncludeAllInstances", False)
    found = [one for one in chosen(call) if with_all or one.state == "running"]
    page, after = call.page(found, order, ids="InstanceIds")
    return {"InstanceStatuses": [_status(one) for one in page], "NextToken": after}


def _status(one: Instance) -> Answer:
    health = {"pending": "initializing", "running": "ok"}.get(one.state, "not-applicable")
    reach = {"ok": "passed", "initializing": "initializing"}.get(health)
    details = [{"Name": "reachability", "Status": reach}] if reach else []
    ending = {"Code": "instance-retirement", "Description": "The lease ends", "NotBefore": one.ends}
    return {
        "InstanceId": one.id, "AvailabilityZone": one.zone, "InstanceState": state(one.state),
        "SystemStatus": {"Status": health, "Details": details}, "InstanceStatus": {"Status": health, "Details": details},
        "Events": [ending] if one.ends and one.state == "running" else [],
    }  # fmt: skip


def terminate(call: Call) -> Answer:
    before = named(call)
    call.check_dry()
    call.desk.terminate(call.owner, [one.id for one in before])
    return {"TerminatingInstances": changes(call, before)}


def changes(call: Call, before: Iterable[Instance]) -> list[Answer]:
    now = {one.id: one.state for one in call.desk.instances(call.owner)}
    return [
        {"InstanceId": one.id, "PreviousState": state(one.state), "CurrentState": state(now.get(one.id, "terminated"))}
        for one in before
    ]


def reboot(call: Call) -> Answer:
    found = named(call)
    for one in found:
        if one.state != "running":
            raise Refused("IncorrectInstanceState", f"The instance '{one.id}' is {one.state}, not running")
    call.check_dry()
    call.desk.reboot(call.owner, [one.id for one in found])
    return {}


def console(call: Call) -> Answer:
    one = _the_one(call)
    call.check_dry()
    when, text = call.desk.console(call.owner, one.id)
    return {
        "InstanceId": one.id,
        "Timestamp": when or None,
        "Output": base64.b64encode(text[-LARGEST_CONSOLE:]).decode(),
    }


def describe_attribute(call: Call) -> Answer:
    one, name = _the_one(call), call.asked["Attribute"]
    call.check_dry()
    facts: dict[str, tuple[str, Any]] = {
        "instanceType": ("InstanceType", one.size),
        "disableApiTermination": ("DisableApiTermination", False),
        "instanceInitiatedShutdownBehavior": ("InstanceInitiatedShutdownBehavior", "terminate"),
        "rootDeviceName": ("RootDeviceName", "/dev/vda"),
        "ebsOptimized": ("EbsOptimized", False),
    }
    if name == "userData":
        data = call.desk.user_data(call.owner, one.id)
        return {"InstanceId": one.id, "UserData": {"Value": base64.b64encode(data).decode()} if data else {}}
    if name in ("blockDeviceMapping", "productCodes", "groupSet"):
        return {"InstanceId": one.id}
    if name not in facts:
        raise Refused("InvalidParameterValue", f"Value ({name[:60]}) for parameter attribute is invalid")
    return {"InstanceId": one.id, facts[name][0]: {"Value": facts[name][1]}}


def _the_one(call: Call) -> Instance:
    known = {one.id: one for one in call.desk.instances(call.owner)}
    asked = Call(**{**vars(call), "asked": {"InstanceIds": [call.asked["InstanceId"]]}})
    found: list[Instance] = asked.of_ids("InstanceIds", known, "i", "InvalidInstanceID")
    return found[0]


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "DescribeInstances": describe,
    "DescribeInstanceStatus": describe_status,
    "TerminateInstances": terminate,
    "RebootInstances": reboot,
    "GetConsoleOutput": console,
    "DescribeInstanceAttribute": describe_attribute,
}
