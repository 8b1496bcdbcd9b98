"""Grid Engine's nodes from the outside: execution hosts that machines become. 8.1.9 and later.

The qmaster must know a host's name and address (DNS, /etc/hosts) before it hears of it first, and remembers for a while what it found:
so the machines of a bait have names and addresses out of a list. A host is added with the queue that takes it up, before its machine
starts; then its execd need not be on an administrative host. It is removed in the reverse order, the host last: by that it is seen
what of it a crash has left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from belljar.batch.job.terms import one_node, whole
from belljar.errors import BadOption
from belljar.pool.gridengine.client import CLIENT, GridEngineClient
from belljar.pool.gridengine.room import left_of, reserve, reserved, whole_host
from belljar.pool.terms import (
    LARGEST_ANSWER,
    Command,
    JobId,
    JobView,
    Joining,
    ListedNodes,
    Member,
    Need,
    NodeState,
    NodeView,
    Part,
    Pool,
    listed,
)
from belljar.records import replace

INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}@[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
USERS = "belljar_"  # begins the name of a host's access list
BOOTSTRAP = Path("/var/lib/gridengine/default/common/bootstrap")  # of Debian's packages

# execd in the foreground (SGE_ND): when it ends, so does the machine. 78 is UNFIT_CODE. The ports are those of /etc/services, or the
# usual ones.
JOIN = rb"""#!/bin/sh
set -eu
umask 022
hostname "$NODE"
printf '%s\n' "$HOSTS" >> /etc/hosts
for address in $(hostname -I); do printf '%s %s\n' "$address" "$NODE" >> /etc/hosts; done
add() { while IFS= read -r line; do grep -q "^${line%%:*}:" "$1" || printf '%s\n' "$line" >> "$1"; done; }
[ -z "$PASSWD" ] || printf '%s\n' "$PASSWD" | add /etc/passwd
[ -z "$GROUPS_OF" ] || printf '%s\n' "$GROUPS_OF" | add /etc/group
command -v sge_execd >/dev/null || { echo "no sge_execd is installed in it" >&2; exit 78; }
admin=$(sed -n 's/^admin_user[[:space:]]*//p' "$SGE_ROOT/$SGE_CELL/common/bootstrap")
mkdir -p /var/spool/gridengine/execd
[ "$admin" = none ] || chown -R "$admin" /var/spool/gridengine
grep -qs '^sge[-_]qmaster' /etc/services || export SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445
export SGE_ND=true
exec sge_execd </dev/null
"""


class GridEngineNodes(ListedNodes):
    """The nodes' side. *queue*: the one that machines are added to; *hosts* and *feature*: as in ListedNodes; *host*: see room.py."""

    tells_reasons = False
    packages = ("gridengine-exec",)

    def __init__(
        self, queue: str = "belljar", hosts: Mapping[str, str] | None = None, feature: str = "", host: tuple[int, int] = (0, 0)
    ) -> None:  # fmt: skip
        super().__init__(hosts or {}, feature)
        self.queue, self._host = queue, host

    def query(self) -> Command:
        return ("qhost", "-xml", "-q", "-F", "slots,h_vmem")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        """Hosts, with the state of our queue there; and each instance of another queue by its own name, QUEUE@HOST."""
        text = printed.decode("utf-8", "replace")
        if len(printed) > LARGEST_ANSWER or "<qhost" not in text[:4096] or not text.rstrip().endswith("</qhost>"):
            raise ValueError("qhost printed no list of hosts, or one that was cut off")
        views = (one for entry in text.split("<host name=")[1:] for one in _views(entry, self.queue))
        return {one.name: replace(one, features=self.features_of(one.name)) for one in views if one.name != "global"}

    def open(self, node: str) -> Command:
        """`-cq`: a prolog that failed has set it into an error state."""
        return ("qmod", "-e", self._instances(node), "-cq", self._instances(node))

    def close(self, node: str, reason: str) -> Command:
        return ("qmod", "-d", self._instances(node))

    def _instances(self, node: str) -> str:
        return node if INSTANCE.fullmatch(node) else f"*@{one_node(node)}"

    def lose(self, node: str, reason: str) -> tuple[Command, ...]:
        """What may run again does; what may not is left to `force_end`."""
        return (self.close(node, reason), ("qmod", "-rq", self._instances(node)))

    def create(self, node: str, job: JobView) -> tuple[Command, ...]:
        """The queue takes the host up, by which it becomes one; for nobody but the job's owner."""
        one, users = one_node(node), f"{USERS}{node}"
        image = (("qconf", "-aattr", "exechost", "complex_values", f"vm_image={job.image}", one),) if job.image else ()
        return (
            ("qconf", "-aattr", "queue", "hostlist", one, self.queue),
            ("qconf", "-aattr", "queue", "slots", f"[{one}={job.cpus}]", self.queue),
            ("qconf", "-au", job.owner, users),
            ("qconf", "-aattr", "queue", "user_lists", f"[{one}={users}]", self.queue),
            *image,
        )

    def remove(self, node: str) -> tuple[Command, ...]:
        one = one_node(node)
        return (
            ("qconf", "-dattr", "queue", "hostlist", one, self.queue),
            ("qconf", "-purge", "queue", "*", f"{self.queue}@{one}"),
            ("qconf", "-dul", f"{USERS}{one}"),
            ("qconf", "-de", one),
        )

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """Raises BadOption for a job of several nodes: its parallel environment would have to be the machines' own."""
        if len(nodes) != 1:
            raise BadOption(f"{job.id}: {len(nodes)} nodes: a job of Grid Engine gets one machine")
        return (("qalter", "-q", f"{queue}@{one_node(nodes[0])}", job.number), CLIENT.release(job.id))

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """Grid Engine takes a start time of the wall clock only; its own next cycle comes later anyway."""
        alter = ("qalter", "-q", queue or "*", job.number)
        return (alter,) if stays_held else (alter, CLIENT.release(job.id))

    def reserve(
        self, node: str, parts: tuple[Part, ...], jobs: Mapping[JobId, JobView], nodes: Mapping[str, NodeView], queue: str
    ) -> tuple[Command, ...]:  # fmt: skip
        return reserve(node, parts, jobs, nodes.get(node), self._host)

    def reserved(
        self, node: str, parts: tuple[Part, ...], jobs: Mapping[JobId, JobView], nodes: Mapping[str, NodeView]
    ) -> frozenset[str]:
        return reserved(node, parts, jobs, nodes.get(node), self._host)

    def needs(
        self, ask: Callable[..., str], text: str, baits: tuple[str, ...], queue: str, feature: str, hosts: tuple[str, ...]
    ) -> Iterator[Need]:  # fmt: skip
        from belljar.pool.gridengine import fitness  # for who asks

        yield from fitness.needs(ask, baits[0], queue, self._hosts)

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        """*conf_file*: the cell's bootstrap. Raises BadOption where its daemons prove themselves by more than their addresses."""
        mode = re.search(rb"(?m)^security_mode\s+(\S+)", text)
        if mode is not None and mode[1] != b"none":
            raise BadOption(
                f"{conf_file}: security_mode {mode[1].decode(errors='replace')}: no key for it is given to machines"
            )
        common = conf_file.parent
        env = {
            "NODE": member.name, "HOSTS": member.hosts, "PASSWD": "".join(member.account[:1]),
            "GROUPS_OF": "\n".join(member.account[1:]), "SGE_ROOT": str(common.parents[1]), "SGE_CELL": common.parent.name,
            "HOME": "/root", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }  # fmt: skip
        pairs = tuple((key.encode(), value.encode()) for key, value in env.items())
        return Joining(JOIN, pairs, (), (conf_file, common / "act_qmaster"))


