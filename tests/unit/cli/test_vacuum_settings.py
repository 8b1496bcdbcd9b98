"""`belljar vacuum config` and `check-config`, as people and programs see them."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.http_server import serving

from belljar.errors import BadSetting

Call = Callable[..., int]
GOOD = """\
[space]
name = "vac01.example.org"
factories = ["wn01.example.org"]
[factory]
name = "wn01.example.org"
[machinetype.a]
image = "debian12"
share = 1
options = {queue = "long"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vacuum.toml"
    path.write_text(GOOD)
    return path


def test_config_shows_values_and_where_they_come_from(
    file: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("vacuum", "config", str(file)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["space.name", "vac01.example.org", f"{file}:2"] in rows
    assert ["space.port", "995", "default"] in rows
    assert ["machinetype.a.options", "queue=long", f"{file}:9"] in rows
    assert call("vacuum", "config", str(file), "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["space"]["types"][0]["image"] == "debian12" and told["origins"]["machinetype.a.share"] == f"{file}:8"


def test_config_shows_what_it_understands_of_a_wrong_file(
    file: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(GOOD + "shares = 1\n")
    with pytest.raises(
        BadSetting, match=r"vacuum\.toml:10, machinetype\.a\.shares: no such key \(did you mean share\?\)"
    ):
        call("vacuum", "config", str(file))
    assert "vac01.example.org" in capsys.readouterr().out


def test_check_config_says_that_all_is_well_or_all_that_is_not(
    file: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("vacuum", "check-config", str(file)) == 0
    assert capsys.readouterr().out == "The space vac01.example.org is good (machinetypes: a).\n"
    file.write_text(GOOD + "token_file = '/nowhere/token'\n")
    assert call("vacuum", "check-config", str(file), "--format", "json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["mistakes"][0]["key"] == "machinetype.a.token_file"
    assert told["mistakes"][0]["origin"] == f"{file}:10"
    file.write_text("[space]\nmode = 'fast'\n[factory]\nport = 1\n")
    assert call("vacuum", "check-config", str(file)) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_check_config_asks_the_pipes_and_config_shows_what_they_said(
    file: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    entry: dict[str, Any] = {"suffix": "prod", "target_share": 1, "root_image": "http://8.8.8.8/x", "x": 1}
    with serving() as server:
        url = server.put("/pipe", json.dumps({"machinetypes": [entry, {**entry, "suffix": "\x1b[2J"}]}).encode())
        file.write_text(f"{GOOD}[pipe.gds]\nurl = '{url}'\nshare = 2\n")
        assert call("vacuum", "check-config", str(file)) == 0
        assert "machinetypes: a" in capsys.readouterr().out
        assert call("vacuum", "check-config", str(file), "--pipes") == 0
        told = capsys.readouterr().out
    assert "machinetypes: a, gds-prod" in told and "\x1b" not in told
    assert "gds-prod.x: is not taken from a pipe (ignored)" in told and "machinetypes[1]: has no suffix" in told
    assert call("vacuum", "config", str(file)) == 0
    assert "pipe gds" in next(line for line in capsys.readouterr().out.splitlines() if "gds-prod.share" in line)
    assert call("vacuum", "config", str(file), "--format", "json") == 0
    assert 0 <= json.loads(capsys.readouterr().out)["pipes"]["gds"] <= time.time()


def test_a_silent_pipe_is_a_note(file: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"{GOOD}[pipe.gds]\nurl = 'http://127.0.0.1:1/pipe'\n")
    assert call("vacuum", "check-config", str(file), "--pipes") == 0
    assert "note: pipe gds: http://127.0.0.1:1/pipe: " in (told := capsys.readouterr().out) and "no copy" in told
