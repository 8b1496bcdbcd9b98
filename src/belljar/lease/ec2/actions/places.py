"""What there is to choose from: regions, zones, images, instance types, limits. And what a lease has none of, as valid empty lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from belljar.lease.ec2.actions.instances import Answer, moment
from belljar.lease.ec2.call import Call
from belljar.lease.ec2.desk import Image, Size
from belljar.lease.ec2.filters import select
from belljar.lease.ec2.refusals import Refused

SITE = "belljar"  # whom images belong to
SELF = ("all", "self")  # of ExecutableBy


def regions(call: Call) -> Answer:
    found = [call.desk.region]
    _check_names(call, "RegionNames", found, "region")
    readers = {"region-name": lambda one: (one,), "endpoint": lambda one: (call.endpoint,)}
    facts = {"Endpoint": call.endpoint, "OptInStatus": "opt-in-not-required"}
    return {"Regions": [{"RegionName": one, **facts} for one in select(found, call.filters(), readers)]}


def zones(call: Call) -> Answer:
    found = list(call.desk.zones())
    _check_names(call, "ZoneNames", found, "availability zone")
    _check_names(call, "ZoneIds", found, "availability zone")
    wanted = {*(call.asked.get("ZoneNames") or found)} & {*(call.asked.get("ZoneIds") or found)}
    readers = {
        "zone-name": lambda one: (one,), "zone-id": lambda one: (one,), "state": lambda one: ("available",),
        "region-name": lambda one: (call.desk.region,), "zone-type": lambda one: ("availability-zone",),
    }  # fmt: skip
    # Tools that know Amazon's regions alone ask for the zones of one of those; there is but one region here.
    filters = [one for one in call.filters() if one.get("Name") != "region-name"]
    shown = [one for one in select(found, filters, readers) if one in wanted]
    facts = {"State": "available", "RegionName": call.desk.region, "ZoneType": "availability-zone"}
    return {"AvailabilityZones": [{"ZoneName": one, "ZoneId": one, **facts} for one in shown]}


def _check_names(call: Call, parameter: str, known: list[str], what: str) -> None:
    for one in call.asked.get(parameter) or ():
        if one not in known:
            raise Refused("InvalidParameterValue", f"Invalid {what}: [{one[:60]}]")


IMAGE_FILTERS: dict[str, Callable[[Image], Any]] = {
    "image-id": lambda one: (one.id,),
    "name": lambda one: (one.name,),
    "description": lambda one: (one.note,),
    "architecture": lambda one: (one.architecture,),
    "state": lambda one: ("available",),
    "is-public": lambda one: ("true",),
    "owner-id": lambda one: (SITE,),
    "owner-alias": lambda one: (SITE,),
    "image-type": lambda one: ("machine",),
    "root-device-type": lambda one: ("instance-store",),
    "virtualization-type": lambda one: ("hvm",),
}


def images(call: Call) -> Answer:
    """All are the site's, and open to whom the site says: they are listed for those."""
    found = list(call.desk.images(call.owner))
    if call.asked.get("ImageIds"):
        found = call.of_ids("ImageIds", {one.id: one for one in found}, "ami", "InvalidAMIID")
    owners, users = call.asked.get("Owners"), call.asked.get("ExecutableUsers")
    if (owners and not {SITE, call.owner.name, "self"} & {*owners}) or (
        users and not {*SELF, call.owner.name} & {*users}
    ):
        found = []
    found = sorted(select(found, call.filters(), IMAGE_FILTERS), key=_image_order)
    page, after = call.page(found, _image_order, ids="ImageIds")
    return {"Images": [_image(one) for one in page], "NextToken": after}


def _image_order(one: Image) -> list[Any]:
    return [one.name, one.id]


def _image(one: Image) -> Answer:
    return {
        "ImageId": one.id, "Name": one.name, "ImageLocation": f"{SITE}/{one.name}", "State": "available", "OwnerId": SITE,
        "Public": True, "Architecture": one.architecture, "ImageType": "machine", "Description": one.note or None,
        "RootDeviceType": "instance-store", "RootDeviceName": "/dev/vda", "VirtualizationType": "hvm",
        "CreationDate": moment(one.created) if one.created else None,
    }  # fmt: skip


