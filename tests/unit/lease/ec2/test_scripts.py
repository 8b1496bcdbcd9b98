"""What users write: scripts for boto3, aws cli and libcloud, as found in their manuals and examples, unchanged but for the endpoint."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from libcloud.compute.base import NodeAuthSSHKey
from libcloud.compute.types import NodeState, Provider
from tests.unit.lease.ec2.clients import client
from tests.unit.lease.ec2.house import IMAGE
from tests.unit.lease.ec2.test_clients import Site, site

from belljar.model import GIB

__all__ = ["site"]


@pytest.fixture
def rsa(tmp_path: Path) -> str:
    """A public key, as a file of ssh-keygen's has it."""
    file = tmp_path / "id_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-C", "me@desk", "-f", file], check=True)
    return (tmp_path / "id_rsa.pub").read_text()


# -- boto3 -------------------------------------------------------------------------------------------------------------


def test_the_newest_image_and_a_type_that_fits(site: Site) -> None:
    ec2 = client(site.port)
    images = ec2.describe_images(
        Owners=["self", "amazon"],
        Filters=[{"Name": name, "Values": [value]} for name, value in {
            "name": "*", "state": "available", "architecture": "x86_64", "virtualization-type": "hvm", "image-type": "machine", "is-public": "true",
        }.items()],
    )["Images"]  # fmt: skip
    newest = sorted(images, key=lambda one: str(one["CreationDate"]))[-1]
    assert newest["Name"] == "worker"  # when the other was made is not known
    fits: list[str] = []
    for page in ec2.get_paginator("describe_instance_types").paginate(Filters=[
        {"Name": "processor-info.supported-architecture", "Values": ["x86_64"]}, {"Name": "current-generation", "Values": ["true"]},
        {"Name": "vcpu-info.default-vcpus", "Values": ["1", "2"]}, {"Name": "supported-usage-class", "Values": ["spot"]},
    ]):  # fmt: skip
        fits += [one["InstanceType"] for one in page["InstanceTypes"] if one["MemoryInfo"]["SizeInMiB"] >= 2048]
    assert fits == ["m1.large", "m1.small"]
    offered = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["m1.*"]}]
    )
    assert [(one["InstanceType"], one["Location"]) for one in offered["InstanceTypeOfferings"]] == [(f"m1.{name}", "lab") for name in ("huge", "large", "small")]  # fmt: skip


def test_a_cluster_by_collections(site: Site) -> None:
    ec2 = client(site.port, kind="resource")
    pair = ec2.create_key_pair(KeyName="cluster", KeyType="ed25519")
    nodes = ec2.create_instances(
        ImageId=IMAGE, InstanceType="m1.small", MinCount=3, MaxCount=3, KeyName=pair.name, UserData="#!/bin/bash\nyum update -y\n",
        SecurityGroupIds=["sg-12345678"], Monitoring={"Enabled": True}, InstanceInitiatedShutdownBehavior="terminate",
        NetworkInterfaces=[{"DeviceIndex": 0, "AssociatePublicIpAddress": True}], MetadataOptions={"HttpTokens": "required"},
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20, "VolumeType": "gp3", "DeleteOnTermination": True}}],
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "node"}, {"Key": "role", "Value": "worker"}]},
            {"ResourceType": "volume", "Tags": [{"Key": "role", "Value": "worker"}]},
        ],
    )  # fmt: skip
    assert site.house.wanted[0].size.disk == 20 * GIB
    mine = [{"Name": "tag:role", "Values": ["worker"]}]
    head = nodes[0]
    head.create_tags(Tags=[{"Key": "role", "Value": "head"}])
    assert {one.id for one in ec2.instances.filter(Filters=mine)} == {one.id for one in nodes[1:]}
    site.house.boot()
    for one in nodes:
        one.wait_until_running()
        one.reload()
    assert all(one.public_ip_address and one.key_pair.name == "cluster" and one.image.id == IMAGE for one in nodes)
    assert [len(page) for page in ec2.instances.pages()] == [3] and len(list(ec2.instances.limit(2))) == 2
    assert (
        list(head.volumes.all()),
        head.network_interfaces,
        head.vpc_addresses and list(head.vpc_addresses.all()),
    ) == ([], [], [])
    assert head.console_output(Latest=True)["Timestamp"] and head.describe_attribute(Attribute="disableApiStop")
    with pytest.raises(ClientError, match=r"UnsupportedOperation.*launch another"):
        head.stop()
    with pytest.raises(ClientError, match="UnsupportedOperation"):
        head.modify_attribute(InstanceType={"Value": "m1.large"})
    client(site.port).get_waiter("system_status_ok").wait(InstanceIds=[one.id for one in nodes])
    ec2.instances.filter(Filters=[{"Name": "key-name", "Values": ["cluster"]}]).terminate()
    site.house.end()
    client(site.port).get_waiter("instance_terminated").wait(Filters=mine)
    pair.delete()
    assert list(ec2.key_pairs.all()) == []


