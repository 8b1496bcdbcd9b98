"""`belljar config show` and `belljar config check`."""

import json
from pathlib import Path
from typing import Any

import pytest

from belljar.config import BadSettings


@pytest.fixture(autouse=True)
def _nothing_else_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("belljar.config.ETC", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


@pytest.fixture
def file(house: Any, tmp_path: Path) -> Path:
    house.config_file = tmp_path / "my.toml"
    return tmp_path / "my.toml"


def test_show_gives_each_setting_and_where_it_comes_from(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = '2G'\n")
    assert call("config", "show", "--origin") == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["machine.memory"] == ["2G", f"{file}:2"]
    assert lines["machine.cpus"] == ["1", "default"]


def test_show_as_json_has_plain_values(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[qemu]\naccelerator = 'tcg'\n")
    call("config", "show", "--format", "json")
    settings = json.loads(capsys.readouterr().out)
    assert settings["qemu"]["accelerator"] == "tcg"
    assert settings["machine"]["grace"] == 10.0
    call("config", "show", "--format", "json", "--origin")
    settings = json.loads(capsys.readouterr().out)
    assert settings["qemu"]["accelerator"] == {"value": "tcg", "origin": f"{file}:2"}


def test_show_still_shows_what_holds_when_there_are_mistakes_and_fails(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = 'x'\ncpus = 4")
    with pytest.raises(BadSettings, match=r"machine\.memory"):
        call("config", "show")
    assert "machine.cpus" in capsys.readouterr().out


def test_check_exits_1_and_lists_every_mistake(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = 'x'\ncpus = 'y'")
    assert call("config", "check") == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert call("config", "check", "--format", "json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and {one["key"] for one in said["mistakes"]} == {"machine.memory", "machine.cpus"}


def test_check_of_good_settings_names_the_files(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\ncpus = 2")
    assert call("config", "check") == 0
    assert capsys.readouterr().out == f"The settings are good ({file}).\n"
