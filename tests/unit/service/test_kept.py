"""What a service keeps: values, lines, files that are made anew."""

import os
from pathlib import Path

import pytest

from belljar.host.files import append_line, renew
from belljar.service.kept import Lines

URL = "https://example.org/x.json"


def test_a_line_begins_behind_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"to')
    assert append_line(path, b'{"b": 2}') == b'\n{"b": 2}\n'
    assert append_line(path, b'{"c": 3}', durable=True) == b'{"c": 3}\n'
    assert path.read_bytes() == b'{"a": 1}\n{"to\n{"b": 2}\n{"c": 3}\n'


def test_lines_do_not_grow_without_end_and_the_last_are_there(tmp_path: Path) -> None:
    lines = Lines(tmp_path, "some", 100)
    for number in range(100):
        lines.add({"number": number})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300
    assert list(lines)[-1] == b'{"number":99}\n'


def test_files_are_made_anew_when_a_source_has_changed_or_one_is_missing(tmp_path: Path) -> None:
    source, made = tmp_path / "source", list[int]()

    def make() -> dict[str, bytes]:
        made.append(1)
        return {"token": b"x%d" % len(made)}

    with pytest.raises(FileNotFoundError):
        renew(tmp_path / "to", ["token"], [source], make)
    source.touch()
    os.utime(source, (1000, 1000))
    assert renew(tmp_path / "to", ["token"], [source], make)
    assert not renew(tmp_path / "to", ["token"], [source], make)
    os.utime(source, (2e9, 2e9))
    assert renew(tmp_path / "to", ["token"], [source], make)
    (tmp_path / "to/token").unlink()
    assert renew(tmp_path / "to", ["token"], [source], make)
    assert (tmp_path / "to/token").read_bytes() == b"x3"
