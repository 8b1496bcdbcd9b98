"""What cannot work is refused at once: its own error class, one line of what, one line of what to do, and nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, STORE, Belljar
from tests.live.test_faults import report, started

GIB = 1 << 30
RUN = ("--", "echo", "ran")


def refused(belljar: Belljar, *words: str, says: str, **options: object) -> str:
    """`belljar run` must fail as ours, in two lines, before anything of the machine exists; returns the lines."""
    done = belljar.run(*words, **options)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (125, b""), done
    assert len(lines) == 2 and lines[0].startswith("belljar: ") and lines[1].startswith("hint: "), lines
    assert says in lines[0], lines
    assert belljar.leftovers() == []
    return done.stderr.decode()


BAD_WORDS = {
    "nothing to run": ((), "nothing to run"),
    "a command without its dashes": (("true",), "true: No such file"),
    "a script that is not there": (("./nosuch.sh",), "nosuch.sh: No such file"),
    "a script that is a folder": (("/etc",), "/etc: Is a directory"),
    "an option that is not there": (("--nosuch", *RUN), "--nosuch"),
    "no cpus": (("--cpus", "0", *RUN), "--cpus 0: must be more than nothing"),
    "cpus that are no number": (("--cpus", "two", *RUN), "--cpus"),
    "memory that is not a size": (("--memory", "much", *RUN), "--memory"),
    "memory below nothing": (("--memory", "-1G", *RUN), "--memory"),
    "a disk of nothing": (("--disk", "0", *RUN), "--disk 0: must be more than nothing"),
    "no memory": (("--memory", "0", *RUN), "--memory 0: must be more than nothing"),
    "no name of an image": (("--image", "", *RUN), "--image '': the name is missing"),
    "no name of a network": (("--network", "", *RUN), "--network ''"),
    "a clock of seventy minutes": (("--timeout", "1:70:00", *RUN), "'1:70:00' is not a duration"),
    "two copies out to one place": (("--out", "/a:/tmp/x", "--out", "/b:/tmp/x", *RUN), "--out: two of them at /tmp/x"),
    "more folders than slots": ((*(w for n in range(21) for w in ("--share", f"/usr:/s{n}")), *RUN), "at most 20"),
    "a time limit of nothing": (("--timeout", "0", *RUN), "--timeout"),
    "a grace below nothing": (("--grace", "-1s", *RUN), "--grace"),
    "a network that is not there": (("--network", "wan", *RUN), "--network 'wan'"),
    "a group without a name": (("--network", "isolated:", *RUN), "no such kind of network"),
    "a start that is not there": (("--start", "warm", *RUN), "--start"),
    "a share without a source": (("--share", ":/data", *RUN), "--share"),
    "a share at a relative place": (("--share", "/tmp:data", *RUN), "--share"),
    "a share over the guest's root": (("--share", "/tmp:/", *RUN), "--share"),
    "two shares at one place": (("--share", "/tmp:/data", "--share", "/var:/data", *RUN), "two of them at /data"),
    "an input that is not there": (("--in", "/no/such", *RUN), "--in /no/such: does not exist"),
    "an output to no folder": (("--out", "/x:/no/such/x", *RUN), "/no/such"),
    "an environment without a name": (("--env", "=x", *RUN), "--env"),
    "an option that is no more": (("--env-file", "/no/such", *RUN), "--env-file"),
    "a folder that is not absolute": (("--cwd", "here", *RUN), "--cwd here: not an absolute path"),
    "a user that is not there": (("--user", "no-such-user", *RUN), "no such user here"),
    "a user that is not a number": (("--user", "1:x", *RUN), "--user 1:x"),
    "a name that is none": (("--name", "a b", *RUN), "--name"),
    "a terminal where there is none": (("-t", *RUN), "--tty"),
    "settings that are not there": (("--config", "/no/such.toml", *RUN), "/no/such.toml"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_WORDS)
def test_words_that_mean_nothing_start_nothing(belljar: Belljar, what: str) -> None:
    words, says = BAD_WORDS[what]
    refused(belljar, *words, says=says)
    assert not belljar.run_folder.exists() or belljar.json("ps", "-a") == []


BAD_WISHES = {
    "an image nobody knows": (("--image", "nosuch"), "ImageUnknown", "image-fault", "no image is called 'nosuch'"),
    "an image that is a path": (("--image", "../../etc/passwd"), "ImageUnknown", "image-fault", "no image is called"),
    "a digest nobody knows": (("--image", "sha256:" + "0" * 64), "ImageUnknown", "image-fault", "no image has"),
    "more cpus than there are": (("--cpus", "4096"), "OverLimit", "refused", "4096 cpus: this host has"),
    "too little memory": (("--memory", "1M"), "OverLimit", "refused", "at least 64 MiB"),
    "more memory than there is": (("--memory", "4096G"), "OverLimit", "refused", "this host has"),
    "a disk smaller than the image": (("--disk", "1M"), "OverLimit", "refused", "too small"),
    "a disk larger than any": (("--disk", "9999T"), "OverLimit", "refused", "too large"),
    "a share that is not there": (("--share", "/no/such"), "UsageError", "refused", "/no/such: does not exist"),
    "a share that is a file": (("--share", "/etc/passwd"), "UsageError", "refused", "/etc/passwd: is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_WISHES)
def test_wishes_that_cannot_be_fulfilled_have_a_class_each(belljar: Belljar, tmp_path: Path, what: str) -> None:
    words, error, cause, says = BAD_WISHES[what]
    refused(belljar, *words, "--report", str(tmp_path / "r"), *RUN, says=says)
    told = report(tmp_path / "r")
    assert (told["error"], told["cause"], told["class"], told["exit_code"]) == (error, cause, "user", None)
    assert told["hint"] and says in str(told["reason"])


def test_a_script_that_cannot_be_read_is_refused(belljar: Belljar) -> None:
    refused(belljar, "/proc/self/mem", says="/proc/self/mem: Input/output error")  # root may open everything


def test_a_script_with_an_interpreter_that_is_not_there_is_not_found(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    done = belljar.run(str(tmp_path / "script"))
    assert (
        done.returncode == 126
        and b"interpreter" in done.stderr
        and b"\nhint: Check its mode and its first line" in done.stderr
    )


def test_a_full_scratch_is_said_before_anything_starts(belljar: Belljar, tmp_path: Path) -> None:
    belljar.scratch.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=711", "tmpfs", str(belljar.scratch)], check=True)
    try:
        refused(belljar, "--report", str(tmp_path / "r"), *RUN, says="MiB free")
        told = report(tmp_path / "r")
        assert (told["error"], told["cause"], told["class"]) == ("NoSpace", "node-fault", "node")
        assert belljar.leftovers() == []
    finally:
        subprocess.run(["umount", str(belljar.scratch)], check=True)


@pytest.mark.parametrize("where", ["run", "logs"])
def test_no_space_for_the_records_is_said(belljar: Belljar, where: str) -> None:
    folder = {"run": belljar.run_folder, "logs": belljar.logs}[where]
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=3,mode=700", "tmpfs", str(folder)], check=True)
    try:
        done = belljar.run(*RUN)
        if where == "run":
            assert done.returncode == 125 and b"No space left" in done.stderr and b"hint: Free space" in done.stderr
        else:  # the job itself does not need them
            assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr
        assert belljar.domains() == [] and list(belljar.scratch.glob("*")) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_no_space_for_a_template_is_a_cold_boot(belljar: Belljar, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "templates").mkdir(parents=True)
    site = {"BELLJAR_PATHS_SITE_STORE": str(STORE), "BELLJAR_QEMU_SITE_TEMPLATES": "false"}
    belljar.env.update(BELLJAR_PATHS_STORE=str(store), **site)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=700", "tmpfs", str(store / "templates")], check=True)
    try:
        done = belljar.run("--report", str(tmp_path / "r"), *RUN)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b"")
        told = report(tmp_path / "r")
        assert told["start"] == "cold" and "MiB free, a template needs" in str(told["start_reason"])
        assert (store / "templates").exists() and not list((store / "templates").glob("*.draft"))
        insisted = belljar.run("--start", "clone", "--report", str(tmp_path / "r"), *RUN)
        assert insisted.returncode == 125 and report(tmp_path / "r")["error"] == "TemplateError"
    finally:
        subprocess.run(["umount", str(store / "templates")], check=True)


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the default image in it, once more."""
    folder = tmp_path_factory.mktemp("imported")
    belljar = Belljar(folder, folder / "store", {"BELLJAR_PATHS_SITE_STORE": str(STORE)})
    disk = (STORE / "images/names/debian12").resolve() / "disk.qcow2"
    done = belljar("image", "import", str(disk), "--name", "mine")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "store/templates")  # of the machine that looked into the disk
    return folder / "store"


