"""Pages for users, followed command by command, in a folder of a test's own."""

from __future__ import annotations

import functools
import hashlib
import http.server
import lzma
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.batch.lab.page import follow
from tests.live.conftest import LONGEST, ROOT, Belljar
from tests.rust_virtiofsd import rust_virtiofsd
from tests.unit.image.test_disk import as_esp, empty


def followed(page: str, belljar: Belljar, home: Path, **more: str) -> None:
    """*more*: variables, and for `https://example.org` the place that stands for it."""
    place, command = more.pop("place", ""), home / "bin/belljar"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m belljar "$@"\n')
    command.chmod(0o755)
    env = {**belljar.env, "PATH": f"{command.parent}:{belljar.env['PATH']}", **more}

    def run(commands: str, as_user: bool) -> str:
        commands = commands.replace("https://example.org", place or "https://example.org")
        done = subprocess.run(
            ["sh", "-euc", commands], cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=4 * LONGEST, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {commands}{done.stdout}exit {done.returncode}"
        return done.stdout

    print("\n".join(follow(ROOT / "docs" / page, run)))
    assert belljar.leftovers() == []


def test_the_first_ten_minutes(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/index.md", belljar, tmp_path / "home")


@pytest.mark.slow
def test_recipes(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/recipes.md", belljar, tmp_path / "home")


@pytest.mark.slow
def test_warm(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/warm.md", belljar, tmp_path / "home")


@pytest.mark.slow
def test_checkpoint(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/checkpoint.md", belljar, tmp_path / "home")


@pytest.mark.slow
def test_fork(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/fork.md", belljar, tmp_path / "home")


@pytest.mark.slow
def test_data(belljar: Belljar, tmp_path: Path) -> None:
    followed("jobs/data.md", belljar, tmp_path / "home", BELLJAR_QEMU_VIRTIOFSD=rust_virtiofsd())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_images(belljar: Belljar, tmp_path: Path) -> None:
    home, stored = tmp_path / "home", belljar.json("image", "show", "debian12")
    home.mkdir()
    belljar.env["BELLJAR_PATHS_STORE"] = str(tmp_path / "store")
    packed = home / "site.qcow2.xz"
    with open(stored["disk"], "rb") as disk, lzma.open(packed, "wb", preset=0) as file:
        shutil.copyfileobj(disk, file)
    for name, source in (("vmlinuz", "kernel"), ("initrd.img", "initrd")):
        shutil.copy(stored[source], home / name)
    (home / "disk.raw").write_bytes(b"\xf4".ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    subprocess.run(["/sbin/mke2fs", "-q", "-t", "ext4", home / "disk.raw2", "8M"], check=True)
    as_esp(empty(home / "esp.raw"))
    for source, target in (("disk.raw2", "disk.qcow2"), ("esp.raw", "appliance.qcow2")):
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", source, target], cwd=home, check=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(home))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place, digest = f"http://127.0.0.1:{server.server_port}", hashlib.sha256(packed.read_bytes()).hexdigest()
        followed("jobs/images.md", belljar, home, place=place, DIGEST=digest)
        server.shutdown()
