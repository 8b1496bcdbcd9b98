"""Where a download leads: redirects, names that turn, proxies, and what only this host reaches."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from tests.unit.image.http_server import Server, get, serving

from belljar.errors import DownloadFailed
from belljar.host.guard import egress
from belljar.image import Settings
from belljar.image.intake import fetch
from belljar.image.progress import Progress
from belljar.model import MIB
from belljar.service.credentials.certificates import own_certificate

DATA = os.urandom(300_000)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_redirect_is_followed_and_the_range_goes_along(server: Server, folder: Path, settings: Settings) -> None:
    target = server.put("/real", DATA, cut_after=[1000])
    assert get(server.put("/disk", redirect=target), folder, settings) == DATA
    assert [path for path, _, _ in server.requests] == ["/disk", "/real", "/disk", "/real"]
    assert server.ranges()[-1] == "bytes=1000-"


def test_a_relative_redirect_is_followed(server: Server, folder: Path, settings: Settings) -> None:
    server.put("/a/real", DATA)
    assert get(server.put("/a/disk", redirect="real"), folder, settings) == DATA


@pytest.mark.parametrize(
    ("target", "path"), [("/\xe9", "/%e9"), ("/\xc3\xa9", "/%c3%a9"), ("/a b", "/a%20b"), ('/"', "/%22")]
)
def test_a_redirect_may_have_bytes_that_an_address_has_not(
    server: Server, folder: Path, settings: Settings, target: str, path: str
) -> None:
    server.put(path, DATA)
    assert get(server.put("/disk", redirect=target), folder, settings) == DATA


def test_a_redirect_loop_ends(server: Server, folder: Path, settings: Settings) -> None:
    with pytest.raises(DownloadFailed, match="redirects"):
        get(server.put("/disk", redirect="/disk"), folder, settings)
    assert len(server.requests) == fetch.MOST_REDIRECTS + 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"])
def test_a_redirect_out_of_http_is_not_followed(server: Server, folder: Path, settings: Settings, target: str) -> None:
    with pytest.raises(DownloadFailed, match="does not follow"):
        get(server.put("/disk", redirect=target), folder, settings)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that count as those of the whole internet."""
    addresses = {"127.0.0.2"}
    monkeypatch.setattr(fetch, "is_public", lambda address: address in addresses)
    return addresses


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What a name server says of a host, one answer after the other."""
    answers: dict[str, list[list[str]]] = {}

    def look_up(host: str, port: int, **options: object) -> list[Any]:
        if host not in answers:
            return [(0, 0, 0, "", (host, port))]
        return [(0, 0, 0, "", (address, port)) for address in answers[host].pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return answers


@pytest.fixture
def outside() -> Iterator[Server]:
    """A server that counts as public."""
    with serving("127.0.0.2") as server:
        yield server


def port_of(server: Server) -> str:
    return server.address.rpartition(":")[2]


def test_a_public_server_sends_nobody_to_what_only_this_host_reaches(
    server: Server, outside: Server, folder: Path, settings: Settings, public: set[str]
) -> None:
    inside = server.put("/real", DATA)
    url = outside.put("/disk", redirect=inside)
    with pytest.raises(DownloadFailed, match=r"/disk: leads to 127\.0\.0\.1, which is an address of this host"):
        get(url, folder, settings)
    assert server.requests == []
    assert get(server.put("/own", redirect=inside), folder, settings) == DATA  # a server of one's own may
    assert get(server.put("/out", redirect=outside.put("/real", DATA)), folder, settings) == DATA


def test_a_name_is_looked_up_once_and_only_that_address_is_connected_to(
    outside: Server, folder: Path, settings: Settings, public: set[str], names: dict[str, list[list[str]]]
) -> None:
    """Else its owner could answer the judge with one address, and the connection with another."""
    outside.put("/disk", DATA)
    names["images.example.org"] = [["127.0.0.2"]]  # a name that the real resolver does not know
    url = f"http://images.example.org:{port_of(outside)}/disk"
    assert fetch.small_file(url, MIB, patience=settings.stall_timeout, public_only=True) == DATA
    assert names == {"images.example.org": []}


def test_a_name_that_turns_to_this_host_is_refused_at_each_connection(
    folder: Path, settings: Settings, public: set[str], names: dict[str, list[list[str]]]
) -> None:
    with serving("127.0.0.2") as outside, serving("127.0.0.1", int(port_of(outside))) as inside:
        outside.put("/disk", DATA, cut_after=[1000])
        inside.put("/disk", b"what only this host reaches")
        names["images.example.org"] = [["127.0.0.2"], ["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.1"]]
        url = f"http://images.example.org:{port_of(outside)}/disk"
        for _ in range(2):
            with pytest.raises(DownloadFailed, match=r"leads to 127\.0\.0\.1"):
                fetch.download(url, folder, settings, Progress(), public_only=True)
        with pytest.raises(DownloadFailed, match=r"leads to 127\.0\.0\.1"):
            fetch.version(url, settings, public_only=True)
        assert inside.requests == [] and len(outside.requests) == 1


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f.1", "localhost", "[::ffff:127.0.0.1]", "[::1]", "127.0.0.1%2f@x"]
)
def test_this_host_by_any_name_is_not_public(server: Server, settings: Settings, host: str) -> None:
    server.put("/disk", DATA)
    with pytest.raises(DownloadFailed):
        fetch.small_file(
            f"http://{host}:{port_of(server)}/disk", MIB, patience=settings.stall_timeout, public_only=True
        )
    assert server.requests == []


@pytest.mark.parametrize("trick", ["http://{out}@{inside}/disk", "http://{inside}@{out}/disk", "http://{out}\\@{inside}/disk",
                                   "http://{out}#@{inside}/disk", "http://{inside}\\@{out}/disk", "http:/{inside}/disk"])  # fmt: skip
def test_an_address_that_two_programs_read_in_two_ways_leads_nowhere_inside(
    server: Server, outside: Server, settings: Settings, public: set[str], trick: str
) -> None:
    server.put("/disk", DATA)
    url = trick.format(out=outside.address[7:], inside=server.address[7:])
    with suppress(DownloadFailed):
        fetch.small_file(url, MIB, patience=settings.stall_timeout, public_only=True)
    assert server.requests == []


def test_the_environment_s_proxy_is_asked(
    server: Server, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    monkeypatch.delenv("no_proxy", raising=False)
    server.put("http://images.example.org/disk", DATA)
    assert get("http://images.example.org/disk", folder, settings) == DATA
    with pytest.raises(DownloadFailed, match="a proxy looks names up for itself"):
        fetch.small_file("http://8.8.8.8/disk", MIB, patience=settings.stall_timeout, public_only=True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert get(server.put("/disk", DATA), folder, settings) == DATA
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("168.63.129.16", False),
        ("224.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("169.254.169.254", False),
        ("10.0.2.2", False),
        ("192.168.1.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert fetch.is_public(address) is public


def test_an_address_of_this_host_is_not_public_wherever_it_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens there may be closed to all others."""
    assert egress.is_own("127.0.0.1") and not egress.is_own("8.8.8.8")
    monkeypatch.setattr(egress, "is_own", lambda address: address == "8.8.8.8")
    assert egress.is_public("1.1.1.1") and not egress.is_public("8.8.8.8")


