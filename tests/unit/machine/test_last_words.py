"""What of a console explains the end of a guest."""

import pytest

from belljar.machine.cleaning.put_away import last_words


@pytest.mark.parametrize(
    ("console", "words", "ours"),
    [
        ("", "", ""),
        ("a\nb\n\n", "b", ""),
        (
            "belljar: cannot mount /dev/vda as ext4\n[ 1.0] reboot: Power down\n",
            "belljar: cannot mount /dev/vda as ext4",
            None,
        ),
        ("belljar: one\r\nbelljar: two\r\nlast\r\n", "belljar: two", None),
        ("said by belljar: no\nend", "end", ""),
        ("x" * 1000, "x" * 300, ""),
        (
            "[ 1.0] Kernel panic - not syncing: No init found.\n[ 1.1] Call Trace:\n[ 1.1]  </TASK>\n",
            "[ 1.0] Kernel panic - not syncing: No init found.",
            "",
        ),
        ("belljar: no root\n[ 1.0] Kernel panic - not syncing: Attempted to kill init!\n", "belljar: no root", None),
    ],
)
def test_a_line_of_ours_stands_before_the_kernels_own_and_that_before_the_last_line_of_all(
    console: str, words: str, ours: str | None
) -> None:
    assert last_words(console) == words
    assert last_words(console, ours_only=True) == (words if ours is None else ours)
