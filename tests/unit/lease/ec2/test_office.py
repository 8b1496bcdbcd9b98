"""The front end over what is really written down: boto3 asks, SQLite keeps, pilots report."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.unit.lease.ec2.clients import client, code, served, wired
from tests.unit.lease.ec2.house import KEY, OTHER_KEY, SETTINGS, SITE_KEY, House

from belljar.errors import BadRequest, BadSetting, NotPermitted, RecordsLost
from belljar.host.threads import in_thread
from belljar.lease import Slot
from belljar.lease import desk as leases
from belljar.lease.desk import Owner
from belljar.lease.ec2.front import THREADS, front_end
from belljar.lease.ec2.keyring import MOST, answer, secret_of
from belljar.lease.ec2.office import image_id
from belljar.lease.states import InstanceState, LeaseState
from belljar.records import replace
from belljar.service.credentials.certificates import own_certificate

RUN = {"ImageId": "debian-12", "MinCount": 1, "MaxCount": 1}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "lease")
    made.most = 4
    yield made
    made.store.close()


def test_from_launch_to_end_as_a_polling_client_sees_it(site: House) -> None:
    ec2 = wired(site)
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
        {tag["Key"]: tag["Value"] for tag in look()["Tags"]}
        == {tag["Key"]: tag["Value"] for tag in one["Tags"]}
        == {"Name": "one", "lease:duration": "7200", "lease:state": "requested"}
    )
    assert (one["ImageId"], one["KeyName"], one["StateReason"]["Code"]) == (image_id("debian-12"), "mine", "pending")
    assert site.woken
    for state in (InstanceState.CLAIMED, InstanceState.STAGING, InstanceState.BOOTING):
        site.change(id, state=state)
        look()
    site.change(id, state=InstanceState.RUNNING, address="10.1.2.3", deadline=2e9, launched=time.time())
    assert look()["PrivateIpAddress"] == "10.1.2.3"
    ec2.reboot_instances(InstanceIds=[id])
    assert site.orders[-1][1].instance == id
    site.wrote(id, b"login: ")
    assert ec2.get_console_output(InstanceId=id)["Output"] == "login: "
    (change,) = ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"]
    assert (change["PreviousState"]["Name"], change["CurrentState"]["Name"]) == ("running", "shutting-down")
    look()
    site.change(id, state=InstanceState.TERMINATED, ended=time.time())
    assert look()["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert seen == ["pending"] * 4 + ["running", "shutting-down", "terminated"]
    ec2.delete_key_pair(KeyPairId=pair["KeyPairId"])
    assert ec2.describe_key_pairs()["KeyPairs"] == [] and site.belongings("alice")[1]


def test_a_token_is_kept_over_a_start_of_the_service_and_after_the_end(site: House) -> None:
    ec2 = wired(site)
    first = ec2.run_instances(**RUN, ClientToken="t")["ReservationId"]
    site.reopen()
    ec2.terminate_instances(InstanceIds=[ec2.describe_instances()["Reservations"][0]["Instances"][0]["InstanceId"]])
    again = ec2.run_instances(**RUN, ClientToken="t")
    assert (again["ReservationId"], again["Instances"][0]["State"]["Name"]) == (first, "terminated")
    assert code(ec2.run_instances, **RUN | {"MaxCount": 2}, ClientToken="t") == "IdempotentParameterMismatch"


def test_ten_at_once_with_one_token_are_one_lease(site: House) -> None:
    with served(site) as port:
        clients = [client(port) for _ in range(10)]
        with ThreadPoolExecutor(10) as pool:
            made = list(pool.map(lambda one: one.run_instances(**RUN, ClientToken="t")["ReservationId"], clients))
    assert len(set(made)) == 1
    assert site.store.read(lambda book: book.sums("alice")).machines == 1


def test_denials_have_ec2s_codes_and_the_numbers(site: House) -> None:
    ec2 = wired(site)
    asked = RUN | {"MinCount": 5, "MaxCount": 5}
    with pytest.raises(
        ec2.exceptions.ClientError, match=r"InstanceLimitExceeded.*machines: 0 there \+ 5 asked for = 5 of at most 4"
    ):
        ec2.run_instances(**asked)
    assert code(ec2.run_instances, **asked, DryRun=True) == "InstanceLimitExceeded"
    assert code(ec2.run_instances, **RUN, DryRun=True) == "DryRunOperation"
    assert code(ec2.run_instances, **RUN, InstanceType="m1.huge") == "VcpuLimitExceeded"
    assert len(ec2.run_instances(**RUN | {"MaxCount": 9})["Instances"]) == 4
    assert not site.store.read(lambda book: book.sums("bob")).machines


def test_nobody_reaches_what_is_anothers(site: House) -> None:
    alice, bob = wired(site), wired(site, OTHER_KEY)
    id = alice.run_instances(**RUN)["Instances"][0]["InstanceId"]
    pair = alice.create_key_pair(KeyName="k", KeyType="ed25519")["KeyPairId"]
    assert bob.describe_instances()["Reservations"] == [] and bob.describe_tags()["Tags"] == []
    assert code(bob.terminate_instances, InstanceIds=[id]) == "InvalidInstanceID.NotFound"
    assert code(bob.get_console_output, InstanceId=id) == "InvalidInstanceID.NotFound"
    assert code(bob.describe_key_pairs, KeyPairIds=[pair]) == "InvalidKeyPair.NotFound"
    assert code(bob.run_instances, **RUN, KeyName="k") == "InvalidKeyPair.NotFound"
    bob.delete_key_pair(KeyPairId=pair)
    assert alice.describe_key_pairs()["KeyPairs"]
    site.revoke(KEY)
    assert code(alice.describe_instances) == "AuthFailure"


def test_images_are_those_that_may_be_leased(site: House) -> None:
    ec2 = wired(site)
    assert [one["Name"] for one in ec2.describe_images()["Images"]] == ["debian-12", "worker"]
    assert code(ec2.run_instances, **RUN | {"ImageId": "secret"}) == "InvalidAMIID.Malformed"
    assert code(ec2.run_instances, **RUN | {"ImageId": image_id("secret")}) == "InvalidAMIID.NotFound"
    made = ec2.run_instances(
        **RUN | {"ImageId": image_id("worker")},
        InstanceMarketOptions={"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.5"}},
    )
    (found,) = site.store.read(lambda book: book.find(leases.Lease))
    assert (found.id, found.wanted.image, found.wanted.preemptible, found.state) == (
        made["ReservationId"],
        "worker",
        True,
        LeaseState.REQUESTED,
    )


def test_records_that_cannot_be_read_are_a_server_that_is_not_available(site: House) -> None:
    ec2 = wired(site)
    site.store.read = lambda look: (_ for _ in ()).throw(RecordsLost("disk"))  # type: ignore[method-assign]
    assert code(ec2.describe_instances) == "Unavailable"


# -- access keys -------------------------------------------------------------------------------------------------------


def test_an_owner_makes_a_key_uses_it_and_revokes_it(site: House) -> None:
    ask = partial(answer, site.store, SITE_KEY)
    made = ask(Owner("alice", "physics"), {"act": "new"})
    assert made["secret"] == secret_of(SITE_KEY, made["id"]) and len(made["secret"]) == 40
    ec2 = wired(site, made["id"])
    ec2.run_instances(**RUN)
    assert len(wired(site).describe_instances()["Reservations"]) == 1
    with pytest.raises(BadRequest, match="no such access key"):
        ask(Owner("bob"), {"act": "revoke", "id": made["id"]})
    ask(Owner("alice"), {"act": "revoke", "id": made["id"]})
    assert code(ec2.describe_instances) == "AuthFailure"
    listed = ask(Owner("alice"), {"act": "list"})["keys"]
    assert {one.id: one.enabled for one in listed} == {KEY: True, made["id"]: False}


def test_keys_of_others_are_roots_to_ask_for(site: House) -> None:
    ask = partial(answer, site.store, SITE_KEY)
    for act in ("new", "list"):
        with pytest.raises(NotPermitted, match="bob may ask for their own"):
            ask(Owner("bob"), {"act": act, "owner": "alice"})
    assert {one.owner for one in ask(Owner("root"), {"act": "list"})["keys"]} == {"alice", "bob"}
    assert ask(Owner("root"), {"act": "new", "owner": "nobody"})["owner"] == "nobody"
    for asked in ({"act": "new", "owner": "nobody-there"}, {"act": "shine"}, {}):
        with pytest.raises(BadRequest):
            ask(Owner("root"), asked)
    for _ in range(MOST - 1):
        ask(Owner("bob"), {"act": "new"})
    with pytest.raises(BadRequest, match="10 access keys"):
        ask(Owner("bob"), {"act": "new"})


def test_a_directory_of_accounts_that_does_not_answer_stops_no_other(
    site: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service looks at its leases meanwhile."""
    looked = list[bool]()

    def slow(name: str) -> Any:
        other = threading.Thread(target=lambda: site.store.read(lambda book: book.find(Slot)), daemon=True)
        other.start()
        other.join(2)
        looked.append(not other.is_alive())
        raise KeyError(name)

    monkeypatch.setattr("pwd.getpwnam", slow)
    assert code(wired(site).describe_instances) == "" and looked == [True]


