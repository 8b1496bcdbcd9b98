"""Whatever arrives at the front end: it is answered in EC2's own shape, by the code that programs know, and nothing is done."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.parsers import EC2QueryParser
from tests.unit.lease.ec2.clients import code, wired
from tests.unit.lease.ec2.house import KEY, OTHER_KEY, SITE_KEY, House
from tests.unit.lease.ec2.test_signature import changed, form, posted, presigned, version_2, with_header

from belljar.lease import belongings
from belljar.lease.ec2.front import ACTIONS, OWNERS, STRANGERS
from belljar.lease.ec2.keyring import secret_of
from belljar.lease.ec2.model import model
from belljar.lease.ec2.request import LARGEST_BODY
from belljar.lease.store import sqlite
from belljar.records import replace
from belljar.service.http.server import Sent

SECRET = secret_of(SITE_KEY, KEY)
LIST = {"Action": "DescribeInstances", "Version": "2016-11-15"}
RUN = {**LIST, "Action": "RunInstances", "ImageId": "debian-12", "MinCount": "1", "MaxCount": "1"}
BOMB = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><a>&b;</a>'
Made = Callable[[], Sent]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "lease")
    yield made
    made.store.close()


def signed(fields: dict[str, str] = RUN, **more: Any) -> Sent:
    return posted(fields, **{"secret": SECRET, **more})


def words(pattern: str, instead: str) -> Sent:
    one = signed()
    return with_header(one, "authorization", re.sub(pattern, instead, dict(one.headers)["authorization"]))


def said(house: House, one: Sent) -> tuple[int, str]:
    """Status and code, as botocore reads them."""
    answer = house.front.answer(replace(one, peer="192.0.2.1"))
    parsed = EC2QueryParser().parse({"status_code": answer.status, "headers": {}, "body": answer.body}, None)
    assert parsed["ResponseMetadata"]["RequestId"] == dict(answer.headers)["x-amzn-requestid"]
    assert answer.status == 200 or parsed["Error"]["Message"]
    return answer.status, parsed.get("Error", {}).get("Code", "")


@pytest.mark.parametrize(
    ("made", "later", "expected"),
    [
        (signed, 960, (400, "RequestExpired")), (signed, -960, (400, "RequestExpired")),
        (lambda: presigned(RUN, expires=60, secret=SECRET), 90, (400, "RequestExpired")), (lambda: version_2(RUN, SECRET), 960, (400, "RequestExpired")),
        (lambda: words(r"Signature=(\w{40})\w+", r"Signature=\1"), 0, (403, "SignatureDoesNotMatch")),
        (lambda: words(r"Signature=\w+", "Signature="), 0, (400, "IncompleteSignature")),
        (lambda: words(r", Signature=.*", ""), 0, (400, "IncompleteSignature")),
        (lambda: words(r"/lab/ec2/", "/lab/ec2/more/"), 0, (400, "IncompleteSignature")),
        (lambda: with_header(signed(), "host", "other.example"), 0, (403, "SignatureDoesNotMatch")),
        (lambda: with_header(version_2(RUN, SECRET), "host", "other.example"), 0, (403, "SignatureDoesNotMatch")),
        (lambda: with_header(signed(), "x-amz-date", None), 0, (400, "IncompleteSignature")),
        (lambda: with_header(signed(), "authorization", None), 0, (403, "MissingAuthenticationToken")),
        (lambda: with_header(signed(), "authorization", "Basic YTpi"), 0, (400, "IncompleteSignature")),
        (lambda: signed(secret="guess"), 0, (403, "SignatureDoesNotMatch")),
        (lambda: words(KEY, "BJ" + "Z" * 18), 0, (401, "AuthFailure")), (lambda: words(KEY, "' OR 1=1"), 0, (400, "IncompleteSignature")),
        (lambda: changed(signed(), body=form(RUN | {"MaxCount": "9"}).encode()), 0, (403, "SignatureDoesNotMatch")),
        (lambda: changed(signed(), target="/?MaxCount=9"), 0, (400, "MalformedQueryString")),
        (lambda: Sent("GET", f"/?{form({**RUN, 'Signature': 'x', 'SignatureVersion': '1'})}", (("host", "a"),)), 0, (400, "IncompleteSignature")),
    ],
    ids=range(19),
)  # fmt: skip
def test_signatures_that_are_not_right(house: House, made: Made, later: float, expected: tuple[int, str]) -> None:
    house.later = later
    assert said(house, made()) == expected
    assert not house.machines


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"Action": "DescribeFleets"}, "InvalidAction"), ({"Action": "<b>&"}, "InvalidAction"), ({"Action": "x" * 50000}, "InvalidAction"),
        ({"Action": ""}, "MissingParameter"), ({"Version": ""}, "MissingParameter"), ({"Version": "2099-01-01"}, "NoSuchVersion"),
        ({"Version": "2006-06-26"}, "NoSuchVersion"), ({"Version": "latest"}, "NoSuchVersion"), ({"Version": "../../etc"}, "NoSuchVersion"),
        ({"Colour": "red"}, "UnknownParameter"), ({"InstanceId.1.2.3.4.5.6.7.8.9": "x"}, "UnknownParameter"),
        ({"InstanceId.999999999999999999": "i-1"}, "UnknownParameter"), ({"InstanceId.-1": "i-1"}, "UnknownParameter"),
        ({"Filter": "a"}, "InvalidParameterValue"), ({"InstanceId.1": BOMB}, "InvalidInstanceID.Malformed"),
        ({"InstanceId.1": "i-1' OR 1=1 --"}, "InvalidInstanceID.Malformed"), ({"InstanceId.1": "i-0123456789abcdef0\n"}, "InvalidInstanceID.Malformed"),
        ({"MaxResults": "-5"}, "InvalidParameterValue"), ({"MaxResults": "1e3"}, "InvalidParameterValue"), ({"MaxResults": "9" * 5000}, "InvalidParameterValue"),
        ({"NextToken": "A" * 9000}, "InvalidPaginationToken"), ({"DryRun": "maybe"}, "InvalidParameterValue"),
        ({f"Filter.{one}.Name": "tag-key" for one in range(1, 1500)}, "InvalidParameterValue"),
        ({"Filter.1.Name": "tag-key"} | {f"Filter.1.Value.{one}": "*a" * 20 for one in range(1, 202)}, "FilterLimitExceeded"),
        ({"Filter.1.Name": "instance-state.name.name", "Filter.1.Value.1": "x"}, "InvalidParameterValue"),
    ],
    ids=range(25),
)  # fmt: skip
def test_requests_that_say_nothing_sensible(house: House, fields: dict[str, str], expected: str) -> None:
    assert said(house, signed({**LIST, **fields}))[1] == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"MaxCount": "-1"}, "InvalidParameterValue"), ({"MaxCount": str(10**17)}, "InvalidParameterValue"),
        ({"MinCount": str(10**17), "MaxCount": str(10**17)}, "InvalidParameterValue"), ({"UserData": "%%%"}, "InvalidUserData.Malformed"),
        ({"ClientToken": "x" * 65}, "InvalidParameterValue"), ({"ImageId": "../../etc/passwd"}, "InvalidAMIID.Malformed"),
        ({"InstanceMarketOptions.MarketType": "spot", "InstanceMarketOptions.SpotOptions.ValidUntil": "never"}, "InvalidParameterValue"),
        ({"TagSpecification.1.ResourceType": "instance", "TagSpecification.1.Tag.1.Key": "lease:duration", "TagSpecification.1.Tag.1.Value": "99999999"}, "InvalidParameterValue"),
        ({"InstanceType": BOMB}, "InvalidParameterValue"),
    ],
    ids=range(9),
)  # fmt: skip
def test_launches_that_cannot_be(house: House, fields: dict[str, str], expected: str) -> None:
    assert said(house, signed({**RUN, **fields}))[1] == expected
    assert not house.machines


@pytest.mark.parametrize(
    "kind", ["text/xml", "application/soap+xml", "application/json", "multipart/form-data; boundary=x"]
)
def test_a_body_that_is_no_form_is_not_looked_into(house: House, kind: str) -> None:
    one = with_header(changed(signed(), body=BOMB.encode() * 100), "content-type", kind)
    assert said(house, one) == (400, "MalformedQueryString")


def test_an_owner_has_so_many_key_pairs(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(belongings, "MOST_PAIRS", 2)
    alice, bob = wired(house), wired(house, OTHER_KEY)
    asked = [code(alice.create_key_pair, KeyName=name, KeyType="ed25519") for name in ("a", "b", "b", "c")]
    assert asked == ["", "", "InvalidKeyPair.Duplicate", "ResourceLimitExceeded"]
    assert code(bob.create_key_pair, KeyName="c", KeyType="ed25519") == ""
    alice.delete_key_pair(KeyName="a")
    assert code(alice.create_key_pair, KeyName="c", KeyType="ed25519") == ""


def test_a_long_path_is_read_in_no_time(house: House) -> None:
    """Nobody has signed it yet: who tries each way to part it in two would be busy for years."""
    assert said(house, changed(signed(), target=f"/{'a' * 5000}!")) == (400, "MalformedQueryString")


def test_xml_in_a_form_is_text(house: House) -> None:
    assert said(house, changed(signed(), body=BOMB.encode()))[0] == 400
    ec2 = wired(house)
    ec2.run_instances(ImageId="debian-12", MinCount=1, MaxCount=1, TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "bomb", "Value": BOMB}]}])  # fmt: skip
    assert {"Key": "bomb", "Value": BOMB} in ec2.describe_instances()["Reservations"][0]["Instances"][0]["Tags"]


def test_too_many_parameters_are_refused_before_anything_else(house: House) -> None:
    many = {f"InstanceId.{one}": "i-0123456789abcdef0" for one in range(3000)}
    one = signed(LIST | many)
    assert len(one.body) < LARGEST_BODY
    assert said(house, one) == (400, "MalformedQueryString")


def test_records_that_another_has_locked(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try again by themselves; with their token, nothing is made twice."""
    monkeypatch.setattr(sqlite, "PATIENCE", 0.01)
    house.reopen()
    (file,) = house.folder.glob("*.sqlite")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert said(house, signed(RUN | {"ClientToken": "t"})) == (503, "Unavailable")
    assert "locked" in house.told[-1]["why"]
    assert said(house, signed(LIST)) == (200, "")
    other.execute("ROLLBACK")
    other.close()
    for _ in range(2):
        assert said(house, signed(RUN | {"ClientToken": "t"})) == (200, "")
    assert len(house.machines) == 1


