"""What clients depend on, asked through boto3, with a desk in memory and no socket."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lease.ec2.conftest import RUN, Site
from tests.unit.lease.ec2.house import KEY, OTHER_KEY

from belljar.lease import Slot
from belljar.lease.ec2 import front
from belljar.lease.ec2.model import moment
from belljar.lease.orders import Do, Order
from belljar.records import replace

UNKNOWN = "i-0123456789abcdef0"


# -- launching ---------------------------------------------------------------------------------------------------------


def test_a_reservation_is_a_lease(site: Site) -> None:
    tags = [{"Key": "Name", "Value": "a b+c~*é"}, {"Key": "lease:duration", "Value": "PT2H30M"}]
    made = site.run_instances(
        **RUN | {"MaxCount": 3}, InstanceType="m1.large", UserData="#!/bin/sh\necho é\n",
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )  # fmt: skip
    (wanted,) = site.house.wanted
    assert (wanted.least, wanted.count, wanted.type, wanted.seconds) == (1, 3, "m1.large", 9000.0)
    assert (wanted.user_data.decode(), wanted.tags) == (
        "#!/bin/sh\necho é\n",
        (("Name", "a b+c~*é"), ("lease:duration", "PT2H30M")),
    )
    assert [one["AmiLaunchIndex"] for one in made["Instances"]] == [0, 1, 2]
    assert {one["State"]["Name"] for one in made["Instances"]} == {"pending"}
    (group,) = site.describe_instances()["Reservations"]
    assert (group["ReservationId"], group["OwnerId"]) == (made["ReservationId"], "alice")


def test_a_token_is_for_one_lease(site: Site) -> None:
    first = site.run_instances(**RUN, ClientToken="t")
    assert site.run_instances(**RUN, ClientToken="t")["ReservationId"] == first["ReservationId"]
    assert site.refused("run_instances", **RUN | {"MaxCount": 2}, ClientToken="t") == "IdempotentParameterMismatch"
    assert len(site.listed()) == 1
    assert site.refused("run_instances", **RUN, ClientToken="x" * 65) == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"ImageId": "nothing"}, "InvalidAMIID.Malformed"),
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
        ({"InstanceType": "x9.huge"}, "InvalidParameterValue"),
        ({"KeyName": "none"}, "InvalidKeyPair.NotFound"),
        ({"MinCount": 2}, "InvalidParameterValue"),
        ({"MinCount": 0}, "InvalidParameterValue"),
        ({"MinCount": 21, "MaxCount": 21}, "InstanceLimitExceeded"),
        ({"Placement": {"AvailabilityZone": "moon"}}, "InvalidParameterValue"),
        ({"LaunchTemplate": {"LaunchTemplateId": "lt-1"}}, "UnsupportedOperation"),
        ({"KernelId": "aki-1"}, "UnsupportedOperation"),
        ({"CpuOptions": {"CoreCount": 9}}, "UnsupportedOperation"),
        ({"MetadataOptions": {"HttpEndpoint": "disabled"}}, "UnsupportedOperation"),
        ({"MetadataOptions": {"HttpTokens": "REQUIRED"}}, "UnsupportedOperation"),
        ({"SubnetId": "subnet-1"}, "InvalidSubnetID.NotFound"),
        ({"NetworkInterfaces": [{"DeviceIndex": 0, "SubnetId": "subnet-1"}]}, "InvalidSubnetID.NotFound"),
        ({"InstanceInitiatedShutdownBehavior": "stop"}, "UnsupportedOperation"),
        ({"UserData": "x" * 16385}, "InvalidUserData.Malformed"),
        ({"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "lease:state", "Value": "x"}]}]}, "InvalidParameterValue"),
        ({"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "lease:duration", "Value": "soon"}]}]}, "InvalidParameterValue"),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, "UnsupportedOperation"),
        ({"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "persistent"}}}, "UnsupportedOperation"),
        ({"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"ValidUntil": 1.5e9}}}, "UnsupportedOperation"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused_and_nothing_is(site: Site, more: dict[str, Any], code: str) -> None:
    assert site.refused("run_instances", **{**RUN, **more}) == code
    assert not site.house.machines


def test_what_tunes_amazons_features_is_let_through(site: Site) -> None:
    site.launch(
        Monitoring={"Enabled": True}, EbsOptimized=True, SecurityGroups=["default"], UserData="x" * 16384,
        IamInstanceProfile={"Name": "p"}, MetadataOptions={"HttpTokens": "required"}, InstanceInitiatedShutdownBehavior="terminate",
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"MaxPrice": "0.25", "SpotInstanceType": "one-time"}])
def test_a_spot_machine_is_a_preemptible_lease_and_its_price_is_ignored(site: Site, options: dict[str, str]) -> None:
    site.launch(InstanceMarketOptions={"MarketType": "spot", "SpotOptions": options})
    site.launch()
    assert {(one.preemptible, one.queue) for one in site.house.wanted} == {(True, "spare"), (False, "")}
    assert {one.get("InstanceLifecycle") for one in site.listed()} == {"spot", None}
    assert len(site.found(instance_lifecycle="spot")) == 1


# -- instances ---------------------------------------------------------------------------------------------------------


def test_an_owner_sees_their_own(site: Site) -> None:
    (mine,) = site.launch()
    for name in ("describe_instances", "terminate_instances", "reboot_instances", "describe_instance_status"):
        assert site.refused(name, key=OTHER_KEY, InstanceIds=[mine]) == "InvalidInstanceID.NotFound"
    for name in ("get_console_output",):
        assert site.refused(name, key=OTHER_KEY, InstanceId=mine) == "InvalidInstanceID.NotFound"
    assert site.clients[OTHER_KEY].describe_instances()["Reservations"] == []
    assert (
        site.refused("create_tags", key=OTHER_KEY, Resources=[mine], Tags=[{"Key": "a", "Value": "b"}])
        == "InvalidInstanceID.NotFound"
    )


def test_one_unknown_id_and_nothing_is_ended(site: Site) -> None:
    (mine,) = site.launch()
    assert site.refused("terminate_instances", InstanceIds=[mine, UNKNOWN]) == "InvalidInstanceID.NotFound"
    assert site.refused("terminate_instances", InstanceIds=[mine, "i-12"]) == "InvalidInstanceID.Malformed"
    assert site.refused("terminate_instances", InstanceIds=[]) == "MissingParameter"
    assert site.listed()[0]["State"]["Name"] == "pending"


def test_a_queued_one_that_is_ended_is_terminated_at_once_and_stays_listed(site: Site) -> None:
    (mine,) = site.launch()
    (change,) = site.terminate_instances(InstanceIds=[mine])["TerminatingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]["Name"]) == ("pending", "terminated")
    site.get_waiter("instance_terminated").wait(InstanceIds=[mine])
    assert site.listed()[0]["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    again = site.terminate_instances(InstanceIds=[mine])["TerminatingInstances"]
    assert again[0]["PreviousState"]["Name"] == "terminated"


def test_waiters_end(site: Site) -> None:
    ids = site.launch(2)
    site.get_waiter("instance_exists").wait(InstanceIds=ids)
    site.house.boot()
    site.get_waiter("instance_running").wait(InstanceIds=ids)
    site.get_waiter("instance_status_ok").wait(InstanceIds=ids)
    site.create_key_pair(KeyName="k", KeyType="ed25519")
    site.get_waiter("key_pair_exists").wait(KeyNames=["k"])


def test_what_runs_tells_when_its_lease_ends(site: Site) -> None:
    site.launch()
    assert site.describe_instance_status()["InstanceStatuses"] == []
    assert len(site.describe_instance_status(IncludeAllInstances=True)["InstanceStatuses"]) == 1
    site.house.boot()
    (status,) = site.describe_instance_status()["InstanceStatuses"]
    ends = int(site.house.now + 7200)
    assert int(status["Events"][0]["NotBefore"].timestamp()) == ends
    assert {"Key": "lease:ends-at", "Value": moment(ends)} in site.listed()[0]["Tags"]


def test_only_what_runs_is_rebooted(site: Site) -> None:
    ids = site.launch()
    assert site.refused("reboot_instances", InstanceIds=ids) == "IncorrectInstanceState"
    site.house.boot()
    site.reboot_instances(InstanceIds=ids)
    assert site.house.rebooted == ids


def test_a_console_is_waited_for_where_there_is_none_yet_or_the_latest_is_wanted(site: Site) -> None:
    (mine,), written, house = site.launch(), [b"booting", b"login: "], site.house
    house.boot()
    slot = Slot(house.machines[0].lease, 1, 0, "pilot")
    house.store.write(lambda book: book.put(slot))
    house.change(mine, slot=slot.id)
    send = lambda slot, id: house.wrote(id, written.pop(0))  # noqa: E731
    house.front._office = replace(house.office, console=send)
    assert site.get_console_output(InstanceId=mine)["Output"] == "booting"
    assert not house.orders
    assert site.get_console_output(InstanceId=mine)["Output"] == "booting"
    assert house.orders == [(slot.id, Order(Do.CONSOLE, mine))]
    assert site.get_console_output(InstanceId=mine, Latest=True)["Output"] == "login: "


def test_console_and_attributes(site: Site) -> None:
    (mine,) = site.launch(UserData="hello")
    site.house.wrote(mine, b"x" * 70000 + b"\xff\x1b[0mlogin: ")
    told = site.get_console_output(InstanceId=mine)
    assert told["Output"].endswith("login: ") and len(told["Output"]) <= 64 << 10
    value = site.describe_instance_attribute(InstanceId=mine, Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(value) == b"hello"
    assert site.describe_instance_attribute(InstanceId=mine, Attribute="instanceType")["InstanceType"] == {
        "Value": "m1.small"
    }
    assert site.describe_instance_attribute(InstanceId=mine, Attribute="disableApiTermination")[
        "DisableApiTermination"
    ] == {"Value": False}
    assert site.refused("describe_instance_attribute", InstanceId=mine, Attribute="colour") == "InvalidParameterValue"


# -- filters and pages -------------------------------------------------------------------------------------------------


def test_filters(site: Site) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "web-1"}, {"Key": "a[b]", "Value": "x*y"}]}]
    (web,) = site.launch(TagSpecifications=tags, ClientToken="t1")
    site.house.boot()
    (other,) = site.launch(InstanceType="m1.large")
    for filters in (
        {"instance_state_name": "running"}, {"instance_state_code": "16"}, {"instance_id": web}, {"tag--Name": "web-*"}, {"tag--Name": "web-?"},
        {"tag_key": "Name"}, {"tag_value": r"x\*y"}, {"tag--a[b]": "x*"}, {"tag_key": "a[b]"},
        {"instance_type": ["*small", "none"]}, {"client_token": "t1"}, {"private_ip_address": "8.0.0.7"}, {"ip_address": "8.0.*"},
        {"reservation_id": site.listed(InstanceIds=[web])[0] and site.describe_instances(InstanceIds=[web])["Reservations"][0]["ReservationId"]},
        {"instance_state_name": ["running", "stopped"], "image_id": "ami-*"}, {"launch_index": "0", "instance_type": "m1.small"}, {"placement_tenancy": "default", "instance_type": "m1.s*"},
    ):  # fmt: skip
        assert site.found(**filters) == [web], filters
    assert site.found(instance_state_name="pending") == [other]
    assert len(site.found(launch_time="20*")) == len(site.found(availability_zone="lab")) == 2
    assert site.found(dns_name="*") == site.found(state_reason_code="Server.*") == []
    assert site.found(state_reason_code="pending") == [other]
    assert site.found(instance_state_name="running", instance_type="m1.large") == []
    assert site.found(tag_value=r"x\?y") == []
    assert (
        site.refused("describe_instances", Filters=[{"Name": "colour", "Values": ["red"]}]) == "InvalidParameterValue"
    )
    assert (
        site.refused("describe_instances", Filters=[{"Name": "tag-key", "Values": ["x"] * 201}])
        == "FilterLimitExceeded"
    )


def test_a_bomb_of_wildcards_is_over_soon(site: Site) -> None:
    site.launch(TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "a" * 250}]}])
    begun = time.process_time()
    assert site.found(**{"tag--a": "*a" * 120 + "b"}) == []
    assert time.process_time() - begun < 1.0


def test_pages_lose_nothing_and_show_nothing_twice_while_instances_come(site: Site) -> None:
    site.house.most = 10000
    ids = [id for _ in range(13) for id in site.launch(2)]
    seen = []
    for page in site.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 5}):
        found = [one["InstanceId"] for group in page["Reservations"] for one in group["Instances"]]
        assert len(found) <= 5
        seen += found
        site.house.now += 1
        if len(seen) < 11:
            site.launch()
    assert len(seen) == len(set(seen)) and set(ids) <= set(seen)


def test_a_token_is_for_who_got_it_and_what_was_asked(site: Site) -> None:
    site.launch(6)
    token = site.describe_instances(MaxResults=5)["NextToken"]
    assert len(site.listed(NextToken=token)) == 1
    assert len(site.listed(NextToken=token, MaxResults=6)) == 1
    for wrong in (token[:-4], "-_"[token[0] == "-"] + token[1:], "x", "é"):
        assert site.refused("describe_instances", NextToken=wrong) == "InvalidPaginationToken"
    filtered = [{"Name": "instance-type", "Values": ["m1.small"]}]
    assert site.refused("describe_instances", NextToken=token, Filters=filtered) == "InvalidPaginationToken"
    assert site.refused("describe_instances", key=OTHER_KEY, NextToken=token) == "InvalidPaginationToken"
    assert site.refused("describe_tags", NextToken=token) == "InvalidPaginationToken"
    assert site.refused("describe_instances", MaxResults=4) == "InvalidParameterValue"
    ids = [one["InstanceId"] for one in site.listed()]
    assert site.refused("describe_instances", MaxResults=5, InstanceIds=ids) == "InvalidParameterCombination"


# -- keys and tags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rsa", "ed25519"])
def test_a_key_pair_that_is_made_is_what_openssh_reads(site: Site, kind: str, tmp_path: Path) -> None:
    made = site.create_key_pair(KeyName="k", KeyType=kind)
    file = tmp_path / "k"
    file.write_text(made["KeyMaterial"])
    file.chmod(0o600)
    public = subprocess.check_output(["ssh-keygen", "-y", "-f", file], text=True).split()[:2]
    (shown,) = site.describe_key_pairs(IncludePublicKey=True)["KeyPairs"]
    assert shown["PublicKey"].split()[:2] == public
    assert (shown["KeyType"], shown["KeyPairId"], shown["KeyFingerprint"]) == (
        kind,
        made["KeyPairId"],
        made["KeyFingerprint"],
    )
    if kind == "rsa":
        der = subprocess.check_output(["openssl", "pkcs8", "-in", file, "-nocrypt", "-topk8", "-outform", "DER"])
        expected = hashlib.sha1(der).hexdigest()
        assert made["KeyFingerprint"].replace(":", "") == expected
    else:
        listed = subprocess.check_output(["ssh-keygen", "-lf", file], text=True).split()[1]
        assert made["KeyFingerprint"].rstrip("=") == listed.removeprefix("SHA256:")
    assert site.refused("create_key_pair", KeyName="k") == "InvalidKeyPair.Duplicate"


def test_a_key_that_is_brought_has_the_fingerprint_of_its_public_half(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "k"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-m", "PEM", "-f", file], check=True)
    line = (tmp_path / "k.pub").read_bytes()
    der = subprocess.check_output(
        ["openssl", "rsa", "-in", file, "-pubout", "-outform", "DER"], stderr=subprocess.DEVNULL
    )
    told = site.import_key_pair(KeyName="k", PublicKeyMaterial=line)
    assert told["KeyFingerprint"].replace(":", "") == hashlib.md5(der).hexdigest()
    two = site.import_key_pair(KeyName="two", PublicKeyMaterial=line.strip() + b"\n" + line)
    assert two["KeyFingerprint"] == told["KeyFingerprint"]
    assert all("\n" not in one["PublicKey"] for one in site.describe_key_pairs(IncludePublicKey=True)["KeyPairs"])
    for wrong in (b"", b"ssh-rsa AAAA", b"x" * 20000, b'command="id" ' + line, file.read_bytes()):
        assert site.refused("import_key_pair", KeyName="k3", PublicKeyMaterial=wrong) == "InvalidKey.Format", wrong


def test_key_pairs_come_and_go(site: Site) -> None:
    made = site.create_key_pair(KeyName="k", KeyType="ed25519")
    assert site.refused("describe_key_pairs", KeyNames=["none"]) == "InvalidKeyPair.NotFound"
    assert len(site.describe_key_pairs(Filters=[{"Name": "key-name", "Values": ["k*"]}])["KeyPairs"]) == 1
    assert site.clients[OTHER_KEY].describe_key_pairs()["KeyPairs"] == []
    site.launch(KeyName="k")
    assert site.delete_key_pair(KeyPairId=made["KeyPairId"])["Return"] is True
    assert site.delete_key_pair(KeyName="k")["Return"] is True
    assert site.describe_key_pairs()["KeyPairs"] == []


def test_tags_are_set_taken_off_and_found(site: Site) -> None:
    (mine,) = site.launch()
    site.create_tags(Resources=[mine], Tags=[{"Key": "Name", "Value": "x"}, {"Key": "b", "Value": ""}])
    rows = site.describe_tags(
        Filters=[{"Name": "resource-id", "Values": [mine]}, {"Name": "key", "Values": ["Name", "b"]}]
    )["Tags"]
    assert [(row["Key"], row["Value"], row["ResourceType"]) for row in rows] == [
        ("Name", "x", "instance"),
        ("b", "", "instance"),
    ]
    site.delete_tags(Resources=[mine], Tags=[{"Key": "Name", "Value": "other"}])
    site.delete_tags(Resources=[mine], Tags=[{"Key": "b"}])
    assert {one["Key"] for one in site.listed()[0]["Tags"]} == {"Name", "lease:state"}
    assert [one["Key"] for one in site.describe_tags()["Tags"]] == ["Name"]  # tools take off whatever else stands there
    assert (
        site.refused("create_tags", Resources=[mine], Tags=[{"Key": f"k{n}", "Value": ""} for n in range(51)])
        == "TagLimitExceeded"
    )
    assert site.refused("create_tags", Resources=["vol-1"], Tags=[{"Key": "a", "Value": ""}]) == "InvalidID"
    assert (
        site.refused("create_tags", Resources=[mine], Tags=[{"Key": "lease:ends-at", "Value": "never"}])
        == "InvalidParameterValue"
    )


# -- places ------------------------------------------------------------------------------------------------------------


def test_places_images_and_types(site: Site) -> None:
    assert [one["RegionName"] for one in site.describe_regions()["Regions"]] == ["lab"]
    assert [one["ZoneName"] for one in site.describe_availability_zones()["AvailabilityZones"]] == ["lab"]
    open_ = {
        "opt-in-status": "opt-in-not-required",
        "state": "available",
        "zone-type": "availability-zone",
        "group-name": "lab",
    }
    filters = [{"Name": name, "Values": [value]} for name, value in open_.items()]
    assert len(site.describe_availability_zones(Filters=filters)["AvailabilityZones"]) == 1
    assert site.refused("describe_availability_zones", ZoneNames=["moon"]) == "InvalidParameterValue"
    assert [one["Name"] for one in site.describe_images(Owners=["self"])["Images"]] == ["debian-12", "worker"]
    assert site.describe_images(Owners=["amazon"])["Images"] == []
    assert site.refused("describe_images", ImageIds=["ami-0123456789abcdef0"]) == "InvalidAMIID.NotFound"
    types = site.describe_instance_types(Filters=[{"Name": "instance-type", "Values": ["m1.sm*", "m1.l*"]}])[
        "InstanceTypes"
    ]
    assert [(one["InstanceType"], one["VCpuInfo"]["DefaultVCpus"], one["MemoryInfo"]["SizeInMiB"]) for one in types] == [
        ("m1.large", 2, 8192), ("m1.small", 1, 2048)]  # fmt: skip
    assert site.refused("describe_instance_types", InstanceTypes=["x9.huge"]) == "InvalidInstanceType"
    (limit,) = site.describe_account_attributes(AttributeNames=["max-instances"])["AccountAttributes"]
    assert limit["AttributeValues"] == [{"AttributeValue": "20"}]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("volumes", "Volumes"), ("launch_templates", "LaunchTemplates"), ("route_tables", "RouteTables"),
        ("addresses", "Addresses"), ("snapshots", "Snapshots"), ("network_interfaces", "NetworkInterfaces"),
    ],
)  # fmt: skip
def test_what_a_lease_has_none_of_is_an_empty_list(site: Site, name: str, key: str) -> None:
    assert getattr(site, f"describe_{name}")()[key] == []


def test_what_is_asked_for_by_id_and_not_there_is_not_found(site: Site) -> None:
    assert site.refused("describe_volumes", VolumeIds=["vol-1"]) == "InvalidVolume.NotFound"


# -- all of them -------------------------------------------------------------------------------------------------------


def test_dry_runs_do_nothing(site: Site) -> None:
    (mine,) = site.launch()
    site.house.boot()
    before = site.house.machines
    asked: dict[str, dict[str, Any]] = {
        "run_instances": RUN, "terminate_instances": {"InstanceIds": [mine]}, "reboot_instances": {"InstanceIds": [mine]},
        "create_key_pair": {"KeyName": "k"}, "delete_key_pair": {"KeyName": "k"}, "describe_instances": {}, "describe_images": {},
        "import_key_pair": {"KeyName": "k", "PublicKeyMaterial": b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"},
        "create_tags": {"Resources": [mine], "Tags": [{"Key": "a", "Value": "b"}]}, "delete_tags": {"Resources": [mine]},
        "get_console_output": {"InstanceId": mine}, "describe_regions": {}, "describe_addresses": {}, "describe_instance_types": {},
    }  # fmt: skip
    for name, parameters in asked.items():
        assert site.refused(name, **parameters, DryRun=True) == "DryRunOperation", name
    assert (site.house.machines, site.describe_key_pairs()["KeyPairs"], site.house.orders) == (before, [], [])
    site.house.most = 1
    assert site.refused("run_instances", **RUN, DryRun=True) == "InstanceLimitExceeded"


def test_unknown_actions_are_refused(site: Site) -> None:
    assert site.refused("describe_fleets") == "InvalidAction"
    assert site.refused("create_volume", AvailabilityZone="lab") == "InvalidAction"


def test_who_asks_too_often_is_told_so(site: Site) -> None:
    codes = []
    for _ in range(5000):  # on a slow host some of the purse fills again meanwhile
        if len(codes) > 10:
            break
        try:
            site.describe_regions()
        except site.exceptions.ClientError as exc:
            codes.append((exc.response["Error"]["Code"], exc.response["ResponseMetadata"]["HTTPStatusCode"]))
    assert codes and set(codes) == {("RequestLimitExceeded", 503)}
    site.clients[OTHER_KEY].describe_regions()


def test_an_access_key_that_was_revoked_opens_nothing(site: Site) -> None:
    site.house.revoke(KEY)
    assert site.refused("describe_regions") == "AuthFailure"


def test_a_mistake_of_ours_is_answered_and_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(front.ACTIONS, "DescribeRegions", lambda call: 1 / 0)
    assert site.refused("describe_regions") == "InternalError"
    assert site.house.told[0]["error"] == "ZeroDivisionError"


def test_a_machine_is_not_stopped_and_started(site: Site) -> None:
    (mine,) = site.launch()
    for name in ("start_instances", "stop_instances"):
        assert site.refused(name, InstanceIds=[mine]) == "UnsupportedOperation"
        assert site.refused(name, InstanceIds=[UNKNOWN]) == "InvalidInstanceID.NotFound"
