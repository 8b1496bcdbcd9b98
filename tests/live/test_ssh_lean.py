"""Images with an ssh server, a shell and nothing else, and what becomes of a machine nobody gets into."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.lean import lean

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(params=["openssh", "dropbear"])
def image(belljar: Belljar, request: pytest.FixtureRequest) -> str:
    return lean(belljar, str(request.param))


@pytest.fixture
def openssh(belljar: Belljar) -> str:
    return lean(belljar, "openssh")


def outcome_of(
    belljar: Belljar, image: str, *words: str, **options: Any
) -> tuple[subprocess.CompletedProcess[bytes], Any]:
    report = belljar.folder / "report.json"
    done = belljar.run("--image", image, "--context", "ssh", "--cwd", "/", "--report", str(report), *words, **options)
    return done, json.loads(report.read_text())


def test_a_shell_and_a_server_are_enough_cold_and_cloned(belljar: Belljar, image: str) -> None:
    says = "cat; echo err >&2; hostname; id -u; cat /etc/machine-id; command -v perl python3 bash; exit 7"
    machines = []
    for start in ("cold", "clone", "clone"):
        done, outcome = outcome_of(belljar, image, "--start", start, "--", "sh", "-c", says, input=b"heard\n")
        assert (done.returncode, done.stderr) == (7, b"err\n"), outcome
        said = done.stdout.decode().split()
        assert said[:3] == ["heard", f"belljar-{outcome['id']}", "0"] and len(said) == 4
        assert (outcome["start"], outcome["context"]) == (start, "ssh")
        machines.append(said[3])
    assert len(set(machines)) == 3
    assert belljar.leftovers() == []


def test_two_clones_of_a_kernel_without_vmgenid_are_no_twins(belljar: Belljar) -> None:
    image, drawn = lean(belljar, "cloud"), set()
    for _ in range(2):
        done, outcome = outcome_of(
            belljar, image, "--start", "clone", "--", "sh", "-c", "head -c 16 /dev/urandom | od -A n -t x1"
        )
        assert (done.returncode, outcome["start"]) == (0, "clone"), done.stderr
        drawn.add(done.stdout)
    assert len(drawn) == 2


def test_a_kernel_without_9p_is_named(belljar: Belljar, tmp_path: Path) -> None:
    image = lean(belljar, "cloud")
    done, outcome = outcome_of(belljar, image, "--start", "cold", "--share", f"{tmp_path}:/mnt", "--", "true")
    assert done.returncode == 125 and outcome["error"] == "NoNineP"
    assert b"the kernel of the image lean-cloud has no 9p" in done.stderr


def test_exit_codes_and_signals_are_told_apart(belljar: Belljar, openssh: str) -> None:
    for script, code in (("exit 137", 137), ("kill -9 $$", -9), ("kill -TERM $$", -15), ("exit 255", 255)):
        assert outcome_of(belljar, openssh, "--", "sh", "-c", script)[0].returncode == code, script


def test_another_user_runs_the_job(belljar: Belljar, openssh: str) -> None:
    says = "id -u; id -g; cd; pwd; touch mine; stat -c %u mine; cat /etc/shadow"
    done, _ = outcome_of(belljar, openssh, "--user", "54321:54322", "--", "sh", "-c", says)
    assert done.stdout.split() == [b"54321", b"54322", b"/home/user54321", b"54321"]
    assert b"Permission denied" in done.stderr


def test_files_scratch_and_a_share(belljar: Belljar, openssh: str, tmp_path: Path) -> None:
    tree, shared = tmp_path / "in", tmp_path / "shared"
    (tree / "below").mkdir(parents=True)
    (tree / "below/data").write_bytes(bytes(range(256)) * 100)
    shared.mkdir()
    (shared / "there").write_text("from outside\n")
    says = (
        "cp -r /tmp/in /tmp/out && cat /mnt/there && echo inside > /mnt/written && grep -c ' /scratch ext4' /proc/mounts"
        " && df -k /scratch | tail -n 1 | while read -r a size rest; do [ $size -gt 40000 ] && echo large; done"
    )
    words = (
        "--in",
        f"{tree}:/tmp/in",
        "--out",
        f"/tmp/out:{tmp_path}/out",
        "--scratch",
        "64M",
        "--share",
        f"{shared}:/mnt:rw",
    )
    done, outcome = outcome_of(belljar, openssh, *words, "--", "sh", "-c", says)
    assert done.returncode == 0, (done.stderr, outcome)
    assert done.stdout.split() == [b"from", b"outside", b"1", b"large"]
    assert (tmp_path / "out/below/data").read_bytes() == (tree / "below/data").read_bytes()
    assert (shared / "written").read_text() == "inside\n"


def test_another_network_than_qemus_own_is_refused(belljar: Belljar, openssh: str) -> None:
    words = ("--context", "ssh", "--cwd", "/", "--network", "isolated:lean")
    done = belljar.run("--image", openssh, *words, "--", "true")
    assert done.returncode == 125 and b"qemu's own user network" in done.stderr.lower(), done.stderr
    assert belljar.leftovers() == []


def test_a_second_command_runs_in_a_machine_that_runs(belljar: Belljar, openssh: str) -> None:
    keeper = belljar.popen(
        "run", "--image", openssh, "--context", "ssh", "--cwd", "/", "--", "sh", "-c", "echo up; sleep 1000"
    )
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    (machine,) = belljar.machines()
    done = belljar("exec", machine, "--", "sh", "-c", "hostname; exit 4")
    assert (done.returncode, done.stdout) == (4, f"belljar-{machine}\n".encode())


# -- nobody gets in ------------------------------------------------------------------------------------------------------


def amended(belljar: Belljar, image: str, name: str, rc: str, tmp_path: Path) -> str:
    """The image with further lines in its start script, in a store of the test's own."""
    from tests.live.stock.build import execute
    from tests.live.stock.lean import RC, build

    raw, script = tmp_path / "amended.raw", tmp_path / "rc"
    execute("qemu-img", "convert", "-O", "raw", str(build("openssh")), str(raw))
    script.write_text(RC + rc)
    commands = f"rm /etc/rc\nwrite {script} /etc/rc\nset_inode_field /etc/rc mode 0100755\n"
    subprocess.run(["debugfs", "-w", str(raw)], input=commands.encode(), capture_output=True, check=True, timeout=60)
    belljar.env["BELLJAR_PATHS_STORE"] = str(tmp_path / "store")
    done = belljar("image", "import", str(raw), "--name", name)
    assert done.returncode == 0, done.stderr.decode()
    raw.unlink()
    return name


