"""What libvirt is asked for, written down whole: one golden file for each kind of domain, each true to libvirt's own
schema. `BELLJAR_GOLDEN=write` renews them."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.errors import UsageError
from belljar.hypervisor import Accelerator, Boot, DomainSpec, ExtraDisk, Nic
from belljar.hypervisor.libvirt import Ends
from belljar.hypervisor.libvirt.xml import domain_xml
from belljar.model import GIB, MIB, Firmware, NetworkMode, Share

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
COLD = DomainSpec(
    id="0123456789ab", cpus=2, memory=512 * MIB, image_digest="d" * 64,
    boot=Boot(Path("/images/kernel"), Path("/images/initrd"), "console=ttyS0 quiet", "b" * 64),
    disk=Path("/scratch/0123456789ab.qcow2"), disk_size=8 * GIB, accelerator=Accelerator.TCG, folder=Path("/run/m"),
)  # fmt: skip
ENDS = Ends((Path("/scratch/0123456789ab.qcow2"), Path("/images/disk")), emulator="/usr/bin/qemu-system-x86_64")
KVM = replace(COLD, accelerator=Accelerator.KVM)
CHAINED = ExtraDisk("foreign", Path("/scratch/id.foreign"), "qcow2", readonly=False, chained=True)
PACKED = ExtraDisk("packed0", Path("/scratch/id.packed0"), "raw", readonly=True)
SHARES = (
    Share("/data,<with>&\"quotes'", "/in", True),
    Share("/home/me", "/in", False),
)

CASES = {
    "tcg": (COLD, ENDS),
    "kvm": (KVM, replace(ENDS, cpu="host", label=(1000, 100))),
    "model": (KVM, replace(ENDS, cpu="Skylake-Server")),
    "bios": (replace(COLD, boot=Boot()), ENDS),
    "uefi": (replace(COLD, boot=Boot(firmware=Firmware.UEFI)), replace(ENDS, firmware="/usr/share/ovmf/OVMF.fd")),
    "disc": (replace(COLD, boot=Boot(is_disc=True)), ENDS),
    "all": (
        replace(
            COLD, nic=Nic(NetworkMode.USER, "52:01:02:03:04:05"), shares=SHARES, disks=(PACKED, CHAINED),
            seed=Path("/run/m/seed.iso"),
        ),
        replace(ENDS, below=((), (Path("/images/a"), Path("/images/b")))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_document_is_the_one_written_down(name: str) -> None:
    text = domain_xml(*CASES[name])
    if os.environ.get("BELLJAR_GOLDEN") == "write":
        (GOLDEN / f"{name}.xml").write_text(text)
    assert text == (GOLDEN / f"{name}.xml").read_text()


def test_each_golden_file_is_true_to_the_schema_of_libvirt() -> None:
    assert SCHEMA.exists(), "libvirt's schema (libvirt-clients) is not installed: `scripts/prepare dev` does that"
    files = sorted(map(str, GOLDEN.glob("*.xml")))
    assert len(files) == len(CASES)
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", str(SCHEMA), *files],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("spec", "ends", "named"),
    [
        (replace(COLD, disks=(PACKED,) * 40), replace(ENDS, below=((),) * 40), "so many disks"),
        (COLD, replace(ENDS, cpu="max,-avx"), "max,-avx"),
        (replace(COLD, shares=(Share("/x\udc80", "/in", True),)), ENDS, "UTF-8"),
        (replace(COLD, shares=(Share("/x\x01", "/in", True),)), ENDS, "control characters"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(spec: DomainSpec, ends: Ends, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        domain_xml(spec, ends)


def test_libvirt_is_left_no_chain_to_find_out_for_itself() -> None:
    """It would read headers of files that a guest wrote."""
    for name in CASES:
        text = domain_xml(*CASES[name])
        ends = text.count("<backingStore/>")
        assert ends == text.count("<disk "), name