@pytest.mark.parametrize(
    "mapping",
    [
        {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 20}}, {"DeviceName": "/dev/sda1", "Ebs": {"SnapshotId": "snap-12345678"}},
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20, "DeleteOnTermination": False}}, {"DeviceName": "/dev/sda1", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20, "Encrypted": True}},
    ],
)  # fmt: skip
def test_other_disks_than_the_root_disk_are_refused(site: Site, mapping: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match=r"UnsupportedOperation.*root disk"):
        client(site.port).run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1, BlockDeviceMappings=[mapping])


# -- aws cli -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # each call of it is a process of two seconds
def test_an_afternoon_with_aws_cli(site: Site, rsa: str, tmp_path: Path) -> None:
    newest = site.aws(
        "describe-images",
        "--owners",
        "self",
        "--query",
        "sort_by(Images,&CreationDate)[-1].ImageId",
        "--output",
        "text",
    ).strip()
    (tmp_path / "init.sh").write_text("#!/bin/sh\ntouch /ready\n")
    site.aws("import-key-pair", "--key-name", "desk", "--public-key-material", f"fileb://{tmp_path}/id_rsa.pub")
    shown = subprocess.check_output(["ssh-keygen", "-ef", tmp_path / "id_rsa.pub", "-m", "PEM"], text=True)
    assert (
        shown
        and site.aws(
            "describe-key-pairs", "--key-names", "desk", "--query", "KeyPairs[0].KeyType", "--output", "text"
        ).strip()
        == "rsa"
    )
    id = site.aws(
        "run-instances", "--image-id", newest, "--instance-type", "m1.small", "--key-name", "desk", "--count", "1", "--user-data", f"file://{tmp_path}/init.sh",
        "--block-device-mappings", "DeviceName=/dev/xvda,Ebs={VolumeSize=30}", "--security-group-ids", "sg-1", "--associate-public-ip-address",
        "--tag-specifications", "ResourceType=instance,Tags=[{Key=Name,Value=desk}]", "--query", "Instances[0].InstanceId", "--output", "text",
    ).strip()  # fmt: skip
    (wanted,) = site.house.wanted
    assert (wanted.image, wanted.user_data, wanted.size.disk) == ("worker", b"#!/bin/sh\ntouch /ready\n", 30 * GIB)
    site.aws("wait", "instance-exists", "--instance-ids", id)
    site.house.boot()
    site.aws("wait", "instance-running", "--filters", "Name=tag:Name,Values=desk")
    site.aws("wait", "instance-status-ok", "--instance-ids", id)
    site.aws("create-tags", "--resources", id, "--tags", "Key=stack,Value=test")
    assert site.aws("describe-tags", "--filters", f"Name=resource-id,Values={id}", "Name=key,Values=stack", "--query", "Tags[].Value", "--output", "text").split() == ["test"]  # fmt: skip
    site.aws("delete-tags", "--resources", id, "--tags", "Key=stack")
    site.house.wrote(id, b"login: ")
    assert site.aws("get-console-output", "--instance-id", id, "--latest", "--output", "text").startswith(id)
    listed = site.aws(
        "describe-instances",
        "--no-paginate",
        "--filters",
        "Name=instance-state-name,Values=pending,running",
        "Name=key-name,Values=desk",
    )
    assert len(listed["Reservations"]) == 1
    for _ in range(2):
        site.aws("run-instances", "--image-id", "worker", "--count", "3")
    first = site.aws(
        "describe-instances",
        "--max-items",
        "4",
        "--page-size",
        "5",
        "--query",
        "[Reservations[].Instances[].InstanceId, NextToken]",
    )
    rest = (
        site.aws("describe-instances", "--starting-token", first[1], "--query", "Reservations[].Instances[].InstanceId")
        if first[1]
        else []
    )
    assert len({*first[0], *rest}) == 7
    assert "UnsupportedOperation" in site.aws("stop-instances", "--instance-ids", id, fails=True)
    assert site.aws("describe-account-attributes", "--attribute-names", "max-instances", "--query", "AccountAttributes[0].AttributeValues[0].AttributeValue", "--output", "text").strip() == "20"  # fmt: skip
    site.aws("delete-key-pair", "--key-name", "desk")


