"""The front end over what is really written down: boto3 asks, SQLite keeps, pilots report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lease.ec2.clients import client, served, wired
from tests.unit.lease.ec2.fake_desk import KEY, OTHER_KEY, SITE_KEY

from belljar.errors import RecordsLost
from belljar.lease import AccessKey, Instance, Order, Settings, Size
from belljar.lease import desk as leases
from belljar.lease.belongings import Belongings
from belljar.lease.ec2.front import Front
from belljar.lease.ec2.office import Office, Service, image_id
from belljar.lease.policy import Policy
from belljar.lease.states import InstanceState, LeaseState
from belljar.lease.store import Store, open_store
from belljar.model import GIB
from belljar.records import replace

RUN = {"ImageId": "alma9", "MinCount": 1, "MaxCount": 1}
SETTINGS = Settings(images=("alma9", "debian*"), types=(("small", "1/2G/10G"),), zone="lab", spot_queue="spare")
POLICIES = (Policy("all", users=("alice", "bob"), machines=4, cores=2, spot=True, images=("alma*", "debian*")),)


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.woken, self.orders = folder, list[bool](), list[tuple[str, Order]]()
        self.store: Store = open_store("", folder)
        self.open()
        for id, owner in ((KEY, "alice"), (OTHER_KEY, "bob")):
            self.belongings.add_access_key(AccessKey(id, owner, "physics"))

    def open(self) -> None:
        """As after a start of the service."""
        self.belongings = Belongings(self.store)
        desk = leases.Desk(self.store, SETTINGS, lambda: POLICIES)
        types = {"small": Size(1, 2 * GIB, 10 * GIB), "large": Size(4, 8 * GIB, 10 * GIB)}
        service = Service(
            lambda: self.woken.append(True), lambda *order: self.orders.append(order), lambda: ["debian12", "secret"]
        )
        self.front = Front(
            Office(desk, self.belongings, SETTINGS, types, lambda: POLICIES, service),
            SITE_KEY,
            tell=lambda *_, **__: None,
        )

    def reopen(self) -> None:
        self.store.close()
        self.store = open_store("", self.folder)
        self.open()

    def answer(self, *given: Any) -> Any:
        return self.front.answer(*given)

    def change(self, id: str, **facts: Any) -> None:
        """As the service does when a pilot reports."""

        def change(book: Any) -> None:
            one = book.get(Instance, id)
            assert one is not None
            case = book.case(one.lease)
            after = tuple(replace(each, **facts) if each.id == id else each for each in case.instances)
            book.save(case, replace(case, instances=after), time.time())

        self.store.write(change)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "lease")
    yield made
    made.store.close()


def code(call: Any, **asked: Any) -> str:
    try:
        call(**asked)
    except Exception as exc:
        return str(exc.response["Error"]["Code"])  # type: ignore[attr-defined]
    return ""


def test_from_launch_to_end_as_a_polling_client_sees_it(site: Site) -> None:
    ec2 = wired(site)  # type: ignore[arg-type]
    pair = ec2.create_key_pair(
        KeyName="mine",
        KeyType="ed25519",
        TagSpecifications=[{"ResourceType": "key-pair", "Tags": [{"Key": "a", "Value": "b"}]}],
    )
    assert ec2.describe_key_pairs()["KeyPairs"][0]["Tags"] == [{"Key": "a", "Value": "b"}]
    tags = [
        {
            "ResourceType": "instance",
            "Tags": [{"Key": "Name", "Value": "one"}, {"Key": "lease:duration", "Value": "7200"}],
        }
    ]
    made = ec2.run_instances(**RUN, KeyName="mine", UserData="#!/bin/sh\n", TagSpecifications=tags)
    (one,) = made["Instances"]
    id, seen = one["InstanceId"], list[str]()

    def look() -> dict[str, Any]:
        found: dict[str, Any] = ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"][0]
        seen.append(found["State"]["Name"])
        return found

    assert (
        one["Tags"] == look()["Tags"] == [{"Key": "Name", "Value": "one"}, {"Key": "lease:state", "Value": "requested"}]
    )
    assert (one["ImageId"], one["KeyName"], one["StateReason"]["Code"]) == (image_id("alma9"), "mine", "pending")
    assert site.woken
    for state in (InstanceState.CLAIMED, InstanceState.STAGING, InstanceState.BOOTING):
        site.change(id, state=state)
        look()
    site.change(id, state=InstanceState.RUNNING, address="10.1.2.3", deadline=2e9, launched=time.time())
    assert look()["PrivateIpAddress"] == "10.1.2.3"
    ec2.reboot_instances(InstanceIds=[id])
    assert site.orders[-1][1].instance == id
    site.belongings.keep_console(id, b"login: ", 1.8e9)
    assert ec2.get_console_output(InstanceId=id)["Output"] == "login: "
    (change,) = ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]["Name"]) == ("running", "shutting-down")
    look()
    site.change(id, state=InstanceState.TERMINATED, ended=time.time())
    assert look()["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert seen == ["pending"] * 4 + ["running", "shutting-down", "terminated"]
    ec2.delete_key_pair(KeyPairId=pair["KeyPairId"])
    assert ec2.describe_key_pairs()["KeyPairs"] == [] and site.belongings.tags("alice")


def test_a_token_is_kept_over_a_start_of_the_service_and_after_the_end(site: Site) -> None:
    ec2 = wired(site)  # type: ignore[arg-type]
    first = ec2.run_instances(**RUN, ClientToken="t")["ReservationId"]
    site.reopen()
    ec2.terminate_instances(InstanceIds=[ec2.describe_instances()["Reservations"][0]["Instances"][0]["InstanceId"]])
    again = ec2.run_instances(**RUN, ClientToken="t")
    assert (again["ReservationId"], again["Instances"][0]["State"]["Name"]) == (first, "terminated")
    assert code(ec2.run_instances, **RUN | {"MaxCount": 2}, ClientToken="t") == "IdempotentParameterMismatch"


def test_ten_at_once_with_one_token_are_one_lease(site: Site) -> None:
    with served(site) as port:  # type: ignore[arg-type]
        clients = [client(port) for _ in range(10)]
        with ThreadPoolExecutor(10) as pool:
            made = list(pool.map(lambda one: one.run_instances(**RUN, ClientToken="t")["ReservationId"], clients))
    assert len(set(made)) == 1
    assert site.store.read(lambda book: book.sums("alice")).machines == 1


def test_denials_have_ec2s_codes_and_the_numbers(site: Site) -> None:
    ec2 = wired(site)  # type: ignore[arg-type]
    asked = RUN | {"MinCount": 5, "MaxCount": 5}
    with pytest.raises(
        ec2.exceptions.ClientError, match=r"InstanceLimitExceeded.*machines: 0 there \+ 5 asked for = 5 of at most 4"
    ):
        ec2.run_instances(**asked)
    assert code(ec2.run_instances, **asked, DryRun=True) == "InstanceLimitExceeded"
    assert code(ec2.run_instances, **RUN, DryRun=True) == "DryRunOperation"
    assert code(ec2.run_instances, **RUN, InstanceType="large") == "VcpuLimitExceeded"
    assert len(ec2.run_instances(**RUN | {"MaxCount": 9})["Instances"]) == 4
    assert not site.store.read(lambda book: book.sums("bob")).machines


def test_nobody_reaches_what_is_anothers(site: Site) -> None:
    alice, bob = wired(site), wired(site, OTHER_KEY)  # type: ignore[arg-type]
    id = alice.run_instances(**RUN)["Instances"][0]["InstanceId"]
    pair = alice.create_key_pair(KeyName="k", KeyType="ed25519")["KeyPairId"]
    assert bob.describe_instances()["Reservations"] == [] and bob.describe_tags()["Tags"] == []
    assert code(bob.terminate_instances, InstanceIds=[id]) == "InvalidInstanceID.NotFound"
    assert code(bob.get_console_output, InstanceId=id) == "InvalidInstanceID.NotFound"
    assert code(bob.describe_key_pairs, KeyPairIds=[pair]) == "InvalidKeyPair.NotFound"
    assert code(bob.run_instances, **RUN, KeyName="k") == "InvalidKeyPair.NotFound"
    bob.delete_key_pair(KeyPairId=pair)
    assert alice.describe_key_pairs()["KeyPairs"]
    site.belongings.revoke(KEY)
    assert code(alice.describe_instances) == "AuthFailure"


def test_images_are_those_that_may_be_leased(site: Site) -> None:
    ec2 = wired(site)  # type: ignore[arg-type]
    assert [one["Name"] for one in ec2.describe_images()["Images"]] == ["alma9", "debian12"]
    assert code(ec2.run_instances, **RUN | {"ImageId": "secret"}) == "InvalidAMIID.Malformed"
    assert code(ec2.run_instances, **RUN | {"ImageId": image_id("secret")}) == "InvalidAMIID.NotFound"
    made = ec2.run_instances(
        **RUN | {"ImageId": image_id("debian12")},
        InstanceMarketOptions={"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.5"}},
    )
    (found,) = site.store.read(lambda book: book.find(leases.Lease))
    assert (found.id, found.wanted.image, found.wanted.bid, found.state) == (
        made["ReservationId"],
        "debian12",
        0.5,
        LeaseState.REQUESTED,
    )


def test_records_that_cannot_be_read_are_a_server_that_is_not_available(site: Site) -> None:
    ec2 = wired(site)  # type: ignore[arg-type]
    site.store.read = lambda look: (_ for _ in ()).throw(RecordsLost("disk"))  # type: ignore[method-assign]
    assert code(ec2.describe_instances) == "Unavailable"
