"""OpenPBS's nodes from the outside: nodes that machines become, and vnodes that are baits. 20 and later.

The server must find a node's name (DNS, /etc/hosts) before it can be made: so the machines of a bait have names and addresses out of a
list. A node is made when its machine starts, tied to a queue that users cannot submit to, and deleted when it is offline and its
machine gone. https://github.com/openpbs/openpbs (doc/man8/pbsnodes.8B, qmgr.8B)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belljar.batch.job.terms import one_line, one_node
from belljar.batch.pbs.common import OURS, plain
from belljar.errors import BadOption
from belljar.model import KIB, PlainFile
from belljar.pool.pbs.openpbs.client import CLIENT, document
from belljar.pool.terms import (
    Command,
    JobView,
    Joining,
    ListedNodes,
    Member,
    NodeState,
    NodeView,
    Pool,
    listed,
)

CONF = Path("/etc/pbs.conf")
HOME = "/var/spool/pbs"  # of a machine's pbs_mom
AWAY = frozenset({"down", "stale", "unresolvable", "state-unknown", "initializing", "sleep", "provisioning"})
COUNT = re.compile(r"([0-9]{1,4})(?::|$)")  # of equal chunks
PINNED = re.compile(r":(?:host|vnode)=[^:+]*")

# pbs_mom in the foreground (-N): when it ends, so does the machine. 78 is UNFIT_CODE. The owner is read by the hook belljar_bait. Output
# is written where the job asks for it: what users' jobs write to is shared with the host, and nobody copies to it by ssh.
JOIN = rb"""#!/bin/sh
set -eu
umask 022
mom=$PBS_EXEC/sbin/pbs_mom
[ -x "$mom" ] || { echo "no $mom is installed in it" >&2; exit 78; }
hostname "$NODE"
printf '%s\n' "$HOSTS" >> /etc/hosts
for address in $(hostname -I); do printf '%s %s\n' "$address" "$NODE" >> /etc/hosts; done
add() { while IFS= read -r line; do grep -q "^${line%%:*}:" "$1" || printf '%s\n' "$line" >> "$1"; done; }
[ -z "$PASSWD" ] || printf '%s\n' "$PASSWD" | add /etc/passwd
[ -z "$GROUPS_OF" ] || printf '%s\n' "$GROUPS_OF" | add /etc/group
mkdir -p /run/belljar
printf '%s\n' "${PASSWD%%:*}" > /run/belljar/owner
for folder in aux checkpoint mom_logs mom_priv/jobs mom_priv/hooks/tmp spool undelivered; do mkdir -p "$PBS_HOME/$folder"; done
chmod 0751 "$PBS_HOME/mom_priv" "$PBS_HOME/mom_priv/jobs"
chmod 0750 "$PBS_HOME/mom_priv/hooks" "$PBS_HOME/mom_priv/hooks/tmp"
chmod 0700 "$PBS_HOME/checkpoint"
chmod 1777 "$PBS_HOME/spool" "$PBS_HOME/undelivered"
printf '$clienthost %s\n$usecp *:/ /\n' "$PBS_SERVER" > "$PBS_HOME/mom_priv/config"
[ -e "$PBS_HOME/pbs_environment" ] || printf 'PATH=/bin:/usr/bin\n' > "$PBS_HOME/pbs_environment"
exec "$mom" -N </dev/null
"""


class OpenPbsNodes(ListedNodes):
    """The nodes' side. *queue*: the one that they are tied to; *hosts* and *feature*: as in ListedNodes."""

    def __init__(self, queue: str = "belljar", hosts: Mapping[str, str] | None = None, feature: str = "") -> None:
        super().__init__(hosts or {}, feature)
        self.queue = queue

    def query(self) -> Command:
        return ("pbsnodes", "-a", "-F", "json")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        found = document(printed, "pbsnodes").get("nodes", {})
        if not isinstance(found, dict):
            raise ValueError("pbsnodes printed no list of nodes")
        return {name: _node(name, facts, self.features_of(name)) for name, facts in found.items()}

    def create(self, node: str, job: JobView) -> tuple[Command, ...]:
        """Before its machine is started. With what its job asks for, whatever more its machine has."""
        each = max(job.nodes, 1)
        asked = {"ncpus": -(-job.cpus // each), "mem": f"{-(-job.memory // each // KIB)}kb", "vm_image": job.image}
        words = ",".join(f"resources_available.{name}={value}" for name, value in asked.items() if value)
        return (("qmgr", "-c", f"create node {one_node(node)} queue={self.queue},{words}"),)

    def open(self, node: str) -> Command:
        return ("pbsnodes", "-r", "-C", "", one_node(node))

    def close(self, node: str, reason: str) -> Command:
        return ("pbsnodes", "-o", "-C", plain(f"{OURS} {reason.removeprefix(OURS).strip()}"), one_node(node))

    def lose(self, node: str, reason: str) -> tuple[Command, ...]:
        """The server queues its jobs again by itself: `node_fail_requeue`."""
        return (self.close(node, reason),)

    def remove(self, node: str) -> tuple[Command, ...]:
        return (("qmgr", "-c", f"delete node {one_node(node)}"),)

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """Each chunk is bound to a node; chunks that are packed on one to the same."""
        chunks = [
            f"1:{chunk}:host={one_node(nodes[at % len(nodes)])}" for at, chunk in enumerate(chunks_of(job.selection))
        ]
        return (
            ("qmove", queue, job.id),
            ("qalter", "-l", f"select={'+'.join(chunks)}", job.id),
            CLIENT.release(job.id),
        )

    def unpin(self, job: JobView, queue: str = "") -> tuple[Command, ...]:
        chunks = "+".join(f"1:{chunk}" for chunk in chunks_of(job.selection))
        return (("qalter", "-l", f"select={chunks}", job.id),) if PINNED.search(job.selection) else ()

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """What its user holds stays so, and is its user's to release. PBS takes a start time of the wall clock only; its own next cycle
        comes later anyway."""
        release = () if stays_held and not job.is_held_by_user else (CLIENT.release(job.id),)
        return (*self.unpin(job), ("qmove", queue, job.id), *release)

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        """*conf_file*: pbs.conf of this host. Raises BadOption where it names no server or installation."""
        found = dict(re.findall(rb"(?m)^[ \t]*(PBS_[A-Z_]+)=([^\r\n]*)", text))
        given = {
            name: found.get(name.encode(), b"").decode("ascii", "replace").strip()
            for name in ("PBS_SERVER", "PBS_EXEC")
        }
        if missing := [name for name, value in given.items() if not value]:
            raise BadOption(f"{conf_file}: {missing[0]} is missing")
        roles = {"PBS_START_MOM": "1", "PBS_START_SERVER": "0", "PBS_START_SCHED": "0", "PBS_START_COMM": "0"}
        kept = {"PBS_HOME": HOME, "PBS_MOM_NODE_NAME": member.name, **given, **roles}
        env = {
            **given, "PBS_HOME": HOME, "NODE": member.name, "HOSTS": member.hosts, "PASSWD": "".join(member.account[:1]),
            "GROUPS_OF": "\n".join(member.account[1:]), "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }  # fmt: skip
        conf = "".join(f"{name}={value}\n" for name, value in kept.items()).encode()
        pairs = tuple((key.encode(), value.encode()) for key, value in env.items())
        return Joining(JOIN, pairs, (PlainFile(bytes(CONF), conf),))


def chunks_of(selection: str) -> list[str]:
    """`2:ncpus=1:mem=1gb+ncpus=2` as one text for each chunk, without what pins it to a host."""
    found: list[str] = []
    for part in selection.split("+"):
        match = COUNT.match(part)
        rest = part[match.end() :] if match else part
        found += [PINNED.sub("", f":{rest}").strip(":") or "ncpus=1"] * int(match[1] if match else 1)
    return found


def _node(name: str, facts: Any, features: tuple[str, ...]) -> NodeView:
    if not isinstance(facts, dict):
        raise ValueError(f"pbsnodes printed {name[:60]!r} without what it is")
    return NodeView(name, _state(facts), features, one_line(str(facts.get("comment", ""))))


def _state(facts: dict[str, Any]) -> NodeState:
    states, is_busy = set(str(facts.get("state", "")).split(",")), bool(facts.get("jobs"))
    if "offline" in states or "offline_by_mom" in states:
        return NodeState.DRAINING if is_busy and not states & AWAY else NodeState.OUT
    if states & AWAY:
        return NodeState.AWAY
    return NodeState.BUSY if is_busy else NodeState.IDLE


class OpenPbsPool(Pool):
    """Both sides."""

    def of_bait(self, name: str, queue: str, feature: str, nodes: tuple[str, ...], room: str = "") -> Pool:
        if room:
            raise ValueError("native", "native jobs beside machines are not built for OpenPBS", "Leave it out.")
        return OpenPbsPool(self.client, OpenPbsNodes(queue, listed(nodes), feature), self.defaults)


POOL = OpenPbsPool(CLIENT, OpenPbsNodes(), {"conf": CONF, "key": Path(), "gone_after": 5.0})
