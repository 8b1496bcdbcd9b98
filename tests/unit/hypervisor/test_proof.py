"""Whether KVM works: what is asked before anything is started, and how long an answer is believed."""

from pathlib import Path

import pytest

from belljar.hypervisor.qemu import proof
from belljar.hypervisor.qemu.proof import Proof, recall, remember

DAY = 86400.0
INTEL = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu vme vmx sse2\n"
PLAIN = "processor\t: 0\nmodel name\t: a processor with vmx in its name\nflags\t\t: fpu vme sse2\n"


def test_without_the_device_nothing_is_tried(tmp_path: Path) -> None:
    assert "does not exist" in proof.obstacle(tmp_path / "kvm")


def test_a_device_that_may_be_used_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    assert proof.obstacle(tmp_path / "kvm") == ""


def test_only_the_flags_line_counts() -> None:
    assert proof.has_native_flag(INTEL)
    assert not proof.has_native_flag(PLAIN)
    assert not proof.has_native_flag("")


def test_the_order_of_flags_does_not_matter_their_presence_does() -> None:
    assert proof.cpu_flags("flags : a b c\n") == proof.cpu_flags("flags : c b a\n") != proof.cpu_flags("flags : a b\n")


def test_yes_is_believed_for_good_and_no_for_a_day(tmp_path: Path) -> None:
    yes, no = tmp_path / "yes.json", tmp_path / "no.json"
    remember(yes, Proof(True, "it booted"), 1000.0)
    remember(no, Proof(False, "it did not"), 1000.0)
    assert recall(yes, 1000.0 + 365 * DAY) == Proof(True, "it booted")
    assert recall(no, 1000.0 + DAY - 1) == Proof(False, "it did not")
    assert recall(no, 1000.0 + DAY + 1) is None
    assert recall(no, 500.0) is None  # from the future: the clock was wrong once


@pytest.mark.parametrize("rubbish", [b"", b"[]", b"{}", b'{"works": true}', b'{"works": 1, "why": 2, "when": "x"}'])
def test_a_broken_memory_is_no_answer(tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / "memory").write_bytes(rubbish)
    assert recall(tmp_path / "memory", 0.0) is None
    assert recall(tmp_path / "missing", 0.0) is None


def test_another_kernel_qemu_host_or_processor_asks_again() -> None:
    names = {proof.memory_name(*words) for words in (("a", "b", "c", "d"), ("x", "b", "c", "d"), ("a", "x", "c", "d"), ("a", "b", "x", "d"), ("a", "b", "c", "x"))}  # fmt: skip
    assert len(names) == 5
