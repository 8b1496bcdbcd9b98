"""What every `Hypervisor` promises, the fake and the real one; and what ours does with a QEMU that misbehaves."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.hypervisor import FakeHypervisor

from belljar.errors import (
    BelljarError,
    DomainDied,
    HypervisorError,
    ImageCorrupt,
    OverLimit,
    QmpError,
    QmpTimeout,
    TemplateError,
)
from belljar.hypervisor import (
    Accelerator,
    Boot,
    Domain,
    DomainEvent,
    DomainSpec,
    EventKind,
    Hypervisor,
    LibvirtSettings,
    Settings,
    Template,
    load,
)
from belljar.hypervisor.qemu.abilities import DEVICES
from belljar.hypervisor.qemu.driver import QemuHypervisor
from belljar.hypervisor.qemu.process.launch import LOG_LIMIT
from belljar.model import MIB

SPEC = DomainSpec(
    id="", cpus=1, memory=64 * MIB, image_digest="d" * 64, boot=Boot(append="quiet", digest="b" * 64), disk=Path(),
    disk_size=64 * MIB, accelerator=Accelerator.TCG, folder=Path(), owner=(os.geteuid(), os.getegid()),
)  # fmt: skip


@dataclass
class Lab:
    """A hypervisor, and how to get a domain and a guest that is ready."""

    hypervisor: Hypervisor
    fresh: Callable[[str], DomainSpec]
    base: Path
    ready: Callable[[Domain], Awaitable[None]]

    @asynccontextmanager
    async def running(self, id: str) -> AsyncIterator[Domain]:
        domain = await self.hypervisor.launch(self.fresh(id), None)
        try:
            yield domain
        finally:
            await end(domain)

    async def template(self, spec: DomainSpec) -> Template:
        await self.hypervisor.prepare_template(spec, self.base)
        domain = self.hypervisor.start_template(spec)
        await self.ready(domain)
        try:
            return await self.hypervisor.save_template(spec, domain)
        finally:
            await end(domain)


async def end(domain: Domain) -> None:
    """Leave nothing of it."""
    domain.kill()
    await domain.quit(grace=0.0)
    domain.channel.close()
    domain.console.close()


def fake_lab(folder: Path) -> Lab:
    def fresh(id: str) -> DomainSpec:
        (folder / id).mkdir(exist_ok=True)
        return replace(SPEC, id=id, folder=folder / id, disk=folder / id / "overlay")

    async def ready(domain: Domain) -> None:
        await domain.connect()

    return Lab(FakeHypervisor(folder / "templates"), fresh, folder / "base", ready)


def real_lab(folder: Path) -> Lab:
    from tests.live import tiny

    guests = tiny.make(folder / "tiny")

    async def ready(domain: Domain) -> None:
        guest = tiny.Talk(domain)
        assert await guest.line() == "ready"
        guest.close()

    return Lab(guests.hypervisor, guests.fresh, guests.base, ready)


def libvirt_lab(folder: Path, daemon: Any) -> Lab:
    """The same guests, by libvirt."""
    lab = real_lab(folder)
    settings = LibvirtSettings(log_folder=str(daemon.folder / "log/qemu"))
    lab.hypervisor = load(Settings(), folder / "store", daemon.driver, settings)
    return lab


@pytest.fixture(scope="module")
def libvirt_daemon() -> Iterator[Any]:
    from tests.live import libvirt_lab

    with libvirt_lab.running() as daemon:
        yield daemon


BY_LIBVIRT = pytest.param("libvirt", marks=pytest.mark.live)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.live), BY_LIBVIRT])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    if request.param == "libvirt":
        return libvirt_lab(tmp_path, request.getfixturevalue("libvirt_daemon"))
    return fake_lab(tmp_path) if request.param == "fake" else real_lab(tmp_path)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.live)])
def caster(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A hypervisor that has templates."""
    return fake_lab(tmp_path) if request.param == "fake" else real_lab(tmp_path)