# -- libcloud ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This method has been deprecated")  # libcloud calls it itself
@pytest.mark.parametrize(
    ("provider", "more"), [(Provider.EC2, {"region": "us-east-1", "signature_version": "4"}), (Provider.NIMBUS, {})], ids=["ec2", "nimbus"]
)  # fmt: skip
def test_libclouds_own_ways(site: Site, provider: str, more: dict[str, Any], rsa: str) -> None:
    driver = site.libcloud(provider, **more)
    image, size = driver.get_image(IMAGE), driver.list_sizes()[0]
    size.id = "m1.small"
    (place,) = driver.list_locations()
    assert [one.name for one in driver.list_images(ex_filters={"name": "deb*"})] == ["debian-12"]
    node = driver.create_node(
        name="n1", image=image, size=size, location=place, auth=NodeAuthSSHKey(rsa.strip()), ex_metadata={"env": "prod"}, ex_clienttoken="t",
        ex_security_groups=["default"], ex_blockdevicemappings=[{"DeviceName": "/dev/sda1", "Ebs.VolumeSize": 20}],
    )  # fmt: skip
    # The key is known by now.
    again = driver.create_node(name="n2", image=image, size=size, auth=NodeAuthSSHKey(rsa.strip()))
    (pair,) = driver.list_key_pairs()
    assert driver.get_key_pair(pair.name).fingerprint == pair.fingerprint and site.house.wanted[0].key == pair.name
    assert len(driver.create_node(name="n3", image=image, size=size, ex_mincount=2, ex_maxcount=2)) == 2
    site.house.boot()
    ((running, addresses),) = driver.wait_until_running([node], wait_period=0.01, timeout=20)
    assert (running.state, addresses) == (NodeState.RUNNING, ["8.0.0.7"])
    (found,) = driver.list_nodes(ex_filters={"tag:env": "prod", "instance-state-name": "running"})
    assert found.id == node.id and found.extra["availability"] == "lab"
    driver.ex_create_tags(found, {"a": "b"})
    if provider == Provider.EC2:  # the other driver sends none
        assert driver.ex_describe_tags(found)["a"] == "b"
        driver.ex_delete_tags(found, {"a": "b"})
    assert driver.ex_get_console_output(found)["instance_id"] == node.id
    assert driver.ex_get_limits()["resource"]["max-instances"] == 20
    for name in (
        "ex_list_availability_zones", "ex_list_networks", "ex_list_subnets", "ex_list_security_groups", "list_volumes", "list_snapshots",
        "ex_describe_all_addresses", "ex_list_reserved_nodes", "ex_list_internet_gateways", "ex_list_route_tables", "ex_list_placement_groups",
        "ex_list_network_interfaces",
    ):  # fmt: skip
        assert isinstance(getattr(driver, name)(), list), name
    assert running.reboot() and site.house.rebooted == [node.id]
    with pytest.raises(Exception, match="UnsupportedOperation"):
        driver.stop_node(found)
    assert again.destroy() and driver.destroy_node(node)
    site.house.end()
    assert sorted(one.state for one in driver.list_nodes()) == [NodeState.RUNNING] * 2 + [NodeState.TERMINATED] * 2
    assert driver.delete_key_pair(driver.get_key_pair(pair.name))
