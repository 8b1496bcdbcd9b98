"""A child that gave up root's rights has none left, and what it says is a stranger's word."""

from __future__ import annotations

import os
import time

import pytest

from belljar.errors import CommandFailed, HostError
from belljar.host.privileges import LARGEST_REPORT, User, as_user, become, user_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
NOBODY = User(65534, 65534, "nobody", "/nonexistent")


def say(text: str) -> bytes:
    return text.encode()


def test_the_child_is_the_user_and_nobody_else() -> None:
    said = as_user(
        NOBODY,
        lambda: say(f"{os.getresuid()} {os.getresgid()} {os.getgroups()} {os.environ['HOME']}"),
        timeout=10,
        what="look",
    )
    assert said == b"(65534, 65534, 65534) (65534, 65534, 65534) [65534] /nonexistent"
    assert os.geteuid() == 0


@pytest.mark.parametrize("way_back", [lambda: os.setuid(0), lambda: os.setresuid(-1, 0, -1), lambda: os.setgroups([0])])
def test_there_is_no_way_back(way_back: object) -> None:
    assert callable(way_back)
    with pytest.raises(CommandFailed, match="not permitted"):
        as_user(NOBODY, lambda: say(str(way_back())), timeout=10, what="try")


def test_the_sessions_folders_of_the_caller_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert as_user(NOBODY, lambda: say(str("XDG_RUNTIME_DIR" in os.environ)), timeout=10, what="look") == b"False"


def test_an_error_in_the_child_is_one_plain_line() -> None:
    def fail() -> bytes:
        raise OSError("broken\n\x1b[2J" + "x" * 9999)

    with pytest.raises(CommandFailed) as caught:
        as_user(NOBODY, fail, timeout=10, what="do it")
    assert caught.value.message.startswith("do it as nobody: broken??[2J")
    assert len(caught.value.message) < 400 and caught.value.message.isprintable()


def test_a_child_that_hangs_is_killed_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(CommandFailed, match=r"not done after 0\.3 s"):
        as_user(NOBODY, lambda: say(str(time.sleep(60))), timeout=0.3, what="wait")
    assert time.monotonic() - begin < 5
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_child_that_says_too_much_is_not_listened_to() -> None:
    with pytest.raises(CommandFailed, match="reported more than"):
        as_user(NOBODY, lambda: bytes(LARGEST_REPORT + 2), timeout=10, what="talk")


def test_a_child_that_is_killed_is_a_failure_even_when_it_had_spoken() -> None:
    def die() -> bytes:
        os.kill(os.getpid(), 9)
        return b""

    with pytest.raises(CommandFailed, match="ended with 9"):
        as_user(NOBODY, die, timeout=10, what="live")


@pytest.mark.parametrize("name", ["no-such-user-here", "", "-1", "99999999999999999999", "root\n", "\u0661"])
def test_a_user_that_is_not_known_is_said(name: str) -> None:
    with pytest.raises(HostError, match="no such user"):
        user_of(name)


def test_a_user_is_found_by_name_and_by_number() -> None:
    assert user_of("nobody").uid == user_of("65534").uid == 65534


def test_who_is_not_root_becomes_nobody_else() -> None:
    with pytest.raises(CommandFailed, match="cannot become root"):
        as_user(NOBODY, lambda: say(str(become(User(0, 0, "root", "/root")))), timeout=10, what="try")
