"""What a site gets for HTCondor, and that nothing of its settings can be more than a word in it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings, load
from belljar.batch.htcondor.ads import Expression, value_of
from belljar.batch.htcondor.rules import requirement, requirements, sentence, start
from belljar.batch.htcondor.site import SITE
from belljar.batch.install.pieces import Change, Clash, OurFile, Place
from belljar.errors import BadOption, CommandMissing

NAME = 'isString(VmImage) && regexp("^[A-Za-z0-9]", VmImage) && !regexp("[^A-Za-z0-9._-]", VmImage) && size(VmImage) <= 100'


def place(folder: Path, settings: Settings | None = None, **answers: bytes) -> Place:
    def run(argv: tuple[str, ...]) -> bytes:
        if argv[-1] not in answers:
            raise CommandMissing(f"{argv[0]}: no such program on this host")
        return answers[argv[-1]]

    libexec = folder / "lib exec"
    return Place(
        settings=settings or Settings(), wrapper=libexec / "wrap-htcondor", belljar=libexec / "belljar",
        store=folder / "store", folder=folder / "config.d", run=run, node=folder / "node",
    )  # fmt: skip


def file(folder: Path, name: str, settings: Settings | None = None) -> OurFile:
    found = [one for one in SITE.pieces(place(folder, settings)) if isinstance(one, OurFile) and one.path.name == name]
    return found[0]


def test_one_file_of_settings_and_its_scripts(tmp_path: Path) -> None:
    assert load("htcondor").site is SITE
    pieces = [one for one in SITE.pieces(place(tmp_path)) if isinstance(one, OurFile)]
    scripts = ["belljar-prepare", "belljar-shell", "belljar-publish", "belljar-pool-images"]
    assert [one.path.name for one in pieces] == [*scripts, "90-belljar.conf"]
    assert all(
        one.content.startswith(b"#!") and b"@" not in one.content.replace(b"$@", b"").replace(b"[@]", b"")
        for one in pieces[:-1]
    )
    config = pieces[-1].content.decode()
    assert f"USER_JOB_WRAPPER = {tmp_path}/lib exec/wrap-htcondor\n" in config
    assert "@" not in config, "every blank is filled in"


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        (("group:physics debian1?",), f'VmImage is undefined || ({NAME} && ((regexp("^debian1.$", VmImage))))'),
        ((), f"VmImage is undefined || ({NAME} && (false))"),
        (("* debian*", "user:bob sl7.?"),
         f'VmImage is undefined || ({NAME} && ((regexp("^debian.*$", VmImage)) || '
         '(Owner =?= "bob" && regexp("^sl7[.].$", VmImage))))'),
        (("queue:night *",), f'VmImage is undefined || ({NAME} && ((AcctGroup =?= "night" && regexp("^.*$", VmImage))))'),
        (('user:a"||true||" *',), f"VmImage is undefined || ({NAME} && ((Owner =?= \"a'||true||'\" && "
         'regexp("^.*$", VmImage))))'),
    ],
)  # fmt: skip
def test_an_access_point_refuses_what_it_can_know(allow: tuple[str, ...], expected: str) -> None:
    assert requirement(Settings(allow=allow)) == expected


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, "VmImage isnt undefined"),
        ({"default_image": "sl7"}, ""),
        ({"queue_images": ("night=sl7",)}, 'stringListMember(AcctGroup ?: "", "night")'),
    ],
)
def test_only_vanilla_jobs_that_get_a_machine_need_its_memory(changes: dict[str, object], asked: str) -> None:
    """DAGMan's own job is of the scheduler universe, and small."""
    text, sentence_ = requirements(replace(Settings(), **changes))["BelljarMemory"]  # type: ignore[arg-type]
    assert text.startswith("!(JobUniverse == 5") and asked in text and text.endswith("(RequestMemory ?: 0) >= 480")
    assert "request_memory = 480" in sentence_


