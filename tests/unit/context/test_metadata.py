"""The metadata service, asked by good and by hostile guests over a pair of sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from belljar.context import Instance, metadata
from belljar.context.metadata import Service
from belljar.context.outputs import Outputs
from belljar.records import replace

INSTANCE = Instance(
    uuid="u-u-i-d", hostname="belljar-0f", user_data=b"#!/bin/sh\n\xff\n", machinetype="prod", zone="node1", size="2-1024",
    address="10.0.2.15", mac="52:54:00:00:00:07", base_url="http://169.254.169.253",
)  # fmt: skip
FEATURES = {"machinefeatures": {"total_cpu": "4", "hs06": "42.0"}, "jobfeatures": {"job_id": "7", "cpu<b>": "x"}}
Client = Callable[["Guest"], Awaitable[None]]


class Guest:
    """The other end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.loop, self.left = end, asyncio.get_running_loop(), b""

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.end, data)

    async def read(self) -> tuple[int, dict[str, str], bytes]:
        """One answer, or (0, {}, what came) when the service closes."""
        while b"\r\n\r\n" not in self.left:
            if not await self.more():
                return 0, {}, self.left
        head, _, self.left = self.left.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(self.left) < size:
            assert await self.more()
        data, self.left = self.left[:size], self.left[size:]
        return int(first.split()[1]), headers, data

    async def more(self) -> bool:
        data = await self.loop.sock_recv(self.end, 65536)
        self.left += data
        return bool(data)

    async def ask(self, method: str, path: str, *lines: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        length = [f"Content-Length: {len(body)}"] if method == "PUT" or body else []
        head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 169.254.169.254", *length, *lines, "", ""])
        await self.send(head.encode("latin-1") + body)
        return await self.read()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(INSTANCE, lambda: FEATURES, Outputs(tmp_path / "out", most_bytes=1000, most_files=3))


def talk(service: Service, *clients: Client) -> None:
    """Each client has a connection of its own; all at once."""

    async def one(client: Client) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            serving = asyncio.ensure_future(_served(service, ours))
            try:
                await asyncio.wait_for(client(Guest(theirs)), 20)
            finally:
                theirs.close()
                await asyncio.wait_for(serving, 20)

    async def every() -> None:
        await asyncio.gather(*(one(client) for client in clients))

    asyncio.run(every())


async def _served(service: Service, ours: socket.socket) -> None:
    await service.serve(ours)
    ours.close()


def get(service: Service, path: str, *lines: str) -> tuple[int, str]:
    found: list[tuple[int, str]] = []

    async def client(guest: Guest) -> None:
        status, _, data = await guest.ask("GET", path, *lines)
        found.append((status, data.decode("latin-1")))

    talk(service, client)
    return found[0]


def put(service: Service, path: str, body: bytes, *lines: str) -> int:
    found: list[int] = []

    async def client(guest: Guest) -> None:
        found.append((await guest.ask("PUT", path, *lines, body=body))[0])

    talk(service, client)
    return found[0]


# -- what is there -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/latest/user-data", "#!/bin/sh\n\xff\n"), ("/2009-04-04/user-data", "#!/bin/sh\n\xff\n"),
        ("/openstack/latest/user_data", "#!/bin/sh\n\xff\n"), ("/openstack/2013-10-17/user-data", "#!/bin/sh\n\xff\n"),
        ("//latest//user-data", "#!/bin/sh\n\xff\n"), ("http://169.254.169.254/latest/user-data", "#!/bin/sh\n\xff\n"),
        ("/latest/meta-data/instance-id", "u-u-i-d"), ("/latest/meta-data/ami-id?x=1", "u-u-i-d"),
        ("/latest/meta-data/hostname", "belljar-0f"), ("/latest/meta-data/local-hostname", "belljar-0f"),
        ("/latest/meta-data/local-ipv4", "10.0.2.15"), ("/latest/meta-data/instance-type", "2-1024"),
        ("/latest/meta-data/placement/availability-zone", "node1"), ("/latest/meta-data/placement/", "availability-zone"),
        ("/latest", "dynamic\nmeta-data\nuser-data"), ("/latest/meta-data/mac", "52:54:00:00:00:07"),
        ("/latest/meta-data/network/interfaces/macs/", "52:54:00:00:00:07/"),
        ("/latest/meta-data/network/interfaces/macs/52:54:00:00:00:07/local-ipv4s", "10.0.2.15"),
        ("/latest/meta-data/network/interfaces/macs/52:54:00:00:00:07/device-number", "0"),
        ("/latest/dynamic/", "instance-identity/"), ("/latest/dynamic/instance-identity", "document"),
        ("/openstack/2020-01-01/meta-data/ami-id", "u-u-i-d"), ("/machinefeatures/total_cpu", "4"), ("/jobfeatures/job_id", "7"),
    ],
)  # fmt: skip
def test_what_guests_of_clouds_and_of_vac_ask_for(service: Service, path: str, text: str) -> None:
    assert get(service, path) == (200, text)


