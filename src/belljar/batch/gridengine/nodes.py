"""Grid Engine's nodes from the outside: execution hosts that machines become. 8.1.9 and later.

The qmaster must know a host's name (DNS, /etc/hosts) before it hears of it first: it remembers for a while that it did not. So the
names of machines are a list of the site's. An execd of a host that is an administrative one adds itself; it takes jobs once a
queue has it, and is removed in the reverse order, after its queue instance is disabled and empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from belljar.batch.gridengine.client import CLIENT
from belljar.batch.job.terms import one_node
from belljar.batch.pool import LARGEST_ANSWER, Command, JobView, Joining, Member, Nodes, NodeState, NodeView, Pool
from belljar.errors import BadOption


class GridEngineNodes(Nodes):
    """The nodes' side. *queue*: the one that machines are added to."""

    def __init__(self, queue: str = "belljar.q") -> None:
        self.queue = queue

    def query(self) -> Command:
        return ("qhost", "-xml", "-q")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        text = printed.decode("utf-8", "replace")
        if len(printed) > LARGEST_ANSWER or "<qhost" not in text[:4096] or not text.rstrip().endswith("</qhost>"):
            raise ValueError("qhost printed no list of hosts, or one that was cut off")
        hosts = (_host(entry, self.queue) for entry in text.split("<host name=")[1:])
        return {one.name: one for one in hosts if one.name != "global"}

    def open(self, node: str) -> Command:
        return ("qmod", "-e", f"*@{one_node(node)}")

    def close(self, node: str, reason: str) -> Command:
        return ("qmod", "-d", f"*@{one_node(node)}")

    def lose(self, node: str, reason: str) -> Command:
        return self.close(node, reason)

    def admit(self, node: str) -> tuple[Command, ...]:
        """Its execd may add it then."""
        return (("qconf", "-ah", one_node(node)),)

    def remove(self, node: str) -> tuple[Command, ...]:
        one = one_node(node)
        return (
            ("qconf", "-dattr", "queue", "hostlist", one, self.queue),
            ("qconf", "-purge", "queue", "slots", f"{self.queue}@{one}"),
            ("qconf", "-de", one),
            ("qconf", "-dh", one),
        )

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """Raises BadOption for a job of several nodes: its parallel environment would have to be the machines' own."""
        if len(nodes) != 1:
            raise BadOption(f"{job.id}: {len(nodes)} nodes: a job of Grid Engine gets one machine")
        node = one_node(nodes[0])
        image = (("qconf", "-aattr", "exechost", "complex_values", f"vm_image={job.image}", node),) if job.image else ()
        return (
            *image,
            ("qconf", "-aattr", "queue", "slots", f"[{node}={job.cpus}]", queue),
            ("qconf", "-aattr", "queue", "hostlist", node, queue),
            ("qalter", "-q", f"{queue}@{node}", job.id),
            CLIENT.release(job.id),
        )

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """Grid Engine takes a start time of the wall clock only; its own next cycle comes later anyway."""
        alter = ("qalter", "-q", queue or "*", job.id)
        return (alter,) if stays_held else (alter, CLIENT.release(job.id))

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        raise BadOption("gridengine: machines that join it by themselves are not built; see docs/bait.md")


def _host(entry: str, queue: str) -> NodeView:
    name = re.match(r"'([^']{1,255})'", entry)
    if name is None:
        raise ValueError("qhost printed a host without a name")
    values = dict(re.findall(r"<hostvalue name='(\w+)'>([^<]*)</hostvalue>", entry))
    ours = dict(re.findall(rf"<queuevalue qname='{re.escape(queue)}' name='(\w+)'>([^<]*)</queuevalue>", entry))
    return NodeView(name[1], _state(values, ours), (), ours.get("state_string", ""))


def _state(values: Mapping[str, str], queue: Mapping[str, str]) -> NodeState:
    is_busy, letters = queue.get("slots_used", "0") != "0", queue.get("state_string", "")
    if "d" in letters:
        return NodeState.DRAINING if is_busy else NodeState.OUT
    if is_busy:
        return NodeState.BUSY
    is_heard = values.get("load_avg", "-") != "-" and "u" not in letters
    return NodeState.IDLE if is_heard else NodeState.AWAY


POOL = Pool(CLIENT, GridEngineNodes())
