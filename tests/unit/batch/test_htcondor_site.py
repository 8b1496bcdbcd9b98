"""What a site gets for HTCondor, and that nothing of its settings can be more than a word in it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings, load_site
from belljar.batch.htcondor_ads import Expression, value_of
from belljar.batch.htcondor_site import SITE, plain_regex, requirement, sentence, shared_here, start
from belljar.batch.siting import OurFile, Place
from belljar.errors import CommandMissing

NAME = 'regexp("^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", VmImage)'


def place(folder: Path, settings: Settings | None = None, **answers: bytes) -> Place:
    def run(argv: tuple[str, ...]) -> bytes:
        if argv[-1] not in answers:
            raise CommandMissing(f"{argv[0]}: no such program on this host")
        return answers[argv[-1]]

    libexec = folder / "lib exec"
    return Place(
        settings=settings or Settings(), wrapper=libexec / "wrap-htcondor", belljar=libexec / "belljar",
        store=folder / "store", folder=folder / "config.d", run=run,
    )  # fmt: skip


def file(folder: Path, name: str, settings: Settings | None = None) -> OurFile:
    found = [one for one in SITE.pieces(place(folder, settings)) if isinstance(one, OurFile) and one.path.name == name]
    return found[0]


def test_one_file_of_settings_and_two_scripts(tmp_path: Path) -> None:
    assert load_site("htcondor") is SITE
    pieces = [one for one in SITE.pieces(place(tmp_path)) if isinstance(one, OurFile)]
    assert [(one.path.name, one.mode) for one in pieces] == [
        ("belljar-prepare", 0o755), ("belljar-publish", 0o755), ("90-belljar.conf", 0o644),
    ]  # fmt: skip
    config = pieces[-1].content.decode()
    assert f"USER_JOB_WRAPPER = {tmp_path}/lib exec/wrap-htcondor\n" in config
    assert "{" not in config.replace("{0,99}", ""), "every blank is filled in"


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        (("* *",), f"VmImage is undefined || {NAME}"),
        (("user:bob *", "group:physics sl7"), f"VmImage is undefined || {NAME}"),
        (("* debian1[12]",), f"VmImage is undefined || {NAME}"),
        ((), f"VmImage is undefined || ({NAME} && (false))"),
        (("* debian*", "user:bob sl7.?"),
         f'VmImage is undefined || ({NAME} && ((regexp("^debian.*$", VmImage)) || '
         '(Owner == "bob" && regexp("^sl7[.].$", VmImage))))'),
        (("queue:night *",), f'VmImage is undefined || ({NAME} && ((AcctGroup =?= "night" && regexp("^.*$", VmImage))))'),
        (('user:a"||true||" *',), f"VmImage is undefined || ({NAME} && ((Owner == \"a'||true||'\" && "
         'regexp("^.*$", VmImage))))'),
    ],
)  # fmt: skip
def test_an_access_point_refuses_what_it_can_know(allow: tuple[str, ...], expected: str) -> None:
    assert requirement(Settings(allow=allow)) == expected


def test_a_pattern_of_names_means_the_same_there() -> None:
    assert plain_regex("sl7.?_x-*") == "sl7[.]._x-.*"


def test_the_sentence_is_one_literal() -> None:
    text = sentence(Settings(allow=("* debian*", "user:bob sl7")))
    assert isinstance(value_of(text, old=True), str) and "debian*, sl7" in text


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({}, "True"), ({"default_image": "sl7"}, "MY.HasVm =?= True"),
        ({"queue_images": ("night=sl7", "day=sl7")},
         '(MY.HasVm =?= True || !stringListMember(TARGET.AcctGroup ?: "", "night,day"))'),
    ],
)  # fmt: skip
def test_a_node_whose_machines_fail_takes_other_jobs_only(changes: dict[str, object], other: str) -> None:
    text = start(replace(Settings(), **changes))  # type: ignore[arg-type]
    assert text.startswith(f"ifThenElse(TARGET.VmImage =?= undefined, {other}, (MY.HasVm =?= True &&")
    assert isinstance(value_of(text, old=True), Expression)


def test_the_node_publishes_its_images_and_why_it_is_closed(tmp_path: Path) -> None:
    names = tmp_path / "store/images/names"
    names.mkdir(parents=True)
    for name in ("debian12", "sl7", "odd name", '"'):
        (names / name).touch()
    closed = tmp_path / "closed"
    script = tmp_path / "publish"
    text = file(tmp_path, "belljar-publish").content.replace(b"/var/lib/belljar/htcondor-closed", os.fsencode(closed))
    script.write_bytes(text)
    assert published(script) == [
        "HasVm = True",
        "VmOfflineReason = undefined",
        'VmImages = "debian12,sl7"',
        "- update:true",
    ]
    closed.symlink_to('belljar: "no" space\\ left\n$(id)')
    assert published(script)[:2] == ["HasVm = False", 'VmOfflineReason = "belljar: ?no? space? left?$(id)"']


def published(script: Path) -> list[str]:
    return subprocess.run(["sh", script], capture_output=True, check=True, timeout=20).stdout.decode().splitlines()


@pytest.mark.parametrize(
    ("belljar", "said"),
    [("printf 'HookStatusCode = 25\\n'", b"HookStatusCode = 25\n"), ("exit 3", b""), ("kill $$", b"")],
)
def test_a_hook_that_breaks_holds_nobody(tmp_path: Path, belljar: str, said: bytes) -> None:
    (tmp_path / "lib exec").mkdir()
    fake = tmp_path / "lib exec/belljar"
    fake.write_text(f"#!/bin/sh\n{belljar}\n")
    fake.chmod(0o755)
    script = tmp_path / "hook"
    script.write_bytes(file(tmp_path, "belljar-prepare").content)
    done = subprocess.run(["sh", script], capture_output=True, check=False, timeout=20, input=b"A = 1\n")
    assert (done.returncode, done.stdout) == (0, said)


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    version = b"$CondorVersion: 23.0.6 2024-03-14 BuildID: 717437 $\n"
    wrapper = os.fsencode(tmp_path / "lib exec/wrap-htcondor") + b"\n"
    answers = {"condor_version": version, "USER_JOB_WRAPPER": wrapper, "EXECUTE": b"/home/condor/execute\n"}
    assert all(one.is_good for one in SITE.findings(place(tmp_path, **answers)))
    old = {**answers, "condor_version": b"$CondorVersion: 8.4.2 2016 $", "USER_JOB_WRAPPER": b"/other"}
    assert [one.is_good for one in SITE.findings(place(tmp_path, **old))] == [False, False, True, True]
    keyword = {**answers, "STARTER_JOB_HOOK_KEYWORD": b"SITE\n"}
    assert not SITE.findings(place(tmp_path, **keyword))[2].is_good
    assert not any(one.is_good for one in SITE.findings(place(tmp_path))[:2])
    assert "copied in and out" in SITE.findings(place(tmp_path, **{**answers, "EXECUTE": b"/scratch"}))[3].detail


@pytest.mark.parametrize(
    ("share", "here"),
    [
        ("/scratch/condor:rw", "/scratch/condor"),
        ("virtiofs:/scratch/condor:/in:rw", "/scratch/condor"),
        ("virtiofs:/scratch/condor/", "/scratch/condor"),
        ("virtiofs", "virtiofs"),
        ("nfs://nas/home:/home:rw", "/home"),
    ],
)
def test_the_hosts_name_of_a_share(share: str, here: str) -> None:
    assert shared_here(share) == here
