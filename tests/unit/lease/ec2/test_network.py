"""What clients are told of networks, addresses and metadata, asked through boto3."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.lease.ec2.conftest import Site

from belljar.lease import Instance, Lease
from belljar.lease.ec2.office import metadata


@pytest.mark.parametrize("form", range(3))
def test_there_is_a_default_network_which_stands_on_every_instance_and_is_found_by_filters(
    site: Site, form: int
) -> None:
    """What Ansible asks before and after it launches."""
    one = lambda found: next(iter(found.values()))[0]  # noqa: E731

    def named(**filters: str) -> dict[str, Any]:
        return {"Filters": [{"Name": name.replace("_", "-"), "Values": [one]} for name, one in filters.items()]}

    vpc = one(site.describe_vpcs(**named(isDefault="true")))["VpcId"]
    subnet = one(site.describe_subnets(**named(vpc_id=vpc, state="available", default_for_az="true")))["SubnetId"]
    group = one(site.describe_security_groups(**named(vpc_id=vpc, group_name="default")))["GroupId"]
    assert site.describe_vpcs(**named(is_default="false"))["Vpcs"] == []
    assert one(site.describe_vpcs(VpcIds=[vpc]))["IsDefault"]
    assert site.refused("describe_subnets", SubnetIds=["subnet-1"]) == "InvalidSubnetID.NotFound"
    assert site.refused("describe_security_groups", GroupNames=["web"]) == "InvalidGroup.NotFound"
    place = {"SubnetId": subnet, ("Groups" if form == 2 else "SecurityGroupIds"): [group]}
    (id,) = site.launch(**[{}, place, {"NetworkInterfaces": [{"DeviceIndex": 0, **place}]}][form])
    (made,) = site.listed()
    assert (made["VpcId"], made["SubnetId"], made["SecurityGroups"]) == (
        vpc, subnet, [{"GroupId": group, "GroupName": "default"}])  # fmt: skip
    for name, value in {
        "vpc-id": vpc, "subnet-id": subnet, "group-id": group, "group-name": "default", "instance.group-id": group, "instance.group-name": "default",
    }.items():  # fmt: skip
        assert site.found(**{name: value}) == [id] and site.found(**{name: "other"}) == [], name
    groups = site.describe_instance_attribute(InstanceId=id, Attribute="groupSet")["Groups"]
    assert [one["GroupId"] for one in groups] == [group]
    for name in ("enableDnsHostnames", "enableDnsSupport", "enableNetworkAddressUsageMetrics"):  # Terraform's
        assert site.describe_vpc_attribute(VpcId=vpc, Attribute=name)[f"E{name[1:]}"] == {"Value": False}
    assert (
        site.refused("describe_vpc_attribute", VpcId="vpc-1", Attribute="enableDnsSupport") == "InvalidVpcID.NotFound"
    )
    assert site.describe_instance_attribute(InstanceId=id, Attribute="disableApiStop")["DisableApiStop"] == {
        "Value": False
    }
    assert made["SourceDestCheck"]
    site.launch(Placement={"AvailabilityZone": ""})
    (limit,) = site.describe_account_attributes(AttributeNames=["default-vpc"])["AccountAttributes"]
    assert limit["AttributeValues"] == [{"AttributeValue": vpc}]


def test_metadata_options_are_those_that_were_asked_for_and_the_machine_is_told(site: Site) -> None:
    (plain,) = site.launch()
    tags = [{"ResourceType": "instance", "Tags": [{"Key": key, "Value": "x"} for key in ("Name", "a/b")]}]
    asked = {"HttpTokens": "required", "InstanceMetadataTags": "enabled", "HttpPutResponseHopLimit": 2}
    site.launch(MetadataOptions=asked, TagSpecifications=tags)
    first, second = (
        one["MetadataOptions"] for one in sorted(site.listed(), key=lambda one: one["InstanceId"] != plain)
    )
    assert (first["HttpTokens"], first["InstanceMetadataTags"], first["HttpPutResponseHopLimit"]) == (
        "optional", "disabled", 1)  # fmt: skip
    assert {**second, **asked} == second and second["HttpEndpoint"] == "enabled"
    leases = site.house.store.read(lambda book: book.find(Lease))
    leases.sort(key=lambda lease: len(lease.wanted.tags))
    told = [dict(metadata(lease, Instance("i-1", lease.id, 0, "alice"), (), "lab")) for lease in leases]
    assert [(one.get("http-tokens"), one.get("tags/instance/Name")) for one in told] == [("", None), ("required", "x")]
    assert "tags/instance/a/b" not in told[1]


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("10.0.2.15", False),
        ("192.168.7.7/24", False),
        ("100.64.0.1", False),
        ("fd00::7", False),
        ("8.0.0.7", True),
        ("1:::2", False),
    ],
)
def test_a_private_address_is_not_told_as_a_public_one(site: Site, address: str, is_public: bool) -> None:
    ids = site.launch()
    site.house.boot()
    site.house.change(*ids, address=address)
    (one,) = site.listed()
    assert (one["PrivateIpAddress"], one.get("PublicIpAddress")) == (address, address if is_public else None)
