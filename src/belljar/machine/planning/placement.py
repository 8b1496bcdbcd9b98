"""Which processors a machine is pinned to, what its guest sees of them, and what its memory consists of: decided before it is planned.

A template is booted with one processor in one socket, and its memory is one file that its clones share. What differs from that is
booted cold (docs/develop/decisions/0032-processors-and-memory.md).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from belljar.errors import NoProcessors
from belljar.host.room import Cpu, Placement, Taken
from belljar.hypervisor import DomainSpec, Layout, Node
from belljar.model import MachineSpec, Pages, Pin, Topology


def pinned(machine: MachineSpec, others: Iterator[Taken], *, can_pin: bool) -> Placement:
    """The cpus that its virtual ones are pinned to, among those that no other machine of this user is. Raises NoProcessors where that
    was insisted on and is not possible."""
    pin, allowed, count = machine.pin, os.sched_getaffinity(0), os.cpu_count() or 1
    if pin is Pin.NONE or not can_pin:
        placement = Placement(reason="asked for" if can_pin else "libvirt places its domains itself (`virsh vcpupin`)")
    elif pin is Pin.AUTO and len(allowed) >= count:
        placement = Placement(reason=f"this process may use all {count} cpus of this host, as others may")
    else:
        from belljar.host.devices import topology

        had = {cpu for other in others for cpu in other.need.pinned}
        placement = topology.place(pin, machine.cpus, topology.read_cpus(allowed), had)
    if pin is Pin.CPUS and not placement.cpus:
        raise NoProcessors(f"--pin cpus: {placement.reason}", hint="Ask for fewer with --cpus, or leave --pin out.")
    return placement


def layout_of(topology: Topology, cpus: Sequence[Cpu], memory: int, block: int, *, must_clone: bool) -> Layout | None:
    """What the guest sees of *cpus*, with its memory divided in whole blocks over their nodes. None: nothing."""
    nodes = Counter(cpu.node for cpu in cpus)  # which stand side by side
    spans = 1 < len(nodes) <= memory // block
    if topology is Topology.FLAT or (topology is Topology.AUTO and (must_clone or not spans)):
        return None
    return Layout(*regular(cpus), nodes=_divided(nodes, memory, block) if spans else ())


def regular(cpus: Sequence[Cpu]) -> tuple[int, int, int]:
    """Sockets, cores in each, threads of each; one socket of single threads where they are not all alike."""
    threads = Counter((cpu.socket, cpu.core) for cpu in cpus)
    cores = Counter(socket for socket, _ in threads)
    if len(set(threads.values())) > 1 or len(set(cores.values())) > 1:
        return 1, len(cpus), 1
    return len(cores), next(iter(cores.values())), next(iter(threads.values()))


def _divided(cpus: Counter[int], memory: int, block: int) -> tuple[Node, ...]:
    """Each node has memory by its cpus, at least a block."""
    blocks, cpus_left, nodes = memory // block, cpus.total(), list[Node]()
    for nodes_left, (host, count) in zip(range(len(cpus) - 1, -1, -1), cpus.items(), strict=True):
        share = min(max(blocks * count // cpus_left, 1), blocks - nodes_left)
        nodes.append(Node(count, share * block, host))
        blocks, cpus_left = blocks - share, cpus_left - count
    return tuple(nodes)


def keeps_from_cloning(spec: DomainSpec, pages: Pages = Pages.DEFAULT) -> str:
    """Why it is booted cold; "" where it need not be."""
    if spec.layout is not None:
        return "its guest sees sockets, siblings and NUMA nodes of this host, which no template has"
    return "" if pages is Pages.DEFAULT else f"its memory is in large pages ({pages.value}), and a template's is not"


def check_memory(spec: DomainSpec, pages: Pages) -> None:
    """Are there such large pages for it now, on each of its nodes? Raises NoMemory, HostError."""
    if pages is not Pages.DEFAULT:
        from belljar.host.devices.topology import check_pages

        nodes = spec.layout.nodes if spec.layout else ()
        check_pages(pages, [(node.host, node.memory) for node in nodes] or [(None, spec.memory)])
