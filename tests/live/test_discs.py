"""A small disc in the place of a CernVM's: firmware boots it, it finds its user data, works, and says how it went."""

import time
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar
from tests.live.small_disc import make_disc

USER_DATA = """\
echo "uuid=##user_data_uuid## q=##user_data_option_q## proxy=##user_data_option_cvmfs_proxy## left=##user_data_option_none##"
for disk in /sys/block/vd*; do echo "disk=$(b cat $disk/serial):$(b cat $disk/size)"; done
echo "job_id=$(b wget -q -O - ##user_data_jobfeatures_url##/job_id)"
echo "uuid_again=$(b wget -q -O - http://169.254.169.254/latest/meta-data/instance-id)"
b head -c 3000000 /dev/zero > /big; put big /big
echo "501 not the disk I need" > /message; put shutdown_message /message
put .hidden /message
"""
CACHE = """for disk in /sys/block/vd*; do [ "$(b cat $disk/serial)" != cache ] || cache=/dev/${disk##*/}; done
b mkdir /cache; b mount -t ext4 $cache /cache && echo "found=$(b cat /cache/left)"
echo "by ##user_data_uuid##" > /cache/left
b umount /cache
"""


@pytest.fixture
def cernvm(belljar: Belljar, tmp_path: Path) -> Belljar:
    """Its own store has the disc."""
    done = belljar.run("--", "sh", "-c", "cat /boot/vmlinuz-*")
    assert done.returncode == 0, done.stderr.decode()
    (tmp_path / "vmlinuz").write_bytes(done.stdout)
    (ramdisk,) = [path for path in (STORE / "images").glob("sha256-*/initrd")][:1]
    make_disc(tmp_path / "small.iso", tmp_path / "vmlinuz", ramdisk)
    own = Belljar(tmp_path / "own", tmp_path / "own/store")
    assert own("image", "import", str(tmp_path / "small.iso"), "--name", "cernvm").returncode == 0
    return own


def test_a_pilot_reads_its_user_data_works_and_says_how_it_went(cernvm: Belljar, tmp_path: Path) -> None:
    (tmp_path / "pilot").write_text(USER_DATA + CACHE)
    done = cernvm.run(
        "--image", "cernvm", "--network", "user", "--user-data", str(tmp_path / "pilot"), "--user-data-option", "q=night",
        "--disk", "1G", "--cache", "32M", "--timeout", "180s",
        env={"BELLJAR_CONTEXT_CVMFS_PROXY": "http://squid:3128;DIRECT", "BELLJAR_CONTEXT_JOBOUTPUTS_SIZE": "1M"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, b""), done.stderr.decode()
    assert b"the guest powered itself off: 501 not the disk I need" in done.stderr
    (machine,) = [path.name for path in cernvm.logs.iterdir() if len(path.name) == 12]
    said = dict(
        line.split("=", 1) for line in cernvm("logs", machine, "--console").stdout.decode().splitlines() if "=" in line
    )
    assert said["uuid"].endswith(" q=night proxy=http://squid:3128;DIRECT left=")
    assert said["uuid"].startswith(said["uuid_again"]) and said["job_id"] == machine
    console = cernvm("logs", machine, "--console").stdout.decode()
    assert "disk=empty:2097152" in console and "HTTP/1.1 413" in console and "HTTP/1.1 403" in console
    assert cernvm("logs", machine, "--joboutputs").stdout.split() == [b"24", b"shutdown_message"]
    assert cernvm("logs", machine, "--joboutput", "shutdown_message").stdout == b"501 not the disk I need\n"
    assert b"shutdown_message (24 B)" in cernvm("show", machine).stdout
    assert cernvm.leftovers() == [str(cernvm.scratch / "caches")]


@pytest.mark.slow
def test_a_cache_is_found_again_by_the_next_machine(cernvm: Belljar, tmp_path: Path) -> None:
    (tmp_path / "pilot").write_text(CACHE)
    for number in (1, 2):
        done = cernvm.run(
            "--image", "cernvm", "--network", "user", "--user-data", str(tmp_path / "pilot"), "--cache", "32M",
            "--timeout", "180s",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        (machine,) = [
            path.name for path in cernvm.logs.iterdir() if len(path.name) == 12 and not (path / "seen").exists()
        ]
        console = cernvm("logs", machine, "--console").stdout.decode()
        assert ("found=by " in console) == (number == 2), console
        (cernvm.logs / machine / "seen").touch()
    assert [one["state"] for one in cernvm.json("cache", "list")] == ["ready"]
    assert cernvm("cache", "remove").returncode == 0 and list((cernvm.scratch / "caches").iterdir()) == []


@pytest.mark.slow
def test_a_line_on_its_console_shows_that_a_guest_is_ready(cernvm: Belljar, tmp_path: Path) -> None:
    (tmp_path / "pilot").write_text('b sleep 3\necho "all is set up"\nb sleep 600\n')
    done = cernvm.run(
        "--detach", "--image", "cernvm", "--network", "user", "--user-data", str(tmp_path / "pilot"), "--timeout", "180s",
        "--ready", "line:all is set up",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    id, end = done.stdout.decode().strip(), time.monotonic() + 120
    while (shown := cernvm.json("show", id))["state"] != "running":
        assert time.monotonic() < end and shown["outcome"] is None, cernvm("logs", id, "--console").stdout.decode()
        time.sleep(0.5)
    told = cernvm("logs", id, "--journal").stdout.decode()
    assert "ready" in told and "all is set up" in told
    assert "all is set up" in cernvm("logs", id, "--console").stdout.decode()  # not before it was said
    assert cernvm("kill", id).returncode == 0
