# ruff: noqa: F811 - `cell` is a fixture
"""Refusals, machines that cannot be had, hooks, hostile words, broken settings: what the user and the site read."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab.gridengine import until
from tests.batch.lab.gridengine_cell import IN_MACHINE, SETTINGS, WITH_BELLJAR, Cell, cell  # noqa: F401
from tests.batch.lab.load import stretched

HELD = ("Eqw", "ERq")  # the error state, of a job that was never and that was started before
# A QEMU that dies at the first start of a job ("once"), or never answers ("always").
DEAF = """#!/bin/bash
case " $* " in *" -name guest=belljar-"*) ;; *) exec /usr/bin/qemu-system-x86_64 "$@" ;; esac
if [ "{when}" = always ]; then exec sleep 1000; fi
[ -e {mark} ] || { : > {mark}; exit 1; }
exec /usr/bin/qemu-system-x86_64 "$@"
"""


def deaf(cell: Cell, when: str) -> tuple[str, str]:
    """Options for a job whose QEMU starts and does not answer."""
    home = cell.site.home("bjalice")
    mark = home / f"mark.{time.monotonic_ns()}"
    binary = cell.script(DEAF.replace("{when}", when).replace("{mark}", str(mark)), f"deaf-{when}")
    short = ",BELLJAR_QEMU_QMP_TIMEOUT=2,BELLJAR_QEMU_BOOT_TIMEOUT=4" if when == "always" else ""
    return "-v", f"BELLJAR_QEMU_BINARY={binary},BELLJAR_MACHINE_START=cold{short}"


@pytest.fixture
def qemu_open(cell: Cell) -> Iterator[None]:
    """A job may name its own QEMU."""
    with cell.site.leaving_qemu_open():
        yield


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("-l", "vm_image=nosuch"), "image nosuch: not allowed for bjalice"),
        (("-l", "vm_image=special"), "Allowed are: debian*"),
        (("-l", "vm_image=../../x"), "not a name of an image"),
        (("-l", "vm_image=" + "a" * 200), "not a name of an image"),
        (("-l", "vm_image=debian12$(id>/tmp/executed)"), ""),
        (("-l", "vm_image=debian12\nPARAM USER root"), ""),
        (("-l", "vm_image=debian12", "-pe", "smp", "8"), "8 cpus: a job in a machine may have at most 4 here"),
        (("-l", "vm_image=debian12,mem_free=100M"), "a job in a machine needs at least"),
        (("-v", "VM_IMAGE=special"), "not allowed for bjalice"),
        (("-l", "vm_image=debian99"), "there is none of this name"),
    ],
)
def test_what_cannot_be_is_refused_at_submit(cell: Cell, options: tuple[str, ...], sentence: str) -> None:
    script = cell.script("echo ran")
    done = cell.lab.run("qsub", "-terse", *options, script, user="bjalice", check=False)
    assert done.returncode != 0, done.stdout
    assert sentence in done.stderr.decode()
    assert not done.stdout.strip()


@pytest.mark.slow
def test_who_may_use_an_image_and_who_has_a_machine_of_whom(cell: Cell) -> None:
    """Rules by user; a stranger neither sees, stops nor enters the machine."""
    script = cell.script("echo ran", user="bjbob")
    done = cell.lab.run("qsub", "-terse", "-h", "-l", "vm_image=special", script, user="bjbob", check=False)
    assert b"image special: there is none of this name" in done.stderr, "the rule lets this user pass"
    job = cell.submit("echo started; sleep 60", *IN_MACHINE)
    cell.started(job)
    name = f"gridengine:{job}"
    assert b"inside" in cell.belljar("exec", name, "--", "echo", "inside", user="bjalice").stdout
    for words in (("exec", name, "--", "id"), ("stop", name), ("kill", name), ("logs", name), ("show", name)):
        assert cell.belljar(*words, user="bjbob", check=False).returncode != 0, words
    cell.lab.run("qdel", job, user="bjalice")
    cell.ended(job)


@pytest.mark.usefixtures("qemu_open")
def test_a_machine_that_cannot_be_had_once_is_had_the_second_time(cell: Cell) -> None:
    job = cell.submit("echo ran $RESTARTED; exit 3", *IN_MACHINE, *deaf(cell, "once"))
    until(lambda: "belljar_tries=1" in cell.context(job), "the count", timeout=60)
    ended = cell.ended(job, rows=2, timeout=90)
    assert [row["exit_status"].split()[0] for row in ended.rows] == ["99", "3"]
    assert ended.out == b"ran 1\n"
    cell.clean()


@pytest.mark.slow
@pytest.mark.usefixtures("qemu_open")
def test_a_machine_that_can_never_be_had_holds_its_job_and_no_other(cell: Cell) -> None:
    poison = cell.submit("echo ran", *IN_MACHINE, *deaf(cell, "always"))
    task = cell.submit("echo ran $SGE_TASK_ID", "-t", "1-2", *IN_MACHINE, *deaf(cell, "always"))
    others = [cell.submit(f"echo other {n}", *IN_MACHINE) for n in range(3)]
    assert [cell.ended(job, timeout=180).out for job in others] == [b"other 0\n", b"other 1\n", b"other 2\n"]
    cell.lab.until_state(poison, *HELD, timeout=120)
    reason = cell.error_reason(poison)
    assert reason.startswith("belljar: try 2 of 2: "), reason
    assert cell.lab.account(poison, rows=2)[1:] and len(cell.lab.account(poison)) == 2, "two starts, not more"
    assert b"ran" not in cell.out(poison)
    until(
        lambda: cell.lab.state(task) in HELD and cell.lab.detail(task).count("try 2 of 2") >= 2,
        "both tasks to be held",
        timeout=120,
    )
    # The owner lets it go: it begins anew, and is held again after as many starts.
    cell.lab.run("qmod", "-cj", poison, user="bjalice", check=False)  # exits 1 when it has done it
    until(lambda: cell.lab.state(poison) not in (*HELD, ""), "the job to be let go", timeout=10)
    cell.lab.until_state(poison, *HELD, timeout=120)
    assert len(cell.lab.account(poison, rows=4)) == 4
    cell.lab.run("qdel", poison, task)
    assert cell.lab.queue_state() == ""
    cell.clean()


@pytest.mark.slow
def test_hostile_words_are_words(cell: Cell) -> None:
    """Job names as far as Grid Engine takes them, and what they could do on the way through belljar."""
    for name in ("$(touch${IFS}executed)", "a;touch executed", "'q'", "x" * 200, "--config", "-v"):
        done = cell.lab.run("qsub", "-terse", "-cwd", "-o", "o.hostile", "-e", "e.hostile", *IN_MACHINE, "-N", name, cell.script("echo \"$JOB_NAME\""),
                            user="bjalice", check=False)  # fmt: skip
        if done.returncode == 0:
            job = done.stdout.decode().split()[0]
            assert cell.ended(job).exit == 0
            assert name.encode() in (cell.site.home("bjalice") / "o.hostile").read_bytes()
    assert not (cell.site.home("bjalice") / "executed").exists()


def test_the_hooks_are_quick_and_never_fail(cell: Cell) -> None:
    """With hostile variables, with no belljar at all: Grid Engine must see success, for a failure closes the queue."""
    hook = str(cell.site.top / "libexec/gridengine/belljar-hook")
    env = {
        "BELLJAR_PATHS_NODE": "/etc",
        "BASH_ENV": "/nowhere",
        "PATH": "/nowhere",
        "PYTHONPATH": "/nowhere",
        "HOME": "/nowhere",
    }
    for words in (
        ("prolog", "99", "0", "bjalice"),
        ("epilog", "99", "0", "bjalice"),
        ("epilog", "$(id)", "x", "../.."),
        ("epilog",),
    ):
        begin = time.monotonic()
        cell.lab.run("env", *(f"{name}={text}" for name, text in env.items()), hook, *words)
        assert time.monotonic() - begin < stretched(1.5), words
    belljar = next(cell.site.top.glob("libexec/gridengine/belljar-gridengine"))
    hidden = belljar.with_name("hidden")
    belljar.rename(hidden)
    try:
        assert cell.run("echo ran", *WITH_BELLJAR).out == b"ran\n"
    finally:
        hidden.rename(belljar)
    assert cell.lab.queue_state() == ""


def test_a_killed_wrapper_leaves_the_rest_to_the_epilog(cell: Cell) -> None:
    job = cell.submit("echo ran", *IN_MACHINE, "-v", "BELLJAR_TESTING_ABORT_AT=payload-started")
    assert cell.ended(job).exit == 137
    cell.clean()
    assert cell.run("echo next", *IN_MACHINE).out == b"next\n"


def test_a_node_is_closed_and_opened_with_its_reason(cell: Cell) -> None:
    cell.belljar("batch", "node", "gridengine", "close", "no space left", "--node", "bjge")
    assert "d" in cell.lab.queue_state()
    assert "vm_closed=belljar:" in cell.lab.run("qhost", "-F", "vm_closed").stdout.decode()
    cell.belljar("batch", "node", "gridengine", "open", "--node", "bjge")
    assert cell.lab.queue_state() == ""
    assert "vm_closed=belljar:" not in cell.lab.run("qhost", "-F", "vm_closed").stdout.decode()


@pytest.mark.slow
def test_broken_settings_are_said_and_no_job_runs_in_a_circle(cell: Cell) -> None:
    """Each key in turn: the sentence names it; the job fails, or is held after some starts."""
    native = cell.run("echo ran", *WITH_BELLJAR)
    assert native.out == b"ran\n"
    for line, key in (
        ('allow = ["nonsense"]', "allow"),
        ('queue_images = ["x"]', "queue_images"),
        ('retries = "many"', "retries"),
    ):
        cell.site.configure(re.sub(rf"(?m)^{key} .*\n", "", SETTINGS) + line + "\n")
        try:
            checked = cell.belljar("batch", "check", "gridengine", check=False)
            assert checked.returncode == 1 or b"fail " in checked.stdout or key.encode() in checked.stderr
            assert key.encode() in checked.stdout + checked.stderr
            if key == "retries":  # the file as a whole cannot be read: this node's fault, tried elsewhere, then held
                job = cell.submit("echo ran", *IN_MACHINE)
                cell.lab.until_state(job, *HELD, timeout=90)
                assert key in cell.error_reason(job)
                cell.lab.run("qdel", job)
                continue
            ended = cell.run("echo ran", *(WITH_BELLJAR if key == "queue_images" else IN_MACHINE))
            assert ended.exit == 125 and key.encode() in ended.err, (line, ended.row["exit_status"], ended.err)
            assert len(ended.rows) == 1
        finally:
            cell.site.configure(SETTINGS)
    assert cell.run("echo ran", *IN_MACHINE).out == b"ran\n"
    assert cell.lab.queue_state() == ""


def test_an_image_that_no_verifier_saw_is_never_a_job_on_the_host(cell: Cell) -> None:
    """The queue has no `vm_image` to offer, so such a job waits; one that runs was seen by the verifier."""
    cell.lab.change("conf", {"jsv_url": "none"})
    try:
        asked = cell.submit("hostname", *IN_MACHINE)
        other = cell.submit("hostname", *WITH_BELLJAR)
        assert cell.ended(other).out == b"bjge\n"
        assert cell.lab.state(asked) == "qw" and cell.lab.queue_state() == ""
    finally:
        cell.install()
    cell.lab.run("qdel", asked)


def test_install_twice_is_as_once_and_uninstall_takes_all_out(cell: Cell) -> None:
    words = ("--queue", "all.q", "--folder", "/var/lib/gridengine/default/common", "--prefix", str(cell.site.top))
    assert b"All is in place" in cell.belljar("batch", "install", "gridengine", *words).stdout
    before = cell.lab.config("-sq", "all.q")
    cell.belljar("batch", "uninstall", "gridengine", *words[2:])
    try:
        shown = cell.lab.config("-sq", "all.q") + cell.lab.config("-sconf", "global") + cell.lab.config("-sc")
        assert not re.search("belljar-(hook|method|jsv)|wrap-gridengine|vm_image|vm=TRUE", shown)
        assert cell.run("echo ran", *WITH_BELLJAR).out == b"ran\n"
    finally:
        cell.install()
    assert cell.lab.config("-sq", "all.q") == before
