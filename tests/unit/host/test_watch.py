"""Following a file that grows."""

from pathlib import Path

from belljar.host.watch import changes


def test_lines_come_as_they_are_written_and_the_last_words_when_the_folder_is_moved(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    log = folder / "log"
    log.write_bytes(b"one\nt")
    following = changes(log)
    assert next(following) == b"one\n"
    with open(log, "ab") as file:
        file.write(b"wo\nlast words")
    assert next(following) == b"two\n"
    folder.rename(tmp_path / "ended")
    assert list(following) == [b"last words"]


def test_a_file_that_is_removed_has_no_more_to_say(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n")
    following = changes(log)
    next(following)
    log.unlink()
    assert list(following) == []


def test_a_missing_file_says_nothing(tmp_path: Path) -> None:
    assert list(changes(tmp_path / "missing")) == []
