"""What `make packages` builds, installed into roots of Debian 12 and 13 and used there by real machines. The rpm is installed by rpm
into a root of Debian 13, for that one's Python: no EL can be had here, so of those for EL only the content is looked at."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import STATE, Done, Room, alone, folder_for_all, root

from belljar import __version__
from belljar.image.build import debian

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed by root"),
]
ROOTS = {  # as test_every_qemu has them
    "bookworm": ("qemu-system-x86", "qemu-utils", "python3", "e2fsprogs", "passwd"),
    "trixie": ("qemu-system-x86", "qemu-utils", "python3", "e2fsprogs", "passwd", "virtiofsd"),
}
NAMES = ("belljar", "belljar-service")
NEEDED = ("rpm", "busybox-static", "curl", "zstd", "xz-utils", "iproute2", "nftables")  # which the rpm asks of EL
FOLDERS = {f"BELLJAR_PATHS_{name.upper()}": f"/belljar/{name}" for name in ("run", "scratch", "logs", "store")}
LONGEST = 900.0
VACUUM = """[space]
name = "vac.lab"
factories = ["node.lab"]
[factory]
processors = 1
"""


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with both packages of both kinds, in two releases. Libraries are fetched once."""
    folder = folder_for_all(STATE / "packages")
    with alone(folder / "lock"):
        for release in ("1", "2"):
            run = {"RELEASE": release, "COMPRESS": "-Znone", "RPM_PYTHON": "3.13", "DIST": str(folder / "dist")}
            env = {**os.environ, **run, "BUILD": str(folder / "build")}
            words = [str(ROOT / "scripts/packages"), "deb", "rpm", *(["tarball"] if release == "1" else [])]
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=2400)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