@pytest.fixture
def own_store(belljar: Belljar, tmp_path: Path, imported: Path) -> Path:
    """That store, which may be broken. Templates are its own, whatever this QEMU could do with the site's."""
    store = tmp_path / "store"
    subprocess.run(["cp", "-a", str(imported), str(store)], check=True)  # the disk stays sparse
    belljar.env["BELLJAR_PATHS_STORE"] = str(store)
    assert belljar("image", "verify", "mine").returncode == 0  # as after a restore
    return store


def test_a_damaged_image_is_found_before_a_job_starts_on_it(belljar: Belljar, own_store: Path, tmp_path: Path) -> None:
    (folder,) = (own_store / "images").glob("sha256-*")
    disk = folder / "disk.qcow2"
    facts = disk.stat()
    for damage in ("shorter", "changed"):
        os.chmod(disk, 0o600)
        with open(disk, "r+b") as file:
            if damage == "shorter":
                file.truncate(facts.st_size - 4096)
            else:
                file.truncate(facts.st_size)
                file.seek(facts.st_size // 2)
                file.write(b"damage")
        says = "disk.qcow2"
        refused(belljar, "--image", "mine", "--report", str(tmp_path / "r"), *RUN, says=says)
        told = report(tmp_path / "r")
        assert (told["error"], told["cause"], told["class"]) == ("ImageCorrupt", "image-fault", "node"), damage
    assert belljar("image", "verify", "mine").returncode != 0
    assert belljar("image", "remove", "mine", "--force").returncode == 0
    refused(belljar, "--image", "mine", *RUN, says="no image is called 'mine'")


def test_an_image_that_machines_use_is_not_removed(belljar: Belljar, own_store: Path) -> None:
    started(
        belljar, "--image", "mine", "--start", "cold", "--name", "job", "--", "sh", "-c", "echo up; exec sleep 1000"
    )
    for words in (("remove", "mine"), ("remove", "mine", "--force")):
        done = belljar("image", *words)
        assert done.returncode == 125 and b"used by a machine" in done.stderr, done
        assert len(done.stderr.splitlines()) == 2
    assert belljar("exec", "job", "--", "ls", "/").returncode == 0
    belljar("kill", "job")
    assert belljar("image", "remove", "mine").returncode == 0
    assert not list((own_store / "images").glob("sha256-*"))


def test_an_image_that_goes_between_its_finding_and_its_use_is_said(
    belljar: Belljar, own_store: Path, tmp_path: Path
) -> None:
    """The lock of the image is taken by the remover while the job has found it and waits to hold it."""
    from belljar.host.locks import try_lock

    (folder,) = (own_store / "images").glob("sha256-*")
    lock = try_lock(folder / "lock")
    assert lock is not None
    events = belljar.popen("events", "-f", "--format", "json")
    job = belljar.popen("run", "--image", "mine", "--report", str(tmp_path / "r"), *RUN)
    assert events.stdout is not None
    while b'"preparing"' not in events.stdout.readline():
        pass
    shutil.move(folder, tmp_path / "gone")
    lock.release()
    out, words = job.communicate(timeout=LONGEST)
    assert (job.returncode, out) == (125, b"")
    assert report(tmp_path / "r")["error"] in ("ImageUnknown", "ImageCorrupt"), words
    assert len(words.splitlines()) == 2 and belljar.leftovers() == []
