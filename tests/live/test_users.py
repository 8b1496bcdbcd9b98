"""An ordinary user, without root and with nothing prepared: an install all can read, the site's images, own templates."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import LONGEST, ROOT, STORE, Belljar, marked_processes
from tests.live.test_faults import report, started
from tests.rust_virtiofsd import rust_virtiofsd

PLACE = Path("/var/tmp")  # an install and homes that other users can reach; pytest's own folders are closed to them
LAUNCHER = """#!/usr/bin/python3 -IS
import sys
sys.path.append("{lib}")
from belljar.cli import entry
entry()
"""
WAITS = ("--", "sh", "-c", "echo up; exec sleep 1000")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """belljar as `make install` leaves it: a library and a launcher that everybody may read and nobody may write."""
    top = PLACE / f"belljar-test-install-{os.getpid()}"
    shutil.copytree(ROOT / "src/belljar", top / "lib/belljar", ignore=shutil.ignore_patterns("__pycache__"))
    (top / "belljar").write_text(LAUNCHER.format(lib=top / "lib"))
    subprocess.run(["chmod", "-R", "u=rwX,go=rX", str(top)], check=True)
    (top / "belljar").chmod(0o755)
    subprocess.run(["/usr/bin/python3", "-m", "compileall", "-q", str(top / "lib")], check=True)
    yield top / "belljar"
    shutil.rmtree(top)


class User(Belljar):
    """`belljar` called by somebody of this number, who is in no user database."""

    def __init__(self, uid: int, launcher: Path, home: Path) -> None:
        self.uid, self.launcher, self.home = uid, launcher, home
        super().__init__(home)
        own = PLACE / f"belljar-{uid}"  # where belljar puts the short-lived files of users without a session
        self.run_folder, self.scratch = own / "run", own / "scratch"
        self.logs = home / ".local/share/belljar/logs"
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "BELLJAR_PATHS_SITE_STORE": str(STORE)}

    def argv(self, *words: str | bytes) -> list[str | bytes]:
        return [str(self.launcher), *words]

    def __call__(self, *words: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return super().__call__(*words, **{**self.who(), **options})

    def popen(
        self, *words: str | bytes, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        return super().popen(*words, env=env, **{**self.who(), **options})

    def who(self) -> dict[str, Any]:
        return {"user": self.uid, "group": self.uid, "extra_groups": [], "cwd": self.home}

    @property
    def store(self) -> Path:
        return self.home / ".local/share/belljar"


@pytest.fixture(scope="session")
def everybody(installed: Path) -> Iterator[list[User]]:
    """Two users with homes of their own; everything of theirs goes with the session."""
    first = 61_000 + os.getpid() % 2_000 * 2
    made = []
    for uid in (first, first + 1):
        home = PLACE / f"belljar-test-home-{uid}"
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        made.append(User(uid, installed, home))
    yield made
    for user in made:
        shutil.rmtree(user.home)
        shutil.rmtree(PLACE / f"belljar-{user.uid}", ignore_errors=True)


@pytest.fixture
def users(everybody: list[User]) -> Iterator[list[User]]:
    yield everybody
    for user in everybody:
        user.close()
        user.keepers.clear()


@pytest.fixture
def user(users: list[User]) -> User:
    return users[0]


def owners(folder: Path) -> set[int]:
    """Whom the files of a tree belong to."""
    return {path.lstat().st_uid for path in (folder, *folder.rglob("*"))}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Files with their times and sizes; root's own jobs, those of other tests, mark an image as used by its lock's time."""
    seen = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (0 if name.endswith("/lock") else one.st_mtime_ns, one.st_size) for name, one in seen.items()}


OWN = {"BELLJAR_QEMU_SITE_TEMPLATES": "false"}  # the site's serve users too: by a copy, or as they are from QEMU 8.2 on