def test_a_key_that_asks_too_often_waits_and_no_other_does(house: House) -> None:
    house.front._clock = lambda at=house.now: at + house.later  # type: ignore[misc]  # it stands still while they ask
    found = [said(house, signed(LIST)) for _ in range(int(OWNERS.burst) + 60)]
    assert found[: int(OWNERS.burst)] == [(200, "")] * int(OWNERS.burst) and (503, "RequestLimitExceeded") in found
    assert code(wired(house, OTHER_KEY).describe_instances) == ""
    house.later += 60 / OWNERS.rate
    assert said(house, signed(LIST)) == (200, "")


def test_who_signs_wrongly_keeps_no_other_of_that_host_out(house: House) -> None:
    """Users of one host have one address: a stale secret in somebody's script is that one's own trouble."""
    others = signed(LIST, key=OTHER_KEY, secret=secret_of(SITE_KEY, OTHER_KEY))
    for wrong, own in (
        (signed(LIST, secret="stale"), (503, "RequestLimitExceeded")), (signed(LIST, key="BJNOBODYS"), (200, "")),
        (replace(signed(LIST), headers=()), (200, "")),
    ):  # fmt: skip
        found = [said(house, wrong)[1] for _ in range(int(STRANGERS.burst) + 10)]
        assert found[0] != "RequestLimitExceeded" and found[-1] == "RequestLimitExceeded"
        assert said(house, others) == (200, "") and said(house, signed(LIST)) == own
        assert house.front.answer(replace(signed(LIST), peer="192.0.2.9")).status == 200
        house.later += STRANGERS.burst / STRANGERS.rate
    assert said(house, signed(LIST)) == (200, "")


