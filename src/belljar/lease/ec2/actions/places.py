"""What there is to choose from: regions, zones, images, instance types, limits. And what a lease has none of, as valid empty lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from belljar.lease import Size
from belljar.lease.decisions.policy import policy_of
from belljar.lease.ec2.actions.instances import DISK
from belljar.lease.ec2.call import Answer, Call
from belljar.lease.ec2.model import elements, model, moment
from belljar.lease.ec2.office import DEFAULT, SUBNET, VPC
from belljar.model import GIB, MIB
from belljar.records import replace

SITE = "belljar"  # whom images belong to


def regions(call: Call) -> Answer:
    name = call.office.settings.zone
    call.of_names("RegionNames", {name: name})
    region = {"RegionName": name, "Endpoint": call.endpoint, "OptInStatus": "opt-in-not-required"}
    return call.listing("Regions", [region], "RegionName")


def zones(call: Call) -> Answer:
    """Tools that know Amazon's regions alone ask for the zones of one of those: there is but one region here, by whatever name."""
    name = call.office.settings.zone
    for parameter in ("ZoneNames", "ZoneIds"):
        call.of_names(parameter, {name: name})
    by_region = [filter for filter in call.filters if filter.get("Name") == "region-name"]
    regions = [value for filter in by_region for value in filter.get("Values", ())]
    asked = {**call.asked, "Filters": [filter for filter in call.filters if filter not in by_region]}
    zone = {
        "ZoneName": name, "ZoneId": name, "State": "available", "RegionName": next(iter(regions), name), "ZoneType": "availability-zone",
        "GroupName": name, "OptInStatus": "opt-in-not-required",
    }  # fmt: skip
    return replace(call, asked=asked).listing("AvailabilityZones", [zone], "ZoneName")


def images(call: Call) -> Answer:
    """All are the site's, and open to whom the site says: they are listed for those."""
    created = call.office.known()
    known = {id: _image(id, name, created.get(name, 0.0)) for id, name in call.office.images().items()}
    images = call.of_ids("ImageIds", known, "ami", "InvalidAMIID") or known.values()
    owners, users = call.asked.get("Owners"), call.asked.get("ExecutableUsers")
    is_not_ours = owners and not {SITE, call.owner.name, "self"} & {*owners}
    if is_not_ours or (users and not {"all", "self", call.owner.name} & {*users}):
        images = []
    return call.listing("Images", images, "Name", "ImageId", ids="ImageIds")


def _image(id: str, name: str, created: float) -> Answer:
    """Clients look for the newest one: an image that this host does not know is the oldest."""
    return {
        "ImageId": id, "Name": name, "ImageLocation": f"{SITE}/{name}", "State": "available", "OwnerId": SITE, "ImageOwnerAlias": SITE,
        "Public": True, "Architecture": "x86_64", "ImageType": "machine", "RootDeviceType": "instance-store", "RootDeviceName": DISK,
        "VirtualizationType": "hvm", "CreationDate": moment(created),
    }  # fmt: skip


def sizes(call: Call) -> Answer:
    known = {name: _size(name, size) for name, size in call.office.types.items()}
    types = call.of_names("InstanceTypes", known, "InvalidInstanceType") or known.values()
    return call.listing("InstanceTypes", types, "InstanceType", ids="InstanceTypes")