def test_a_user_runs_jobs_with_the_sites_images_and_own_templates(user: User) -> None:
    images = [*(STORE / "images").glob("sha256-*")]  # other tests may add some meanwhile
    site = [listing(image) for image in images]
    script = "id -u; id -g; id -un; pwd; echo made > made; stat -c %u made"
    done = user.run("--report", "r1", "--share", ".:rw", "--", "sh", "-c", script, env=OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == [
        str(user.uid),
        str(user.uid),
        f"user{user.uid}",
        str(user.home),
        str(user.uid),
    ]
    assert (user.home / "made").stat().st_uid == user.uid
    assert report(user.home / "r1")["start"] == "clone"
    again = user.run("--report", "r2", "--start", "clone", "--share", ".", "--", "true", env=OWN)
    assert again.returncode == 0 and "template" not in dict(report(user.home / "r2")["phases"])  # type: ignore[call-overload]
    assert user.leftovers() == [] and owners(user.home) == {user.uid}
    assert not (user.store / "images").exists() or not list((user.store / "images").glob("sha256-*"))
    assert [listing(image) for image in images] == site  # nothing of the site's was touched
    for folder in (user.store, user.store / "templates", user.scratch.parent, user.run_folder):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0, folder


def test_everything_of_the_machine_is_the_users(user: User) -> None:
    job = started(user, "--name", "job", *WAITS)
    (id,) = user.machines()
    (domain,) = [pid for pid, machine in marked_processes() if machine == id]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{domain}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == [str(user.uid)] * 4 and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert int(status["CapEff"], 16) == 0
    assert owners(user.run_folder) == owners(user.scratch) == {user.uid}
    for path in (user.run_folder / "machines" / id).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert user("exec", "job", "--", "sh", "-c", "id -u; echo in > /tmp/file").stdout == b"%d\n" % user.uid
    assert user("cp", "job:/tmp/file", ".").returncode == 0 and (user.home / "file").read_text() == "in\n"
    assert user("stop", "job").returncode == 0 and job.wait(LONGEST) == -15
    assert user.leftovers() == []


def test_inside_a_user_may_be_root_and_outside_stays_who_he_is(user: User) -> None:
    script = "id -u; mount -t tmpfs none /mnt && echo mounted; echo > by-root; chown 0:0 by-root"
    done = user.run("--user", "0", "--cwd", str(user.home), "--share", ".:rw", "--", "sh", "-c", script)
    assert done.stdout.split() == [b"0", b"mounted"], done.stderr
    assert (user.home / "by-root").stat().st_uid == user.uid


def test_without_a_home_a_session_or_a_name(user: User) -> None:
    before = listing(user.home)
    env = {"HOME": "", "XDG_RUNTIME_DIR": "", "XDG_DATA_HOME": "", "PATH": ""}
    done = user.run("--start", "cold", "--", "sh", "-c", "echo $HOME; cd; pwd", env=env, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == [f"/home/user{user.uid}"] * 2
    assert listing(user.home) == before and (PLACE / f"belljar-{user.uid}").stat().st_uid == user.uid


def test_folders_may_lie_deep(user: User) -> None:
    deep = user.home / ("d" * 100) / ("e" * 100)
    env = {"BELLJAR_PATHS_RUN": str(deep / "run"), "BELLJAR_PATHS_SCRATCH": str(deep / "scratch")}
    job = user.popen("run", "--name", "job", "--start", "cold", *WAITS, env=env)
    assert job.stdout is not None and job.stdout.readline() == b"up\n", job.communicate(timeout=LONGEST)
    assert user("exec", "job", "--", "echo", "deep", env=env).stdout == b"deep\n"
    assert user("kill", "job", env=env).returncode == 0


NO_KVM = (
    "mount -t tmpfs none /dev && for d in null:3 zero:5 full:7 random:8 urandom:9; do "
    "mknod -m 666 /dev/${d%:*} c 1 ${d#*:}; done && ln -s /proc/self/fd /dev/fd && mkdir -m 1777 /dev/shm && "
    'exec setpriv --reuid "$1" --regid "$1" --clear-groups -- "$2" run --report "$3" --start cold -- echo ran'
)


def test_without_the_device_of_kvm(user: User) -> None:
    argv = ["unshare", "--mount", "sh", "-c", NO_KVM, "sh", str(user.uid), str(user.launcher), str(user.home / "r")]
    done = subprocess.run(argv, env=user.env, cwd=user.home, capture_output=True, check=False, timeout=LONGEST)
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr
    assert report(user.home / "r")["accelerator"] == "tcg"


# -- what belongs to somebody else -----------------------------------------------------------------------------------


@pytest.fixture(params=["an ordinary user's", "root's"])
def victim(request: pytest.FixtureRequest, users: list[User], belljar: Belljar) -> Belljar:
    return belljar if request.param == "root's" else users[0]


def test_a_strangers_process_with_a_machines_name_stops_nobody(victim: Belljar, users: list[User]) -> None:
    died = victim.run("--", "true", env={"BELLJAR_TESTING_ABORT_AT": "payload-started"})
    assert died.returncode == -signal.SIGKILL
    (id,) = victim.machines()
    argv = ["qemu-system-x86_64", "-c", "print('up', flush=True); input()", "-name", f"guest=belljar-{id}"]
    with subprocess.Popen(
        argv, executable="/usr/bin/python3", stdin=subprocess.PIPE, stdout=subprocess.PIPE, **users[1].who()
    ) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"up\n"
        done = victim.run("--", "echo", "ran")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b"")
        assert victim.machines() == []
        reaped = victim("reap")
        assert (reaped.returncode, reaped.stdout, reaped.stderr) == (0, b"", b"")
        assert victim("reap", "-n").stdout == b"" and stranger.poll() is None
        stranger.communicate(b"")


GRAB_LOCKS = """
import fcntl, os, sys
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
input()
"""


def test_a_stranger_who_locks_the_sites_images_stops_nobody(users: list[User], belljar: Belljar) -> None:
    locks = [str(path) for path in STORE.rglob("lock") if path.stat().st_mode & 0o004]
    argv = ["/usr/bin/python3", "-Ic", GRAB_LOCKS, *locks]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **users[1].who()) as stranger:
        assert locks and stranger.stdout is not None and stranger.stdout.readline() == b"held\n"
        for somebody in (users[0], belljar):
            done = somebody.run("--start", "cold", "--", "echo", "ran")
            assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr
        stranger.communicate(b"\n")