def test_a_redirect_from_https_to_http_is_not_followed(
    server: Server, folder: Path, settings: Settings, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_certificate(folder / "pem", ("127.0.0.1", "images.example.org"))
    with serving(certificate=folder / "pem") as safe, NamedTemporaryFile("w") as trusted:
        trusted.write((folder / "pem").read_text().partition("-----END PRIVATE KEY-----")[2])
        trusted.flush()
        os.fchmod(trusted.fileno(), 0o644)
        url = safe.put("/disk", redirect=server.put("/disk", DATA))
        with pytest.raises(DownloadFailed, match="certificate"):
            get(url, folder, settings)
        monkeypatch.setenv("SSL_CERT_FILE", trusted.name)
        with pytest.raises(DownloadFailed, match="from https to http") as caught:
            get(url, folder, settings)
        assert "stays https" in caught.value.hint
        names["images.example.org"] = [["127.0.0.1"]]
        url = f"https://images.example.org:{port_of(safe)}/own"
        safe.put("/own", DATA)
        assert get(url, folder, settings) == DATA  # the certificate is that of the name, not of the address


def test_nobody_there(folder: Path, settings: Settings, names: dict[str, list[list[str]]]) -> None:
    with serving() as gone:
        url = gone.put("/disk", DATA)
    with pytest.raises(DownloadFailed, match="connect to 127"):
        get(url, folder, settings)
    names["images.example.org"] = [["127.0.0.1"]] * fetch.MOST_FAILURES
    with pytest.raises(DownloadFailed, match=r"connect to images\.example\.org") as caught:
        get(url.replace("127.0.0.1", "images.example.org"), folder, settings)
    assert fetch.JUDGED not in caught.value.message


def test_a_name_that_nobody_knows_is_asked_for_again(folder: Path, settings: Settings) -> None:
    with pytest.raises(DownloadFailed, match=r"nowhere\.invalid: Name or service not known"):
        get("http://nowhere.invalid/disk", folder, settings)


@pytest.mark.parametrize("host", ["xn--a", "a" * 300, "....", "[::1", "a b", "127.0.0.1:99999"])
def test_a_redirect_to_what_cannot_be_a_host_is_an_error_of_ours(
    server: Server, folder: Path, settings: Settings, host: str
) -> None:
    url = server.put("/disk", redirect=f"http://{host}/disk")
    with pytest.raises(DownloadFailed):
        get(url, folder, settings)
    with pytest.raises(DownloadFailed):
        fetch.small_file(url, MIB, patience=settings.stall_timeout)
