"""What QEMU lists as its processors."""

from belljar.hypervisor.qemu.values import read_models

OLDER = """Available CPUs:
x86 486                   (alias configured by machine type)
x86 Broadwell-v1          Intel Core Processor (Broadwell)
x86 max                   Enables all features supported by the accelerator in the current host

Recognized CPUID flags:
  3dnow 3dnowext
"""
NEWER = """Available CPUs:
  486                   (alias configured by machine type)
  max                   Enables all features supported by the accelerator in the current host

Recognized CPUID flags:
  3dnow 3dnowext
"""


def test_the_models_are_read_in_the_forms_of_older_and_newer_qemu() -> None:
    assert read_models(OLDER) == {"486", "Broadwell-v1", "max"}
    assert read_models(NEWER) == {"486", "max"}
    assert read_models("") == set()
