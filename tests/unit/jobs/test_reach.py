"""What `--allow` and `--secret` may say, and where a secret's value may be."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.errors import BadOption, InputMissing
from belljar.jobs.reach import secret, value_of
from belljar.jobs.starting import make_request
from belljar.machine import Settings
from belljar.model import Account, NetworkMode, OwnWork, Payload, Request, RunPayload, Secret, Work, dumps

TOKEN = "TOKEN=env:REAL,host=api.example.org"
WORK = RunPayload(Payload((b"true",), Account("me", 1, 1, "me"), env=((b"PATH", b"/bin"), (b"REAL", b"hunter2"))))


def asked(work: Work = WORK, **options: Any) -> Request:
    settings: Any = SimpleNamespace(machine=Settings(), image=SimpleNamespace(default="debian"))
    return make_request(settings, work, **options)


@pytest.mark.parametrize(
    "text",
    [
        "", "TOKEN", "TOKEN=hunter2,host=a.example", "TOKEN=env:REAL", "TOKEN=env:,host=a.example", "=env:REAL,host=a.example",
        "TO-KEN=env:REAL,host=a.example", "TOKEN=env:REAL,host=", "TOKEN=env:REAL,host=*.example", "TOKEN=env:REAL,host=192.0.2.1",
        "TOKEN=env:REAL,host=a b", "TOKEN=env:REAL,host=none", "TOKEN=env:REAL,host=a.example:0",
    ],
)  # fmt: skip
def test_a_secret_that_cannot_be_read_is_refused_and_its_value_not_repeated(text: str) -> None:
    with pytest.raises(BadOption, match="--secret") as caught:
        secret(text)
    assert "hunter2" not in str(caught.value)


def test_a_secret_has_a_source_and_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert secret(TOKEN) == Secret("TOKEN", "env:REAL", ("api.example.org",))
    assert secret("A=file:a,b,host=x.example,host=y.example:8443") == Secret(
        "A", f"file:{tmp_path}/a,b", ("x.example", "y.example:8443")
    )


def test_values_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REAL", "hunter2")
    (tmp_path / "file").write_text("from a file\n")
    both = [secret(TOKEN), secret(f"B=file:{tmp_path}/file,host=a.example")]
    assert [value_of(it) for it in both] == [b"hunter2", b"from a file"]


@pytest.mark.parametrize("value", ["", "\n", "two\nlines", "a\r\nHost: other", "nul\0"])
def test_a_value_that_no_header_can_have_is_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(value)
    with pytest.raises(BadOption, match="--secret B"):
        value_of(Secret("B", f"file:{tmp_path}/file", ("a.example",)))


@pytest.mark.parametrize("source", ["env:NOT_SET_ANYWHERE", "file:/nowhere/at/all", "file:/tmp"])
def test_a_value_that_is_not_there_is_missed(source: str) -> None:
    with pytest.raises(InputMissing, match="--secret B"):
        value_of(Secret("B", source, ("a.example",)))


def test_a_request_has_the_placeholder_in_the_place_of_the_value() -> None:
    request = asked(secrets=(TOKEN,))
    assert isinstance(request.work, RunPayload)
    env = dict(request.work.payload.env)
    assert (
        env[b"TOKEN"] == b"belljar-TOKEN-placeholder"
        and env[b"PATH"] == b"/bin"
        and env[b"SSL_CERT_FILE"] == env[b"CURL_CA_BUNDLE"]
    )
    assert b"hunter2" not in dumps(request) and request.machine.network is NetworkMode.USER
    assert Request.from_json(json.loads(dumps(request))) == request
    same = asked(secrets=(TOKEN.replace("REAL", "TOKEN"),))  # of the same name
    assert b"belljar-TOKEN-placeholder" in dumps(same)
    both = asked(secrets=("REAL=env:OTHER,host=a.example", TOKEN))  # one's variable is the other's source
    assert b"belljar-REAL-placeholder" in dumps(both) and b"hunter2" not in dumps(both)


def test_a_list_means_a_user_network_and_no_other() -> None:
    assert asked(allow=("none",)).machine.network is NetworkMode.USER
    assert asked().machine == asked(allow=(), secrets=()).machine and asked().work == WORK
    for mode in (NetworkMode.NONE, NetworkMode.BRIDGE):
        with pytest.raises(BadOption, match="user network"):
            asked(allow=("a.example",), network=mode)
    with pytest.raises(BadOption, match="--allow: 'fe80::1'"):
        asked(allow=("fe80::1",))
    with pytest.raises(BadOption, match="without a command"):
        asked(OwnWork(), secrets=(TOKEN,))
    assert asked(OwnWork(), allow=("a.example",)).machine.allow == ("a.example",)
