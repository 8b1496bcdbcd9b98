"""Machines that came another way than by belljar's ramdisk are forked, and written to a folder, as all are: their disks and discs are
whole in what goes on from them, and not only what their memory had of these."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.images import stock
from tests.unit.image.container_parts import Container, folder, layer, link

from belljar.host.watch import growth
from belljar.image import AGENT_PATH, UNIT_PATH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LONGEST = 1800  # seconds: a whole Debian is booted first, emulated, by its own boot loader
BUSYBOX = Path("/bin/busybox").read_bytes()
APPLETS = ("sh", "cat", "md5sum", "mv", "rm", "sleep", "sync")

# So, of a file: what its disk has of it, and not the guest's memory.
SUM = "sync; echo 3 > /proc/sys/vm/drop_caches; cat {files} | md5sum"
COUNTS = "i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.1; done"
COUNTS_ON = "first=$(cat /count); until [ $(cat /count) -gt $first ]; do sleep 0.1; done"
WRITES = """
before=$({sum})
i=0
while [ $i -lt 3000 ]; do
  i=$((i + 1)); echo $i
  [ $((i % 100)) = 0 ] && sleep 0.1
done
[ "$before" = "$({sum})" ] || exit 9
exit 7
"""
WROTE = b"".join(b"%d\n" % number for number in range(1, 3001))


@pytest.mark.parametrize(
    ("imported", "asked", "files"),
    [
        pytest.param(("--firmware", "uefi"), "inject", f"{AGENT_PATH}/* {UNIT_PATH}", id="uefi-inject"),
        pytest.param(("--firmware", "bios"), "cloud-init", "/dev/vdb /usr/bin/perl", id="bios-cloud-init"),
        pytest.param((), "cloud-init", "/dev/vdb /usr/bin/perl", id="cloud-init-of-its-own"),
        pytest.param((), "inject", "/usr/bin/perl", id="inject"),
    ],
)
def test_a_whole_debian(belljar: Belljar, imported: tuple[str, ...], asked: str, files: str) -> None:
    machine = ("--image", stock(belljar, "bookworm", *imported), "--context", asked, "-m", "1G")
    if not imported and asked == "cloud-init":  # it has no template then
        (belljar.folder / "user-data").write_text("#!/bin/sh\necho mine > /etc/mine\n")
        machine, files = (*machine, "--user-data", str(belljar.folder / "user-data")), f"{files} /etc/mine"
    is_forked(belljar, machine, files)
    is_written(belljar, machine, files)


def test_a_container_image(belljar: Belljar, tmp_path: Path) -> None:
    parts = [("bin/", folder()), ("bin/busybox", BUSYBOX), *((f"bin/{name}", link("busybox")) for name in APPLETS)]
    Container([layer(*parts)], {"Env": ["PATH=/bin"]}).docker_archive(tmp_path / "image.tar")
    with open(tmp_path / "image.tar", "rb") as saved:
        done = belljar("image", "import", "-", "--name", "other-way", stdin=saved)
    assert done.returncode == 0, done.stderr
    try:
        is_forked(belljar, ("--image", "other-way"), "/bin/busybox")
        is_written(belljar, ("--image", "other-way"), "/bin/busybox")
    finally:
        belljar("image", "remove", "other-way", "--force")


def is_forked(belljar: Belljar, machine: tuple[str, ...], files: str) -> None:
    """Twice, and the fork too: each counts on, by another name, and reads the same."""
    done = belljar.run("-d", "-n", *machine, "--user", "0:0", "--cwd", "/", "--", "sh", "-c", COUNTS, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    parent = done.stdout.decode().strip()
    looks = f"until [ -e /count ]; do sleep 0.1; done; {COUNTS_ON}; {SUM.format(files=files)}; cat /proc/sys/kernel/hostname"
    machines, seen = [parent], []
    for of in (parent, parent, 2):
        seen.append(said(belljar, machines[-1], looks))
        forked = belljar("fork", of if isinstance(of, str) else machines[of], timeout=LONGEST)
        assert forked.returncode == 0, forked.stderr
        machines += forked.stdout.decode().split()
    seen += [said(belljar, id, looks) for id in (machines[-1], parent)]
    assert len({sum for sum, _, _ in seen}) == 1, seen
    assert len({host for _, _, host in seen}) == len(machines) == 4, seen
    for id in machines:
        assert belljar("stop", id).returncode == 0
    assert belljar.leftovers() == []


def said(belljar: Belljar, id: str, script: str) -> list[str]:
    done = belljar("exec", "--wait", f"{LONGEST}s", id, "--", "sh", "-c", script, timeout=LONGEST)
    assert done.returncode == 0, (done, belljar("logs", id).stdout)
    return done.stdout.decode().split()


def is_written(belljar: Belljar, machine: tuple[str, ...], files: str) -> None:
    """It goes on, loses and doubles no number, and reads what it read before."""
    kept, output = belljar.folder / "kept", belljar.folder / "output"
    script = WRITES.format(sum=SUM.format(files=files))
    with open(output, "wb") as stdout:
        job = belljar.popen("run", *machine, "--user", "0:0", "--cwd", "/", "--", "sh", "-c", script, stdout=stdout)
    size = 0
    for data in growth(output):
        size += len(data)
        if size > 500:
            break
    (id,) = belljar.machines()
    done = belljar("checkpoint", "--stop", id, str(kept), timeout=LONGEST)
    assert (done.returncode, job.wait(LONGEST)) == (0, os.EX_TEMPFAIL), done.stderr
    gone = belljar.run("--restore", str(kept), timeout=LONGEST)
    assert gone.returncode == 7, gone.stderr
    assert output.read_bytes() + gone.stdout == WROTE and belljar.leftovers() == []
