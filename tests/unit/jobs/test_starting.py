"""A request, made by the settings and by what is said otherwise: the same by the command line and by a Python program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.assembly import Runtime
from belljar.cli import parser_of
from belljar.cli.machine import request as words
from belljar.config import Settings, inspect
from belljar.host.caller import caller
from belljar.jobs.starting import make_request
from belljar.model import GIB, MIB, NetworkMode, OwnWork, Payload, Request, RunPayload, Start

SAID = {"cpus": 2, "memory": GIB, "disk": 9 * GIB, "timeout": 60.0, "grace": 3.0, "name": "mine"}


@pytest.fixture
def settings() -> Settings:
    found = inspect(environ={"HOME": "/root"}, etc=Path("/nowhere")).checked()
    machine = replace(found.machine, cpus=3, memory=300 * MIB, network=NetworkMode.USER, start=Start.COLD, grace=7.0)
    return replace(found, machine=machine)


def test_what_is_not_said_is_as_the_settings_have_it(settings: Settings) -> None:
    request = make_request(settings, OwnWork(), cpus=None, disk=None, labels={"space": "atlas"})
    machine = request.machine
    assert (machine.image, machine.cpus, machine.memory) == (settings.image.default, 3, 300 * MIB)
    assert (machine.network, machine.start, machine.disk, request.grace) == (NetworkMode.USER, Start.COLD, None, 7.0)
    assert request.labels == (("space", "atlas"),) and request.timeout is None and request.created > 0


def test_no_two_requests_have_one_id(settings: Settings) -> None:
    assert len({make_request(settings, OwnWork()).id for _ in range(10)}) == 10


def test_a_program_and_the_command_line_ask_for_the_same(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "settings", settings)
    monkeypatch.setattr(api, "_runtime", lambda: Runtime())
    line = ["--cpus", "2", "--memory", "1G", "--disk", "9G", "--timeout", "60s", "--grace", "3s", "--name", "mine"]
    typed = words.build(parser_of("run").parse_args([*line, "--cwd", "/", "--", "true"]), settings)
    called = api.request(["true"], **SAID)  # type: ignore[arg-type]
    assert bare(called) == bare(replace(typed, requester="api"))


def bare(request: Request) -> Any:
    """Without what is never the same: the id, the moment, and the streams of whoever asks."""
    assert isinstance(request.work, RunPayload)
    payload = request.work.payload
    work = RunPayload(Payload(payload.argv, payload.account, cwd=payload.cwd, env=payload.env, umask=payload.umask))
    assert payload.account == caller()
    return replace(request, id="", created=0.0, work=work, collect_limit=0)