def test_another_users_machines_are_closed(users: list[User]) -> None:
    owner, other = users
    job = started(owner, "--name", "job", *WAITS)
    theirs = {"BELLJAR_PATHS_RUN": str(owner.run_folder), "BELLJAR_PATHS_LOGS": str(owner.logs)}
    for words in (
        ("ps",),
        ("show", "job"),
        ("exec", "job", "--", "true"),
        ("stop", "job"),
        ("kill", "job"),
        ("logs", "job"),
        ("console", "job"),
    ):
        done = other(*words, env=theirs)
        assert done.returncode == 125, (words, done)
        assert b"belong" in done.stderr and b"\nhint: " in done.stderr, (words, done.stderr)
    (id,) = owner.machines()
    assert id.encode() not in other("kill-all", "--dry-run").stdout
    assert "job" not in [row["name"] for row in other.json("ps", "-a")]
    assert job.poll() is None
    # Root may, as everywhere.
    root = Belljar(owner.home, STORE)
    root.env.update(theirs, BELLJAR_PATHS_SCRATCH=str(owner.scratch))
    assert root("exec", "job", "--", "id", "-u").stdout == b"%d\n" % owner.uid
    stopped = root("stop", "job")
    assert stopped.returncode == 0, stopped.stderr
    assert job.wait(LONGEST) == -15


def test_a_machine_cannot_be_put_into_somebody_elses_folders(users: list[User]) -> None:
    owner, other = users
    assert owner.run("--start", "cold", "--", "true").returncode == 0
    for name, folder in (
        ("RUN", owner.run_folder),
        ("SCRATCH", owner.scratch),
        ("LOGS", owner.logs),
        ("STORE", owner.store),
    ):
        done = other.run("--start", "cold", "--", "echo", "ran", env={f"BELLJAR_PATHS_{name}": str(folder)})
        assert (done.returncode, done.stdout) == (125, b""), name
        lines = done.stderr.decode().splitlines()
        assert len(lines) == 2 and lines[0].startswith("belljar: ") and lines[1].startswith("hint: "), lines