class Host:
    """A root in which packages of one kind are installed."""

    def __init__(self, room: Room, kind: str) -> None:
        self.room, self.kind = room, kind

    def __call__(self, *words: str, code: int | None = 0, **env: str) -> str:
        done: Done = self.room.run(
            *words, check=False, timeout=LONGEST, DEBIAN_FRONTEND="noninteractive", **FOLDERS, **env
        )
        text = (done.stdout + done.stderr).decode()
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{text}"
        return text

    def fetch(self, *packages: str) -> str:
        """From Debian's mirror, with what they depend on."""
        self("apt-get", "update", "-qq", **debian.proxies())
        return self("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, **debian.proxies())

    def files(self, release: int) -> list[str]:
        form = "/dist/{}_{}-{}_amd64.deb" if self.kind == "deb" else "/dist/{}-{}-{}.x86_64.rpm"
        return [form.format(name, __version__, release) for name in NAMES]

    def install(self) -> str:
        if self.kind == "deb":
            return self.fetch(*self.files(1))
        return self.fetch(*NEEDED) + self("rpm", "-i", "--nodeps", *self.files(1))

    def change(self, release: int) -> str:
        words = ["dpkg", "-i"] if self.kind == "deb" else ["rpm", "-U", "--nodeps", "--oldpackage"]
        return self(*words, *self.files(release))

    def remove(self, code: int | None = 0) -> str:
        words = ["dpkg", "--purge"] if self.kind == "deb" else ["rpm", "-e"]
        return self(*words, *reversed(NAMES), code=code)

    def installed(self) -> list[str]:
        return self("sh", "-c", "ls -d /usr/lib/belljar/lib-*").split()


@pytest.fixture(scope="module", params=[("bookworm", "deb"), ("trixie", "deb"), ("trixie", "rpm")], ids="-".join)
def host(request: pytest.FixtureRequest, built: Path) -> Iterator[Host]:
    suite, kind = request.param
    binds: dict[Path | str, str] = {built: "/dist", STORE / "images": "/belljar/store/images"}
    with Room(root(suite, ROOTS[suite]), host="node", binds=binds) as room:
        room.run("mkdir", "-m", "0755", "-p", "/belljar/store")
        yield Host(room, kind)


def test_machines_outlive_an_upgrade_and_no_removal_takes_them_away(host: Host) -> None:
    host.install()
    (old,) = host.installed()
    host("sh", "-c", "id belljar && id belljar-lease")
    machine = host("belljar", "run", "-d", "--", "sleep", "1000").strip()

    assert f"{old} stays: processes run from it" in host.change(2)
    assert old in host.installed() and len(host.installed()) == 2
    assert "Linux" in host("belljar", "exec", machine, "--", "uname")
    refusal = host.remove(code=None)
    assert "Nothing was removed" in refusal and f"machine {machine}" in refusal
    assert machine in host("belljar", "ps")
    host("belljar", "stop", machine)
    assert machine not in host("belljar", "ps")

    assert "is older than" in host.change(1)
    assert old not in host.installed() and len(host.installed()) == 1


def test_daemons_have_their_libraries(host: Host) -> None:
    host("sh", "-c", f"mkdir -p /etc/belljar && printf '%s' '{VACUUM}' >/etc/belljar/vacuum.toml")
    daemon = host.room.start("belljar", "vacuum", "run", "--metrics", "127.0.0.1:29095", env=FOLDERS)
    try:
        words = (
            "curl",
            "-s",
            "--retry",
            "60",
            "--retry-delay",
            "1",
            "--retry-connrefused",
            "http://127.0.0.1:29095/metrics",
        )
        assert "belljar_vacuum_processors_used" in host(*words)
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
    host("sh", "-c", "PYTHONPATH=/usr/lib/belljar/lib /usr/bin/python3 -c 'import botocore, psycopg; psycopg.adapters'")


def test_the_monitor_sees_a_machine_from_within_what_its_unit_allows(host: Host) -> None:
    """The unit's folder and walls, made by hand: there is no systemd here."""
    own = f"{FOLDERS['BELLJAR_PATHS_STORE']}/monitor"
    host("install", "-d", "-m", "0700", own)
    machine = host("belljar", "run", "-d", "--", "sleep", "1000").strip()
    walls = f"mount --bind {own} {own}; for at in / /run /tmp; do mount -o remount,bind,ro $at; done; exec setpriv --no-new-privs "
    walls += "--bounding-set=-all,+setuid,+setgid,+dac_read_search,+kill belljar monitor serve --listen 127.0.0.1:29180"
    daemon = host.room.start("unshare", "--mount", "sh", "-ec", walls, env=FOLDERS)
    try:
        curl = "curl -s --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:29180"
        assert 'belljar_machines{node="node"} 1.0' in host(*f"{curl}/metrics".split())
        assert "<html" in host(*f"{curl}/".split())
        assert host("stat", "-c", "%a %U", "/var/lib/belljar", f"{own}/token") == "755 root\n600 root\n"
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
    host("belljar", "kill", machine)
    libraries = "import opentelemetry.exporter.otlp.proto.http.trace_exporter"
    host("sh", "-c", f"PYTHONPATH=/usr/lib/belljar/lib /usr/bin/python3 -c '{libraries}'")


def test_an_installation_beside_another_says_which_one_is_run(host: Host) -> None:
    host(
        "sh",
        "-c",
        "mkdir -p /opt/belljar/bin && touch /opt/belljar/bin/belljar && ln -s /opt/belljar/bin/belljar /usr/local/bin/belljar",
    )
    try:
        assert "Another belljar is at /opt/belljar/bin/belljar" in host.change(2)
    finally:
        host("rm", "-r", "/opt/belljar", "/usr/local/bin/belljar")


def test_a_removal_leaves_nothing_of_the_program(host: Host) -> None:
    host.remove()
    host("sh", "-c", "! ls -d /usr/lib/belljar /usr/bin/belljar /usr/share/man/man1/belljar*")


def test_the_tarball_is_installed_and_taken_away_without_a_network(built: Path, tmp_path: Path) -> None:
    name = f"belljar-{__version__}-1-linux-x86_64"
    subprocess.run(["tar", "-xf", str(built / f"{name}.tar.xz"), "-C", str(tmp_path)], check=True, timeout=LONGEST)
    binds: dict[Path | str, str] = {tmp_path: "/packed", STORE / "images": "/belljar/store/images"}
    with Room(root("trixie", ROOTS["trixie"]), net=True, host="node", binds=binds) as room:
        room.run("mkdir", "-m", "0755", "-p", "/belljar/store")
        host = Host(room, "tarball")
        install = f"/packed/{name}/install"
        assert f"Installed: belljar {__version__}" in host(install)
        assert host("belljar", "run", "--", "uname", "-s") == "Linux\n"
        machine = host("belljar", "run", "-d", "--", "sleep", "1000").strip()
        assert f"machine {machine}" in host(install, "--uninstall", code=1)
        host("belljar", "kill", machine)
        assert "belljar is gone" in host(install, "--uninstall")
        host("sh", "-c", "! ls -d /opt/belljar /usr/local/bin/belljar /usr/local/share/man/man1/belljar*")
        host("sh", "-c", f"echo x >>/packed/{name}/tree/belljar/errors.py")
        assert "not as they were packed" in host(install, code=1)


def test_those_for_el_have_modules_for_its_python(built: Path) -> None:
    for name, module in (("belljar", "_cffi_backend"), ("belljar-service", "_psycopg")):
        words = ["rpm", "-qlp", str(built / f"{name}-{__version__}-1.x86_64.rpm")]
        files = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
        for python in ("312", "313"):
            assert f"{module}.cpython-{python}-x86_64-linux-gnu.so" in files
        assert "/usr/share/man/man1/belljar-run.1.gz" in files or name != "belljar"