def test_the_listing_of_metadata_names_every_leaf_and_folder(service: Service) -> None:
    status, text = get(service, "/latest/meta-data/")
    names = text.split("\n")
    assert status == 200 and {"ami-id", "instance-id", "placement/"} <= set(names)
    assert len(names) == len(set(names))
    for name in names:
        assert get(service, f"/latest/meta-data/{name}")[0] == 200, name


def test_a_machine_of_a_lease_is_told_what_ec2_would_tell(tmp_path: Path) -> None:
    """Read from the listings as cloud-init does: NAME/ is a folder, and `0=NAME` stands for 0/openssh-key."""
    told = {"instance-id": "i-1", "ami-launch-index": "3", "placement/availability-zone": "lab", "public-keys/0/openssh-key": "ssh-ed25519 AAAA me"}  # fmt: skip
    service = Service(
        replace(INSTANCE, told=tuple(told.items())), lambda: {}, Outputs(tmp_path, most_bytes=1, most_files=1)
    )

    def tree(path: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for name in get(service, path)[1].splitlines():
            number, _, key = name.partition("=")
            if name.endswith("/"):
                found[name[:-1]] = tree(path + name)
            else:
                found[key or name] = get(service, f"{path}{number}/openssh-key" if key else path + name)[1]
        return found

    found = tree("/2009-04-04/meta-data/")
    assert (found["instance-id"], found["ami-launch-index"], found["placement"]) == (
        "i-1",
        "3",
        {"availability-zone": "lab"},
    )
    assert found["public-keys"] == {"key-0": "ssh-ed25519 AAAA me"} and found["local-ipv4"] == "10.0.2.15"


def test_the_identity_document_has_what_the_leaves_have(tmp_path: Path) -> None:
    told = {
        "instance-id": "i-1",
        "ami-id": "ami-1",
        "instance-type": "small",
        "placement/availability-zone": "lab",
        "placement/region": "lab",
    }
    out = Outputs(tmp_path, most_bytes=1, most_files=1)
    found = get(
        Service(replace(INSTANCE, told=tuple(told.items())), lambda: {}, out),
        "/latest/dynamic/instance-identity/document",
    )[1]
    assert json.loads(found) == {
        "instanceId": "i-1", "imageId": "ami-1", "instanceType": "small", "availabilityZone": "lab", "region": "lab",
        "privateIp": "10.0.2.15", "architecture": "x86_64", "version": "2017-09-30",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["meta_data.json", "meta-data.json"])
def test_openstacks_documents_in_both_spellings(service: Service, name: str) -> None:
    status, text = get(service, f"/openstack/latest/{name}")
    found = json.loads(text)
    assert status == 200
    assert found["uuid"] == "u-u-i-d" and found["meta"]["machinetype"] == "prod"
    assert found["meta"]["joboutputs"] == "http://169.254.169.253/joboutputs"
    assert get(service, "/2009-04-04/meta-data.json")[1] == text  # where Vac has it


def test_features_are_listed_as_links(service: Service) -> None:
    status, text = get(service, "/machinefeatures/")
    assert status == 200 and '<a href="hs06">hs06</a>' in text and '<a href="total_cpu">' in text
    assert "<b>" not in get(service, "/jobfeatures")[1].replace("<br>", "")


@pytest.mark.parametrize(
    "path",
    ["/latest/nothing", "/nothing", "/openstack/latest/network_data.json", "/machinefeatures/none", "/machinefeatures/total_cpu/more", "/joboutputs", "/joboutputs/a", "/2020/user-data"],
)  # fmt: skip
def test_what_is_not_there(service: Service, path: str) -> None:
    assert get(service, path)[0] == 404


def test_without_user_data_there_is_none(tmp_path: Path) -> None:
    service = Service(Instance("u", "h"), lambda: {}, Outputs(tmp_path, most_bytes=1, most_files=1))
    assert [get(service, path)[0] for path in ("/latest/user-data", "/openstack/latest/user_data")] == [404, 404]
    assert get(service, "/latest")[1] == "dynamic\nmeta-data"


@pytest.mark.parametrize(
    "path",
    [
        "/../etc/passwd", "/latest/../../etc/passwd", "/%2e%2e/etc/passwd", "/latest/%2e%2e%2fetc", "/latest/%00", "/latest/%ff",
        "/latest/%252e", "/latest/a b"[:9] + "%20b", "/./latest", "*", "/latest\\..\\x", "/joboutputs/%0a",
    ],
)  # fmt: skip
def test_a_hostile_path_is_refused_and_the_next_request_is_served(service: Service, path: str) -> None:
    async def client(guest: Guest) -> None:
        assert (await guest.ask("GET", path))[0] == 400
        assert (await guest.ask("GET", "/latest/meta-data/ami-id"))[0] == 200

    talk(service, client)


# -- outputs ---------------------------------------------------------------------------------------------------------------


def test_a_file_is_kept_whole_and_private(service: Service) -> None:
    assert put(service, "/joboutputs/shutdown_message", b"200 ok") == 201
    path = service.outputs.folder / "shutdown_message"
    assert path.read_bytes() == b"200 ok"
    assert path.stat().st_mode & 0o777 == 0o600 and service.outputs.folder.stat().st_mode & 0o777 == 0o700
    assert put(service, "/joboutputs/shutdown_message", b"300 none") == 201 and path.read_bytes() == b"300 none"


@pytest.mark.parametrize(
    "path", ["/joboutputs/", "/joboutputs", "/joboutputs/a/b", "/joboutputs/.x", "/joboutputs/" + "n" * 129]
)
def test_other_names_and_depths_are_forbidden(service: Service, path: str) -> None:
    assert put(service, path, b"x") == 403
    assert not service.outputs.folder.exists()


@pytest.mark.parametrize("path", ["/joboutputs/..", "/joboutputs/%2e%2e", "/joboutputs/a%2fb", "/joboutputs/a%00"])
def test_a_name_that_climbs_is_no_path_at_all(service: Service, path: str) -> None:
    assert put(service, path, b"x") == 400
    assert not service.outputs.folder.exists()


def test_the_quota_counts_bytes_and_files(service: Service) -> None:
    assert put(service, "/joboutputs/a", b"x" * 600) == 201
    assert put(service, "/joboutputs/b", b"x" * 600) == 507
    assert put(service, "/joboutputs/c", b"x" * 1001) == 413
    assert put(service, "/joboutputs/d", b"x" * 400) == 201
    assert put(service, "/joboutputs/e", b"") == 201
    assert put(service, "/joboutputs/f", b"") == 507  # the fourth file
    assert sorted(os.listdir(service.outputs.folder)) == ["a", "d", "e"]


def test_ten_gibibytes_are_refused_before_they_come(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(
            b"PUT /joboutputs/big HTTP/1.1\r\nHost: x\r\nContent-Length: 10737418240\r\n\r\n" + b"x" * 5000
        )
        status, headers, _ = await guest.read()
        assert (status, headers["connection"]) == (413, "close")
        guest.end.shutdown(socket.SHUT_WR)
        assert await guest.read() == (0, {}, b"")

    talk(service, client)
    assert not service.outputs.folder.exists()


def test_bytes_without_a_length_are_cut_off_at_the_quota(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(b"PUT /joboutputs/big HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            await guest.send(b"190\r\n" + b"x" * 400 + b"\r\n")
        assert (await guest.read())[0] == 507

    talk(service, client)
    assert os.listdir(service.outputs.folder) == []


def test_a_file_that_breaks_off_leaves_nothing(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(b"PUT /joboutputs/half HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")

    talk(service, client)
    assert service.outputs.sizes == {} and os.listdir(service.outputs.folder) == []


def test_a_full_host_is_told_and_leaves_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("belljar.context.outputs.write_all", full)
    assert put(service, "/joboutputs/a", b"x") == 507
    assert os.listdir(service.outputs.folder) == []


def test_whoever_asks_first_is_told_to_go_on(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await guest.read())[0] == 100
        await guest.send(b"ok")
        assert (await guest.read())[0] == 201

    talk(service, client)


# -- hostile connections ----------------------------------------------------------------------------------------------------


def test_requests_may_come_all_at_once(service: Service) -> None:
    async def client(guest: Guest) -> None:
        one = b"GET /latest/meta-data/ami-id HTTP/1.1\r\nHost: x\r\n\r\n"
        await guest.send(one * 200 + b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok" + one)
        assert [(await guest.read())[0] for _ in range(202)] == [200] * 200 + [201, 200]

    talk(service, client)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n\r\n", 400), (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400), (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405), (b"PUT /latest HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
    ],
)  # fmt: skip
def test_what_is_no_good_request_is_refused(service: Service, head: bytes, status: int) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(head)
        assert (await guest.read())[0] == status

    talk(service, client)


def test_an_old_client_gets_its_answer_and_the_end(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(b"GET /latest/user-data HTTP/1.0\r\n\r\n")
        assert (await guest.read())[0] == 200
        guest.end.shutdown(socket.SHUT_WR)
        assert (await guest.read())[0] == 0

    talk(service, client)


def test_a_head_request_has_no_body(service: Service) -> None:
    async def client(guest: Guest) -> None:
        await guest.send(b"HEAD /latest/meta-data/ami-id HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while await guest.more():
            if guest.left.endswith(b"\r\n\r\n"):
                guest.end.shutdown(socket.SHUT_WR)
        assert b"content-length: 7\r\n" in guest.left.lower() and guest.left.endswith(b"\r\n\r\n")

    talk(service, client)


def test_slow_heads_and_bodies_are_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "LIMITS", replace(metadata.LIMITS, request=0.05, stall=0.05, linger=0.05))

    async def slow_head(guest: Guest) -> None:
        await guest.send(b"GET / HT")
        assert (await guest.read())[0] == 408

    async def slow_body(guest: Guest) -> None:
        await guest.send(b"PUT /joboutputs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nx")
        assert (await guest.read())[0] == 408
        assert (await guest.read())[0] == 0

    talk(service, slow_head, slow_body)
    assert os.listdir(service.outputs.folder) == []


def test_a_guest_that_does_not_read_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "LIMITS", replace(metadata.LIMITS, send=0.05, linger=0.05))

    async def client(guest: Guest) -> None:
        guest.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one = b"GET /machinefeatures HTTP/1.1\r\nHost: x\r\n\r\n"
        with pytest.raises(OSError):
            while True:
                await guest.send(one * 100)

    talk(service, client)


def test_more_connections_than_a_machine_needs_are_refused(service: Service) -> None:
    found: list[int] = []
    everybody = asyncio.Event()

    async def client(guest: Guest) -> None:
        found.append((await guest.ask("GET", "/latest"))[0])
        if len(found) == 40:
            everybody.set()
        await everybody.wait()

    talk(service, *[client] * 40)
    assert sorted(found) == [200] * 32 + [503] * 8
    assert get(service, "/latest")[0] == 200


# -- who may read what ---------------------------------------------------------------------------------------------------


class ForEverybody(Service):
    """As the service answers at the address that payloads can reach."""

    async def serve(self, connection: socket.socket, *, for_everybody: bool = True) -> None:
        await super().serve(connection, for_everybody=for_everybody)


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "token").write_text("ey.first")
    return folder


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/machinefeatures/total_cpu", 200), ("/jobfeatures/", 200), ("/", 404), ("/latest/user-data", 404), ("//latest/user-data", 404),
        ("/openstack/latest/user_data", 404), ("/latest/meta-data/", 404), ("/credentials/token", 404), ("/2009-04-04/user-data", 404),
        ("http://169.254.169.254/latest/user-data", 404),
    ],
)  # fmt: skip
def test_where_payloads_can_ask_there_are_features_and_no_secrets(
    tmp_path: Path, credentials: Path, path: str, status: int
) -> None:
    outputs = Outputs(tmp_path / "out", most_bytes=1000, most_files=3)
    service = ForEverybody(INSTANCE, lambda: FEATURES, outputs, credentials=credentials)
    assert get(service, path)[0] == status
    assert put(service, "/joboutputs/heartbeat", b"x") == 201
    assert put(service, "/latest/api/token", b"", "X-aws-ec2-metadata-token-ttl-seconds: 60") == 404


def test_credentials_are_as_they_are_now_and_nothing_else_of_the_host(tmp_path: Path, credentials: Path) -> None:
    service = Service(
        INSTANCE, lambda: FEATURES, Outputs(tmp_path / "out", most_bytes=9, most_files=3), credentials=credentials
    )
    assert get(service, "/credentials/token") == (200, "ey.first")
    (credentials / "token").write_text("ey.second")
    assert get(service, "/credentials/token") == (200, "ey.second")
    (credentials / "large").write_bytes(b"x" * (300 << 10))
    (credentials / "folder").mkdir()
    for path in ("", "/", "/no", "/large", "/folder", "/token/x", "/Token", "/.token", "/.."):
        assert get(service, f"/credentials{path}")[0] in (400, 404), path


def test_without_a_folder_for_them_there_are_no_credentials(service: Service) -> None:
    assert get(service, "/credentials/token")[0] == 404
