"""What a guest sees of the processors that it is pinned to, and what its memory consists of: pure decisions, before it is planned.

A template is booted with one processor in one socket, and its memory is one file that its clones share. What differs from that is
booted cold (docs/develop/decisions/0032-processors-and-memory.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from itertools import groupby

from belljar.host.room import Cpu
from belljar.hypervisor import DomainSpec, Layout, Node
from belljar.model import MachineSpec, Pages, Topology


def layout_of(
    machine: MachineSpec, cpus: Sequence[Cpu], memory: int, block: int, nodes: Set[int], *, must_clone: bool
) -> Layout | None:
    """What the guest sees of *cpus*, with its memory divided in whole blocks over their nodes, where *nodes* have memory for it.
    None: nothing."""
    of_nodes = {node: len(list(group)) for node, group in groupby(cpus, lambda cpu: cpu.node)}
    spans = len(of_nodes) > 1 and of_nodes.keys() <= nodes and memory // block >= len(of_nodes)
    if (
        not cpus
        or machine.topology is Topology.FLAT
        or (machine.topology is Topology.AUTO and (must_clone or not spans))
    ):
        return None
    return Layout(*regular(cpus), nodes=_divided(of_nodes, memory, block) if spans else ())


def regular(cpus: Sequence[Cpu]) -> tuple[int, int, int]:
    """Sockets, cores in each, threads of each; one socket of single threads where they are not all alike."""
    threads = Counter((cpu.socket, cpu.core) for cpu in cpus)
    cores = Counter(socket for socket, _ in threads)
    if len(set(threads.values())) > 1 or len(set(cores.values())) > 1:
        return 1, len(cpus), 1
    return len(cores), next(iter(cores.values())), next(iter(threads.values()))


def _divided(of_nodes: dict[int, int], memory: int, block: int) -> tuple[Node, ...]:
    """Each node has memory by its cpus, at least a block."""
    left, cpus_left, nodes = memory // block, sum(of_nodes.values()), list[Node]()
    for count, (host, cpus) in enumerate(of_nodes.items(), 1):
        blocks = min(max(left * cpus // cpus_left, 1), left - (len(of_nodes) - count))
        nodes.append(Node(cpus, blocks * block, host))
        left, cpus_left = left - blocks, cpus_left - cpus
    return tuple(nodes)


def keeps_from_cloning(spec: DomainSpec, pages: Pages) -> str:
    """Why it is booted cold; "" where it need not be."""
    if spec.layout is not None:
        return "its guest sees sockets, siblings and NUMA nodes of this host, which no template has"
    return "" if pages is Pages.DEFAULT else f"its memory is in large pages ({pages.value}), and a template's is not"
