"""What a clone gets that its template did not have, as commands for QEMU's monitor, when its state is loaded.

A guest takes memory in whole blocks, so what is plugged in is rounded up to them; its agent keeps the rest from the payload.
https://www.kernel.org/doc/html/latest/admin-guide/mm/memory-hotplug.html
"""

from __future__ import annotations

from belljar.errors import PlugRefused
from belljar.hints import Any
from belljar.hypervisor import Accelerator, DomainSpec, Frame
from belljar.hypervisor.devices import kinds_of, served
from belljar.hypervisor.qemu.abilities import PLUGGED_CPUS, Abilities
from belljar.hypervisor.qemu.cmdline import SLOTS, pieces
from belljar.hypervisor.qemu.domain import RESIZE, Command

MOST_CPUS = 255  # more take an interrupt remapper
MOST_MEMORY = 512 << 30  # of address space: an emulated processor has 40 bits of it
# For a kernel whose clones get more, or less: a small buffer for DMA, and the books of new memory in that memory. Its code is not
# rewritten when the second processor comes. What nobody uses is not filled with zeros when it is held back: the host would have to
# give it. https://www.kernel.org/doc/html/latest/admin-guide/kernel-parameters.html
WORDS = "swiotlb=512 memory_hotplug.memmap_on_memory=1 noreplace-smp init_on_alloc=0 belljar.net"
# How long its delay loops are (2.5 GHz at 250 Hz) is not measured anew on each processor: emulated hardware needs none of them.
EMULATED = "lpj=10000000"
DISK = "disk0"


def frame_of(spec: DomainSpec, abilities: Abilities, *, memory: int, disk: int, cpus: int, total: int) -> Frame | None:
    """The size of a base template, by the host's *cpus* and *total* memory; None where this does not work."""
    if "pc-dimm" not in abilities.devices or PLUGGED_CPUS not in abilities.features:
        return None
    memory = -(-memory // Frame.block) * Frame.block
    # The next power of two: a little memory more or less in the host makes no other template.
    most = min(max(1 << (total - 1).bit_length(), 2 * memory), MOST_MEMORY)
    words = f"{EMULATED} {WORDS}" if spec.accelerator is Accelerator.TCG else WORDS
    frame = Frame(1, memory, disk, min(cpus, MOST_CPUS), most, words=words)
    fits = spec.cpus <= frame.most_cpus and spec.memory <= most and spec.disk_size >= disk
    return frame if fits and len(pieces(spec.memory - memory, memory)) <= SLOTS else None


def commands(spec: DomainSpec, slots: Any) -> list[Command]:
    """All that a clone gets; what serves it a folder shares its memory. *slots*: QEMU's answer to CPU_SLOTS. Raises PlugRefused."""
    booted, is_shared = spec.of_template, bool(served(spec))
    plugged: list[Command] = []
    for number, size in enumerate(pieces(spec.plugged, booted.memory)):
        kind = {"qom-type": "memory-backend-memfd", "share": True} if is_shared else {"qom-type": "memory-backend-ram"}
        plugged.append(("object-add", {**kind, "id": f"more{number}", "size": size}))
        plugged.append(("device_add", {"driver": "pc-dimm", "id": f"dimm{number}", "memdev": f"more{number}"}))
    devices = (device for kind in kinds_of(spec) for device in kind.plugged(spec))
    plugged += [("device_add", device) for device in (*processors(spec.cpus - booted.cpus, slots), *devices)]
    if spec.disk_size > booted.disk_size:
        plugged.append((RESIZE, {"node-name": DISK, "size": spec.disk_size}))
    return plugged


def processors(count: int, slots: Any) -> list[dict[str, Any]]:
    """So many of those that QEMU says are free, in their order."""
    if count <= 0:
        return []
    try:
        free = [(str(slot["type"]), dict(slot["props"])) for slot in slots if "qom-path" not in slot]
    except (TypeError, KeyError, ValueError) as exc:
        raise PlugRefused("QEMU did not tell which processors can be plugged in") from exc
    free.sort(key=lambda processor: sorted(processor[1].items()))
    if len(free) < count:
        raise PlugRefused(f"QEMU has room for {len(free)} more processors, {count} are wanted")
    return [{"driver": kind, "id": f"cpu{number}", **props} for number, (kind, props) in enumerate(free[:count], 1)]