# -- as a part of the service ------------------------------------------------------------------------------------------


async def test_the_service_serves_it_by_tls(tmp_path: Path) -> None:
    site, pem, port, loop = House(tmp_path / "lease"), tmp_path / "service.pem", free_port(), asyncio.get_running_loop()
    own_certificate(pem, ("localhost", "127.0.0.1"))
    here, woken = loop.create_future(), asyncio.Event()
    settings = replace(SETTINGS, ec2_listen=f"127.0.0.1:{port}", ec2_certificate=str(pem))
    desk = leases.Desk(site.store, settings, site.office.leases.policies)

    async def sent(slot: str, id: str) -> None:
        assert asyncio.get_running_loop() is loop
        site.wrote(id, b"login: ")

    office = replace(site.office, leases=desk, settings=settings, wake=woken.set, order=lambda *_: None, console=sent)
    work = asyncio.ensure_future(front_end(office, SITE_KEY, pem, lambda event, **facts: here.set_result(facts)))
    assert (await here)["address"] == f"https://127.0.0.1:{port}"
    made = boto3.session.Session(KEY, secret_of(SITE_KEY, KEY), region_name="lab").client(
        "ec2", endpoint_url=f"https://127.0.0.1:{port}", verify=str(pem)
    )
    found = await in_thread(lambda: made.run_instances(**RUN))
    assert found["OwnerId"] == "alice"
    (one,) = site.machines
    site.store.write(lambda book: book.put(slot := Slot(one.lease, 1, 0, "pilot"), replace(one, slot=slot.id)))
    assert (await in_thread(lambda: made.get_console_output(InstanceId=one.id)))["Output"] == "login: "
    await asyncio.wait_for(woken.wait(), 5)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert not is_open(port)
    site.store.close()


