"""What the words of `belljar run` mean, and which of them mean nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.cli import parser_of
from belljar.cli.machine import request
from belljar.config import Settings, default_paths
from belljar.errors import BadOption, BelljarError, InputMissing
from belljar.model import MIB, Account, Container, NetworkMode, Payload, Request, RunPayload, Start, StdinKind

Build = Callable[..., Request]


def payload_of(request: Request) -> Payload:
    assert isinstance(request.work, RunPayload)
    return request.work.payload


@pytest.fixture
def build() -> Build:
    settings = Settings(default_paths(0, {}))

    def parse(*words: str) -> Request:
        args: argparse.Namespace = parser_of("run").parse_args(list(words))
        return request.build(args, settings)

    return parse


def test_a_command_after_the_dashes_is_taken_to_the_byte(build: Build) -> None:
    odd = os.fsdecode(b"a\n'\"\xff $(id)")
    payload = payload_of(build("--", "printf", odd, "--image", "-t"))
    assert payload.script is None
    assert payload.argv == (b"printf", b"a\n'\"\xff $(id)", b"--image", b"-t")


def test_a_script_travels_by_its_bytes_and_keeps_its_own_options(build: Build, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_bytes(b"#!/bin/sh\nexit 3\n\xff")
    payload = payload_of(build("--cpus", "1", str(tmp_path / "job.sh"), "--cpus", "many"))
    assert payload.script == b"#!/bin/sh\nexit 3\n\xff" and payload.argv == (b"job.sh", b"--cpus", b"many")


def test_short_options_are_those_of_other_runners(build: Build) -> None:
    asked = build("-c", "2", "-m", "1G", "-e", "A=b", "-n", "--", "cat")
    assert (asked.machine.cpus, asked.machine.memory) == (2, 1024 * MIB)
    assert (b"A", b"b") in payload_of(asked).env and payload_of(asked).stdin is StdinKind.NULL


def test_a_folder_that_was_removed_is_no_place_to_start_in(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(BadOption, match="the current folder was removed"):
        build("--", "true")
    assert payload_of(build("--cwd", "/srv", "--", "true")).cwd == b"/srv"


def test_defaults_come_from_the_settings(build: Build) -> None:
    asked = build("--", "true")
    assert (asked.machine.image, asked.machine.cpus, asked.machine.memory) == ("debian12", 1, 512 * MIB)
    assert asked.machine.network is NetworkMode.NONE and asked.machine.start is Start.AUTO
    assert asked.timeout is None and asked.grace == 10.0


def test_the_payload_is_the_caller_in_the_callers_place(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    payload = payload_of(build("--", "true"))
    assert (payload.account.uid, payload.account.gid) == (os.geteuid(), os.getegid())
    assert payload.cwd == os.fsencode(tmp_path)
    assert dict((name, (soft, hard)) for name, soft, hard in payload.rlimits)["NOFILE"] is not None


def test_a_scratch_disk_is_where_temporary_files_go_unless_told_otherwise(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tmpdir(*words: str) -> bytes | None:
        payload = payload_of(build(*words, "--", "true"))
        assert payload is not None
        return dict(payload.env).get(b"TMPDIR")

    monkeypatch.setenv("TMPDIR", "/tmp/of/the/host")
    assert build("--scratch", "3M", "--", "true").machine.scratch == 3 * MIB
    assert build("--", "true").machine.scratch is None and tmpdir() is None
    assert tmpdir("--scratch", "3M") == tmpdir("--scratch", "3M", "--inherit-env") == b"/scratch"
    assert tmpdir("--scratch", "3M", "--env", "TMPDIR=/tmp") == b"/tmp"


def test_nothing_else_comes_to_the_place_of_the_scratch_disk(build: Build) -> None:
    assert build("--share", "/usr:/scratch", "--", "true").machine.shares[0].target == "/scratch"
    with pytest.raises(BadOption, match="/scratch"):
        build("--scratch", "3M", "--share", "/usr:/scratch", "--", "true")


def test_somebody_else_begins_at_home_unless_told_otherwise(build: Build) -> None:
    words = ("--user", "54321:54322")
    assert payload_of(build(*words, "--", "true")).cwd is None
    assert payload_of(build(*words, "--cwd", "/srv", "--", "true")).cwd == b"/srv"


def test_the_umask_is_read_without_changing_it(build: Build) -> None:
    before = os.umask(0o027)
    try:
        payload = payload_of(build("--", "true"))
        assert payload is not None and payload.umask == 0o027
    finally:
        assert os.umask(before) == 0o027


def test_the_environment_is_small_unless_inherited_and_the_last_word_counts(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "1")
    words = (
        "--env",
        "A=file",
        "--env",
        "B=with = and # inside",
        "--env",
        "A=word",
        "--env",
        "MINE",
        "--env",
        "NOT_SET",
    )
    plain = dict(payload_of(build(*words, "--", "true")).env)
    assert plain[b"A"] == b"word" and plain[b"B"] == b"with = and # inside" and plain[b"MINE"] == b"1"
    assert b"NOT_SET" not in plain and plain[b"HOME"]
    assert b"MINE" not in dict(payload_of(build("--", "true")).env)
    inherited = payload_of(build("--inherit-env", "--", "true"))
    assert inherited is not None and dict(inherited.env) == dict(os.environb)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{d}", ("{d}", "{d}", True)),
        ("{d}:rw", ("{d}", "{d}", False)),
        ("{d}:/data", ("{d}", "/data", True)),
        ("{d}:/data/x/:rw", ("{d}", "/data/x", False)),
    ],
)
def test_the_forms_of_a_share(build: Build, tmp_path: Path, text: str, wanted: tuple[str, str, bool]) -> None:
    share = build("--share", text.format(d=tmp_path), "--", "true").machine.shares[0]
    source, target, readonly = wanted
    assert (share.source, share.target, share.readonly) == (
        source.format(d=tmp_path),
        target.format(d=tmp_path),
        readonly,
    )


def test_a_copy_in_keeps_its_name_unless_it_is_given_another(build: Build, tmp_path: Path) -> None:
    (tmp_path / "a:b").write_text("x")
    payload = payload_of(build("--in", str(tmp_path / "a:b"), "--in", f"{tmp_path}/a:b:/data/c", "--", "true"))
    assert [(item.outside, item.inside) for item in payload.inputs] == [
        (f"{tmp_path}/a:b", "a:b"),
        (f"{tmp_path}/a:b", "/data/c"),
    ]


def test_a_copy_out_lands_beside_the_caller_unless_told_otherwise(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    payload = payload_of(build("--out", "result/data", "--out", f"/var/log:{tmp_path}/log", "--", "true"))
    assert [(item.inside, item.outside) for item in payload.outputs] == [
        ("result/data", f"{tmp_path}/data"),
        ("/var/log", f"{tmp_path}/log"),
    ]


def test_a_number_without_an_entry_is_a_user_all_the_same(build: Build) -> None:
    account = payload_of(build("--user", "54321:54322", "--", "true")).account
    assert (account.uid, account.gid, account.name, account.group, account.groups) == (
        54321,
        54322,
        "user54321",
        "group54322",
        (),
    )


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ((), BadOption, "nothing to run"),
        (("--",), BadOption, "nothing to run"),
        (("--cpus", "0", "--", "true"), BadOption, "--cpus 0"),
        (("--memory", "0", "--", "true"), BadOption, "--memory 0: must be more than nothing"),
        (("--disk", "0", "--", "true"), BadOption, "--disk 0: must be more than nothing"),
        (("--network", "", "--", "true"), BadOption, "--network ''"),
        (("--timeout", "1:70:00", "--", "true"), BadOption, "--timeout: '1:70:00' is not a duration"),
        (("--out", "/a:x", "--out", "/b:./x", "--", "true"), BadOption, "--out: two of them at "),
        (("--out", "/a/x", "--out", "/b/x", "--", "true"), BadOption, "--out: two of them at"),
        (("--out", "/a:no-such-folder/", "--", "true"), BadOption, "the folder no-such-folder/ does not exist here"),
        (
            (*(word for n in range(21) for word in ("--share", f"/usr:/s{n}")), "--", "true"),
            BadOption,
            "21 folders, and a machine takes at most 20",
        ),
        (("--cpus", "x", "--", "true"), BadOption, "--cpus"),
        (("--memory", "-1", "--", "true"), BadOption, "--memory"),
        (("--memory", "lots", "--", "true"), BadOption, "--memory"),
        (("--timeout", "0", "--", "true"), BadOption, "--timeout"),
        (("--network", "wan", "--", "true"), BadOption, "--network 'wan'"),
        (("--network", "none:x", "--", "true"), BadOption, "no such kind"),
        (("--network", "bridge:", "--", "true"), BadOption, "no such kind"),
        (("--network", "isolated", "--", "true"), BadOption, "no such kind"),
        (("--start", "warm", "--", "true"), BadOption, "--start"),
        (("--share", "/tmp:relative", "--", "true"), BadOption, "--share /tmp:relative"),
        (("--share", "/tmp:/", "--", "true"), BadOption, "guest's own"),
        (("--share", "/tmp:/x", "--share", "/usr:/x", "--", "true"), BadOption, "two of them at /x"),
        (("--in", "/no/such/file", "--", "true"), InputMissing, "/no/such/file"),
        (("--in", "/etc/passwd:", "--", "true"), BadOption, "--in /etc/passwd:"),
        (("--out", "x:/no/such/folder/x", "--", "true"), BadOption, "/no/such/folder"),
        (("--env", "=x", "--", "true"), BadOption, "--env =x"),
        (("--env-file", "/no/such/file", "--", "true"), BadOption, "--env-file"),
        (("--cwd", "here", "--", "true"), BadOption, "--cwd here"),
        (("--user", "nobody-of-this-name", "--", "true"), BadOption, "no such user"),
        (("--user", "root:wheel", "--", "true"), BadOption, "--user root:wheel"),
        (("--user", "99999999999", "--", "true"), BadOption, "--user"),
        (("--name", "../../x", "--", "true"), BadOption, "--name"),
        (("--name", "$(id)", "--", "true"), BadOption, "--name"),
        (("--tty", "--", "true"), BadOption, "not a terminal"),
        (("--nonsense", "--", "true"), BadOption, "nonsense"),
        (("/no/such/script",), InputMissing, "/no/such/script"),
        (("/tmp",), InputMissing, "/tmp"),
    ],
)
def test_what_means_nothing_is_refused_with_the_word_at_fault(
    build: Build, words: tuple[str, ...], kind: type[BelljarError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        build(*words)
    assert says in caught.value.message and caught.value.hint and caught.value.exit_code == 125


def test_what_is_too_little_is_not_told_to_ask_for_less(build: Build) -> None:
    for words in (("--memory", "0"), ("--cpus", "0"), ("--disk", "0")):
        with pytest.raises(BadOption) as caught:
            build(*words, "--", "true")
        assert caught.value.hint == f"Give {words[0]} a larger value."


def test_a_file_goes_into_a_folder_that_is_named_with_a_slash(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").touch()
    (tmp_path / "d").mkdir()
    payload = payload_of(build("--in", "f:/new/dir/", "--in", "d:/data/", "--out", "/etc/passwd:d/", "--", "true"))
    assert [one.inside for one in payload.inputs] == ["/new/dir/f", "/data/"]
    assert [one.outside for one in payload.outputs] == [f"{tmp_path}/d"]


def test_the_name_of_a_guests_program_without_dashes_gets_the_right_hint(build: Build) -> None:
    with pytest.raises(InputMissing) as caught:
        build("uname", "-a")
    assert "belljar run -- uname" in caught.value.hint


def test_a_script_larger_than_the_limit_is_refused(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "LARGEST_SCRIPT", 10)
    (tmp_path / "huge").write_bytes(b"#" * 11)
    with pytest.raises(InputMissing, match="larger"):
        build(str(tmp_path / "huge"))


def test_null_and_streams_are_told_apart(tmp_path: Path) -> None:
    with open(os.devnull) as null, open("/dev/zero") as zero, open(tmp_path / "file", "w+") as file:
        assert request.kind(null.fileno()) is StdinKind.NULL
        assert request.kind(zero.fileno()) is StdinKind.STREAM
        assert request.kind(file.fileno()) is StdinKind.STREAM


@pytest.mark.parametrize(
    ("text", "mode", "name"),
    [("user", "user", ""), ("bridge", "bridge", ""), ("bridge:br1", "bridge", "br1"), ("isolated:a", "isolated", "a")],
)
def test_a_network_may_have_a_name(text: str, mode: str, name: str) -> None:
    from belljar.jobs.shares import network_of

    assert network_of(text) == (mode, name)


SAID = Container(
    ("/entry", "-x"), ("serve", "80"), (("PATH", "/opt/bin"), ("A", "image")), "/srv", Account("web", 33, 33, "web")
)


def of_image(*words: str, container: Container | None = SAID) -> Payload:
    args = parser_of("run").parse_args(list(words))
    return payload_of(request.build(args, Settings(default_paths(0, {})), container))


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ((), (b"/entry", b"-x", b"serve", b"80")),
        (("--",), (b"/entry", b"-x", b"serve", b"80")),
        (("--", "id", "-u"), (b"id", b"-u")),
        (("--entrypoint", "--", "id", "-u"), (b"/entry", b"-x", b"id", b"-u")),
    ],
)
def test_words_are_the_command_and_without_any_a_container_image_runs_its_own(
    words: tuple[str, ...], argv: tuple[bytes, ...]
) -> None:
    assert of_image(*words).argv == argv


def test_a_payload_is_as_its_container_image_says_unless_words_say_otherwise() -> None:
    payload = of_image("--env", "B=mine")
    assert (payload.account, payload.cwd) == (SAID.account, b"/srv")
    assert dict(payload.env).items() >= {b"PATH": b"/opt/bin", b"A": b"image", b"B": b"mine", b"HOME": b"/"}.items()
    payload = of_image("--env", "A=mine", "--user", "1:2", "--cwd", "/x", "--inherit-env")
    assert (payload.account.uid, payload.account.gid, payload.cwd) == (1, 2, b"/x")
    assert dict(payload.env).items() >= {b"A": b"mine", b"PATH": b"/opt/bin"}.items()


def test_a_container_image_without_a_command_wants_one(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="nothing to run"):
        of_image(container=Container())
    (tmp_path / "job.sh").write_bytes(b"#!/bin/sh\n")
    for words in (["--entrypoint", str(tmp_path / "job.sh")], ["--entrypoint", "--", "id"]):
        with pytest.raises(BadOption, match="--entrypoint"):
            of_image(*words, container=Container())
    assert of_image(str(tmp_path / "job.sh")).script == b"#!/bin/sh\n"