@pytest.mark.parametrize("how", ["of somebody else", "open to others"])
def test_templates_that_cannot_be_trusted_are_refused(users: list[User], how: str) -> None:
    owner, other = users
    store = other.home / how
    templates = store / "templates"
    templates.mkdir(parents=True)
    os.chown(store, other.uid, other.uid)
    if how == "open to others":
        os.chown(templates, other.uid, other.uid)
        templates.chmod(0o777)
    else:
        os.chown(templates, owner.uid, owner.uid)
    done = other.run("--report", "r", "--", "echo", "ran", env={"BELLJAR_PATHS_STORE": str(store)})
    assert (done.returncode, done.stdout) == (125, b"")
    says = "others may write to it" if how == "open to others" else f"templates: belongs to uid {owner.uid}"
    assert says.encode() in done.stderr and b"\nhint: Remove it, or make it yours" in done.stderr
    told = report(other.home / "r")
    assert (told["error"], told["cause"], told["class"]) == ("UnsafeFolder", "node-fault", "user")
    assert other.leftovers() == []


def test_a_template_that_was_changed_is_made_again(user: User) -> None:
    assert user.run("--", "true", env=OWN).returncode == 0
    templates = user.json("template", "list")
    assert templates
    for template in templates:
        assert Path(template["folder"]).is_relative_to(user.store)
        with open(Path(template["folder"]) / "ram", "r+b") as file:
            file.write(b"changed")
    done = user.run("--report", "r", "--", "echo", "ran", env=OWN)
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr
    told = report(user.home / "r")
    assert told["start"] == "clone" and "template" in dict(told["phases"])  # type: ignore[call-overload]


def test_the_sites_images_are_not_the_users_to_change(user: User) -> None:
    before = user.json("image", "list")
    assert ["debian12"] in [image["names"] for image in before]
    for words in (("image", "remove", "debian12", "--force"), ("image", "tag", "debian12", "mine")):
        done = user(*words)
        assert done.returncode == 125 and b"hint: " in done.stderr, (words, done)
    assert user.json("image", "list") == before


def test_a_link_in_the_place_of_a_folder_is_refused(users: list[User]) -> None:
    owner, other = users
    target = PLACE / f"belljar-test-home-{owner.uid}-open"
    target.mkdir()
    target.chmod(0o777)
    trap = PLACE / f"belljar-{other.uid}-trap"
    trap.symlink_to(target)
    os.lchown(trap, owner.uid, owner.uid)  # somebody was quicker in a folder where everybody may write
    try:
        for name in ("RUN", "SCRATCH", "LOGS"):
            done = other.run("--start", "cold", "--", "true", env={f"BELLJAR_PATHS_{name}": str(trap)})
            assert done.returncode == 125 and b"hint: Remove it" in done.stderr, done
            assert not [path for path in target.rglob("*") if not path.is_dir()]
    finally:
        trap.unlink()
        shutil.rmtree(target)


def test_doctor_speaks_to_a_user(user: User) -> None:
    done = user("doctor")
    assert done.returncode == 0, done.stdout.decode()


def test_the_api_is_imported_from_an_install_as_the_page_says(user: User) -> None:
    lib = user.launcher.parent / "lib"
    code = "import belljar.api as b; print(b.run(['id', '-u']).check().stdout.decode())"
    ways = (
        ({}, f"import sys; sys.path.append({str(lib)!r}); {code}"),
        ({"PYTHONPATH": str(lib)}, code),
    )
    for env, program in ways:
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", program], env={**user.env, **env}, **user.who(),
            capture_output=True, timeout=LONGEST, check=False,
        )  # fmt: skip
        assert done.stdout.split() == [str(user.uid).encode()], done.stderr.decode()


@pytest.mark.slow  # a minute: test_virtiofs.py has the shares themselves
def test_a_user_shares_a_folder_by_virtiofs(user: User) -> None:
    (user.home / "shared").mkdir()
    os.chown(user.home / "shared", user.uid, user.uid)
    env = {**OWN, "BELLJAR_QEMU_VIRTIOFSD": rust_virtiofsd()}
    script = "echo made > /data/file; stat -c %u /data/file"
    done = user.run("--share", f"virtiofs:{user.home}/shared:/data:rw", "--", "sh", "-c", script, env=env)
    assert (done.returncode, done.stdout) == (0, b"%d\n" % user.uid), done.stderr
    assert (user.home / "shared/file").stat().st_uid == user.uid
