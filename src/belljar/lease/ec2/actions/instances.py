"""Instances: launched, described, ended, rebooted, looked at.

When they are launched, what only tunes a feature of Amazon's is let through; what would make another machine than was asked for is
refused."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_interface
from itertools import groupby
from typing import Any

from belljar.lease import LARGEST_USER_DATA, Do, Instance, Order, Size, Wanted, belongings
from belljar.lease.desk import Shown
from belljar.lease.ec2.call import DURATION, Answer, Call, Page, shown, specified
from belljar.lease.ec2.model import Shape, model, moment
from belljar.lease.ec2.office import DEFAULT, SUBNET, VPC, image_id
from belljar.lease.ec2.refusals import Refused
from belljar.lease.states import EC2, InstanceState
from belljar.model import GIB
from belljar.records import replace

OTHER = "custom"  # the type of machines whose size is not a type's
DISK = "/dev/vda"
CODE = "InvalidInstanceID"
# What we would have to do, and do not: asked for at all, or with other values than these.
UNSUPPORTED = (
    "LaunchTemplate", "KernelId", "RamdiskId", "CpuOptions", "PrivateIpAddress", "Ipv6Addresses",
    "ElasticGpuSpecification", "ElasticInferenceAccelerators", "DisableApiTermination",
)  # fmt: skip
# Options of a spot machine. MaxPrice is ignored: machines have no price here.
SPOT = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
UNLESS: dict[str, Callable[[Any], bool]] = {
    "MetadataOptions": lambda given: (
        given.get("HttpEndpoint", "enabled") == "enabled"
        and given.get("HttpTokens", "optional") in ("optional", "required")
    ),
    "HibernationOptions": lambda given: not given.get("Configured"),
    "EnclaveOptions": lambda given: not given.get("Enabled"),
    "InstanceInitiatedShutdownBehavior": lambda given: given == "terminate",
    "InstanceMarketOptions": lambda given: (
        given.get("MarketType") == "spot"
        and all(name == "MaxPrice" or SPOT.get(name) == value for name, value in given.get("SpotOptions", {}).items())
    ),
    "Placement": lambda given: given.get("Tenancy", "default") == "default" and "HostId" not in given,
}
# https://en.wikipedia.org/wiki/ISO_8601#Durations, as far as it says seconds.
ISO = re.compile(r"P(?:(\d{1,4})D)?(?:T(?:(\d{1,5})H)?(?:(\d{1,6})M)?(?:(\d{1,8})S)?)?")
UNITS = (86400, 3600, 60, 1)
ROOTS = (DISK, "/dev/sda", "/dev/sda1", "/dev/xvda")  # what it is called, here and elsewhere
VOLUME = {"VolumeSize", "VolumeType", "DeleteOnTermination", "Iops", "Throughput", "Encrypted"}
LARGEST_DISK = 65536  # GiB
METADATA = {
    "State": "applied", "HttpTokens": "optional", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled", "InstanceMetadataTags": "disabled",
}  # fmt: skip
# Their tags are the instances'.
KINDS = ("instance", "reservation", "spot-instances-request", "volume", "network-interface")


# -- launched ----------------------------------------------------------------------------------------------------------


def run(call: Call) -> Answer:
    least, most = call.asked["MinCount"], call.asked["MaxCount"]
    if not 1 <= least <= most:
        raise Refused("InvalidParameterValue", f"MinCount and MaxCount: 1 <= {least} <= {most} does not hold")
    terms = _wanted(call, call.asked, least, most)
    lease, machines = call.office.leases.run(call.owner, terms, lambda book, lease: call.check_dry())
    call.check_dry()  # the token may belong to an earlier request
    call.office.wake()
    return reservation(call, lease.id, [instance(call, Shown(machine, lease, tags=terms.tags)) for machine in machines])


def _wanted(call: Call, asked: Mapping[str, Any], least: int, most: int) -> Wanted:
    """Raises Refused."""
    wrong = [name for name in UNSUPPORTED if asked.get(name)]
    wrong += [name for name, is_usual in UNLESS.items() if name in asked and not is_usual(asked[name])]
    if wrong:
        raise Refused("UnsupportedOperation", f"{wrong[0]} is not supported here")
    tags = specified(call, *KINDS)
    duration = tags.get(DURATION)
    for name in ("AvailabilityZone", "AvailabilityZoneId"):
        zone = (asked.get("Placement") or {}).get(name)
        if zone not in (None, "", call.office.settings.zone):
            raise Refused("InvalidParameterValue", f"Invalid availability zone: [{zone[:60]}]")
    for part in (asked, *(asked.get("NetworkInterfaces") or ())):
        replace(call, asked=part).of_names("SubnetId", {SUBNET: SUBNET}, "InvalidSubnetID.NotFound")
    type_, size = _size(call, asked.get("InstanceType"))
    disk = _disk(asked.get("BlockDeviceMappings") or ()) or size.disk
    return Wanted(
        _image(call, asked.get("ImageId")), most, least, replace(size, disk=disk), type_,
        seconds_of(duration) if duration is not None else 0.0, key=asked.get("KeyName", ""),
        user_data=_user_data(asked.get("UserData", "")), tags=tuple(tags.items()), token=call.asked.get("ClientToken", ""),
        preemptible="InstanceMarketOptions" in asked, metadata=tuple((name, str(value)) for name, value in (asked.get("MetadataOptions") or {}).items()),
    )  # fmt: skip


def seconds_of(text: str) -> float:
    """`7200` or `PT2H`. Raises Refused."""
    parts = ISO.fullmatch(f"PT{text}S" if text.isdecimal() else text)
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts.groups(), UNITS, strict=True)) if parts else 0.0
    if seconds <= 0:
        raise Refused("InvalidParameterValue", f"{DURATION}={text[:40]}: give seconds, or as in PT2H")
    return seconds


def _image(call: Call, asked: str | None) -> str:
    """Its name, by that or by its id."""
    if not asked:
        raise Refused("MissingParameter", "The request must contain the parameter ImageId")
    for id, name in call.office.images().items():
        if asked in (id, name):
            return name
    if not re.fullmatch(r"ami-[0-9a-f]{8,17}", asked):
        raise Refused("InvalidAMIID.Malformed", f'Invalid id: "{asked[:60]}": neither ami-... nor the name of an image')
    raise Refused("InvalidAMIID.NotFound", f"The image id '[{asked}]' does not exist")


def _size(call: Call, asked: str | None) -> tuple[str, Size]:
    for name, size in call.office.types.items():
        if asked in (None, name):
            return name, size
    known = ", ".join(call.office.types)
    raise Refused("InvalidParameterValue", f"Invalid value '{str(asked)[:60]}' for InstanceType: one of {known}")


def _disk(mappings: Sequence[Mapping[str, Any]]) -> int:
    """Bytes; 0: nothing is said. There is but the root disk, which ends with its machine and is not encrypted."""
    mappings = [device for device in mappings if "NoDevice" not in device or device.get("DeviceName", DISK) in ROOTS]
    for device in mappings:
        ebs = device.get("Ebs", {})
        is_root = device.get("DeviceName", DISK) in ROOTS and device.keys() <= {"DeviceName", "Ebs"}
        is_ours = ebs.keys() <= VOLUME and ebs.get("DeleteOnTermination", True) and not ebs.get("Encrypted")
        if not is_root or len(mappings) > 1 or not is_ours:
            raise Refused("UnsupportedOperation", "BlockDeviceMappings: there is the root disk, with an Ebs.VolumeSize")
        if not 0 <= ebs.get("VolumeSize", 0) <= LARGEST_DISK:
            raise Refused("InvalidParameterValue", f"Ebs.VolumeSize is 1 to {LARGEST_DISK} GiB")
        return int(ebs.get("VolumeSize", 0)) * GIB
    return 0


def _user_data(text: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise Refused("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from None
    if len(data) > LARGEST_USER_DATA:
        raise Refused("InvalidUserData.Malformed", f"User data is limited to {LARGEST_USER_DATA} bytes")
    return data


# -- as they are -------------------------------------------------------------------------------------------------------


def state(machine: Instance) -> Answer:
    code, name = EC2[machine.state]
    return {"Code": code, "Name": name}


def named(call: Call, name: str = "InstanceIds") -> list[Shown]:
    """The instances that an action names. Raises Refused where one is not there, or none is named."""
    machines: list[Shown] = call.of_ids(name, call.office.machines(call.owner), "i", CODE)
    if not machines:
        raise Refused("MissingParameter", "The request must contain the parameter InstanceId")
    return machines


def _page(call: Call, show: Callable[[Call, Shown], Answer], shape: Shape, *, running: bool = False) -> Page[Shown]:
    """The named ones, or all, as `Call.page`."""
    known = call.office.machines(call.owner)
    chosen = call.of_ids("InstanceIds", known, "i", CODE) or known.values()
    chosen = [machine for machine in chosen if not running or machine.instance.state is InstanceState.RUNNING]
    place = lambda machine: [machine.lease.created, machine.lease.id, machine.instance.index]  # noqa: E731
    also = {"reservation_id": lambda machine: machine.lease.id, "owner_id": lambda machine: call.owner.name}
    return call.page(chosen, place, partial(show, call), shape, ids="InstanceIds", **also)


def describe(call: Call) -> Answer:
    shape = model().output(call.action).members["Reservations"].member.members["Instances"].member
    page, after = _page(call, instance, shape)
    groups = groupby(page, lambda pair: pair[0].lease.id)
    reservations = [reservation(call, lease, [answer for _, answer in group]) for lease, group in groups]
    return {"Reservations": reservations, "NextToken": after}


def reservation(call: Call, lease: str, answers: list[Answer]) -> Answer:
    return {"ReservationId": lease, "OwnerId": call.owner.name, "Instances": answers}


def instance(call: Call, shown_: Shown) -> Answer:
    machine, lease = shown_.instance, shown_.lease
    why, zone = machine.why or lease.why, call.office.settings.zone
    # Why it waits is the batch system's to say: EC2 has one code for it.
    cause = "pending" if state(machine)["Name"] == "pending" else machine.cause.value if machine.cause else ""
    answer: dict[str, Any] = {
        "InstanceId": machine.id, "ImageId": image_id(lease.wanted.image_of(machine.index)), "InstanceType": lease.wanted.type or OTHER, "State": state(machine),
        "AmiLaunchIndex": machine.index, "LaunchTime": lease.created, "Architecture": "x86_64", "Monitoring": {"State": "disabled"},
        "Placement": {"AvailabilityZone": zone, "AvailabilityZoneId": zone, "GroupName": "", "Tenancy": "default"},
        "PrivateDnsName": "", "PublicDnsName": "", "StateTransitionReason": why, "RootDeviceType": "instance-store",
        "RootDeviceName": DISK, "VirtualizationType": "hvm", "EbsOptimized": False, "ClientToken": lease.wanted.token,
        "VpcId": VPC, "SubnetId": SUBNET, "SecurityGroups": [DEFAULT], "SourceDestCheck": True, "MetadataOptions": METADATA | dict(lease.wanted.metadata),
        "CpuOptions": {"CoreCount": machine.size.cpus, "ThreadsPerCore": 1}, "Tags": tags(shown_),
    }  # fmt: skip
    optional = {
        "KeyName": lease.wanted.key, "PrivateIpAddress": machine.address, "PublicIpAddress": machine.address if _is_public(machine.address) else "",
        "InstanceLifecycle": "spot" if lease.wanted.preemptible else "",
        "StateReason": {"Code": cause, "Message": why or cause} if cause else None,
    }  # fmt: skip
    return answer | {name: value for name, value in optional.items() if value}


def _is_public(address: str) -> bool:
    with suppress(ValueError):
        return ip_interface(address).is_global
    return False


def tags(machine: Shown) -> list[dict[str, str]]:
    """The owner's, and how its lease stands, which no owner sets."""
    lease, ends = machine.lease, machine.instance.deadline or machine.lease.ends
    standing = {
        "state": lease.state.value, "lrm-job": lease.job, "node": machine.slot.facts.host if machine.slot else "",
        "estimated-start": moment(lease.expected) if lease.expected else "", "ends-at": moment(ends) if ends else "",
    }  # fmt: skip
    return shown((*machine.tags, *((f"lease:{name}", value) for name, value in standing.items() if value)))


