# ruff: noqa: F811 - `cell` is a fixture
"""What the guide promises and other tests do not show: interactive jobs, jobs that cannot be started, announced ends, a
verifier that is up to date, an uninstallation that leaves nothing."""

from __future__ import annotations

import time

import pytest
from tests.batch.lab.gridengine import CELL, ROOT, until
from tests.batch.lab.gridengine_cell import IN_MACHINE, SETTINGS, WITH_BELLJAR, WITHOUT, Cell, cell  # noqa: F401

ANNOUNCED = "trap 'echo got USR2' USR2; trap 'echo got TERM; exit 7' TERM; echo started; while :; do sleep 0.2; done"


def test_interactive_jobs_stay_out_and_close_no_queue(cell: Cell) -> None:
    """Grid Engine 8.1.9 closes a queue with a prolog at the first qrsh that it starts there."""
    elsewhere = cell.lab.run("qrsh", "hostname", user="bjalice", timeout=60)
    assert elsewhere.stdout.strip() == b"bjge"
    here = cell.lab.run("qrsh", "-q", "all.q", "hostname", user="bjalice", check=False, timeout=60)
    assert here.returncode == 1 and b"could not be scheduled" in here.stdout + here.stderr
    for words in (
        ("qrsh", "-l", "vm_image=debian12", "hostname"),
        ("qsh", "-display", "x:0", "-l", "vm_image=debian12"),
    ):
        asked = cell.lab.run(*words, user="bjalice", check=False, timeout=60)
        assert asked.returncode == 1 and b"qsh, qrsh and qlogin have no machine" in asked.stdout + asked.stderr
    assert cell.lab.queue_state() == ""


def test_a_job_that_cannot_be_started_is_held_as_without_a_machine(cell: Cell) -> None:
    jobs = [cell.submit("#!/no/such/interpreter\n", *queue) for queue in (IN_MACHINE, WITHOUT)]
    jobs += [cell.qsub("-b", "y", "-shell", "n", *queue, "/no/such/program") for queue in (IN_MACHINE, WITHOUT)]
    for job in jobs:
        cell.lab.until_state(job, "Eqw", timeout=240)
    assert "interpreter is missing" in cell.error_reason(jobs[0])
    assert "/no/such/program" in cell.error_reason(jobs[2])
    cell.lab.run("qdel", *jobs)
    cell.clean()
    assert cell.lab.queue_state() == ""


def test_an_announced_end_comes(cell: Cell) -> None:
    """The notice goes to the running terminate method too, and Grid Engine starts no other one when that dies of it."""
    jobs = [cell.submit(ANNOUNCED, "-notify", *IN_MACHINE) for _ in range(3)]
    for job in jobs:
        cell.started(job)
        cell.lab.run("qdel", job, user="bjalice")
    for ended in [cell.ended(job, timeout=60) for job in jobs]:
        assert ended.exit == 7 and b"got USR2" in ended.out and b"got TERM" in ended.out
    cell.clean()


@pytest.mark.parametrize("queue", [IN_MACHINE, WITH_BELLJAR])
def test_an_announced_end_comes_without_the_method(cell: Cell, queue: tuple[str, ...]) -> None:
    method = cell.site.top / "libexec/gridengine/belljar-method"
    text = method.read_text()
    method.write_text("#!/bin/sh\nexit 0\n")
    try:
        job = cell.submit(ANNOUNCED, "-notify", *queue)
        cell.started(job)
        begin = time.monotonic()
        cell.lab.run("qdel", job, user="bjalice")
        ended = cell.ended(job, timeout=60)
    finally:
        method.write_text(text)
    assert time.monotonic() - begin > 5, "it had its time"
    assert b"got USR2" in ended.out and ended.exit == (7 if queue is IN_MACHINE else 137)
    cell.clean()


def test_an_installation_after_a_change_makes_the_verifier_start_anew(cell: Cell) -> None:
    folder = cell.site.top / "libexec/gridengine"
    before = (folder / "belljar-jsv").read_bytes()
    try:
        cell.site.configure(SETTINGS.replace("max_cpus = 4", "max_cpus = 1"))
        cell.install()
        assert (folder / "belljar-jsv").read_bytes() != before
        words = ("qsub", "-b", "y", *IN_MACHINE, "-pe", "smp", "2", "/bin/true")
        refused = until(
            lambda: (done := cell.lab.run(*words, user="bjalice", check=False)).returncode and done,
            "the verifier to know that there is one cpu",
        )
        assert b"belljar:" in refused.stdout + refused.stderr and b"cpus" in refused.stdout + refused.stderr
    finally:
        cell.site.configure(SETTINGS)
        cell.install()
    assert (folder / "belljar-jsv").read_bytes() == before
    cell.lab.run("qdel", "-u", "bjalice", check=False)
    until(lambda: not cell.lab.run("qstat", "-u", "*").stdout, "no jobs")


