"""How large a guest may be inside a job's limits, so that no limit of the job ever meets QEMU."""

from __future__ import annotations

from belljar.batch import Settings
from belljar.errors import BadSetting, OverLimit
from belljar.model import MIB

SMALLEST_GUEST = 128 * MIB
STEPS = 32  # a guest's size is cut to one of so many per power of two, for each size has a template of its own
SMALLEST_STEP = 2 * MIB
# Address space that QEMU takes beside the guest's memory: libraries, stacks of threads, the translator's buffer and
# buffers of devices: 341 MiB were measured for 512 MiB and for 1 GiB of guest memory with TCG.
ADDRESS_SPACE = 448 * MIB
# The same of what a limit on a process's data counts (`ulimit -d`; Torque's `-l mem=`), with QEMU's few workers for disks.
DATA_SPACE = 288 * MIB


def guest_memory(limit: int | None, address_space: int, settings: Settings, default: int, *, data: int = -1) -> int:
    """Bytes of memory for the guest of a job that may use *limit* bytes (None: the system sets no limit), *address_space*
    bytes of virtual memory (-1: any) and *data* bytes of what it writes to (-1: any). Raises OverLimit when nothing
    useful is left."""
    bounds = [] if limit is None else [(limit - overhead(limit, settings), limit, smallest_limit(settings))]
    for most, part in ((address_space, ADDRESS_SPACE), (data, DATA_SPACE)):
        bounds += [(most - part, most, SMALLEST_GUEST + part)] if most >= 0 else []
    size, got, needed = min(bounds, default=(default, 0, 0))
    if bounds and (size < SMALLEST_GUEST or got < needed):
        raise OverLimit(
            f"{got // MIB} MiB of memory: a job in a machine needs at least {needed // MIB} MiB,"
            " for the guest and for what makes it",
            hint="Ask for more memory, or run the job without a machine.",
        )
    return rounded(min(size, default) if limit is None else size) if bounds else size


def smallest_limit(settings: Settings) -> int:
    """The least memory limit of a job with which it gets a machine: whole MiB. Raises BadSetting."""
    if settings.overhead_percent >= 100:
        raise BadSetting(f"batch.overhead_percent = {settings.overhead_percent:g}: nothing is left for the guest")
    share = SMALLEST_GUEST * 100 / (100 - settings.overhead_percent)
    limit = -(-max(SMALLEST_GUEST + settings.overhead, int(share)) // MIB) * MIB
    return limit if limit - overhead(limit, settings) >= SMALLEST_GUEST else limit + MIB


def overhead(limit: int, settings: Settings) -> int:
    """What QEMU and belljar may use of a limit."""
    return max(settings.overhead, int(limit * settings.overhead_percent / 100))


def rounded(size: int) -> int:
    """*size* cut down to one of STEPS sizes per power of two (at most 3 % less), in whole large pages."""
    step = max(SMALLEST_STEP, (1 << (size.bit_length() - 1)) // STEPS)
    return size // step * step