# -- what is another's -------------------------------------------------------------------------------------------------


def test_no_action_tells_what_is_anothers_from_what_is_not(house: House) -> None:
    """Each action, asked by bob with alice's ids and names, and with such as nobody has."""
    alice = wired(house)
    machine = alice.run_instances(ImageId="debian-12", MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    pair = alice.create_key_pair(KeyName="alices", KeyType="ed25519")["KeyPairId"]
    house.boot()
    alice.create_tags(Resources=[machine], Tags=[{"Key": one, "Value": "b"} for one in "abcdef"])
    token = alice.describe_tags(MaxResults=5)["NextToken"]
    hers = {"i": machine, "key": pair, "name": "alices", "token": token}
    none = {
        "i": "i-00000000000000000",
        "key": "key-00000000000000000",
        "name": "nobodys",
        "token": "y",
    }
    before = house.machines, house.belongings("alice")
    bob = {"secret": secret_of(SITE_KEY, OTHER_KEY)}
    # What is made comes last: bob may call his own as alice called hers.
    for action in sorted(ACTIONS, key=lambda name: (name.startswith(("Create", "Import", "R")), name)):
        for parameters in asked_of(action):
            answers = []
            for known in (hers, none):
                fields = {name: known.get(value, value) for name, value in parameters.items()}
                one = signed({**LIST, "Action": action, **fields}, **bob, key=OTHER_KEY)
                house.later += 1  # nobody asks too often
                answer = house.front.answer(replace(one, peer="192.0.2.1"))
                text = answer.body.decode()
                assert "<Code>SignatureDoesNotMatch<" not in text and "<Code>RequestLimitExceeded<" not in text
                assert all(value in fields.values() or value not in text for value in hers.values()), action
                for name, value in known.items():
                    text = text.replace(value, name) if name != "token" else text
                text = re.sub(r"\b(r|i|key)-[0-9a-f]{17}", r"\1", text)  # bob's own, which he has just made
                answers.append((answer.status, re.sub(r"<request(Id)>.*?<|<RequestI(D)>.*?<", "", text, flags=re.I)))
            if action not in ("CreateKeyPair", "ImportKeyPair"):
                assert answers[0] == answers[1], (action, parameters)
    machines = [one for one in house.machines if one.owner == "alice"]
    assert (machines, house.belongings("alice")) == before


def asked_of(action: str) -> list[dict[str, str]]:
    """Parameters that name something: every one of the action's shape that could."""
    shape = model().input(action)
    fill = {
        "InstanceIds": {"InstanceId.1": "i"}, "InstanceId": {"InstanceId": "i"},
        "KeyNames": {"KeyName.1": "name"}, "KeyPairIds": {"KeyPairId.1": "key"}, "KeyPairId": {"KeyPairId": "key"}, "KeyName": {"KeyName": "name"},
        "NextToken": {"NextToken": "token"}, "Resources": {"ResourceId.1": "i"}, "Filters": {"Filter.1.Name": "key-name", "Filter.1.Value.1": "name"},
    }  # fmt: skip
    must = {
        "RunInstances": {"ImageId": "debian-12", "MinCount": "1", "MaxCount": "1"}, "CreateTags": {"Tag.1.Key": "a", "Tag.1.Value": "b"},
        "DescribeInstanceAttribute": {"Attribute": "userData"}, "ImportKeyPair": {"PublicKeyMaterial": "QUJD"},
    }.get(action, {})  # fmt: skip
    named = [known for name, known in fill.items() if name in shape.members]
    return [
        {},
        must,
        *({**must, **known} for known in named),
        *([{**must, "ResourceId.1": "key"}] if "Resources" in shape.members else []),
    ]
