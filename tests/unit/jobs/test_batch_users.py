"""Root among the users of a node: finds their machines by the batch id, looks as they do, ends what outlived its job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.jobs.paper_node import ALICE, BOB, Node, make_node, paper_system

from belljar import batch
from belljar.batch.node import Answer, Live
from belljar.cli import main
from belljar.cli.host import reap as reaping
from belljar.cli.machine.inside import split
from belljar.errors import NoSuchMachine, UsageError
from belljar.jobs import reap as reaper
from belljar.jobs import users
from belljar.machine import MachineView

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees everybody's machines")
GOOD = {"class": "payload", "cause": "finished", "exit_code": 0, "image_digest": "sha256-feed"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = make_node()
    for key in ("run", "scratch", "store", "logs"):  # root's own; users' folders obey the site's settings alone
        monkeypatch.setenv(f"BELLJAR_PATHS_{key.upper()}", str(made.folder / "root" / key))
    monkeypatch.setattr(batch, "load", lambda name: paper_system(made))
    yield made
    made.close()


def root(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """A verb in a process of its own: some of them become the machine's user."""
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom belljar.cli import entry\nentry()"
    return subprocess.run(
        [sys.executable, "-c", code, "--config", str(node.config), *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


# -- finding -------------------------------------------------------------------------------------------------------------


def test_root_finds_a_users_machine_by_its_batch_id_and_is_that_user_then(node: Node) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:10_3", GOOD, alias="13")
    for reference in ("slurm:10_3", "slurm:13", "0123456789ab", "01234", "nobody/slurm:13", "65534/01"):
        done = root(node, "show", reference)
        assert done.returncode == 0, done.stderr
        assert "machine 0123456789ab" in done.stdout
    assert "sha256-feed" in done.stdout and "night" in done.stdout
    assert root(node, "logs", "slurm:13", "--journal").stdout.count("claim") == 1


def test_what_a_user_put_into_a_record_is_not_read_with_roots_rights(node: Node) -> None:
    secret = node.folder / "secret"
    secret.write_text("the secret")
    secret.chmod(0o600)
    node.ended(ALICE, "0123456789ab", "slurm:7", GOOD)
    console = node.node / "65534/logs/0123456789ab/console.log"
    console.symlink_to(secret)
    done = root(node, "logs", "slurm:7", "--console")
    assert "the secret" not in done.stdout + done.stderr
    assert done.returncode != 0


def test_the_latest_start_of_a_job_is_the_one_and_all_are_listed(node: Node) -> None:
    for number in (1, 2, 3):
        node.ended(ALICE, f"{number:012x}", "slurm:7", GOOD)
        time.sleep(0.01)  # their journals begin at different times
    shown = root(node, "show", "slurm:7").stdout
    assert f"machine {3:012x}" in shown
    others = shown.partition("other starts of this job")[2]
    assert [word for word in others.split() if word.startswith("0000")] == [f"{n:012x}" for n in (1, 2)]
    listed = root(node, "ps", "-a", "--all-users").stdout
    assert [word for word in listed.split() if word.startswith("00000000000")] == [f"{n:012x}" for n in (1, 2, 3)]


def test_two_users_who_say_that_a_job_is_theirs_are_told_apart_by_their_names(node: Node) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7", GOOD)
    node.ended(BOB, "0123456789ac", "slurm:7", GOOD)
    with pytest.raises(UsageError, match="fits bin/slurm:7, nobody/slurm:7"):
        users.reach(node.runtime, "slurm:7")
    assert "machine 0123456789ac" in root(node, "show", "bin/slurm:7").stdout


def test_a_live_machine_comes_before_old_records_of_anybody(node: Node) -> None:
    node.ended(BOB, "0123456789ac", "slurm:7", GOOD)
    node.living(ALICE, "0123456789ab", "slurm:7")
    assert "machine 0123456789ab" in root(node, "show", "slurm:7").stdout
    assert "machine 0123456789ac" in root(node, "show", "bin/slurm:7").stdout


@pytest.mark.parametrize("reference", ["slurm:8", "nobody/slurm:8", "no-such-user/slurm:7", "../slurm:7", "/", "$(id)"])
def test_what_is_not_there_is_said(node: Node, reference: str) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7", GOOD)
    with pytest.raises(NoSuchMachine):
        users.reach(node.runtime, reference)
    assert os.geteuid() == 0


def test_one_user_whose_records_hang_hides_nobody_elses(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.ended(BOB, "0123456789ac", "slurm:8", GOOD)
    node.ended(ALICE, "0123456789ab", "slurm:7", GOOD)
    journal = node.node / "2/logs/0123456789ac/journal.jsonl"
    journal.unlink()
    os.mkfifo(journal, 0o666)
    monkeypatch.setattr(users, "asked_as", partial(users.asked_as, timeout=2.0))  # which is enough for whose do not
    monkeypatch.setattr(users, "become", lambda user: None)  # this process goes on
    assert users.reach(node.runtime, "slurm:7")[1].id == "0123456789ab"
    rows, trouble = users.rows_of_all(node.runtime, lambda view: {"ID": view.id}, ended=True)
    assert ([row["ID"] for row in rows], trouble) == (["0123456789ac", "0123456789ab"], []), "a pipe hangs nobody"

    def describe(view: MachineView) -> dict[str, Any]:
        if view.id == "0123456789ac":
            signal.pause()  # as a look at a file system whose server is gone
        return {"ID": view.id}

    rows, trouble = users.rows_of_all(node.runtime, describe, ended=True)
    assert [row["ID"] for row in rows] == ["0123456789ab"]
    assert len(trouble) == 1 and trouble[0].startswith("bin: ")


def test_only_folders_that_are_a_users_own_are_looked_into(node: Node) -> None:
    node.prolog(ALICE)
    (node.node / "batch").mkdir()
    (node.node / "2").mkdir()  # root's
    (node.node / "3").symlink_to(node.node / "65534")
    (node.node / "0").mkdir()
    for name in ("65534-word", "3-word", "4-word"):  # a stranger made `3` first, and 4's is another stranger's
        (node.node / name).mkdir()
        os.chown(node.node / name, int(name.partition("-")[0]) % 4, -1)
    os.chown(node.node / "65534-word", 65534, -1)
    assert sorted(user.uid for user in users.users_of(node.runtime)) == [3, 65534]


def test_hostile_names_are_shown_harmless(node: Node) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7\n\x1b[2J$(id)", GOOD, alias='"; id; \u202e')
    for words in (("ps", "-a", "--all-users"), ("show", "0123456789ab")):
        done = root(node, *words)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout and "\u202e" not in done.stdout
        assert "slurm:7\\n\\x1b[2J$(id)" in done.stdout


def test_a_batch_id_has_a_colon_of_its_own_where_files_are_copied() -> None:
    assert split("slurm:4711:/etc/x") == ("slurm:4711", "/etc/x")
    assert split("openpbs:4[1].server:x") == ("openpbs:4[1].server", "x")
    assert split("3f2a:/etc/x") == ("3f2a", "/etc/x")


def test_who_is_not_root_cannot_list_everybodys(node: Node) -> None:
    node.prolog(ALICE)
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom belljar.cli import entry\nentry()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", str(node.config), "ps", "--all-users"],
        capture_output=True, text=True, timeout=60, cwd="/", user=65534, group=65534, extra_groups=[],
    )  # fmt: skip
    assert done.returncode == 125 and "only root" in done.stderr


# -- reap --batch ----------------------------------------------------------------------------------------------------------


def reap(node: Node, *words: str, batch: object = False) -> int:
    args = SimpleNamespace(batch=batch, dry_run="-n" in words, format="json")
    return reaping.reap(args, node.runtime)  # type: ignore[arg-type]


@pytest.fixture
def quick(node: Node) -> Node:
    node.configure("gone_after = 0")
    return node


def test_a_machine_whose_job_is_gone_is_ended_at_the_second_answer(
    quick: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, others = quick.living(ALICE, "0123456789ab", "slurm:7"), quick.living(BOB, "0123456789ac", "slurm:8")
    quick.dialect.said = b"8"
    assert reap(quick) == 0
    assert ours.poll() is None
    assert "job unknown" in capsys.readouterr().out
    assert reap(quick) == 0
    assert ours.wait(timeout=5) == -9
    assert others.poll() is None
    (row,) = json.loads(capsys.readouterr().out)
    ended = {"user": "nobody", "machine": "0123456789ab", "what": "ended", "where": "slurm:7", "error": ""}
    assert row == ended


def test_a_time_must_pass_between_the_answers(node: Node) -> None:
    node.configure("gone_after = 3600")
    ours = node.living(ALICE, "0123456789ab", "slurm:7")
    for _ in range(3):
        reap(node)
    assert ours.poll() is None


@pytest.mark.parametrize("said", [None, b"nonsense"])
def test_a_system_that_cannot_be_asked_ends_nothing_and_is_said(
    quick: Node, said: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = quick.living(ALICE, "0123456789ab", "slurm:7")
    quick.dialect.said = said
    for _ in range(3):
        assert reap(quick) == 1
    assert ours.poll() is None
    assert "slurm cannot be asked, its machines are left alone" in capsys.readouterr().err


def test_a_dry_run_remembers_and_ends_nothing(quick: Node) -> None:
    ours = quick.living(ALICE, "0123456789ab", "slurm:7")
    for _ in range(3):
        reap(quick, "-n")
    assert ours.poll() is None
    assert not (quick.node / "batch").exists()


def test_machines_that_no_batch_system_made_are_not_asked_about(quick: Node) -> None:
    by_hand = quick.living(ALICE, "0123456789ab", "cli")
    quick.dialect.said = None
    assert reap(quick) == 0
    assert by_hand.poll() is None


def test_one_system_alone_can_be_asked(quick: Node) -> None:
    ours = quick.living(ALICE, "0123456789ab", "slurm:7")
    for _ in range(3):
        assert reap(quick, batch="gridengine") == 0
    assert ours.poll() is None


def test_what_dead_supervisors_left_with_any_user_is_finished_on_the_way(quick: Node) -> None:
    quick.ended(ALICE, "0123456789ab", "slurm:7", None, abandoned=True)
    reap(quick)
    folders = quick.runtime.of_user(ALICE.uid, ALICE.home).folders
    assert list(folders.machines.iterdir()) == []


def test_what_a_user_reports_is_read_as_a_strangers_word(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.prolog(ALICE)
    nothing = {"left": [], "machines": {}}
    for report in ([], 1, {"machines": {}}, *({**nothing, "machines": it} for it in (["a"], {"a": "b"}, {"a": [7]}))):
        monkeypatch.setattr(reaper, "_look", lambda runtime, dry, report=report: report if os.geteuid() else nothing)
        rows, machines, (trouble,) = reaper.look(node.runtime, dry=True)
        assert (rows, machines) == ([], {}) and trouble.startswith("nobody: cannot be looked at: ")
    assert list(reaper._lives(reaper.Seen((), {"a": ("cli:7",), "b": ("slurm",)}), ALICE)) == []
    (live,) = reaper._lives(reaper.Seen((), {"a": ("slurm:7", "x:9", "gridengine:3")}), ALICE)
    assert (live.system, live.jobs) == ("slurm", {"7"})


def test_a_memory_that_is_nonsense_is_as_none(node: Node) -> None:
    path, live = node.node / "batch" / reaper.MEMORY, Live("65534/0123456789ab", "slurm", frozenset({"7"}))
    path.parent.mkdir()
    node.configure("gone_after = 0")
    for memory, is_known in (("", 0), ("[]", 0), ('{"a": "b"}', 0), ('{"a": null}', 0), (f'{{"{live.key}": 0}}', 1)):
        path.write_text(memory)
        decision = reaper.judge(node.runtime, [live], {"slurm": Answer(frozenset())}, dry=True)
        assert (decision.waiting, decision.to_end) == (((), (live.key,)) if is_known else ((live.key,), ()))


def test_the_verb_takes_a_system_or_none(node: Node) -> None:
    assert main(["--config", str(node.config), "reap", "--batch"]) == 0
    assert main(["--config", str(node.config), "reap", "--batch", "slurm", "--format", "json"]) == 0
    assert main(["--config", str(node.config), "reap", "--batch", "cron"]) == 125
