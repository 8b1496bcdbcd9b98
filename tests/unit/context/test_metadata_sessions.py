"""Sessions of the metadata service, as IMDSv2 has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.context.test_metadata import FEATURES, INSTANCE, Guest, get, put, talk

from belljar.context import metadata
from belljar.context.metadata import Service
from belljar.context.outputs import Outputs
from belljar.records import replace


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(INSTANCE, lambda: FEATURES, Outputs(tmp_path / "out", most_bytes=1000, most_files=3))


TTL = "X-aws-ec2-metadata-token-ttl-seconds: {}"


def token(service: Service, *lines: str) -> tuple[int, dict[str, str], str]:
    found: list[tuple[int, dict[str, str], str]] = []

    async def client(guest: Guest) -> None:
        status, headers, data = await guest.ask("PUT", "/latest/api/token", *lines)
        found.append((status, headers, data.decode()))

    talk(service, client)
    return found[0]


@pytest.mark.parametrize("is_required", [False, True])
def test_a_session_token_opens_what_a_wrong_or_an_old_one_does_not(
    tmp_path: Path, is_required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (("http-tokens", "required"),) if is_required else ()
    out = Outputs(tmp_path / "out", most_bytes=1000, most_files=3)
    service = Service(replace(INSTANCE, told=told), lambda: FEATURES, out)
    status, headers, good = token(service, TTL.format(60))
    assert (status, headers["x-aws-ec2-metadata-token-ttl-seconds"]) == (200, "60")
    for path in ("/latest/user-data", "/latest/meta-data/instance-id", "/openstack/latest/user_data"):
        assert get(service, path, f"X-aws-ec2-metadata-token: {good}")[0] == 200
        assert get(service, path)[0] == (401 if is_required else 200)
        for bad in ("AAAA", f"9{good}", f"{good}0", good.partition(".")[0]):
            assert get(service, path, f"X-aws-ec2-metadata-token: {bad}")[0] == 401
    assert get(service, "/machinefeatures/total_cpu")[0] == 200 and put(service, "/joboutputs/a", b"x") == 201
    now = metadata.monotonic()
    monkeypatch.setattr(metadata, "monotonic", lambda: now + 61)
    assert get(service, "/latest/user-data", f"X-aws-ec2-metadata-token: {good}")[0] == 401


@pytest.mark.parametrize(
    "lines", [(), (TTL.format(0),), (TTL.format(21601),), (TTL.format("1e3"),), (TTL.format("-5"),)]
)
def test_a_session_has_a_second_to_six_hours(service: Service, lines: tuple[str, ...]) -> None:
    assert token(service, *lines)[0] == 400
