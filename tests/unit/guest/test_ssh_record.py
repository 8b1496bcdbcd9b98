"""The record a guest writes of a payload's end, whatever waited for it; and the words its scripts are made of."""

import base64
import subprocess
from pathlib import Path

import pytest

from belljar.errors import AgentLost
from belljar.guest.ssh_identity import read_clock
from belljar.guest.ssh_keys import keys_from
from belljar.guest.ssh_record import read_record
from belljar.guest.ssh_scripts import quote

RECORDS = {
    b"wait 0 0.1 0.2\n": (0, None, False),
    b"wait 768 0 0\n": (3, None, False),
    b"wait 9 0 0\n": (None, 9, False),
    b"wait 139 0 0\n": (None, 11, True),
    b"shell 3 [1]+  Exit 3   ( trap - INT; exec x )\n0m0.000s 0m0.000s\n": (3, None, False),
    b"shell 137 [1]+  Killed   ( trap )\n0m1.500s 0m0.250s\n": (None, 9, False),
    b"shell 137 [1]+  Exit 137   ( trap )\n": (137, None, False),
    b"shell 139 [1]+  Segmentation fault (core dumped) ( trap )\n": (None, 11, True),
    b"time 137\nCommand terminated by signal 9\n0 0.00 0.01\n": (None, 9, False),
    b"time 137\nCommand exited with non-zero status 137\n137 0.00 0.00\n": (137, None, False),
    b"time 0\n0 1.25 0.50\n": (0, None, False),
    b"plain 127\n": (127, None, False),
    b"plain 143\n": (None, 15, False),
    b"plain 255\n": (255, None, False),
}


@pytest.mark.parametrize(("record", "end"), RECORDS.items())
def test_each_waiter_tells_an_end_in_its_own_words(record: bytes, end: tuple[int | None, int | None, bool]) -> None:
    status = read_record(record, "", {})
    assert (status.exit_code, status.signal, status.core_dumped) == end


def test_times_peak_and_lack_of_memory_are_told() -> None:
    status = read_record(b"wait 9 1.5 0.25\noom\npeak 4096\n", "", {})
    assert (status.usage.user, status.usage.system, status.usage.peak_memory, status.oom_killed) == (
        1.5,
        0.25,
        4096,
        True,
    )
    assert read_record(b"shell 0 [1]+ Done x\n1m2.500s 0m0.250s\n", "", {}).usage.user == 62.5


def test_what_could_not_be_started_is_named() -> None:
    status = read_record(b"wait 32512 0 0\n", "not-found", {"": "prog", "no-cwd": "/there"})
    assert (status.exit_code, status.error) == (127, "not-found") and "prog" in status.message
    assert "/there" in read_record(b"wait 32000 0 0\n", "no-cwd", {"": "prog", "no-cwd": "/there"}).message


HOSTILE = [
    b"", b"\n", b"wait\n", b"wait x 0 0\n", b"wait 99999 0 0\n", b"wait -1 0 0\n", b"wait 0 nan 0\n", b"wait 0 -1 0\n",
    b"wait 0 1e99 0\n", b"exit 0\n", b"\xff\xfe\n", b"plain \xd9\xa3\n" b"x", b"wait 0\n", b"time\n",
]  # fmt: skip


@pytest.mark.parametrize("record", HOSTILE)
def test_what_is_no_record_is_no_end(record: bytes) -> None:
    with pytest.raises(AgentLost):
        read_record(record, "", {})


def test_the_word_a_payload_left_in_the_error_file_cannot_be_any_word() -> None:
    assert read_record(b"wait 0 0 0\n", "\x1b[31mfine", {}).error == ""


@pytest.mark.parametrize("said", [b"", b"%N\n", b"-5\n", b"1" * 30, b"12 13\n"])
def test_a_guest_that_does_not_tell_the_time_is_lost(said: bytes) -> None:
    with pytest.raises(AgentLost):
        read_clock(said)


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_a_quoted_word_is_the_same_to_the_byte(shell: str, tmp_path: Path) -> None:
    word = bytes(range(1, 256)) * 2 + b"'\\''\n"
    script = tmp_path / "script"
    script.write_bytes(b"exec cat /proc/self/cmdline " + quote(word))
    argv = [shell, "sh", script] if shell == "busybox" else [shell, script]
    done = subprocess.run(argv, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout.split(b"\0")[2] == word


def test_keys_follow_from_the_secret_and_the_purpose_alone() -> None:
    one, again, other = (keys_from(b"s" * 32, purpose, "root") for purpose in ("a", "a", "b"))
    assert one.public == again.public and one.keys.host == again.keys.host == (one.host_public,)
    assert len({one.public, one.host_public, other.public, other.host_public}) == 4
    assert one.keys.private not in repr(one) and one.host_private not in repr(one)


def test_a_host_key_in_dropbears_format_is_the_same_key() -> None:
    one = keys_from(b"s" * 32, "a", "root")
    kind, both = one.host_dropbear[4:15], one.host_dropbear[19:]
    assert one.host_dropbear[:4] == (11).to_bytes(4, "big") and one.host_dropbear[15:19] == (64).to_bytes(4, "big")
    assert kind == b"ssh-ed25519" and len(both) == 64
    assert base64.b64decode(one.host_public.split()[1]).endswith(both[32:])
    assert both[:32] not in one.host_public.encode() and repr(both) not in repr(one)
