"""devices.toml beside belljar.toml: the site's classes of devices that machines may have. Every mistake at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from belljar.errors import BadSetting
from belljar.host.devices.pci import WORDS, DeviceClass, Site
from belljar.host.toml import Mistake
from belljar.service.tables import Wrong, blame, keys_of, read_values

FILE, TABLE = "devices.toml", "class"


def load(settings_file: Path) -> Site:
    """In the order of the file; nothing where there is none. Raises BadSetting."""
    path = settings_file.with_name(FILE)
    if not path.exists():
        return ()
    mistakes: list[Mistake] = []
    tables, values = read_values([path], {TABLE: keys_of((DeviceClass,), TABLE)}, {TABLE}, mistakes)
    site = tuple(DeviceClass(full.partition(".")[2], **keys) for full, keys in values.items())
    blame(path, tables, ((f"{TABLE}.{class_.name}", wrong) for class_ in site for wrong in _wrongs(class_)), mistakes)
    if mistakes:
        raise BadSetting.of(tuple(mistakes))
    return site


def _wrongs(class_: DeviceClass) -> Iterator[Wrong]:
    words = [word.partition("=") for pattern in class_.match for word in pattern.split()]
    if not class_.match or any(name not in WORDS or not value for name, _, value in words):
        yield "match", "is no list of patterns", 'as in match = ["vendor=10de class=03*"]'