def describe_status(call: Call) -> Answer:
    shape = model().output(call.action).members["InstanceStatuses"].member
    page, after = _page(call, _status, shape, running=not call.asked.get("IncludeAllInstances"))
    return {"InstanceStatuses": [answer for _, answer in page], "NextToken": after}


def _status(call: Call, shown_: Shown) -> Answer:
    machine, name = shown_.instance, state(shown_.instance)["Name"]
    health = {"pending": "initializing", "running": "ok"}.get(name, "not-applicable")
    reach = {"ok": "passed", "initializing": "initializing"}.get(health)
    status = {"Status": health, "Details": [{"Name": "reachability", "Status": reach}] if reach else []}
    ending = {"Code": "instance-retirement", "Description": "The lease ends", "NotBefore": machine.deadline}
    return {
        "InstanceId": machine.id, "AvailabilityZone": call.office.settings.zone, "InstanceState": state(machine),
        "SystemStatus": status, "InstanceStatus": status, "Events": [ending] if machine.deadline is not None and name == "running" else [],
    }  # fmt: skip


def terminate(call: Call) -> Answer:
    ids = [machine.instance.id for machine in named(call)]
    call.check_dry()
    changes = call.office.leases.terminate(call.owner, ids)
    call.office.wake()
    answers = [{"InstanceId": now.id, "PreviousState": state(was), "CurrentState": state(now)} for was, now in changes]
    return {"TerminatingInstances": answers}


