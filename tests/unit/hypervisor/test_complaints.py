"""What QEMU and setpriv have been heard to say when they could not go on, and what we make of it."""

import pytest

from belljar.errors import (
    BelljarError,
    CommandMissing,
    DomainDied,
    HostError,
    ImageCorrupt,
    NoMemory,
    NoSpace,
    NotPermitted,
    OverLimit,
    TemplateError,
)
from belljar.hypervisor.qemu.process.complaints import explain, last_line
from belljar.hypervisor.qemu.process.launch import ended

Q = "qemu-system-x86_64: "
HEARD: list[tuple[str, type[BelljarError]]] = [
    (Q + "cannot set up guest memory 'pc.ram': Cannot allocate memory", NoMemory),
    (Q + "unable to map backing store for guest RAM: Cannot allocate memory", NoMemory),
    (Q + "Could not access KVM kernel module: Permission denied", HostError),
    (Q + "Could not access KVM kernel module: No such file or directory\n" + Q + "failed to initialize kvm: No such file or directory", HostError),
    (Q + "error: failed to set MSR 0x10a to 0x0", HostError),
    (Q + "-accel kvm: invalid accelerator kvm", HostError),
    (Q + "Invalid SMP CPUs 1000. The max CPUs supported by machine 'pc-q35-7.2' is 288", OverLimit),
    (Q + "Address space limit 0x3ff < 0x40 phys-bits too low (40)", OverLimit),
    (Q + "-device virtio-blk-pci,drive=disk0: Failed to get \"write\" lock\nIs another process using the image [/x]?", HostError),
    (Q + "-blockdev {}: Image is not in qcow2 format", ImageCorrupt),
    (Q + "-blockdev {}: qcow2: Marking image as corrupt: L1 entry out of range", ImageCorrupt),
    ("qemu: could not open kernel file '/proc/self/fd/9': Permission denied", ImageCorrupt),
    (Q + "error while loading state for instance 0x0 of device 'pci@1af4'\n" + Q + "load of migration failed: Invalid argument", TemplateError),
    (Q + "Unknown savevm section or instance '0000:00:02.0/virtio-net' 0.", TemplateError),
    (Q + "-device virtio-9p-pci: 'virtio-9p-pci' is not a valid device model name", HostError),
    (Q + "unable to find CPU model 'Nehalen'", HostError),
    (Q + "-fsdev local,id=share0: cannot initialize fsdev 'share0': failed to open '/x': Permission denied", NotPermitted),
    ("qemu-system-x86_64: error while loading shared libraries: libgnutls.so.30: failed to map segment from shared object", NoMemory),
    ("qemu-system-x86_64: error while loading shared libraries: libfoo.so: cannot open shared object file", HostError),
    ("setpriv: setresuid failed: Operation not permitted", NotPermitted),
    ("setpriv: failed to execute /no/qemu: No such file or directory", CommandMissing),
    (Q + "-sandbox on: failed to install seccomp syscall filter", HostError),
    (Q + "write error: No space left on device", NoSpace),
    ("qemu: qemu_thread_create: Resource temporarily unavailable", HostError),
]  # fmt: skip


@pytest.mark.parametrize(("said", "kind"), HEARD, ids=lambda value: value[-40:] if isinstance(value, str) else "")
def test_what_qemu_was_heard_to_say_is_one_of_our_errors(said: str, kind: type[BelljarError]) -> None:
    error = explain(said, 256, "starting")
    assert type(error) is kind
    assert error.hint
    assert "\n" not in error.message


def test_too_little_address_space_is_told_where_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"{Q}unable to map backing store for guest RAM: Cannot allocate memory\n"
    assert "ulimit" not in explain(said, 256, "starting").hint
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 29, 1 << 29))
    assert "`ulimit -v`" in explain(said, 256, "starting").hint


def test_the_unknown_is_quoted_as_it_is() -> None:
    error = explain(f"warning: harmless\n{Q}something new\n", 256, "starting")
    assert type(error) is DomainDied
    assert error.message == "QEMU ended while starting: something new"


def test_a_silent_end_is_told_by_its_status() -> None:
    assert explain("", 9, "stopping").message == "QEMU ended while stopping: killed by SIGKILL"
    assert ended(256) == "exit code 1"
    assert ended(0) == "exit code 0"
    assert ended(None) == "no reason known"


def test_only_the_last_line_counts_and_it_is_short() -> None:
    assert last_line("a\nb\n\n") == "b"
    assert len(last_line("x" * 10_000)) == 300