def new_id() -> str:
    return os.urandom(6).hex()


def mine(hypervisor: Hypervisor, *ids: str) -> list[str]:
    """Those of *ids* that live."""
    return sorted(id for id, _ in hypervisor.alive() if id in ids)


async def test_a_domain_is_found_by_its_mark_until_it_is_gone(lab: Lab) -> None:
    id = new_id()
    async with lab.running(id) as domain:
        assert (id, domain.pid) in lab.hypervisor.alive()
        assert not domain.channel.getblocking() and not domain.console.getblocking()
    assert mine(lab.hypervisor, id) == []


async def test_quitting_twice_is_fine_and_tells_the_same_status(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        await domain.connect()
        status = await domain.quit(grace=30.0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await domain.quit(grace=0.0) == status
        domain.kill()


async def test_quitting_without_grace_is_death_by_kill(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        assert os.waitstatus_to_exitcode(await domain.quit(grace=0.0)) == -9


async def test_a_domain_can_be_paused_and_resumed(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        await domain.connect()
        await domain.pause()
        await domain.pause()
        await domain.resume()


async def test_what_is_dead_cannot_be_paused_and_says_so(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        domain.kill()
        await domain.quit(grace=0.0)
        with pytest.raises(DomainDied):
            await domain.pause()
        with pytest.raises(DomainDied):
            await domain.connect()


async def test_whoever_asks_late_still_hears_the_end_and_nothing_after_it(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        early = asyncio.ensure_future(collect(domain))
        domain.kill()
        status = await domain.quit(grace=0.0)
        for events in (await early, await collect(domain), await collect(domain)):
            assert (events[-1].kind, events[-1].status) == (EventKind.EXITED, status)
            assert [event.kind for event in events].count(EventKind.EXITED) == 1


async def collect(domain: Domain) -> list[DomainEvent]:
    return [event async for event in domain.events()]


async def test_the_use_of_the_host_is_known_during_the_life_and_after_it(lab: Lab) -> None:
    async with lab.running(new_id()) as domain:
        await domain.connect()
        assert domain.usage()[2] > MIB
        await domain.quit(grace=30.0)
        user, system, peak = domain.usage()
        assert user + system > 0 and peak > MIB


async def test_discarding_leaves_no_process_and_needs_none(lab: Lab) -> None:
    id, other = new_id(), new_id()
    async with lab.running(id) as domain, lab.running(other):
        lab.hypervisor.discard(id)
        lab.hypervisor.discard(id)
        await domain.quit(grace=0.0)
        assert mine(lab.hypervisor, id, other) == [other]


async def test_a_template_is_made_once_and_cloned_until_it_is_removed(caster: Lab) -> None:
    hypervisor, maker, clone = caster.hypervisor, caster.fresh(new_id()), caster.fresh(new_id())
    assert hypervisor.find_template(maker) is None
    template = await caster.template(maker)
    assert mine(hypervisor, maker.id) == []
    assert hypervisor.find_template(clone) == template
    assert [one.key for one in hypervisor.templates()] == [template.key]
    assert hypervisor.verify_template(template) == []
    clone.disk.unlink(missing_ok=True)
    hypervisor.clone_disk(template, clone)
    domain = hypervisor.start(clone, template)
    try:
        await domain.connect()
        hypervisor.remove_template(template.key)
        hypervisor.remove_template(template.key)
        await domain.pause()  # it lives on
    finally:
        await end(domain)
    assert hypervisor.find_template(maker) is None
    with pytest.raises(TemplateError):
        hypervisor.start(clone, template)
    with pytest.raises(TemplateError):
        hypervisor.clone_disk(template, clone)


async def test_a_draft_that_nobody_finishes_expires(caster: Lab) -> None:
    spec = caster.fresh(new_id())
    await caster.hypervisor.prepare_template(spec, caster.base)
    assert caster.hypervisor.template_draft(spec).exists()
    caster.hypervisor.expire_templates(time.time())
    assert not caster.hypervisor.template_draft(spec).exists()
    with pytest.raises(TemplateError):
        caster.hypervisor.start_template(spec)


async def test_a_guest_that_dies_while_it_is_saved_makes_no_template(caster: Lab) -> None:
    spec = caster.fresh(new_id())
    await caster.hypervisor.prepare_template(spec, caster.base)
    domain = caster.hypervisor.start_template(spec)
    domain.kill()
    with pytest.raises((TemplateError, DomainDied)):
        await caster.hypervisor.save_template(spec, domain)
    await end(domain)
    assert mine(caster.hypervisor, spec.id) == []
    assert caster.hypervisor.find_template(spec) is None


async def test_templates_grow_old(caster: Lab) -> None:
    template = await caster.template(caster.fresh(new_id()))
    assert caster.hypervisor.expire_templates(template.created + 86400) == []
    assert caster.hypervisor.expire_templates(template.created + 365 * 86400) == [template.key]
    assert caster.hypervisor.templates() == []


@pytest.mark.live
async def test_a_driver_without_templates_says_so(libvirt_daemon: Any, tmp_path: Path) -> None:
    lab = libvirt_lab(tmp_path, libvirt_daemon)
    with pytest.raises(TemplateError, match="always booted cold"):
        _ = lab.hypervisor.cloning


async def test_a_launch_is_a_start_that_can_be_waited_for(lab: Lab) -> None:
    id = new_id()
    domain = await lab.hypervisor.launch(lab.fresh(id), None)
    try:
        assert mine(lab.hypervisor, id) == [id]
    finally:
        await end(domain)
    assert mine(lab.hypervisor, id) == []


# -- a QEMU that is not what it should be: a script in its place ---------------------------------------------------------


@pytest.fixture
def impostor(tmp_path: Path) -> Callable[..., tuple[QemuHypervisor, DomainSpec]]:
    """A hypervisor whose QEMU is the given shell script, and a spec to start it with. `$monitor` is the monitor's
    descriptor."""

    def make(body: str, timeout: float = 30.0, **changes: Any) -> tuple[QemuHypervisor, DomainSpec]:
        listing = "\n".join(f"echo 'name \"{name}\"'" for name in DEVICES)
        program = tmp_path / "qemu-impostor"
        program.write_text(f"""#!/bin/bash
case "$1" in --version) echo "QEMU emulator version 7.2.22 (impostor)"; exit;; esac
case "$*" in *"-qmp stdio") exit;; esac
case "$1 $2" in "-device help") {listing.replace(chr(10), "; ")}; exit;; esac
for word; do case $word in socket,id=monitor,fd=*) monitor=${{word##*=}};; esac; done
{body}
""")
        program.chmod(0o755)
        disk = tmp_path / "disk"
        disk.write_bytes(b"QFI\xfb\0\0\0\3" + bytes(504))
        hypervisor = QemuHypervisor(Settings(binary=str(program), qmp_timeout=timeout), tmp_path / "store")
        return hypervisor, replace(SPEC, id=new_id(), folder=tmp_path, disk=disk, **changes)

    return make


@asynccontextmanager
async def started(hypervisor: QemuHypervisor, spec: DomainSpec) -> AsyncIterator[Domain]:
    domain = hypervisor.start(spec)
    try:
        yield domain
    finally:
        await end(domain)


Impostor = Callable[..., tuple[QemuHypervisor, DomainSpec]]


async def test_a_qemu_that_ends_at_once_is_explained_by_its_last_words(impostor: Impostor) -> None:
    hypervisor, spec = impostor("echo 'qemu-system-x86_64: Invalid SMP CPUs 9. The max CPUs' >&2; exit 1")
    async with started(hypervisor, spec) as domain:
        with pytest.raises(OverLimit, match="Invalid SMP CPUs 9"):
            await domain.connect()
        assert [event.kind for event in await collect(domain)] == [EventKind.EXITED]
    assert b"Invalid SMP" in (spec.folder / "qemu.log").read_bytes()


async def test_a_qemu_that_never_answers_costs_no_more_than_its_deadline(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exec sleep 1000", timeout=0.2)
    async with started(hypervisor, spec) as domain:
        with pytest.raises(QmpTimeout, match=r"qmp_capabilities within 0\.2 s"):
            await domain.connect()
        assert os.waitstatus_to_exitcode(await domain.quit(grace=0.05)) == -9


async def test_a_qemu_that_talks_rubbish_is_not_talked_to(impostor: Impostor) -> None:
    hypervisor, spec = impostor("echo 'HTTP/1.1 200 OK' >&$monitor; exec sleep 1000")
    async with started(hypervisor, spec) as domain:
        with pytest.raises(QmpError, match="not QMP"):
            await domain.connect()


async def test_the_log_of_a_qemu_that_complains_without_end_is_capped(impostor: Impostor) -> None:
    hypervisor, spec = impostor("head -c 5000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo 'its last words' >&2")
    async with started(hypervisor, spec) as domain:
        assert (await collect(domain))[-1].detail == "its last words"
    assert (spec.folder / "qemu.log").stat().st_size == LOG_LIMIT
    assert (spec.folder / "qemu.log").stat().st_mode & 0o777 == 0o600


async def test_signals_of_the_terminal_and_the_batch_system_pass_qemu_by(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exec sleep 1000")
    async with started(hypervisor, spec) as domain:
        for number in (1, 2, 3, 10, 12, 13, 14, 15, 20, 21, 22, 24, 25):
            os.kill(domain.pid, number)
        domain.kill()
        assert os.waitstatus_to_exitcode(await domain.quit(grace=0.0)) == -9


async def test_qemu_inherits_its_own_descriptors_and_no_others(impostor: Impostor, tmp_path: Path) -> None:
    hypervisor, spec = impostor(f"ls -l /proc/$$/fd > {tmp_path}/fds")
    stray = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(stray, True)
    try:
        async with started(hypervisor, spec) as domain:
            await collect(domain)
    finally:
        os.close(stray)
    targets = [line.rpartition(" -> ")[2] for line in (tmp_path / "fds").read_text().splitlines() if " -> " in line]
    assert str(tmp_path) not in targets
    assert sum(target.startswith("socket:") for target in targets) == 3
    assert str(spec.disk) in targets


async def test_a_program_that_cannot_be_run_is_named(impostor: Impostor, tmp_path: Path) -> None:
    hypervisor, spec = impostor("true")
    _ = hypervisor.abilities
    (tmp_path / "qemu-impostor").write_text("#!/no/such/interpreter\n")
    async with started(hypervisor, spec) as domain:
        with pytest.raises(BelljarError, match="failed to execute"):
            await domain.connect()


async def test_a_disk_that_is_missing_is_noticed_before_anything_runs(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exec sleep 1000")
    with pytest.raises(ImageCorrupt, match="missing"):
        hypervisor.start(replace(spec, disk=Path("/no/such/disk")))
    assert mine(hypervisor, spec.id) == []


async def test_a_kernel_that_is_missing_is_noticed_before_anything_runs(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exec sleep 1000", boot=Boot(kernel=Path("/no/such/kernel")))
    with pytest.raises(ImageCorrupt, match="/no/such/kernel"):
        hypervisor.start(spec)


async def test_many_failing_starts_leave_no_descriptor_behind(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exit 3", boot=Boot(kernel=Path("/no/such/kernel")))
    _ = hypervisor.abilities
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(ImageCorrupt):
            hypervisor.start(spec)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_ended_domain_keeps_only_the_ends_it_handed_out(impostor: Impostor) -> None:
    hypervisor, spec = impostor("exit 3")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        async with started(hypervisor, spec) as domain:
            with pytest.raises(HypervisorError, match="exit code 3"):
                await domain.connect()
    assert len(os.listdir("/proc/self/fd")) == before
