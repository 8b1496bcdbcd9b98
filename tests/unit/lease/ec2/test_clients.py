"""Clients of EC2 as they are, against the front end over loopback: boto3, aws cli, libcloud with its EC2 and its Nimbus driver, curl."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libcloud.compute.base import NodeImage
from libcloud.compute.providers import get_driver
from libcloud.compute.types import NodeState, Provider
from tests.unit.lease.ec2.clients import client, served
from tests.unit.lease.ec2.house import IMAGE, KEY, OTHER_KEY, SITE_KEY, House

from belljar.lease.ec2.keyring import secret_of

LOGIN = b"Debian GNU/Linux 12 ttyS0\n"


class Site:
    def __init__(self, port: int, house: House) -> None:
        self.port, self.house = port, house
        self.url = f"http://127.0.0.1:{port}"

    def aws(self, *words: str, key: str = KEY, fails: bool = False) -> Any:
        env = {
            **os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret_of(SITE_KEY, key), "AWS_DEFAULT_REGION": "lab",
            "AWS_ENDPOINT_URL_EC2": self.url, "AWS_PAGER": "", "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }  # fmt: skip
        program = str(Path(sys.executable).with_name("aws"))
        done = subprocess.run(
            [program, "ec2", *words], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode != 0) == fails, done.stderr
        if fails:
            return done.stderr
        return json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else done.stdout

    def libcloud(self, provider: str, **more: Any) -> Any:
        return get_driver(provider)(
            KEY, secret_of(SITE_KEY, KEY), secure=False, host="127.0.0.1", port=self.port, **more
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    house = House(tmp_path / "lease")
    with served(house.front) as port:
        yield Site(port, house)
    house.store.close()


def test_boto3(site: Site) -> None:
    ec2 = client(site.port, kind="resource")
    (made,) = ec2.create_instances(ImageId=IMAGE, MinCount=1, MaxCount=1, InstanceType="m1.large", UserData="#!/bin/sh")
    assert made.state["Name"] == "pending"
    site.house.boot()
    made.wait_until_running()
    made.reload()
    tags = {one["Key"]: one["Value"] for one in made.tags}
    assert (made.public_ip_address, made.image.name, tags["lease:state"]) == ("8.0.0.7", "debian-12", "requested")
    made.create_tags(Tags=[{"Key": "Name", "Value": "one"}])
    running = ec2.instances.filter(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    assert [one.id for one in running] == [made.id]
    site.house.wrote(made.id, LOGIN)
    assert made.console_output()["Output"] == "Debian GNU/Linux 12 ttyS0\n"
    assert base64.b64decode(made.describe_attribute(Attribute="userData")["UserData"]["Value"]) == b"#!/bin/sh"
    assert ec2.create_key_pair(KeyName="k").key_material.startswith("-----BEGIN RSA PRIVATE KEY-----")
    assert [one.name for one in ec2.key_pairs.all()] == ["k"]
    running.terminate()
    site.house.end()
    made.wait_until_terminated()
    assert [one.name for one in ec2.images.all()] == ["debian-12", "worker"]


def test_a_thousand_instances_are_told_in_pages(site: Site) -> None:
    site.house.most = 1000
    plain = client(site.port)
    plain.run_instances(ImageId=IMAGE, MinCount=1000, MaxCount=1000)
    begun = time.monotonic()
    assert sum(len(one["Instances"]) for one in plain.describe_instances()["Reservations"]) == 1000
    assert time.monotonic() - begun < 5
    pages = plain.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 300})
    sizes = [sum(len(one["Instances"]) for one in page["Reservations"]) for page in pages]
    assert sizes == [300, 300, 300, 100]


def test_aws_cli(site: Site) -> None:
    told = site.aws(
        "run-instances", "--image-id", IMAGE, "--count", "1:2", "--instance-type", "m1.small", "--user-data", "#!/bin/sh",
        "--tag-specifications", "ResourceType=instance,Tags=[{Key=Name,Value=one},{Key=lease:duration,Value=PT2H}]",
    )  # fmt: skip
    ids = [one["InstanceId"] for one in told["Instances"]]
    assert len(ids) == 2 and site.house.wanted[0].seconds == 7200
    site.house.boot()
    site.aws("wait", "instance-running", "--instance-ids", *ids)
    query = "Reservations[].Instances[].[InstanceId,State.Name,PublicIpAddress]"
    text = site.aws("describe-instances", "--query", query, "--output", "text", "--filters", "Name=tag:Name,Values=o*")
    assert text.split() == [ids[0], "running", "8.0.0.7", ids[1], "running", "8.0.0.7"]
    assert "running" in site.aws("describe-instances", "--output", "table", "--page-size", "5")
    site.house.wrote(ids[0], LOGIN)
    assert site.aws("get-console-output", "--instance-id", ids[0])["Output"] == "Debian GNU/Linux 12 ttyS0\n"
    assert "PRIVATE KEY" in site.aws("create-key-pair", "--key-name", "k", "--query", "KeyMaterial", "--output", "text")
    assert "DryRunOperation" in site.aws("terminate-instances", "--dry-run", "--instance-ids", *ids, fails=True)
    site.aws("reboot-instances", "--instance-ids", ids[0])
    site.aws("create-tags", "--resources", ids[0], "--tags", "Key=a,Value=b c")
    assert [one["InstanceType"] for one in site.aws("describe-instance-types")["InstanceTypes"]] == [
        "m1.huge",
        "m1.large",
        "m1.small",
        "t3.micro",
    ]
    wanted = json.dumps({"ImageId": "worker", "MinCount": 1, "MaxCount": 1, "ClientToken": "t"})
    again = [site.aws("run-instances", "--cli-input-json", wanted)["ReservationId"] for _ in range(2)]
    assert again[0] == again[1]
    ended = site.aws("terminate-instances", "--instance-ids", *ids)["TerminatingInstances"]
    assert [one["CurrentState"]["Name"] for one in ended] == ["shutting-down"] * 2
    site.house.end()
    site.aws("wait", "instance-terminated", "--instance-ids", *ids)
    assert "InvalidInstanceID.NotFound" in site.aws(
        "describe-instances", "--instance-ids", ids[0], key=OTHER_KEY, fails=True
    )


@pytest.mark.parametrize(
    ("provider", "more"),
    [(Provider.EC2, {"region": "us-east-1", "signature_version": "4"}), (Provider.EC2, {"region": "us-east-1", "signature_version": "2"}), (Provider.NIMBUS, {})],
    ids=["ec2", "ec2-v2", "nimbus"],
)  # fmt: skip
def test_libcloud(site: Site, provider: str, more: dict[str, Any]) -> None:
    driver = site.libcloud(provider, **more)
    wanted = "m1.small" if provider == Provider.NIMBUS else "t3.micro"
    size = next(one for one in driver.list_sizes() if one.id == wanted)
    images = driver.list_images() if provider == Provider.NIMBUS else driver.list_images(ex_owner="self")
    image = next(one for one in images if isinstance(one, NodeImage) and one.name == "debian-12")
    assert driver.list_locations()
    pair = (
        driver.create_key_pair("k") if provider != Provider.NIMBUS else driver.import_key_pair_from_string("k", PUBLIC)
    )
    assert [one.name for one in driver.list_key_pairs()] == [pair.name] == ["k"]
    node = driver.create_node(
        name="one two", image=image, size=size, ex_keyname="k", ex_userdata="#!/bin/sh\necho a & b"
    )
    assert site.house.wanted[0].user_data == b"#!/bin/sh\necho a & b"
    assert node.state == NodeState.PENDING
    site.house.boot()
    (found,) = [one for one in driver.list_nodes() if one.id == node.id]
    assert (found.state, found.public_ips, found.name) == (NodeState.RUNNING, ["8.0.0.7"], "one two")
    assert driver.reboot_node(found) and site.house.rebooted == [node.id]
    assert driver.destroy_node(found)
    site.house.end()
    assert driver.list_nodes()[0].state == NodeState.TERMINATED
    assert driver.delete_key_pair(pair)


PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def test_a_presigned_request_with_curl(site: Site) -> None:
    for method in ("GET", "POST"):
        url = client(site.port).generate_presigned_url(
            "describe_images", Params={"ImageIds": [IMAGE]}, HttpMethod=method
        )
        done = subprocess.run(["curl", "-s", "-X", method, url], capture_output=True, text=True, timeout=20, check=True)
        assert f"<imageId>{IMAGE}</imageId>" in done.stdout
    late = (
        client(site.port)
        .generate_presigned_url("describe_images", ExpiresIn=604800, HttpMethod="GET")
        .replace(IMAGE[:4], "x")
    )
    done = subprocess.run(
        ["curl", "-s", late.replace("604800", "604799")], capture_output=True, text=True, timeout=20, check=True
    )
    assert "SignatureDoesNotMatch" in done.stdout


# -- who does not speak as they should ---------------------------------------------------------------------------------


def said(site: Site, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as sock:
        sock.sendall(data)
        found = b""
        while part := sock.recv(65536):
            found += part
        return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\n\r\n", b"400"), (b"GET /" + b"a" * 300000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", b"413"), (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"a" * 65535 + b"\r\n" + b"ffffff\r\n" + b"a" * 131072, b"413"),
        (b"GET /?Action=A HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"403"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: text/xml\r\nContent-Length: 4\r\n\r\n<a/>", b"400"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_request_is_answered_in_ec2s_shape(site: Site, data: bytes, status: bytes) -> None:
    head, _, body = said(site, data).partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert body.startswith(b'<?xml version="1.0"') and b"<Response><Errors><Error><Code>" in body


def test_a_body_in_chunks_is_a_body(site: Site) -> None:
    data = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nAction\r\n2\r\n=A\r\n0\r\n\r\n"
    assert b"MissingAuthenticationToken" in said(site, data)


def test_who_guesses_is_not_looked_at_for_a_while(site: Site) -> None:
    one = b"GET /?Action=A HTTP/1.1\r\nHost: a\r\n\r\n"
    last = b"GET /?Action=A HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answers = said(site, one * 60 + last)
    assert answers.count(b"<Code>MissingAuthenticationToken") >= 50
    assert b"<Code>RequestLimitExceeded" in answers
