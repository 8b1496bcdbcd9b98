"""The tests' own rooms in roots of other suites: what else is tested there counts on this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.conftest import ROOT
from tests.roots import STATE, Room, root

SUITE = "trixie"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroots want root"),
]
ASKS = f"from tests.roots import root; print(root({SUITE!r}, ['hello']))"
LIVES = f"""import time
from tests.roots import Room, root
room = Room(root({SUITE!r}, ['hello']))
room.start("sleep", "1000")
print(room.pid, flush=True)
time.sleep(1000)
"""


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)


def test_two_who_ask_at_once_get_the_same_root() -> None:
    asking = [python(ASKS), python(ASKS)]
    told = {one.communicate()[0] for one in asking}
    assert told == {f"{root(SUITE, ['hello'])}\n".encode()}
    assert not list((STATE / "roots").glob("*.draft"))


def test_what_is_written_in_a_room_is_gone_with_it() -> None:
    made = root(SUITE, ["hello"])
    with Room(made, net=True, host="elsewhere", binds={ROOT: "/checkout"}) as room:
        assert room.run("hello").stdout == b"Hello, world!\n"
        assert room.run("hostname").stdout == b"elsewhere\n"
        assert room.run("ls", "/sys/class/net").stdout == b"lo\n"
        assert room.run("cat", "/checkout/Makefile").stdout == (ROOT / "Makefile").read_bytes()
        assert room.run("id", "-nu", user="nobody").stdout == b"nobody\n"
        room.run("touch", "/etc/written")
        assert room.path("/etc/written").exists()
    assert not (made / "etc/written").exists()


def test_a_room_dies_with_the_process_that_made_it() -> None:
    maker = python(LIVES)
    assert maker.stdout is not None
    first = os.pidfd_open(int(maker.stdout.readline()))
    mounted = f"{STATE}/rooms"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    import select

    assert select.select([first], [], [], 30)[0], "the room's first process goes on"
    assert mounted not in Path("/proc/mounts").read_text()