def test_a_server_that_does_not_take_the_key_is_named(belljar: Belljar, openssh: str, tmp_path: Path) -> None:
    image = amended(belljar, openssh, "deaf", "rm /root/.ssh/authorized_keys\n", tmp_path)
    done, outcome = outcome_of(
        belljar, image, "--start", "cold", "--", "true", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "200"}
    )
    assert done.returncode == 125 and outcome["error"] == "SshRefused"
    assert b"does not accept belljar's key" in done.stderr


def test_a_server_that_never_comes_ends_with_the_boot_deadline(belljar: Belljar, openssh: str, tmp_path: Path) -> None:
    image = amended(belljar, openssh, "mute", "sleep 10000\n", tmp_path)
    done, outcome = outcome_of(belljar, image, "--start", "cold", "--", "true", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "15"})
    assert done.returncode == 125 and outcome["error"] == "BootTimeout"
    assert b"ssh server to let belljar in" in done.stderr


def test_a_machine_that_goes_off_before_it_answers_has_died(belljar: Belljar, openssh: str, tmp_path: Path) -> None:
    image = amended(belljar, openssh, "short", "poweroff -f\n", tmp_path)
    done, outcome = outcome_of(belljar, image, "--start", "cold", "--", "true")
    assert done.returncode == 125 and outcome["error"] not in ("SshRefused", "BootTimeout")


def test_a_server_that_dies_amid_the_job_is_nothing_to_it(belljar: Belljar, openssh: str) -> None:
    says = "for p in $(pidof sshd); do kill -9 $p; done; echo done; exit 3"
    done, outcome = outcome_of(belljar, openssh, "--start", "cold", "--", "sh", "-c", says)
    assert (done.returncode, done.stdout, outcome["exit_code"]) == (3, b"done\n", 3)
    assert belljar.leftovers() == []


def test_the_machine_leaves_nothing_behind_when_its_supervisor_is_killed(belljar: Belljar, openssh: str) -> None:
    keeper = belljar.popen(
        "run", "--image", openssh, "--context", "ssh", "--cwd", "/", "--", "sh", "-c", "echo up; sleep 1000"
    )
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    os.kill(keeper.pid, 9)
    keeper.wait(30)
    assert belljar("reap").returncode == 0
    assert belljar.leftovers() == []
