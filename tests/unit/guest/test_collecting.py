"""Collecting through the real agent, in rehearsal."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest
from tests.contracts.payloads import ME, Collector, ran, shell, talking
from tests.rehearsal import rehearse


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    with rehearse() as connection:
        yield connection


class Full(Collector):
    """Takes so many bytes, then no more."""

    async def write(self, data: bytes) -> None:
        await super().write(data)
        if len(self.data) > 100_000:
            raise BrokenPipeError


async def test_folders_of_the_guest_arrive_as_one_archive(channel: socket, tmp_path: Path) -> None:
    async with talking(channel) as guest:
        await guest.add_account(ME)
        await ran(guest, shell(f"mkdir -p {tmp_path}/log; echo said >{tmp_path}/log/job; echo 1 >{tmp_path}/one"))
        await guest.end_payload()
        sink = Collector()
        await guest.collect([f"{tmp_path}/log", "/nowhere/at/all", f"{tmp_path}/one"], sink)
    with tarfile.open(fileobj=io.BytesIO(sink.data)) as archive:
        found = [name.rpartition("/")[2] for name in archive.getnames()]
        content = archive.extractfile(str(tmp_path / "log/job").strip("/"))
        assert found == ["log", "job", "one"] and content is not None and content.read() == b"said\n"
    assert sink.is_closed


async def test_a_sink_that_takes_no_more_ends_it(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(5_000_000))
    sink = Full()
    async with talking(channel) as guest:
        await guest.collect([str(tmp_path)], sink)
        assert (await ran(guest, shell("exit 3"))).status.exit_code == 3, "the guest goes on"
    assert len(sink.data) < 3_000_000