def test_the_sentence_is_one_literal() -> None:
    text = sentence(Settings(allow=("* debian*", "user:bob sl7")))
    assert isinstance(value_of(text), str) and "debian*, sl7" in text


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({}, "True"), ({"default_image": "sl7"}, "MY.BelljarWorks =?= True"),
        ({"queue_images": ("night=sl7", "day=sl7")},
         '(MY.BelljarWorks =?= True || !stringListMember(TARGET.AcctGroup ?: "", "night,day"))'),
    ],
)  # fmt: skip
def test_a_node_whose_machines_fail_takes_other_jobs_only(changes: dict[str, object], other: str) -> None:
    text = start(replace(Settings(), **changes))  # type: ignore[arg-type]
    assert text.startswith(f"ifThenElse(TARGET.VmImage =?= undefined, {other}, (MY.BelljarWorks =?= True &&")
    assert isinstance(value_of(text), Expression)


@pytest.mark.skipif(os.geteuid() != 0, reason="folders of root")
def test_the_node_publishes_its_images_and_why_it_is_closed(tmp_path: Path) -> None:
    names = tmp_path / "store/images/names"
    names.mkdir(parents=True)
    for name in ("debian12", "sl7", "odd name", '"'):
        (names / name).touch()
    closed = tmp_path / "closed"
    script = tmp_path / "publish"
    text = file(tmp_path, "belljar-publish").content.replace(b"/var/lib/belljar/htcondor-closed", os.fsencode(closed))
    script.write_bytes(text)
    node = tmp_path / "node"
    node.mkdir()
    node.chmod(0o1777)
    assert published(script) == [
        "BelljarWorks = True",
        "BelljarClosedReason = undefined",
        'BelljarImages = "debian12,sl7"',
        "- update:true",
    ]
    closed.symlink_to('belljar: "no" space\\ left\n$(id)')
    assert published(script)[:2] == ["BelljarWorks = False", 'BelljarClosedReason = "belljar: ?no? space? left?$(id)"']
    closed.unlink()
    for make_wrong in (
        *(lambda mode=mode: node.chmod(mode) for mode in (0o711, 0o700, 0o777, 0o1770, 0o1776, 0o1775)),
        lambda: node.chmod(0o1777) or os.chown(node, 65534, 0),
        node.rmdir,
        lambda: node.symlink_to("/tmp"),
    ):
        make_wrong()  # type: ignore[no-untyped-call]
        works, why, *_ = published(script)
        assert works == "BelljarWorks = False" and f'"belljar: {node} (paths.node) must be a folder of root' in why


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


def final(folder: Path) -> dict[str, bytes]:
    """What condor_config_val says where nothing but our file is there."""
    text = file(folder, "90-belljar.conf").content.decode()
    pairs = dict(re.findall(r"^([A-Za-z_]+) = (.*)$", text, re.MULTILINE))
    values = {name: re.sub(r"\$\([A-Z_]+\)", "", value).encode() for name, value in pairs.items()}
    version = b"$CondorVersion: 23.0.6 2024-03-14 BuildID: 717437 $\n"
    return {**values, "condor_version": version, "EXECUTE": b"/home/condor/execute\n", "DAEMON_LIST": b"MASTER STARTD SCHEDD",
            "BelljarPoolImages": b"debian12\n"}  # fmt: skip


def wrong(folder: Path, **changes: bytes) -> list[str]:
    """What `check` finds wrong."""
    where = place(folder, **{**final(folder), **changes})
    config = file(folder, "90-belljar.conf")
    config.put(where)
    return [finding.name for finding in SITE.findings(where) if not finding.is_good]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("USER_JOB_WRAPPER", b"/other"), ("STARTER_DEFAULT_JOB_HOOK_KEYWORD", b"SITE"),
        ("BELLJAR_HOOK_PREPARE_JOB", b"/other"), ("STARTD_CRON_JOBLIST", b"kflops"), ("START", b"True"),
        ("ENABLE_CHIRP", b"false"), ("ENABLE_CHIRP_DELAYED", b"False"), ("SUBMIT_REQUIREMENT_BelljarKnown", b"True"),
        ("SYSTEM_PERIODIC_HOLD_NAMES", b"Other"), ("SCHEDD_CRON_JOBLIST", b""), ("SUBMIT_REQUIREMENT_NAMES", b"Other"),
    ],
)  # fmt: skip
def test_what_another_file_said_later_is_found(tmp_path: Path, name: str, value: bytes) -> None:
    assert wrong(tmp_path) == []
    assert wrong(tmp_path, **{name: value}) == [name]


