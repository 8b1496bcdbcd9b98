"""What EC2's reference lets clients ask for, and scripts that are found everywhere do: it is answered as the reference says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from libcloud.compute.base import NodeImage, NodeSize
from libcloud.compute.types import Provider
from tests.unit.lease.ec2.clients import code, wired
from tests.unit.lease.ec2.house import IMAGE, House
from tests.unit.lease.ec2.test_clients import Site, site

from belljar.lease import Facts, Lease, LeaseState, Slot
from belljar.lease.ec2.front import ACTIONS
from belljar.lease.ec2.model import model
from belljar.model import GIB
from belljar.records import replace

__all__ = ["site"]
RUN = {"ImageId": "debian-12", "MinCount": 1, "MaxCount": 1}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "lease")
    yield made
    made.store.close()


def tagged(**tags: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def launch(ec2: Any, **more: Any) -> str:
    return str(ec2.run_instances(**RUN, **more)["Instances"][0]["InstanceId"])


def tags_of(ec2: Any, id: str) -> dict[str, str]:
    (one,) = ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"]
    return {tag["Key"]: tag["Value"] for tag in one["Tags"] if not tag["Key"].startswith("lease:")}


# -- filters and pages -------------------------------------------------------------------------------------------------


def test_what_has_no_tags_passes_no_filter_of_tags(house: House) -> None:
    assert wired(house).describe_images(Filters=[{"Name": "tag:Name", "Values": ["*"]}])["Images"] == []
    assert house.told == []


def documented(action: str) -> list[str]:
    shape = model().input(action).members.get("Filters")
    found = re.findall(r"<li>\s*<p>\s*<code>([^<]+)</code>(?!:)", shape.documentation) if shape else []
    return [name.replace("&lt;key&gt;", "x").replace("<key>", "x") for name in found]


def test_every_filter_of_the_reference_is_one(house: House) -> None:
    ec2, asked = wired(house), 0
    launch(ec2)
    for action in (one for one in ACTIONS if one.startswith("Describe")):
        for name in documented(action):
            house.later, asked = house.later + 1, asked + 1
            refused = code(getattr(ec2, xform_name(action)), Filters=[{"Name": name, "Values": ["no such value"]}])
            assert refused == "", (action, name)
    assert asked > 450
    for name in ("group", "host-ids", "running", "code"):
        assert code(ec2.describe_instances, Filters=[{"Name": name, "Values": ["x"]}]) == "InvalidParameterValue", name


def test_a_zone_has_an_id(house: House) -> None:
    ec2 = wired(house)
    one = launch(ec2, Placement={"AvailabilityZoneId": "lab"})
    found = ec2.describe_instances(Filters=[{"Name": "availability-zone-id", "Values": ["lab"]}])["Reservations"]
    assert found[0]["Instances"][0]["InstanceId"] == one
    assert code(ec2.run_instances, **RUN, Placement={"AvailabilityZoneId": "moon"}) == "InvalidParameterValue"


def test_pages_are_as_small_as_the_reference_lets_them_be(house: House) -> None:
    ec2 = wired(house)
    first = ec2.describe_images(MaxResults=1)
    assert len(ec2.describe_images(NextToken=first["NextToken"])["Images"]) == len(first["Images"]) == 1
    assert code(ec2.describe_instances, MaxResults=4) == "InvalidParameterValue"
    assert code(ec2.describe_images, MaxResults=-1) == "InvalidParameterValue"


# -- tags --------------------------------------------------------------------------------------------------------------


def test_a_volumes_name_is_not_its_instances(house: House) -> None:
    ec2 = wired(house)
    kinds = {
        "volume": {"Name": "web-root", "size": "8"},
        "instance": {"Name": "web"},
        "network-interface": {"Name": "web-eth0"},
    }
    for order in (list(kinds), list(reversed(kinds))):
        given = [{"ResourceType": kind, "Tags": tagged(**kinds[kind])} for kind in order]
        assert tags_of(ec2, launch(ec2, TagSpecifications=given)) == {"Name": "web", "size": "8"}


def test_tags_are_as_long_as_the_reference_says_and_come_back_as_they_were(house: House) -> None:
    ec2 = wired(house)
    one = launch(ec2)
    given = {"k" * 127: "v" * 256, "lines": "a\nb\tc\r\nd\re", "signs": "😀&<>\"'"}
    ec2.create_tags(Resources=[one], Tags=tagged(**given))
    assert tags_of(ec2, one) == given
    assert code(ec2.create_tags, Resources=[one], Tags=tagged(a="v" * 257)) == "InvalidParameterValue"
    assert code(ec2.create_tags, Resources=[one], Tags=[*tagged(a="1"), *tagged(a="2")]) == "InvalidParameterValue"


def test_a_duration_that_is_empty_is_none(house: House) -> None:
    given = [{"ResourceType": "instance", "Tags": [{"Key": "lease:duration", "Value": ""}]}]
    assert code(wired(house).run_instances, **RUN, TagSpecifications=given) == "InvalidParameterValue"


# -- launching and looking ---------------------------------------------------------------------------------------------


def test_disks_that_say_what_is_so_anyway(house: House) -> None:
    root = {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 12, "VolumeType": "gp3", "Encrypted": False}}
    launch(wired(house), BlockDeviceMappings=[root, {"DeviceName": "/dev/xvdb", "NoDevice": ""}])
    assert house.wanted[0].size.disk == 12 * GIB
    no_root = [{"DeviceName": "/dev/xvda", "NoDevice": ""}]
    assert code(wired(house).run_instances, **RUN, BlockDeviceMappings=no_root) == "UnsupportedOperation"


def test_what_waits_tells_of_its_place_in_the_queue_and_what_runs_of_its_end(house: House) -> None:
    ec2 = wired(house)
    mine = launch(ec2)

    def told(*values: object) -> tuple[object, dict[str, str]]:
        house.store.write(lambda book: book.put(*values))
        (one,) = ec2.describe_instances()["Reservations"][0]["Instances"]
        return one.get("StateReason"), {tag["Key"]: tag["Value"] for tag in one["Tags"]}

    (lease,) = house.store.read(lambda book: book.find(Lease))
    waits = replace(lease, state=LeaseState.QUEUED, job="4711", why="Priority", expected=1.8e9)
    assert told(waits) == (
        {"Code": "pending", "Message": "Priority"},
        {"lease:state": "queued", "lease:lrm-job": "4711", "lease:estimated-start": "2027-01-15T08:00:00.000Z"},
    )
    slot = Slot(lease.id, 1, 0, "pilot", facts=Facts("wn7"))
    house.boot()
    house.change(mine, slot=slot.id, deadline=1.9e9)
    ends = {"lease:node": "wn7", "lease:ends-at": "2030-03-17T17:46:40.000Z"}
    runs = replace(waits, state=LeaseState.ACTIVE, expected=0.0, ends=1.9e9)
    assert told(slot, runs) == (None, {"lease:state": "active", "lease:lrm-job": "4711", **ends})


@pytest.mark.parametrize("provider", [Provider.EC2, Provider.NIMBUS])
def test_libcloud_writes_true_in_pythons_way(site: Site, provider: str) -> None:
    driver = site.libcloud(provider, **({"region": "us-east-1"} if provider == Provider.EC2 else {}))
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20, "DeleteOnTermination": True}}
    size = NodeSize("m1.small", "", 0, 0, 0, 0, driver)
    driver.create_node(name="n", image=NodeImage(IMAGE, "", driver), size=size, ex_blockdevicemappings=[disk])
    assert site.house.wanted[0].size.disk == 20 * GIB


def test_a_machine_has_no_windows_password(house: House) -> None:
    ec2 = wired(house)
    one = launch(ec2)
    told = ec2.get_password_data(InstanceId=one)
    assert (told["InstanceId"], told["PasswordData"]) == (one, "")
    assert code(ec2.get_password_data, InstanceId="i-0123456789abcdef0") == "InvalidInstanceID.NotFound"


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_pair_that_is_deleted_has_the_name_and_the_id(house: House) -> None:
    ec2 = wired(house)
    ids = {name: ec2.create_key_pair(KeyName=name, KeyType="ed25519")["KeyPairId"] for name in ("a", "b")}
    assert ec2.delete_key_pair(KeyName="a", KeyPairId=ids["b"])["Return"] is True
    assert len(ec2.describe_key_pairs()["KeyPairs"]) == 2
    ec2.delete_key_pair(KeyName="a", KeyPairId=ids["a"])
    assert [one["KeyName"] for one in ec2.describe_key_pairs()["KeyPairs"]] == ["b"]
