"""How a prolog is told that its job is off the bait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from belljar.bait.arrivals import SOCKET, Answer, listening, tell
from belljar.errors import HostError
from belljar.pool import Revoked


async def test_a_prolog_is_answered_when_its_job_is_off_the_bait(tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    async def arrived(job: str, again: bool) -> Answer:
        asked.append((job, again))
        return Answer.TAKEN if job == "7" else Answer.FAILED

    async with listening(tmp_path, arrived):
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
        answers = iter((Revoked.NO, Revoked.NO, Revoked.YES))  # slurmd's: the prolog ends after the last one
        await asyncio.to_thread(tell, tmp_path, "7", 5.0, lambda: next(answers))
        assert next(answers, None) is None
        await asyncio.to_thread(tell, tmp_path, "7", 5.0)  # of whom nobody can be asked
        with pytest.raises(HostError, match=r"did not take job 8 back within 0\.2 s: it could not"):
            await asyncio.to_thread(tell, tmp_path, "8", 0.2)
        for bad in (b"7; rm\n", b'{"job": "7"}\n', b"7 again and again\n"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
            writer.write(bad)
            assert await reader.readline() == b"failed\n"
            writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        writer.write(b"x" * 100_000 + b"\n")
        assert await reader.read() == b""
        writer.close()
    assert asked == [("7", False), ("7", False), ("8", False)]
    with pytest.raises(HostError, match="No such file or directory"):
        tell(tmp_path / "nowhere", "7", 0.1)


async def test_a_prolog_does_not_end_before_the_nodes_daemon_knows_that_its_job_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.bait.arrivals.HEARD", 0.05)
    monkeypatch.setattr("belljar.bait.arrivals.AGAIN", 0.01)
    answers = iter((Answer.TAKEN, Answer.NOT_YET, Answer.FAILED, Answer.NOT_YET, Answer.NOT_YET))
    asked: list[bool] = []

    async def arrived(job: str, again: bool) -> Answer:
        asked.append(again)
        return next(answers)

    async with listening(tmp_path, arrived):
        await asyncio.to_thread(tell, tmp_path, "7", 5.0, lambda: Revoked.YES if len(asked) == 5 else Revoked.NO)
        assert asked == [False, True, True, True, True]
        asked.clear()
        answers = iter((Answer.NOT_YET, Answer.TAKEN, Answer.TAKEN))
        # The batch system knows, and tells it to end the job.
        await asyncio.to_thread(tell, tmp_path, "7", 5.0, lambda: Revoked.NO)
        assert asked == [False, False, True]
