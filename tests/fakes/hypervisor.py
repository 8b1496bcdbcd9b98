"""A hypervisor without machines, for tests of those who use one. Domains are socket pairs whose far ends a test drives.

    hypervisor = FakeHypervisor(folder)
    domain = await hypervisor.launch(spec, None)
    domain.guest                        # the guest's end of the agent's channel
    domain.happen(EventKind.PANICKED)   # what a guest or QEMU may do by itself
    domain.end()

`run_guest`, when given, is called with each new domain: it may hand `domain.guest` to a real agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence, Set
from pathlib import Path

from belljar.errors import BelljarError, DomainDied, TemplateError
from belljar.host.files import private_folder, remove_tree
from belljar.host.guard.traffic import Call, Refusal
from belljar.host.locks import is_locked, try_lock
from belljar.host.quick_imports import sha256
from belljar.hypervisor import (
    NO_TRACES,
    Accelerator,
    Boot,
    Domain,
    DomainEvent,
    DomainSpec,
    EventKind,
    Frame,
    Template,
    Templates,
    Traces,
)
from belljar.hypervisor.qemu.domain import History
from belljar.model import MachineId, to_json
from belljar.records import dataclass, field, replace

KILLED = 9  # wait status of a process that SIGKILL ended
FIRST_PID = 1 << 23  # beyond every real pid


@dataclass
class Faults:
    """What goes wrong, by the name of the call; each is raised once for every time it is listed."""

    check: list[BelljarError] = field(default_factory=list)
    start: list[BelljarError] = field(default_factory=list)
    start_clone: list[BelljarError] = field(default_factory=list)
    connect: list[BelljarError] = field(default_factory=list)
    pin: list[BelljarError] = field(default_factory=list)
    quit: list[BelljarError] = field(default_factory=list)
    prepare_template: list[BelljarError] = field(default_factory=list)
    save_template: list[BelljarError] = field(default_factory=list)
    fork: list[BelljarError] = field(default_factory=list)
    write_memory: list[BelljarError] = field(default_factory=list)
    discard: list[BelljarError] = field(default_factory=list)

    def strike(self, call: str) -> None:
        waiting: list[BelljarError] = getattr(self, call)
        if waiting:
            raise waiting.pop(0)


class FakeDomain:
    """Implements `Domain`. `done` lists what was asked of it."""

    def __init__(self, spec: DomainSpec, pid: int, faults: Faults, on_end: Callable[[FakeDomain], None]) -> None:
        self.spec, self.pid, self.done = spec, pid, list[str]()
        self.argv: tuple[str, ...] = ("fake-qemu", "-name", f"guest=belljar-{spec.id}")
        self.channel, self.guest = socket.socketpair()
        self.console, self.serial = socket.socketpair()
        for end in (self.channel, self.guest, self.console, self.serial):
            end.setblocking(False)
        self.is_deaf = False  # a QEMU that never answers: SIGSTOP, or worse
        self._faults, self._on_end = faults, on_end
        self._history = History()
        self.told: list[Call | Refusal] = []
        self._heard = asyncio.Event()
        self.status: int | None = None

    # -- the Domain protocol -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        self.done.append("connect")
        self._faults.strike("connect")
        await self._answer()

    async def pause(self) -> None:
        self.done.append("pause")
        await self._answer()

    async def resume(self) -> None:
        self.done.append("resume")
        await self._answer()

    async def pin(self, cpus: Sequence[int]) -> dict[str, int]:
        self._faults.strike("pin")
        self.done.append(f"pin {','.join(map(str, cpus))}")
        return {str(self.pid + number): cpu for number, cpu in enumerate(cpus)}

    async def press_power(self) -> None:
        self.done.append("press power")
        await self._answer()

    async def quit(self, *, grace: float) -> int:
        self.done.append("quit")
        self._faults.strike("quit")
        if self.is_deaf and self.status is None:
            await asyncio.sleep(grace)
        self.end(KILLED if self.is_deaf or grace <= 0 else 0)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        self.done.append("kill")
        self.end(KILLED)

    def events(self) -> AsyncIterator[DomainEvent]:
        return self._history.events()

    async def traffic(self) -> AsyncIterator[Call | Refusal]:
        while self.status is None or self.told:
            while self.told:
                yield self.told.pop(0)
            if self.status is None:
                self._heard.clear()
                await self._heard.wait()

    def usage(self) -> tuple[float, float, int]:
        return 0.25, 0.125, 64 << 20

    # -- for tests -----------------------------------------------------------------------------------------------------

    def happen(self, kind: EventKind, detail: str = "", status: int | None = None) -> None:
        """Let the domain do something by itself."""
        self._history.tell(DomainEvent(kind, detail, status))

    def tell(self, item: Call | Refusal) -> None:
        """Let the guard of its network tell something."""
        self.told.append(item)
        self._heard.set()

    def end(self, status: int = 0, why: str = "") -> None:
        """Let the process end. Ending twice changes nothing."""
        if self.status is not None:
            return
        self.status = status
        self._heard.set()
        self.guest.close()
        self.serial.close()
        self._on_end(self)
        self.happen(EventKind.EXITED, why or f"status {status}", status)

    async def _answer(self) -> None:
        if self.status is not None:
            raise DomainDied(f"the fake domain ended with status {self.status}")
        if self.is_deaf:
            await asyncio.get_running_loop().create_future()


class FakeHypervisor:
    """Implements `Hypervisor`. Templates are folders with a name in them; domains live in `running`."""

    def __init__(self, folder: Path, run_guest: Callable[[FakeDomain], None] | None = None) -> None:
        self.folder = private_folder(folder)
        self.running: dict[MachineId, FakeDomain] = {}
        self.domains: list[FakeDomain] = []  # all there ever were
        self.faults = Faults()
        self.kvm_works = False
        self.site: FakeHypervisor | None = None  # whose templates serve this one's users
        self.can_pin = True
        self.can_grow = True  # clones can be given more than their templates had
        self.damaged: dict[str, str] = {}  # template key -> what is wrong with it
        self.own_traits = {"QEMU": "7.2", "processor": "tcg max", "hardware": "a board"}
        self.loaded: list[bytes] = []  # what machines that went on were given as their memory
        self._run_guest = run_guest

    def accelerator(self, boot: Boot) -> tuple[Accelerator, str]:
        return (Accelerator.KVM, "the fake says so") if self.kvm_works else (Accelerator.TCG, "the fake has no KVM")

    def check(self, spec: DomainSpec) -> None:
        self.faults.strike("check")

    async def launch(self, spec: DomainSpec, template: Template | None) -> FakeDomain:
        return self.start(spec, template)

    def start(self, spec: DomainSpec, template: Template | None = None) -> FakeDomain:
        self.faults.strike("start_clone" if template else "start")
        if template and not template.folder.exists():
            raise TemplateError(f"the template {template.key} cannot be used any more: it is missing")
        return self._begin(spec)

    def start_template(self, spec: DomainSpec) -> FakeDomain:
        self.faults.strike("start")
        if not self.template_draft(spec).exists():
            raise TemplateError("the template's draft is missing")
        return self._begin(spec)

    def frame(self, spec: DomainSpec, *, memory: int, disk: int) -> Frame | None:
        return Frame(1, memory, disk, 64, 1 << 40) if self.can_grow else None

    @property
    def cloning(self) -> Templates:
        return self

    def find_template(self, spec: DomainSpec) -> Template | None:
        key = self._key(spec)
        return None if key in self.damaged or not self._path(key).exists() else self._read(key)

    def clone_disk(self, template: Template, spec: DomainSpec) -> None:
        if not template.folder.exists():
            raise TemplateError(f"the template {template.key} cannot be used any more: it is missing")
        spec.disk.write_bytes(b"a fake overlay")

    def traits(self, spec: DomainSpec) -> dict[str, str]:
        return dict(self.own_traits)

    async def write_memory(self, domain: Domain, pipe: int, *, timeout: float) -> None:
        self.faults.strike("write_memory")
        os.write(pipe, b"memory of " + domain.argv[-1].encode())

    def restore(self, spec: DomainSpec, memory: int) -> FakeDomain:
        self.faults.strike("start")
        self.loaded.append(os.read(memory, 1 << 16))
        return self._begin(spec)

    def template_lock(self, spec: DomainSpec) -> Path:
        return self.folder / f"{self._key(spec)}.lock"

    def template_draft(self, spec: DomainSpec) -> Path:
        return self.folder / f"{self._key(spec)}.draft"

    async def adopt_template(self, spec: DomainSpec) -> Template | None:
        if self.site is None or self.site.find_template(spec) is None:
            return None
        self._path(self._key(spec)).mkdir()
        (self._path(self._key(spec)) / "facts").write_text((self.site._path(self._key(spec)) / "facts").read_text())
        return self._read(self._key(spec))

    async def prepare_template(self, spec: DomainSpec, image_disk: Path) -> None:
        self.faults.strike("prepare_template")
        remove_tree(self.template_draft(spec))
        self.template_draft(spec).mkdir()

    def abandoned_templates(self) -> list[Path]:
        return [path for path in self.folder.glob("*.draft") if not is_locked(path.with_suffix(".lock"))]

    async def save_template(self, spec: DomainSpec, domain: Domain, grows: Set[str] = frozenset()) -> Template:
        try:
            self.faults.strike("save_template")
            await domain.pause()
        finally:
            await domain.quit(grace=0.0)
        key = self._key(spec)
        remove_tree(self._path(key))
        draft = self.template_draft(spec)
        facts = {"image_digest": spec.image_digest, "memory": spec.of_template.memory, "grows": sorted(grows)}
        (draft / "facts").write_text(json.dumps(facts))
        draft.rename(self._path(key))
        self.damaged.pop(key, None)
        return self._read(key)

    async def fork(
        self, domain: Domain, spec: DomainSpec, layer: Path, point: Callable[[str], None]
    ) -> tuple[Template, float]:
        remove_tree(self.template_draft(spec))
        self.template_draft(spec).mkdir()
        self.faults.strike("fork")
        for name in ("fork-moving", "fork-split", "fork-moved"):
            point(name)
        layer.write_bytes(b"a further overlay")  # noqa: ASYNC240
        facts = {"image_digest": spec.image_digest, "memory": spec.memory, "grows": [], "fork": spec.fork}
        (self.template_draft(spec) / "facts").write_text(json.dumps(facts))
        self.template_draft(spec).rename(self._path(self._key(spec)))
        return self._read(self._key(spec)), 0.0

    def fork_lock(self, key: str) -> Path:
        return self.folder / f"{key}.lock"

    def of_fork(self, spec: DomainSpec, key: str) -> DomainSpec:
        if not self._path(key).exists():
            raise TemplateError("the fork is gone: it goes with the last machine of it")
        return replace(spec, fork=str(self._read(key).facts["fork"]))

    def templates(self) -> list[Template]:
        return [self._read(path.name) for path in sorted(self.folder.iterdir()) if path.is_dir() and not path.suffix]

    def verify_template(self, template: Template) -> list[str]:
        return [self.damaged[template.key]] if template.key in self.damaged else []

    def remove_template(self, key: str) -> None:
        self.damaged.pop(key, None)
        remove_tree(self._path(key))

    def expire_templates(self, now: float) -> list[str]:
        for draft in self.folder.glob("*.draft"):
            lock = try_lock(draft.with_suffix(".lock"))
            if lock is not None:
                remove_tree(draft)
                lock.release()
        old = [template.key for template in self.templates() if now - template.created > 7 * 86400]
        for template in self.templates():
            if "fork" in template.facts and (lock := try_lock(self.fork_lock(template.key))) is not None:
                old.append(template.key)
                lock.release()
        for key in old:
            self.remove_template(key)
        return old

    def alive(self) -> list[tuple[MachineId, int]]:
        return [(id, domain.pid) for id, domain in self.running.items()]

    def is_kept(self, id: MachineId, pid: int) -> bool:
        return False

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        self.faults.strike("discard")
        domain = self.running.get(id)
        if domain is not None:
            domain.end(KILLED)

    def _begin(self, spec: DomainSpec) -> FakeDomain:
        domain = FakeDomain(spec, FIRST_PID + len(self.domains), self.faults, self._forget)
        self.domains.append(domain)
        self.running[spec.id] = domain
        if self._run_guest is not None:
            self._run_guest(domain)
        return domain

    def _forget(self, domain: FakeDomain) -> None:
        self.running.pop(domain.spec.id, None)

    def _key(self, spec: DomainSpec) -> str:
        if spec.fork:
            return sha256(spec.fork.encode()).hexdigest()[:20]
        spec = spec.of_template
        image = (spec.image_digest, spec.image_stored, spec.boot.digest, spec.boot.append)
        machine = (spec.cpus, spec.memory, spec.disk_size, spec.owner[0], spec.accelerator.value)
        devices = (
            spec.nic is not None,
            [share.kind for share in spec.shares],
            [it.windows for it in spec.devices],
            spec.frame is not None,
        )
        return sha256(json.dumps(to_json([*image, *machine, *devices])).encode()).hexdigest()[:20]

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _read(self, key: str) -> Template:
        folder = self._path(key)
        facts = json.loads((folder / "facts").read_text())
        made, grows = (folder / "facts").stat().st_mtime, frozenset(facts["grows"])
        return Template(key, folder, 1 << 20, made, facts, grows)
