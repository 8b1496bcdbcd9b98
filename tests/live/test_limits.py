"""Limits of the caller that bind QEMU too."""

import resource
import signal
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.test_faults import report

from belljar.batch import Settings
from belljar.batch.job.policy import guest_memory


def test_a_limit_on_processor_time_ends_the_payload_as_it_would_outside(belljar: Belljar, tmp_path: Path) -> None:
    belljar.run("--", "true")  # the template is not to be made within the limit

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (4, 4))

    words = ("--report", str(tmp_path / "r"), "--", "sh", "-c", "echo up; while :; do :; done")
    done = belljar.run(*words, preexec_fn=limited)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = report(tmp_path / "r")
    # Both sides count to 4 s: QEMU's usually come first, on a busy host the guest's, which counts what it was kept waiting.
    assert told["signal"] == 9 and told["class"] in ("cancelled", "payload")
    if told["class"] == "cancelled":
        assert told["reason"] == "the limit of 4 s of processor time was reached"
    assert belljar.leftovers() == []


def test_a_small_limit_on_address_space_is_enough(belljar: Belljar) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    done = belljar.run("--", "echo", "up", preexec_fn=limited)
    assert (done.returncode, done.stdout) == (0, b"up\n"), done.stderr


@pytest.mark.slow
def test_many_writers_fit_into_a_limit_on_data(belljar: Belljar) -> None:
    """As Torque's `-l mem=700mb` sets it, soft and hard. QEMU's own number of workers for disks did not fit."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20))

    script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do dd if=/dev/zero of=/var/tmp/$i bs=1M count=40 conv=fsync & done; wait; echo up"
    memory = guest_memory(700 << 20, -1, Settings(), 0, data=700 << 20) >> 20
    done = belljar.run("--memory", f"{memory}M", "--", "sh", "-c", script, preexec_fn=limited)
    assert (done.returncode, done.stdout) == (0, b"up\n"), done.stderr
