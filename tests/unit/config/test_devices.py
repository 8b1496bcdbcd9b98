"""devices.toml: classes in the order of the file, and every mistake at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.assembly import Runtime
from belljar.config.devices import load
from belljar.errors import BadSetting
from belljar.host.devices.pci import NONE_ACCEPTED, DeviceClass

GOOD = """
[class.gpu]
match = ["vendor=10de class=03*"]
groups = ["ml"]
driver = "nvidia"
ids = ["GPU-aa", "GPU-bb"]

[class.ib]
match = ["vendor=15b3 kind=virtual"]
reset = "none-accepted"
"""


def write(folder: Path, text: str) -> Path:
    (folder / "devices.toml").write_text(text)
    return folder / "belljar.toml"


def test_classes_come_as_they_stand(tmp_path: Path) -> None:
    gpu, ib = load(write(tmp_path, GOOD))
    assert gpu == DeviceClass("gpu", ("vendor=10de class=03*",), ("ml",), "nvidia", ids=("GPU-aa", "GPU-bb"))
    assert ib == DeviceClass("ib", ("vendor=15b3 kind=virtual",), reset=NONE_ACCEPTED)


def test_a_site_without_the_file_has_none(tmp_path: Path) -> None:
    assert load(tmp_path / "belljar.toml") == ()


def test_it_lies_beside_the_settings_that_are_named(tmp_path: Path) -> None:
    settings = write(tmp_path, GOOD)
    settings.touch()
    assert [class_.name for class_ in Runtime(str(settings)).devices] == ["gpu", "ib"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[class.gpu]\n", "class.gpu.match: is no list of patterns"),
        ('[class.gpu]\nmatch = ["vendor"]\n', "devices.toml:2, class.gpu.match: is no list of patterns"),
        ('[class.gpu]\nmatch = ["maker=nvidia"]\n', "is no list of patterns"),
        ('[class.gpu]\nmatch = ["class=03*"]\nreset = "never"\n', "devices.toml:3, class.gpu.reset: wants one of required, none-accepted"),
        ('[class.gpu]\nmatch = ["class=03*"]\ngroup = "ml"\n', "devices.toml:3, class.gpu.group: no such key (did you mean groups?)"),
        ("[gpu]\n", "no such table"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadSetting) as caught:
        load(write(tmp_path, text))
    assert words in caught.value.message