def test_a_host_is_asked_only_about_the_daemons_it_has(tmp_path: Path) -> None:
    assert (
        wrong(tmp_path, DAEMON_LIST=b"MASTER STARTD", SYSTEM_PERIODIC_HOLD_NAMES=b"", SUBMIT_REQUIREMENT_NAMES=b"")
        == []
    )
    assert wrong(tmp_path, DAEMON_LIST=b"MASTER, STARTD, SCHEDD", START=b"True") == ["START"]
    assert wrong(tmp_path, DAEMON_LIST=b"MASTER, SCHEDD", START=b"True", USER_JOB_WRAPPER=b"") == []


def test_a_schedd_that_does_not_know_the_pool_is_to_be_restarted(tmp_path: Path) -> None:
    assert wrong(tmp_path, BelljarPoolImages=b"undefined\n") == ["the schedd knows the images of the pool"]


# -- what is the site's own ----------------------------------------------------------------------------------------------


def clashes(
    folder: Path, node: Path | None = Path("/var/lib/node"), options: dict[str, str] | None = None, **said: bytes
) -> dict[str, str]:
    where = replace(place(folder, **said), node=node, options=options or {})
    return {one.purpose: one.text for one in SITE.pieces(where) if isinstance(one, Clash)}


def test_a_wrapper_or_hook_of_the_sites_is_not_overridden(tmp_path: Path) -> None:
    assert clashes(tmp_path) == {}
    found = clashes(tmp_path, USER_JOB_WRAPPER=b"/site/wrap\n", STARTER_JOB_HOOK_KEYWORD=b"SITE\n")
    text = found["USER_JOB_WRAPPER"]
    assert (
        text.startswith("/site/wrap (`condor_config_val -subsystem STARTER -verbose") and "--set wrapper=site" in text
    )
    text = found["STARTER_JOB_HOOK_KEYWORD"]
    assert text.startswith("SITE (") and "take it out" in text
    ours = str(place(tmp_path).wrapper).encode()
    assert clashes(tmp_path, USER_JOB_WRAPPER=ours + b"\n", STARTER_DEFAULT_JOB_HOOK_KEYWORD=b"BELLJAR\n") == {}


def test_a_site_may_call_ours_from_its_own(tmp_path: Path) -> None:
    chosen = {"wrapper": "site"}
    assert clashes(tmp_path, options=chosen, USER_JOB_WRAPPER=b"/site/wrap\n") == {}
    (config,) = [
        one
        for one in SITE.pieces(replace(place(tmp_path), options=chosen))
        if getattr(one, "path", None) and one.path.name == "90-belljar.conf"  # type: ignore[union-attr]
    ]
    assert isinstance(config, OurFile) and b"USER_JOB_WRAPPER" not in config.content
    for refused in ({"wrapper": "none"}, {"hook": "site"}):
        with pytest.raises(BadOption, match="wrapper=site"):
            list(SITE.pieces(replace(place(tmp_path), options=refused)))


def test_without_a_folder_for_machines_nothing_is_installed(tmp_path: Path) -> None:
    assert "[paths]" in clashes(tmp_path, node=None)["paths.node"]
    folder = next(
        one for one in SITE.pieces(replace(place(tmp_path), node=tmp_path / "node")) if isinstance(one, Change)
    )
    assert folder.is_done("1777 0\n") and not folder.is_done("711 0\n")