def reboot(call: Call) -> Answer:
    ids = [machine.instance.id for machine in named(call)]
    orders = call.office.leases.reboot(call.owner, ids)
    call.check_dry()
    for slot, order in orders:
        call.office.order(slot, order)
    return {}


def unsupported(call: Call) -> Answer:
    """Its memory and disk are with a job of the batch system, and gone with it."""
    named(call, "InstanceIds" if "InstanceIds" in call.asked else "InstanceId")
    raise Refused("UnsupportedOperation", "A lease's machine is not stopped, started or changed: launch another one")


def console(call: Call) -> Answer:
    """As it was last sent. A machine that runs is asked for more, for the next time, or for now where that is wanted or there is none."""
    (machine,) = named(call, "InstanceId")
    call.check_dry()
    kept = partial(belongings.console, owner=call.owner.name, id=machine.instance.id)
    console = call.read(kept)
    if machine.slot is not None and machine.instance.is_live:
        if call.asked.get("Latest") or not console.text:
            call.office.console(machine.slot.id, machine.instance.id)
            console = call.read(kept)
        else:
            call.office.order(machine.slot.id, Order(Do.CONSOLE, machine.instance.id))
    text = base64.b64encode(console.text).decode()
    return {"InstanceId": machine.instance.id, "Timestamp": console.at or call.now, "Output": text}