def _size(name: str, size: Size) -> Answer:
    return {
        "InstanceType": name, "CurrentGeneration": True, "FreeTierEligible": False, "BareMetal": False,
        "SupportedUsageClasses": ["on-demand", "spot"], "SupportedRootDeviceTypes": ["instance-store"],
        "SupportedVirtualizationTypes": ["hvm"], "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": size.cpus, "DefaultCores": size.cpus, "DefaultThreadsPerCore": 1},
        "MemoryInfo": {"SizeInMiB": size.memory // MIB}, "InstanceStorageSupported": bool(size.disk), "BurstablePerformanceSupported": False,
        "InstanceStorageInfo": {"TotalSizeInGB": size.disk // GIB} if size.disk else None, "HibernationSupported": False,
    }  # fmt: skip


def account(call: Call) -> Answer:
    most = policy_of(call.office.leases.policies(), call.owner.name, call.owner.group).machines
    attributes = {"supported-platforms": "VPC", "default-vpc": VPC, "max-instances": str(most)}
    asked = [name for name in call.asked.get("AttributeNames") or attributes if name in attributes]
    rows = [{"AttributeName": name, "AttributeValues": [{"AttributeValue": attributes[name]}]} for name in asked]
    return {"AccountAttributes": rows}


def offerings(call: Call) -> Answer:
    kind, zone = call.asked.get("LocationType", "region"), call.office.settings.zone
    rows = [{"InstanceType": name, "LocationType": kind, "Location": zone} for name in call.office.types]
    return call.listing("InstanceTypeOfferings", rows, "InstanceType")


def network(call: Call) -> Answer:
    """The default one: tools look for it before they launch, and find machines by it."""
    zone, cidr = call.office.settings.zone, call.office.settings.private_net
    here = {"AvailabilityZone": zone, "AvailabilityZoneId": zone, "DefaultForAz": True, "MapPublicIpOnLaunch": False}
    kinds: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "DescribeVpcs": ("Vpcs", "VpcId", "VpcID", {"CidrBlock": cidr, "IsDefault": True, "InstanceTenancy": "default", "State": "available"}),
        "DescribeSubnets": ("Subnets", "SubnetId", "SubnetID", {"SubnetId": SUBNET, "CidrBlock": cidr, "State": "available", **here}),
        "DescribeSecurityGroups": ("SecurityGroups", "GroupId", "Group", {**DEFAULT, "Description": "the default one"}),
    }  # fmt: skip
    member, key, code, fields = kinds[call.action]
    row: dict[str, Any] = {"OwnerId": call.owner.name, "VpcId": VPC, **fields}
    for name, id in ((f"{key}s", row[key]), ("GroupNames", "default")):
        call.of_names(name, {id: row}, f"Invalid{code}.NotFound")
    return call.listing(member, [row], key, ids=f"{key}s")


def attribute(call: Call) -> Answer:
    """For the default network: it does nothing of what Amazon's may do by itself."""
    name: str = call.asked["Attribute"]
    call.of_names("VpcId", {VPC: VPC}, "InvalidVpcID.NotFound")
    return {"VpcId": VPC, f"{name[0].upper()}{name[1:]}": {"Value": False}}


# What a lease has none of, and how EC2 says that one is not there which is asked for by id or name.
NONE = {
    "DescribeVolumes": "InvalidVolume", "DescribeAddresses": "InvalidAddress", "DescribeSnapshots": "InvalidSnapshot", "DescribeNetworkInterfaces": "InvalidNetworkInterfaceID",
    "DescribePlacementGroups": "InvalidPlacementGroup", "DescribeReservedInstances": "InvalidReservedInstancesId", "DescribeRouteTables": "InvalidRouteTableID",
    "DescribeInternetGateways": "InvalidInternetGatewayID", "DescribeLaunchTemplates": "InvalidLaunchTemplateId",
}  # fmt: skip


def none(call: Call) -> Answer:
    """The answer's list, and what can be asked for by id, are those of the model."""
    for name in call.asked:
        if name.endswith(("Ids", "Names", "Ips")) and name not in ("OwnerIds", "RestorableByUserIds"):
            call.of_names(name, {}, f"{NONE[call.action]}.NotFound")
    replace(call, asked={**call.asked, "Filters": ()}).page([], list, dict, None)  # a wrong page is refused as anywhere
    return {next(name for name, _, member in elements(model().output(call.action)) if member.type_name == "list"): []}


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "DescribeRegions": regions, "DescribeAvailabilityZones": zones, "DescribeImages": images, "DescribeInstanceTypes": sizes,
    "DescribeAccountAttributes": account, "DescribeInstanceTypeOfferings": offerings, **dict.fromkeys(NONE, none),
    "DescribeVpcAttribute": attribute, **dict.fromkeys(("DescribeVpcs", "DescribeSubnets", "DescribeSecurityGroups"), network),
}  # fmt: skip