class GridEnginePool(Pool):
    """Both sides."""

    def of_bait(self, name: str, queue: str, feature: str, nodes: tuple[str, ...], room: str = "") -> Pool:
        if not INSTANCE.fullmatch(name):
            raise ValueError("name", f"{name[:60]!r} is no queue of a host", 'as in name = "vm.q@wn01"')
        hosts, host = listed(nodes), whole_host(room) if room else (0, 0)
        return replace(self, client=GridEngineClient(name), nodes=GridEngineNodes(queue, hosts, feature, host))


def _views(entry: str, queue: str) -> list[NodeView]:
    name = re.match(r"'([^']{1,255})'", entry)
    if name is None:
        raise ValueError("qhost printed a host without a name")
    values = dict(re.findall(r"<hostvalue name='(\w+)'>([^<]*)</hostvalue>", entry))
    queues: dict[str, dict[str, str]] = {}
    for one, key, value in re.findall(r"<queuevalue qname='([^']+)' name='(\w+)'>([^<]*)</queuevalue>", entry):
        queues.setdefault(one, {})[key] = value
    ours, (slots, size) = queues.pop(queue, {}), left_of(entry)
    used = sum(whole(one.get("slots_used", "")) or 0 for one in (ours, *queues.values()))
    own = NodeView(name[1], _state(values, ours), (), _reason(ours))
    if slots is not None:
        own = replace(own, cpus=slots + used, memory=size or 0, free_cpus=max(slots, 0))
    return [
        own,
        *(NodeView(f"{one}@{name[1]}", _state(values, of), (), _reason(of)) for one, of in queues.items()),
    ]


def _state(values: Mapping[str, str], queue: Mapping[str, str]) -> NodeState:
    """d(isabled) by somebody, E(rror) of a prolog, u(nheard)."""
    is_busy, letters = queue.get("slots_used", "0") != "0", queue.get("state_string", "")
    if {"d", "E"} & set(letters):
        return NodeState.DRAINING if is_busy else NodeState.OUT
    if is_busy:
        return NodeState.BUSY
    is_heard = values.get("load_avg", "-") != "-" and "u" not in letters
    return NodeState.IDLE if is_heard else NodeState.AWAY


def _reason(queue: Mapping[str, str]) -> str:
    letters = queue.get("state_string", "")
    return "Prolog error" if "E" in letters and "d" not in letters else letters


POOL = GridEnginePool(CLIENT, GridEngineNodes(), {"conf": BOOTSTRAP, "key": Path(), "gone_after": 5.0})