SIZE_FILTERS: dict[str, Callable[[Size], Any]] = {
    "instance-type": lambda one: (one.name,),
    "current-generation": lambda one: ("true",),
    "bare-metal": lambda one: ("false",),
    "vcpu-info.default-vcpus": lambda one: (str(one.cpus),),
    "memory-info.size-in-mib": lambda one: (str(one.memory),),
    "processor-info.supported-architecture": lambda one: ("x86_64",),
    "supported-usage-class": lambda one: ("on-demand", "spot"),
    "supported-virtualization-type": lambda one: ("hvm",),
}


def sizes(call: Call) -> Answer:
    found = {one.name: one for one in call.desk.sizes(call.owner)}
    asked = call.asked.get("InstanceTypes") or list(found)
    missing = [one for one in asked if one not in found]
    if missing:
        raise Refused("InvalidInstanceType", f"The following supplied instance types do not exist: [{missing[0][:60]}]")
    chosen = sorted(select([found[one] for one in dict.fromkeys(asked)], call.filters(), SIZE_FILTERS), key=_size_order)
    page, after = call.page(chosen, _size_order, ids="InstanceTypes")
    return {"InstanceTypes": [_size(one) for one in page], "NextToken": after}


def _size_order(one: Size) -> list[Any]:
    return [one.name]


def _size(one: Size) -> Answer:
    return {
        "InstanceType": one.name, "CurrentGeneration": True, "FreeTierEligible": False, "BareMetal": False,
        "SupportedUsageClasses": ["on-demand", "spot"], "SupportedRootDeviceTypes": ["instance-store"],
        "SupportedVirtualizationTypes": ["hvm"], "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": one.cpus, "DefaultCores": one.cpus, "DefaultThreadsPerCore": 1},
        "MemoryInfo": {"SizeInMiB": one.memory}, "InstanceStorageSupported": bool(one.disk), "BurstablePerformanceSupported": False,
        "InstanceStorageInfo": {"TotalSizeInGB": one.disk >> 10} if one.disk else None, "HibernationSupported": False,
    }  # fmt: skip


def account(call: Call) -> Answer:
    facts = {
        "supported-platforms": "VPC",
        "default-vpc": "none",
        "max-instances": str(call.desk.most_instances(call.owner)),
    }
    asked = call.asked.get("AttributeNames") or list(facts)
    return {
        "AccountAttributes": [
            {"AttributeName": name, "AttributeValues": [{"AttributeValue": facts[name]}]}
            for name in asked
            if name in facts
        ]
    }


# What a lease has none of: the answer's list, the ids that can be asked for, and how EC2 says that one is not there.
NONE: dict[str, tuple[str, Mapping[str, str]]] = {
    "DescribeSecurityGroups": ("SecurityGroups", {"GroupIds": "InvalidGroup", "GroupNames": "InvalidGroup"}),
    "DescribeVolumes": ("Volumes", {"VolumeIds": "InvalidVolume"}),
    "DescribeVpcs": ("Vpcs", {"VpcIds": "InvalidVpcID"}),
    "DescribeSubnets": ("Subnets", {"SubnetIds": "InvalidSubnetID"}),
    "DescribeAddresses": ("Addresses", {"PublicIps": "InvalidAddress", "AllocationIds": "InvalidAllocationID"}),
    "DescribeSnapshots": ("Snapshots", {"SnapshotIds": "InvalidSnapshot"}),
    "DescribeNetworkInterfaces": ("NetworkInterfaces", {"NetworkInterfaceIds": "InvalidNetworkInterfaceID"}),
}


def none(name: str, ids: Mapping[str, str], call: Call) -> Answer:
    for parameter, code in ids.items():
        if call.asked.get(parameter):
            raise Refused(f"{code}.NotFound", f"There are no {name} here")
    call.page([], lambda one: [])  # a wrong page is refused as anywhere
    return {name: []}


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "DescribeRegions": regions,
    "DescribeAvailabilityZones": zones,
    "DescribeImages": images,
    "DescribeInstanceTypes": sizes,
    "DescribeAccountAttributes": account,
    **{action: partial(none, *known) for action, known in NONE.items()},
}