async def test_who_waits_for_consoles_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """A pilot that is silent has two seconds for each, and there are few threads."""
    site, port = House(tmp_path / "lease"), free_port()
    here, ended = asyncio.get_running_loop().create_future(), asyncio.Event()
    settings = replace(SETTINGS, ec2_listen=f"127.0.0.1:{port}")
    desk = leases.Desk(site.store, settings, site.office.leases.policies)

    async def silent(slot: str, id: str) -> None:
        await ended.wait()

    office = replace(site.office, leases=desk, settings=settings, wake=int, order=lambda *_: None, console=silent)
    work = asyncio.ensure_future(front_end(office, SITE_KEY, tmp_path, lambda event, **facts: here.set_result(facts)))
    await here
    ec2 = client(port, max_pool_connections=2 * THREADS)
    await in_thread(lambda: ec2.run_instances(**RUN))
    (one,) = site.machines
    site.store.write(lambda book: book.put(slot := Slot(one.lease, 1, 0, "pilot"), replace(one, slot=slot.id)))
    ask = lambda: ec2.get_console_output(InstanceId=one.id, Latest=True)  # noqa: E731
    looks = [asyncio.ensure_future(in_thread(ask)) for _ in range(THREADS)]
    try:
        async with asyncio.timeout(5):
            await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)  # one too many is told what there is
            assert (await in_thread(ec2.describe_instances))["Reservations"]
    finally:
        ended.set()
        await asyncio.gather(*looks)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        site.store.close()


@pytest.mark.parametrize(
    ("where", "what"),
    [("0.0.0.0:8444", "certificate"), ("[::]:8444", "certificate"), ("8444", "listen"), ("localhost:8444", "listen")],
)
async def test_without_a_certificate_no_other_host_is_served(site: House, where: str, what: str) -> None:
    office = replace(site.office, settings=replace(SETTINGS, ec2_listen=where))
    with pytest.raises(BadSetting, match=rf"lease\.ec2_{what}"):
        await front_end(office, SITE_KEY, site.folder / "none.pem", lambda event, **facts: None)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