def test_the_remedy_of_check_done_word_for_word_ends_with_check_green(cell: Cell) -> None:
    hook, folder = cell.site.top / "libexec/gridengine/belljar-hook", str(ROOT / CELL / "common")
    check = ("batch", "check", "gridengine", "--folder", folder, "--prefix", str(cell.site.top))
    assert b"fail " not in cell.belljar(*check).stdout
    hook.write_text(hook.read_text() + "# by hand\n")
    found = cell.belljar(*check, check=False)
    assert found.returncode == 1 and found.stdout.count(b"fail ") == 1
    remedy = found.stdout.partition(b"-> ")[2].partition(b"\n")[0].decode()
    cell.lab.run("sh", "-c", f'PATH="{cell.site.top}:$PATH" {remedy}')
    assert b"fail " not in cell.belljar(*check).stdout


def test_a_queue_and_a_share_that_are_not_there_are_told_by_check_and_the_share_by_the_job(cell: Cell) -> None:
    check = ("batch", "check", "gridengine", "--folder", str(ROOT / CELL / "common"), "--prefix", str(cell.site.top))
    shares = f'["{cell.site.homes}:rw", "/nonexistent/data"]'
    text = cell.site.config.read_text()
    try:
        settings = text.replace(f'["{cell.site.homes}:rw"]', shares)
        cell.site.config.write_text(settings.replace("[batch]", '[batch]\nqueue_images = ["al.q=debian12"]'))
        found = cell.belljar(*check, check=False).stdout
        assert (
            b"fail  batch.queue_images: gridengine has no queue al.q" in found
            and b"there are: all.q, plain.q." in found
        )
        assert b"fail  batch.shares:" in found and b"no such folder on this host: /nonexistent/data" in found
        ended = cell.run("echo ran", *IN_MACHINE)
        assert (ended.exit, ended.out) == (0, b"ran\n")
        assert ended.err == b"belljar: batch.shares: /nonexistent/data: no such folder on this node\n"
    finally:
        cell.site.config.write_text(text)


def test_uninstallation_is_refused_as_a_whole_while_a_queue_offers_images(cell: Cell) -> None:
    """Without the hooks such a queue would run jobs with `-l vm_image=` on the host."""
    words = ("--folder", str(ROOT / CELL / "common"), "--prefix", str(cell.site.top))
    shows = (("-sc",), ("-sconf", "global"), ("-sq", "all.q"))
    cell.lab.run("qconf", "-mattr", "queue", "complex_values", "vm_image=debian12", "all.q")
    try:
        before = [cell.lab.config(*one) for one in shows]
        for _ in range(2):
            refused = cell.belljar("batch", "uninstall", "gridengine", *words, check=False)
            assert refused.returncode == 125 and not refused.stdout
            assert b'"vm_image" is still referenced in queue "all.q"' in refused.stderr
            assert b"hint: Nothing was taken out." in refused.stderr and b"qconf -dattr queue" in refused.stderr
        assert [sorted(cell.lab.config(*one).split("\n")) for one in shows] == [
            sorted(one.split("\n")) for one in before
        ]
    finally:
        cell.lab.run("qconf", "-dattr", "queue", "complex_values", "vm_image=debian12", "all.q")


def test_uninstallation_leaves_nothing(cell: Cell) -> None:
    """The last one: the cell is as it was before `install`, and takes interactive jobs in every queue."""
    words = ("--queue", "all.q", "--folder", str(ROOT / CELL / "common"), "--prefix", str(cell.site.top))
    cell.belljar("batch", "uninstall", "gridengine", *words)
    shown = [cell.lab.config(*one) for one in (("-sc",), ("-sconf", "global"), ("-sq", "all.q"), ("-se", "global"))]
    for text in shown:
        for ours in ("belljar-hook", "belljar-method", "belljar-jsv", "wrap-gridengine", "vm_", "vm="):
            assert ours not in text
    assert not (cell.site.top / "libexec").exists()
    assert cell.lab.run("qrsh", "-q", "all.q", "hostname", user="bjalice", timeout=60).stdout.strip() == b"bjge"
    assert cell.run("echo as ever", *WITH_BELLJAR).out == b"as ever\n"
