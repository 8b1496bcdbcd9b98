"""From what is written down of a cluster: who is there, what each machine waits for, and what its shell is told next. And what it
answers, in lines `TOKEN WORD ...`: untrusted, as all that a guest sends. Pure."""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Container, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from shlex import quote

from belljar.lease import Instance
from belljar.lease.broker import LARGEST_DATA, Context, Data, Member, Role
from belljar.lease.states import InstanceState
from belljar.records import dataclass, replace

GUEST, HOME = Path(__file__).with_name("guest.sh").read_text(), "/var/lib/belljar/cluster"
LARGEST, LARGEST_LOG = 512 << 10, 4 << 10  # bytes of an answer, and of the last that scripts wrote
NICS = ("localnic", "publicnic")  # there is one card, and scripts are written for either name
Answer = tuple[int, str, bytes, Data]  # exit code, script, log, data


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, and how it stands."""

    instance: Instance
    role: Role
    name: str
    stand: str = "forming"  # waiting, configuring (it is to be told its program), ready, failed
    why: str = ""
    plan: str = ""  # digest of what its program is made of

    @property
    def is_there(self) -> bool:
        machine = self.instance
        return machine.state is InstanceState.RUNNING and not machine.stop and bool(machine.address)

    @property
    def address(self) -> str:
        return self.instance.address.partition("/")[0]


@dataclass(frozen=True)
class Scene:
    """A cluster as it stands. *nodes*: in the order of its lease; *here*: those of this generation."""

    context: Context
    nodes: tuple[Node, ...]
    members: Mapping[str, Member]
    here: tuple[Node, ...] = ()

    @property
    def missing(self) -> str:
        """The first role that is not filled, in words; "": all are."""
        for role in self.context.cluster.roles:
            mine = [node for node in self.nodes if node.role.name == role.name]
            if (there := sum(node.is_there for node in mine)) < role.count:
                bare = any(node.instance.state is InstanceState.RUNNING and not node.instance.address for node in mine)
                why = ": its network class gives machines no addresses; ask for a private one" if bare else ""
                return f"role {role.name}: {there} of {role.count} machines are there{why}"
        return ""


def scene(context: Context, instances: Sequence[Instance], members: Mapping[str, Member], now: float) -> Scene:
    """A new generation begins where other machines are there than before, once all were there. Each is told what is due."""
    pairs = zip(sorted(instances, key=lambda machine: machine.index), context.cluster.seats, strict=False)
    scene = Scene(context, tuple(Node(machine, role, name) for machine, (role, name) in pairs), members)
    up = tuple(node.instance.id for node in scene.nodes if node.is_there)
    if up and up != context.roster and (context.generation or not scene.missing):
        scene = replace(scene, context=replace(context, roster=up, generation=context.generation + 1, since=now))
    roster = {*scene.context.roster}
    here = {node.name: node for node in scene.nodes if node.is_there and node.instance.id in roster}
    scene = replace(scene, here=tuple(here.values()))
    answers = {id: member for id, member in members.items() if member.generation == scene.context.generation}
    view = _digest(*(f"{node.instance.id} {node.address} {node.instance.host_keys}".encode() for node in scene.here))
    nodes = tuple(_told(scene, node, answers, view) if node.name in here else node for node in scene.nodes)
    return replace(scene, nodes=nodes)


def standing(scene: Scene, now: float) -> tuple[str, str]:
    """For a cluster whose lease lives, and why: forming, configuring, ready or failed."""
    live, limit = [node for node in scene.nodes if node.instance.is_live], scene.context.cluster.limit
    if failed := next((node for node in live if node.stand == "failed"), None):
        return "failed", f"{failed.name}: {failed.why}"
    if live and all(node.stand == "ready" for node in live):
        return "ready", scene.missing
    first = min((node.instance.launched for node in live if node.instance.launched is not None), default=now)
    if now > max([scene.context.since or first, *(node.instance.rebooted or 0.0 for node in live)]) + limit:
        waits = scene.missing or next((f"{node.name} waits {node.why}" for node in live if node.why), "scripts go on")
        return "failed", f"not ready after {limit:.0f} s: {waits}"
    return "configuring" if scene.context.generation else "forming", scene.missing


def _told(scene: Scene, me: Node, answers: Mapping[str, Member], view: str) -> Node:
    for node in scene.here:
        given = ", ".join(sorted({*node.role.provides} & {*me.role.needs}))
        answer = answers.get(node.instance.id)
        if (given or node.role.name in me.role.after) and (answer is None or answer.code):
            return replace(me, stand="waiting", why=f"for {node.name}" + (f", which provides {given}" if given else ""))
    view = f"{view} {me.instance.rebooted}"
    me = replace(me, plan=_digest(view.encode(), *(value for _, value in _data(scene, me))))
    answer = answers.get(me.instance.id)
    if answer is None or answer.plan != me.plan:
        return replace(me, stand="configuring")
    if answer.code:
        return replace(me, stand="failed", why=f"{answer.script}: exit {answer.code}")
    return replace(me, stand="ready")


def program(scene: Scene, me: Node) -> str:
    """What its shell reads, but for its token. All that acts is one function's: half of it does nothing."""
    here, domain, data = scene.here, scene.context.cluster.name, _data(scene, me)
    names = {node: f"{node.name}.{domain},{node.name},{node.address}" for node in here}
    variables = {
        "name": me.name, "provides": " ".join(me.role.provides), "wanted": "\n".join(_calls(scene, me, data)),
        "hosts": "".join(f"{node.address} {node.name}.{domain} {node.name}\n" for node in here),
        "known": "".join(f"{name} {' '.join(key.split()[:2])}\n" for node, name in names.items() for key in node.instance.host_keys),
    }  # fmt: skip
    files = [(f"scripts/{path}", content) for path, content in me.role.files] + [*data]
    puts = [f"put {quote(path)} {b64encode(content).decode()}\n" for path, content in files]
    assigned = "".join(f"{name}={quote(value)}\n" for name, value in variables.items())
    return f"{assigned}unpack() {{\n:\n{''.join(puts)}}}\n{GUEST}\nmain\n"


