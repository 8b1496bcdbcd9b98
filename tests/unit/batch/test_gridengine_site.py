"""What a site gets, and what of the site's own is left alone."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.batch import Settings
from belljar.batch.gridengine.hooks import value, with_complexes, with_verifier, without_complexes, without_verifier
from belljar.batch.gridengine.site import SITE, fingerprint
from belljar.batch.install.pieces import Advice, Change, Clash, OurFile, Place
from belljar.errors import BadOption, CommandFailed, UsageError

COMPLEXES = """#name               shortcut   type        relop   requestable consumable default  urgency
#----------------------------------------------------------------------------------------
arch                a          STRING      ##      YES         NO         NONE     0
mem_free            mf         MEMORY      <=      YES         YES        0        0
h_rss               h_rss      MEMORY      <=      YES         NO         0        0
"""
CONF = "#global:\nexecd_spool_dir              /var/spool/gridengine/execd\njsv_url                      none\njsv_allowed_mod              ac,h,i\n"
QUEUE = "qname                 all.q\nprolog                NONE\nepilog                NONE\nstarter_method        NONE\nsuspend_method        NONE\nresume_method         NONE\nterminate_method      NONE\ncomplex_values        NONE\n"


def place(queue: str = "all.q", **shown: str) -> Place:
    answers = {"-sc": COMPLEXES, "-sconf": CONF, "-sq": QUEUE, **{f"-{key}": text for key, text in shown.items()}}

    def run(argv: tuple[str, ...]) -> bytes:
        if argv[1] == "-sq" and argv[2] == "gone.q":
            raise CommandFailed("qconf: exit 1: No cluster queue or queue instance matches the phrase")
        return answers[argv[1]].encode()

    folder = Path("/var/lib/gridengine/default/common")
    options = {"queue": queue} if queue else {}
    return Place(Settings(), Path("/opt/b/wrap-gridengine"), Path("/opt/b/belljar"), Path("/s"), folder, options, run)


def of(kind: Any, where: Place) -> list[Any]:
    return [piece for piece in SITE.pieces(where) if isinstance(piece, kind)]


def test_the_pieces_of_one_queue() -> None:
    files = {one.path.name: one for one in of(OurFile, place())}
    assert set(files) == {"belljar-hook", "belljar-method", "belljar-jsv"}
    assert b"--per-slot=mem_free\n" in files["belljar-jsv"].content
    assert b"|| :\nexit 0\n" in files["belljar-hook"].content and b"env -i" in files["belljar-hook"].content
    changes = of(Change, place())
    lines = [" ".join(command) for one in changes for command in one.do]
    assert "qconf -mattr queue starter_method /opt/b/wrap-gridengine all.q" in lines
    hook = "/opt/b/belljar-hook"
    assert f"qconf -mattr queue prolog root@{hook} prolog $job_id $ja_task_id $job_owner all.q" in lines
    assert not any(one.is_done(QUEUE) for one in changes if one.probe[1] == "-sq")


def test_interactive_jobs_are_kept_out_of_the_queues() -> None:
    """TRUE for all hosts, FALSE in our queues: a site that wants it otherwise says TRUE there."""
    changes = {one.purpose: one for one in of(Change, place())}
    everywhere, queue = changes["all hosts take interactive jobs"], changes["queue all.q takes no interactive jobs"]
    assert everywhere.do == (("qconf", "-mattr", "exechost", "complex_values", "vm_interactive=TRUE", "global"),)
    assert everywhere.undo == (("qconf", "-dattr", "exechost", "complex_values", "vm_interactive", "global"),)
    assert queue.do == (("qconf", "-mattr", "queue", "complex_values", "vm_interactive=FALSE", "all.q"),)
    for text in ("vm=TRUE,vm_interactive=FALSE", "vm_interactive=TRUE", "a=1,vm_interactive=0"):
        assert queue.is_done(f"complex_values   {text}\n")
    for text in ("NONE", "vm=TRUE", "a=vm_interactive"):
        assert not queue.is_done(f"complex_values   {text}\n")
    order = [one.purpose for one in of(Change, place())]
    assert order.index("complexes: what users ask with") < order.index("all hosts take interactive jobs")
    assert order.index("all hosts take interactive jobs") < order.index("verifier of the server")


def test_what_is_done_is_seen_as_done_also_over_two_lines() -> None:
    for one in of(Change, place()):
        if one.probe[1] == "-sq" and one.do[0][2] == "queue" and one.do[0][3].endswith("_method"):
            name, wanted = one.do[0][3:5]
            first, _, last = wanted.rpartition(" ")
            shown = f"{name}   {first} \\\n                      {last}\n" if first else f"{name}   {last}\n"
            assert one.is_done(shown)


def test_a_queue_of_the_sites_own_making_stays_as_it_is() -> None:
    own = QUEUE.replace("prolog                NONE", "prolog                /site/prolog")
    where = place(sq=own)
    assert [piece.purpose for piece in of(Advice, where)] == ["prolog of queue all.q"]
    assert not any("prolog" in command for one in of(Change, where) for command in one.do)


@pytest.mark.parametrize("queue", ["$(id)", "a b", "-x"])
def test_a_queue_that_can_have_no_such_name(queue: str) -> None:
    with pytest.raises(BadOption):
        list(SITE.pieces(place(queue)))


def test_a_queue_that_is_not_there_stops_install_and_not_uninstall() -> None:
    (clash,) = of(Clash, place("gone.q"))
    assert clash.purpose == "queue gone.q" and "`qconf -sql` lists the queues" in clash.text


def test_without_a_queue_somebody_is_told_to_name_one() -> None:
    assert len(of(Advice, place(""))) == 1


def test_complexes_come_and_go_and_the_sites_stay() -> None:
    once = with_complexes(COMPLEXES)
    assert with_complexes(once) == once and once.count("vm_image ") == 1
    assert without_complexes(once) == without_complexes(COMPLEXES)
    assert "mem_free mf MEMORY" in without_complexes(once)
    for line in ("vm_image vmi RESTRING == YES NO NONE 0", "other vmi STRING == YES NO NONE 0"):
        with pytest.raises(UsageError):
            with_complexes(COMPLEXES + line + "\n")


def test_the_verifier_comes_and_goes_and_a_sites_own_stays() -> None:
    ours = with_verifier(CONF, "/x/belljar-jsv")
    assert value(ours, "jsv_url") == "/x/belljar-jsv" and value(ours, "jsv_allowed_mod") == "a,ac,h,i"
    assert with_verifier(ours, "/x/belljar-jsv") == ours
    assert value(without_verifier(ours, "/x/belljar-jsv"), "jsv_url") == "NONE"
    theirs = ours.replace("/x/belljar-jsv", "/site/jsv")
    assert without_verifier(theirs, "/x/belljar-jsv") == theirs
    with pytest.raises(UsageError):
        with_verifier(theirs, "/x/belljar-jsv")


def test_a_method_outlives_what_announces_the_end(tmp_path: Path) -> None:
    """`qsub -notify`: Grid Engine sends USR2 to all that carries the job's group, its own running method among them, and
    starts no other one when that dies."""
    belljar, (reader, writer) = tmp_path / "belljar", os.pipe()
    belljar.write_text('#!/bin/sh\necho begun\nread word\necho "$word"\n')
    belljar.chmod(0o755)
    where = replace(place(), belljar=belljar)
    method = tmp_path / "method"
    method.write_bytes(next(one.content for one in of(OurFile, where) if one.path.name == "belljar-method"))
    with subprocess.Popen(
        ["/bin/sh", str(method), "terminate", "1"], stdin=reader, stdout=subprocess.PIPE, start_new_session=True
    ) as running:
        os.close(reader)
        assert running.stdout is not None and running.stdout.readline() == b"begun\n"
        for number in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "XCPU"):
            os.killpg(running.pid, getattr(signal, f"SIG{number}"))
        os.write(writer, b"ended\n")
        os.close(writer)
        assert running.communicate(timeout=10)[0] == b"ended\n"
        assert running.returncode == 0


def test_a_resume_waits_for_the_suspend_that_was_before_it(tmp_path: Path) -> None:
    """One that overtakes it would leave the job halted."""
    belljar = tmp_path / "belljar"
    belljar.write_text('#!/bin/sh\necho "$4"\n')
    belljar.chmod(0o755)
    method = tmp_path / "method"
    pieces = of(OurFile, replace(place(), belljar=belljar))
    method.write_bytes(next(piece.content for piece in pieces if piece.path.name == "belljar-method"))
    suspend = os.open(f"/proc/{os.getpid()}", os.O_RDONLY)
    fcntl.flock(suspend, fcntl.LOCK_EX)
    words = ["/bin/sh", str(method), "resume", str(os.getpid())]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and select.select([running.stdout], [], [], 0.3)[0] == []
        os.close(suspend)
        assert running.communicate(timeout=10)[0] == b"resume\n"


def test_the_verifier_is_another_file_after_a_change_of_the_settings() -> None:
    """Grid Engine's server keeps a verifier running until its file changes."""
    assert fingerprint(Settings()) == fingerprint(Settings()) != fingerprint(Settings(max_cpus=4))
    files = {piece.path.name: piece.content for piece in of(OurFile, place())}
    assert fingerprint(Settings()).encode() in files["belljar-jsv"]