def password(call: Call) -> Answer:
    """None: that is for Windows."""
    (machine,) = named(call, "InstanceId")
    return {"InstanceId": machine.instance.id, "Timestamp": call.now, "PasswordData": ""}


def describe_attribute(call: Call) -> Answer:
    (machine,), name = named(call, "InstanceId"), call.asked["Attribute"]
    attributes: dict[str, Any] = {
        "instanceType": machine.lease.wanted.type or OTHER, "disableApiTermination": False, "disableApiStop": False, "rootDeviceName": DISK, "ebsOptimized": False,
        "instanceInitiatedShutdownBehavior": "terminate", "userData": base64.b64encode(machine.lease.wanted.user_data).decode() or None,
    }  # fmt: skip
    if name == "groupSet":
        return {"InstanceId": machine.instance.id, "Groups": [DEFAULT]}
    if name in attributes:
        return {"InstanceId": machine.instance.id, f"{name[0].upper()}{name[1:]}": {"Value": attributes[name]}}
    if name not in model().input(call.action).members["Attribute"].enum:
        raise Refused("InvalidParameterValue", f"Value ({name[:60]}) for parameter attribute is invalid")
    return {"InstanceId": machine.instance.id}


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "RunInstances": run, "DescribeInstances": describe, "DescribeInstanceStatus": describe_status, "TerminateInstances": terminate,
    "RebootInstances": reboot, "GetConsoleOutput": console, "GetPasswordData": password, "DescribeInstanceAttribute": describe_attribute,
    "StopInstances": unsupported, "StartInstances": unsupported, "ModifyInstanceAttribute": unsupported,
}  # fmt: skip
