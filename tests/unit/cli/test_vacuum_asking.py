"""`belljar vacuum machines|machinetypes|factories` against factories on loopback."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.vacuum.protocol.peers import SPACE, free_port
from tests.unit.vacuum.protocol.test_responder import ONE, TWO, snapshot_of, space

from belljar.errors import BadSetting
from belljar.records import replace
from belljar.vacuum.protocol.responder import responding

DEAD = "127.0.8.9"


@pytest.fixture
def port() -> Iterator[int]:
    """Two factories in a thread of their own; TWO has a machine that says what no terminal should see."""
    number, is_up, loop = free_port(ONE, TWO), threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()
    second = snapshot_of(TWO)
    said = replace(second.machines[0], state="Shut down", message="300 no \x1b[2Jwork", message_time=1767268000)
    second = replace(second, machines=(said,))

    async def serve() -> None:
        async with (
            responding(space(number, ONE), lambda: snapshot_of(ONE), lambda *_, **__: None),
            responding(space(number, TWO), lambda: second, lambda *_, **__: None),
        ):
            is_up.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(20)
    yield number
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def words(port: int, act: str, *factories: str) -> list[str]:
    return ["vacuum", act, *factories, "--space", SPACE, "--port", str(port), "--settings", "/nowhere"]


def test_machines_are_listed_and_their_words_are_harmless(call: Any, port: int, capsys: Any) -> None:
    assert call(*words(port, "machines", ONE, TWO)) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["MACHINE", "TYPE", "STATE", "CPUS", "HS06", "AGE", "CPU", "MESSAGE"]
    assert len(lines) == 1 + 8 + 1
    assert lines[1].split()[:5] == ["m-00", "lhcb-prod", "Running", "4", "42.0"]
    assert lines[9].endswith("300 no ?[2Jwork")
    assert "\x1b" not in out


def test_types_and_factories_are_listed(call: Any, port: int, capsys: Any) -> None:
    assert call(*words(port, "machinetypes", TWO)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:6] for row in rows[1:]] == [[TWO, name, "2", "8", "90.0", "1"] for name in ("atlas", "gridpp", "lhcb")]
    assert call(*words(port, "factories", ONE, TWO)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[1:]] == [[name, "3/16", "12/16", "126/168"] for name in (ONE, TWO)]


def test_programs_get_all_of_it_and_who_was_silent(call: Any, port: int, capsys: Any) -> None:
    assert call(*words(port, "machinetypes", ONE, DEAD), "--timeout", "1s", "--format", "json") == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["silent"], found["short"], found["refused"]) == ([DEAD], [], {})
    assert [one["machinetype"] for one in found["machinetypes"]] == ["atlas", "gridpp", "lhcb"]
    assert found["machinetypes"][0]["message"] == "300 Nothing to do"
    assert told.err == f"belljar: {DEAD} does not answer\n"


def test_the_settings_say_whom_to_ask(call: Any, port: int, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "vacuum.toml"
    file.write_text(
        f"[space]\nname = '{SPACE}'\nfactories = ['{ONE}', '{TWO}']\nport = {port}\n[factory]\nname = '{ONE}'\n"
    )
    assert call("vacuum", "factories", "--settings", str(file)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["FACTORY", ONE, TWO]
    assert call("vacuum", "factories", TWO, "--settings", str(file)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["FACTORY", TWO]
    assert call("vacuum", "factories", "--settings", str(file), "--space", "another", "--timeout", "0.5s") == 1
    assert capsys.readouterr().out.splitlines() == [
        "FACTORY  MACHINES  CPUS  HS06  LOAD  FREE GB  MEMORY GB  SEEN  VERSION"
    ]


def test_without_settings_and_names_it_says_what_is_missing(call: Any, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"nowhere\.toml"):
        call("vacuum", "machines", "--settings", str(tmp_path / "nowhere.toml"))
