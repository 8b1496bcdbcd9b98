"""Whether KVM works is proved by a guest: on every host the answer comes within its deadline, and is remembered."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.live import tiny
from tests.live.tiny import Tiny

from belljar.hypervisor import Accelerator, Boot, Settings
from belljar.hypervisor.qemu import cmdline, proof
from belljar.hypervisor.qemu.driver import QemuHypervisor

TIMEOUT = 3.0  # seconds; where KVM works the tiny guest needs less than one


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's own guests, but with an accelerator that works everywhere."""
    real = cmdline.tiny_guest

    def pretend(*parts: object, **more: object) -> list[str]:
        return ["tcg" if word == "kvm" else word for word in real(*parts, **more)]  # type: ignore[arg-type]

    monkeypatch.setattr(cmdline, "tiny_guest", pretend)
    monkeypatch.setattr(proof, "obstacle", lambda: "")


@pytest.mark.parametrize("cpu", ["auto", "qemu64"])
def test_the_answer_comes_before_the_deadline_and_then_at_once(guests: Tiny, tmp_path: Path, cpu: str) -> None:
    hypervisor = QemuHypervisor(Settings(proof_timeout=TIMEOUT, cpu=cpu), tmp_path)
    started = time.monotonic()
    first = hypervisor.accelerator(guests.boot)
    assert time.monotonic() - started < TIMEOUT + 5
    started = time.monotonic()
    assert hypervisor.accelerator(guests.boot) == first
    assert time.monotonic() - started < 0.5
    assert first[1]


@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_boots_is_proof(guests: Tiny, tmp_path: Path) -> None:
    hypervisor = QemuHypervisor(Settings(proof_timeout=tiny.LONGEST, cpu="max"), tmp_path)
    chosen, why = hypervisor.accelerator(guests.boot)
    assert (chosen, "booted" in why) == (Accelerator.KVM, True)


@pytest.mark.usefixtures("emulated")
def test_a_kernel_without_a_root_that_panics_has_booted_too(guests: Tiny, tmp_path: Path) -> None:
    hypervisor = QemuHypervisor(Settings(proof_timeout=tiny.LONGEST, cpu="max"), tmp_path)
    alone = replace(guests.boot, initrd=None, digest="kernel alone")
    assert hypervisor.accelerator(alone)[0] is Accelerator.KVM


@pytest.mark.usefixtures("emulated")
def test_without_a_kernel_the_firmware_is_proof_where_the_processor_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "has_native_flag", lambda cpuinfo: True)
    hypervisor = QemuHypervisor(Settings(proof_timeout=tiny.LONGEST, cpu="max"), tmp_path)
    assert hypervisor.accelerator(Boot())[0] is Accelerator.KVM


@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_does_not_boot_is_no_proof_and_leaves_nothing(guests: Tiny, tmp_path: Path) -> None:
    (tmp_path / "rubbish").write_bytes(b"\xeb\xfe" * 4096)
    hypervisor = QemuHypervisor(Settings(proof_timeout=1.0, cpu="max"), tmp_path / "store")
    chosen, why = hypervisor.accelerator(Boot(tmp_path / "rubbish", None, "", "rubbish"))
    assert chosen is Accelerator.TCG
    assert why