def _calls(scene: Scene, me: Node, data: Data) -> Iterator[str]:
    """Lines of a key, a script and its arguments, in the convention's order: each is called once for its line."""
    domain = scene.context.cluster.name
    words = {node.instance.id: f"{node.address} {node.name} {node.name}.{domain}" for node in scene.here}
    required = {role: [node for node in scene.here if node.role.name == role] for role in me.role.requires}
    view = f"{scene.context.generation}.{me.instance.rebooted}.{_digest(*(value for _, value in data))}"
    yield from (f"- 0-etchosts.sh {entry}" for entry in words.values())
    yield from (f"- 1-ipandhost/{role} {words[node.instance.id]}" for role, nodes in required.items() for node in nodes)
    yield from (f"- 2-thishost/{nic} {words[me.instance.id]}" for nic in NICS)
    yield from (f"{_digest(value)} 3-data/{path.split('/')[1]} {HOME}/{path}" for path, value in data)
    yield from (f"{view} 4-restarts/{role}" for role in required)
    yield from (f"{view} 5-thishost-finalize/{nic} {words[me.instance.id]}" for nic in NICS)


def _data(scene: Scene, me: Node) -> Data:
    """What it needs, as files data/NAME/SOURCE."""
    written = [(f"data/{name}/document", text.encode()) for name, text in scene.context.cluster.data]
    given = [
        (f"data/{name}/{node.name}", value)
        for node in scene.here
        if (answer := scene.members.get(node.instance.id)) is not None
        for name, value in answer.data
    ]
    return tuple((path, value) for path, value in (*written, *given) if path.split("/")[1] in me.role.needs)


def _digest(*parts: bytes) -> str:
    return sha256(b"\n".join(parts)).hexdigest()[:16]


# -- what it answers ---------------------------------------------------------------------------------------------------


class Refused(ValueError):
    """What no machine of ours says."""


def token(site_key: bytes, context: Context, instance: str, plan: str) -> str:
    """Of one conversation: of this machine, in this generation, about this plan."""
    words = ("belljar cluster", context.id, str(context.generation), instance, plan)
    return hmac.new(site_key, "\n".join(words).encode(), sha256).hexdigest()


def read(text: bytes, token: str, expected: Container[str]) -> Answer | None:
    """*expected*: names of data that its role provides. None: it was cut off before its end; what comes behind that is not looked at.
    Raises Refused."""
    if len(text) > LARGEST:
        raise Refused(f"more than {LARGEST} bytes")
    log, data = b"", dict[str, bytes]()
    for line in text.split(b"\n")[:-1]:
        mark, *words = line.decode("latin-1").split(" ")
        if not hmac.compare_digest(mark.encode(), token.encode()):
            raise Refused("an answer with another token")
        match words:
            case ["log", coded]:
                log = _decoded(coded, LARGEST_LOG)
            case ["data", name, coded] if name in expected and name not in data:
                data[name] = _decoded(coded, LARGEST_DATA)
            case ["end", code, script] if code in map(str, range(256)) and len(script) < 200 and script.isprintable():
                return int(code), script, log, tuple(sorted(data.items()))
            case _:
                raise Refused(f"{' '.join(words)[:60]!r} is nothing that its role has to say")
    return None


def _decoded(text: str, largest: int) -> bytes:
    try:
        data = b64decode(text, validate=True)
    except ValueError as exc:
        raise Refused("text that is no base64") from exc
    if len(data) > largest:
        raise Refused(f"{len(data)} bytes of at most {largest}")
    return data
