"""The service as a process, whose administrator corrects its settings while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.vacuum.protocol.peers import free_port

from belljar.lease import settings
from belljar.lease.service.start import serve
from belljar.service import systemd


async def test_settings_that_are_wrong_change_nothing_and_systemd_is_told_that_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no batch system
    notes, told, file = list[str](), list[tuple[str, dict[str, Any]]](), tmp_path / "lease.toml"
    monkeypatch.setattr(systemd, "notify", lambda *lines: notes.append(lines[0]))
    good = (
        f'[lease]\naddress = "localhost"\nport = {free_port("127.0.0.1")}\njobs = "{tmp_path}/jobs"\nimages = ["*"]\n'
        f'door = "{tmp_path}/door"\n[policy.all]\nusers = ["*"]\n'
    )

    async def until(is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < end, (notes, told)
            await asyncio.sleep(0.02)

    file.write_text(good)
    tell = lambda event, **facts: told.append((event, facts))  # noqa: E731
    service = asyncio.ensure_future(serve(lambda: settings.load(file), tmp_path / "state", tell))
    await until(lambda: "READY=1" in notes)
    for text, event in ((good + "machine = 4\n", "settings refused"), (good + "machines = 4\n", "policies read")):
        notes.clear()
        file.write_text(text)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(notes) == 2)
        assert notes == ["RELOADING=1", "READY=1"] and event in [one for one, _ in told]
    refused = next(facts for event, facts in told if event == "settings refused")
    assert f"{file}:" in refused["why"] and "policy.all.machine: no such key" in refused["why"]
    os.kill(os.getpid(), signal.SIGTERM)
    await service
