"""`belljar run --user-data`: what is read, what is filled in, what is refused before anything starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.image.http_server import serving

from belljar.cli import parser_of, split
from belljar.cli.machine import request
from belljar.config import inspect
from belljar.context import Settings
from belljar.errors import BadOption, DownloadFailed
from belljar.image import Settings as ImageSettings
from belljar.jobs import starting
from belljar.model import OwnWork, Probe, Request, RunPayload, Sign


def parsed(*words: str) -> argparse.Namespace:
    line = split(["run", *words])
    return parser_of(line.verb).parse_args(line.rest)


def built(*words: str) -> Request:
    return request.build(parsed(*words), inspect(environ={"HOME": "/root"}, etc=Path("/nowhere")).settings)


def filled(*words: str, **context: Any) -> bytes:
    args = parsed(*words)
    runtime = SimpleNamespace(
        settings=SimpleNamespace(context=Settings(**context), image=ImageSettings(stall_timeout=2.0)),
        images=SimpleNamespace(resolve=lambda name: SimpleNamespace(source="https://example.org/cernvm.iso")),
    )
    made = starting.with_user_data(built(*words), args.user_data, args.user_data_option, args.user_data_file, runtime)  # type: ignore[arg-type]
    assert made.work.user_data is not None
    return made.work.user_data


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template"
    path.write_text(
        "##user_data_machine_hostname## ##user_data_option_q## ##user_data_joboutputs_url## ##user_data_url##."
    )
    return str(path)


def test_without_a_command_the_guest_knows_its_own_work(template: str) -> None:
    assert isinstance(built("--user-data", template).work, OwnWork)
    assert isinstance(built("--user-data", template, "--", "true").work, RunPayload)
    assert built("--context", "none").work == OwnWork()
    assert isinstance(built("--context", "none", "--", "true").work, RunPayload)
    with pytest.raises(BadOption, match="nothing to run"):
        built("--image", "debian12")


@pytest.mark.parametrize(
    "words", [["--in", "/etc/hosts"], ["--out", "x:/tmp/x"], ["--collect", "/var/log"], ["--context", "inject"]]
)
def test_what_takes_an_agent_takes_a_command(template: str, words: list[str]) -> None:
    with pytest.raises(BadOption, match="without a command"):
        built("--user-data", template, *words)


@pytest.mark.parametrize(
    ("text", "wanted", "has_agent"),
    [
        ("agent", Probe(Sign.AGENT), True), ("none", Probe(), False),
        ("file:/run/ready", Probe(Sign.FILE, "/run/ready"), True), ("line:login: ", Probe(Sign.LINE, "login: "), False),
    ],
)  # fmt: skip
def test_what_shows_that_it_is_ready_is_said(text: str, wanted: Probe, has_agent: bool) -> None:
    work = built("--ready", text).work
    assert work == OwnWork(ready=wanted) and work.has_agent is has_agent


@pytest.mark.parametrize("text", ["", "port:22", "file:run", "file", "line:", "agent:1", "line:a\nb", "x"])
def test_a_sign_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--ready"):
        built("--ready", text)


def test_a_sign_is_for_guests_without_a_command() -> None:
    with pytest.raises(BadOption, match="--ready with a command"):
        built("--ready", "agent", "--", "true")


def test_a_file_is_filled_in_for_one_machine(template: str) -> None:
    data = filled("--network", "user", "--user-data", template, "--user-data-option", "q=a=b")
    assert data.startswith(b"belljar-") and data.endswith(b" a=b http://169.254.169.253/joboutputs .")
    assert filled("--user-data", template).endswith(b"   .")  # without a network there is nowhere to put outputs


def test_options_come_from_words_files_and_the_site(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("##user_data_option_a##|##user_data_file_b##|##user_data_option_cvmfs_proxy##")
    (tmp_path / "b").write_bytes(b"PEM\n")
    words = ["--user-data", str(tmp_path / "t"), "--user-data-option", "a=1", "--user-data-file", f"b={tmp_path / 'b'}"]
    assert filled(*words, cvmfs_proxy="http://squid:3128") == b"1|PEM\n|http://squid:3128"
    assert filled(*words, "--user-data-option", "cvmfs_proxy=DIRECT", cvmfs_proxy="x") == b"1|PEM\n|DIRECT"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--user-data-option", "q=1"], "without --user-data"), (["--user-data", "/nowhere/x"], "No such file"),
        (["--user-data", "/etc"], "directory"), (["--user-data", "/dev/null"], "not a file"),
        (["--user-data", "T", "--user-data-option", "q"], "not of the form"),
        (["--user-data", "T", "--user-data-option", "Q=1"], "small letters"),
        (["--user-data", "T", "--user-data-option", "q=1", "--user-data-option", "q=2"], "twice"),
        (["--user-data", "T", "--user-data-option", "q=1", "--user-data-file", "q=T"], "twice"),
        (["--user-data", "T", "--user-data-file", "q=/nowhere/x"], "No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(template: str, words: list[str], why: str) -> None:
    words = [word.replace("=T", f"={template}") if word != "T" else template for word in words]
    with pytest.raises(BadOption, match=why):
        filled(*words)


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(BadOption, match="at most 1048576"):
        filled("--user-data", str(path))


def test_an_address_is_fetched_and_told() -> None:
    with serving() as server:
        url = server.put("/t", b"from ##user_data_url## of ##user_data_root_image_url##")
        assert filled("--user-data", url) == f"from {url} of https://example.org/cernvm.iso".encode()
        with pytest.raises(BadOption, match="1048576"):
            filled("--user-data", server.put("/large", b"x" * ((1 << 20) + 1)))
        with pytest.raises(DownloadFailed, match="404"):
            filled("--user-data", server.put("/none", status=404))
