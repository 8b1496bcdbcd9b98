"""What a service keeps: values, lines."""

from pathlib import Path

from belljar.host.files import append_line
from belljar.service.kept import Lines


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
