"""A site in one folder that everybody may enter: belljar installed as on a batch node, its settings, its users.

The lab modules beside this one bring a batch system up on it: slurm.py, gridengine.py.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.batch.lab.libraries import libraries
from tests.live.conftest import ROOT, STORE, marked_processes

PLACE = Path("/var/tmp")
USERS = ("bjalice", "bjbob")
USERS_LOCK = PLACE / ".belljar-lab-users"
LAUNCHER = """#!/usr/bin/python3 -IS
import sys
sys.path += ["{lib}", "{libraries}"]
from belljar.cli import entry
entry()
"""


class Site:
    """`top`: belljar (the command), belljar.toml (the site's settings, given to every call by --config), node/ (folders
    of the users' machines), home/USER. Everything goes with `close`."""

    def __init__(self, name: str, settings: str = "") -> None:
        self.top = PLACE / f"belljar-lab-{name}-{os.getpid()}"
        self.lib, self.belljar, self.config = self.top / "lib", self.top / "belljar", self.top / "belljar.toml"
        self.node, self.homes = self.top / "node", self.top / "home"
        self.top.mkdir(mode=0o755)
        self._install()
        self.configure(settings)
        for folder in (self.node, self.homes):
            folder.mkdir(mode=0o755)
        for user in USERS:
            self._add_user(user)

    def _install(self) -> None:
        shutil.copytree(ROOT / "src/belljar", self.lib / "belljar", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["/usr/bin/python3", "-m", "compileall", "-q", str(self.lib)], check=True)
        self.belljar.write_text(LAUNCHER.format(lib=self.lib, libraries=libraries()))
        subprocess.run(["chmod", "-R", "u=rwX,go=rX", str(self.lib)], check=True)
        self.belljar.chmod(0o755)

    def configure(self, batch: str = "", **sections: str) -> None:
        """Write the site's settings: lines of [batch], and of other sections by name."""
        text = f'[paths]\nnode = "{self.node}"\nsite_store = "{STORE}"\n{sections.pop("paths", "")}\n'
        text += f'[batch]\nshares = ["{self.homes}:rw"]\n{batch}\n'
        text += "".join(f"[{section}]\n{lines}\n" for section, lines in sections.items())
        self.config.write_text(text)
        self.config.chmod(0o644)

    @contextmanager
    def leaving_qemu_open(self) -> Iterator[None]:
        """Inside, a job's variables reach QEMU's settings, which only the site sets else: so a test breaks one job alone."""
        before = self.config.read_text()
        self.config.write_text(f'{before}[site]\nlock = ["paths.*"]\n')
        try:
            yield
        finally:
            self.config.write_text(before)

    def _add_user(self, name: str) -> None:
        """The user, made where it is missing and left there; its home here is this site's. One site at a time: of two that make
        the same user at once, useradd gives the second another uid."""
        with open(USERS_LOCK, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/bash", name], check=True)
                entry = pwd.getpwnam(name)
        home = self.home(name)
        home.mkdir(mode=0o711)
        os.chown(home, entry.pw_uid, entry.pw_gid)

    def home(self, user: str) -> Path:
        return self.homes / user

    def run(
        self, *words: str, user: str | None = None, check: bool = True, timeout: float = 240, **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        """A command of the host, as root or as a user in its home, with a bare environment."""
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        env.update(options.pop("env", {}))  # type: ignore[call-overload]
        who: dict[str, object] = {}
        if user is not None:
            entry = pwd.getpwnam(user)
            env.update(HOME=str(self.home(user)), USER=user, LOGNAME=user)
            who = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": self.home(user)}
        done = subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            **{**who, **options},
        )  # type: ignore[call-overload]
        if check and done.returncode:
            raise AssertionError(f"{words}: exit {done.returncode}\n{done.stdout.decode()}\n{done.stderr.decode()}")
        return done

    def command(
        self, *words: str, user: str | None = None, check: bool = True, **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        """`belljar --config SITE words`."""
        return self.run(str(self.belljar), "--config", str(self.config), *words, user=user, check=check, **options)

    def leftovers(self) -> list[str]:
        """Everything of a machine that is still there, of any user: folders, overlays, identities, QEMU processes."""
        found = []
        for user in self.node.iterdir():
            for part in ("run/machines", "run/identities", "scratch"):
                folder = user / part
                found += [str(path) for path in folder.iterdir()] if folder.is_dir() else []
        return found + [f"qemu {pid}" for pid, _ in marked_processes() if self._has_files_of(pid)]

    def _has_files_of(self, pid: int) -> bool:
        """Does it have files of this site open? Its command line names their descriptors."""
        links = set[str]()
        with suppress(OSError):  # it may end meanwhile
            for one in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    links.add(os.readlink(f"/proc/{pid}/fd/{one}"))
        return any(one.startswith(str(self.top)) for one in links)

    def close(self) -> None:
        shutil.rmtree(self.top, ignore_errors=True)


def python() -> str:
    return sys.executable


Environment = Mapping[str, str]
