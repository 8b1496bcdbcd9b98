"""`belljar lease`: what is refused before the service is asked, what it is asked, and what its answers look like."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.cli.lease import asking
from belljar.errors import BadOption, HostError

KIND = b"ssh-ed25519"
DATA = b"".join(len(one).to_bytes(4, "big") + one for one in (KIND, b"k" * 32))
KEY = f"ssh-ed25519 {base64.b64encode(DATA).decode()} ann@here"
Lease = Callable[..., int]


class Service:
    """Keeps what it is asked, and answers the same each time."""

    def __init__(self, folder: Path) -> None:
        self.door, self.asked, self.hangs_up = folder / "door", list[dict[str, Any]](), False
        self.answer: dict[str, Any] = {"lease": {"id": "r-1"}, "instances": [{"id": "i-1"}]}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.door))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            caller = self._socket.accept()[0]
            if self.hangs_up:
                caller.close()
                continue
            with caller, caller.makefile("rwb") as lines:
                if not (line := lines.readline()):
                    return
                self.asked.append(json.loads(line))
                lines.write(json.dumps(self.answer).encode() + b"\n")

    def close(self) -> None:
        self.hangs_up = False
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.door))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Its callers have a home, and a key there."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519.pub").write_text(KEY + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    service = Service(tmp_path)
    yield service
    service.close()


@pytest.fixture
def lease(service: Service, call: Callable[..., int]) -> Lease:
    return lambda act, *words: call("lease", act, *words, "--door", str(service.door))


@pytest.mark.parametrize(("words", "seconds"), [(("--time", "2h"), 7200.0), (("--time", "90m"), 5400.0), ((), 0.0)])
def test_a_time_is_asked_for_as_it_was_said(
    words: tuple[str, ...], seconds: float, lease: Lease, service: Service
) -> None:
    assert lease("run", "debian12", *words) == 0
    assert service.asked[0]["wanted"]["seconds"] == seconds and service.asked[0]["public"] == KEY


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--time", "0"), "--time 0"), (("--time", "-1"), "--time: '-1'"), (("--time", "nan"), "--time: 'nan'"),
        (("--time", "inf"), "--time: 'inf'"), (("--time", "two"), "--time: 'two'"),
    ],
)  # fmt: skip
def test_a_time_that_is_none_is_not_a_day(words: tuple[str, ...], what: str, lease: Lease, service: Service) -> None:
    for act in ("run", "explain"):
        with pytest.raises(BadOption) as caught:
            lease(act, "debian12", *words)
        assert what in caught.value.message and caught.value.hint
    assert not service.asked


def test_user_data_that_is_too_large_is_named_with_its_file(lease: Lease, service: Service, tmp_path: Path) -> None:
    large = tmp_path / "begin.sh"
    large.write_bytes(b"#" * 16384)
    assert lease("run", "debian12", "--user-data", str(large)) == 0
    large.write_bytes(b"#" * 300_000)
    with pytest.raises(BadOption) as caught:
        lease("run", "debian12", "--user-data", str(large))
    assert caught.value.message == f"--user-data {large}: 300000 bytes; 16384 are the most" and len(service.asked) == 1


@pytest.mark.parametrize(
    "text",
    [f"{KEY}\n{KEY}\n", "ssh-ed25519 garbage!!!", "",
     "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", "root:x:0:0:root:/root:/bin/bash", KEY.replace("ssh-ed25519 ", "", 1)],
)  # fmt: skip
def test_a_file_that_is_not_one_public_key_opens_no_machine(
    text: str, lease: Lease, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "key.pub").write_text(text)
    with pytest.raises(BadOption) as caught:
        lease("run", "debian12", "--key", str(tmp_path / "key.pub"))
    assert caught.value.message.startswith(f"--key {tmp_path / 'key.pub'}: ") and "ssh-keygen" in caught.value.hint
    assert not service.asked


def test_who_has_no_key_is_told_that_nobody_can_log_in(
    lease: Lease, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lease("run", "debian12") == 0 and not capsys.readouterr().err
    (tmp_path / ".ssh/id_ed25519.pub").unlink()
    assert lease("run", "debian12") == 0
    told = capsys.readouterr().err
    assert (
        "no public key" in told and f"{tmp_path}/.ssh" in told and "--key" in told and service.asked[1]["public"] == ""
    )


def test_time_is_left_to_what_goes_on(lease: Lease, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    one = {
        "id": "r-1", "wanted": {"image": "debian12"}, "job": "7", "why": "", "begun": time.time(), "ends": time.time() + 3700,
    }  # fmt: skip
    for state, is_shown in (("active", True), ("draining", False), ("released", False)):
        service.answer = {"leases": [{**one, "state": state}], "machines": []}
        assert lease("status") == 0
        assert ("1 h 01 min" in capsys.readouterr().out) is is_shown, state


def test_a_service_that_hangs_up_has_a_reason(lease: Lease, service: Service, tmp_path: Path) -> None:
    """As it does where a user has too many connections, before it has read what is asked."""
    service.hangs_up = True
    large = tmp_path / "begin.sh"
    large.write_bytes(b"\xff" * 16384)  # more than a socket's buffer, as JSON
    for words in (("status",), ("run", "debian12", "--user-data", str(large), "--token", "x" * 500_000)):
        with pytest.raises(HostError, match="closed the connection") as caught:
            lease(*words)
        assert "32" in caught.value.hint and "log" in caught.value.hint


def test_a_service_that_says_nothing_is_not_waited_for_without_end(
    tmp_path: Path, call: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "door"))
        silent.listen()
        with pytest.raises(HostError, match="no answer of the lease service") as caught:
            call("lease", "status", "--door", str(tmp_path / "door"))
    assert "try again" in caught.value.hint.lower()


def test_what_may_be_left_out_is_not_asked_for(call: Callable[..., int]) -> None:
    with pytest.raises(BadOption, match=r"required: MACHINE$"):
        call("lease", "ssh")
