"""Real templates and clones: many at once, private memory, what is noticed when somebody touched a template."""

import asyncio
import os
import shutil
import signal
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from tests.live import tiny
from tests.live.tiny import Tiny

from belljar.errors import DomainDied, HypervisorError, TemplateError
from belljar.hypervisor import Template
from belljar.hypervisor.qemu.domain import QemuDomain
from belljar.model import MIB, Share

NOBODY = (65534, 65534)


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def template(guests: Tiny) -> Template:
    """One template for all tests that do not harm it."""
    return asyncio.run(guests.template(guests.spec(new_id(), shares=SHARES)))


SHARES = (Share("/tmp", "/in", True),)


def new_id() -> str:
    return os.urandom(6).hex()


async def test_eight_clones_at_once_go_on_where_the_template_stood(guests: Tiny, template: Template) -> None:
    clones = [guests.clone(guests.spec(new_id(), shares=SHARES), template) for _ in range(8)]
    try:
        answers = await asyncio.gather(*(clone.ask(f"clone {number}") for number, clone in enumerate(clones)))
        assert answers == [f"heard clone {number}" for number in range(8)]
        await asyncio.gather(*(clone.domain.connect() for clone in clones))
    finally:
        for clone in clones:
            await clone.end()
    assert guests.hypervisor.verify_template(template) == []


async def test_a_clone_runs_though_qemu_comes_to_cont_while_it_loads(
    guests: Tiny, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host. Here QEMU hears it before it begins to load, which comes to the same."""
    ask = QemuDomain.ask

    def other_order(domain: QemuDomain, command: str, arguments: dict[str, object] | None = None) -> None:
        if command == "migrate-incoming":
            ask(domain, "cont")
        if command != "cont":
            ask(domain, command, arguments)

    monkeypatch.setattr(QemuDomain, "ask", other_order)
    clone = guests.clone(guests.spec(new_id(), shares=SHARES), template)
    try:
        async with asyncio.timeout(20):
            assert await clone.ask("are you there") == "heard are you there"
    finally:
        await clone.end()


async def test_a_clone_that_is_paused_while_it_loads_stays_so(guests: Tiny, template: Template) -> None:
    clone = guests.clone(guests.spec(new_id(), shares=SHARES), template)
    try:
        await clone.domain.pause()
        await clone.domain.connect()
        assert (await clone.domain.call("query-status"))["status"] == "paused"
        await clone.domain.resume()
        assert await clone.ask("are you there") == "heard are you there"
    finally:
        await clone.end()


async def test_what_a_clone_writes_stays_its_own(guests: Tiny, template: Template) -> None:
    one, two = (guests.clone(guests.spec(new_id(), shares=SHARES), template) for _ in range(2))
    try:
        for number, clone in ((1, one), (2, two)):
            await clone.do(
                f"mkdir -p /m; mount -t tmpfs none /m; busybox dd if=/dev/urandom of=/m/x bs=1M count=20; echo {number} > /m/word"
            )
            await clone.do(f"echo disk {number} | busybox dd of=/dev/vda conv=notrunc; busybox sync")
        assert [(await clone.do("busybox cat /m/word"))[0] for clone in (one, two)] == [["1"], ["2"]]
        assert [(await clone.do("busybox head -c 6 /dev/vda; echo"))[0] for clone in (one, two)] == [
            ["disk 1"],
            ["disk 2"],
        ]
    finally:
        await one.end()
        await two.end()
    assert guests.hypervisor.verify_template(template) == []


async def test_an_idle_clone_shares_the_memory_of_its_template(guests: Tiny, template: Template) -> None:
    clones = [guests.clone(guests.spec(new_id(), shares=SHARES), template) for _ in range(3)]
    try:
        for clone in clones:
            await clone.ask("hello")
        assert private_memory(clones[0].domain.pid) < 80 * MIB  # its guest has 256 MiB
    finally:
        for clone in clones:
            await clone.end()


def private_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


async def test_each_clone_mounts_a_folder_of_its_own(guests: Tiny, template: Template, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "word").write_text(f"folder {name}\n")
        spec = guests.spec(new_id(), shares=(Share(str(folder), "/in", readonly=name == "one"),))
        clone = guests.clone(spec, template)
        try:
            mount = "mkdir /s; mount -t 9p -o trans=virtio,version=9p2000.L share0 /s; busybox cat /s/word; echo new > /s/new"
            lines, _ = await clone.do(mount)
            assert lines[0] == f"folder {name}"
        finally:
            await clone.end()
        assert (folder / "new").exists() is (name == "two")


async def test_a_clone_that_stands_still_is_ended_all_the_same(guests: Tiny, template: Template) -> None:
    clone = guests.clone(guests.spec(new_id(), shares=SHARES), template)
    os.kill(clone.domain.pid, signal.SIGSTOP)
    assert os.waitstatus_to_exitcode(await clone.domain.quit(grace=0.1)) == -signal.SIGKILL
    await clone.end()
    assert clone.domain.pid not in [pid for _, pid in guests.hypervisor.alive()]


async def test_a_template_is_for_its_own_kind_of_machine_only(guests: Tiny, template: Template) -> None:
    spec = guests.spec(new_id(), shares=SHARES)
    assert guests.hypervisor.find_template(spec) == template
    for other in (
        replace(spec, memory=512 * MIB), replace(spec, cpus=2), replace(spec, shares=()), replace(spec, owner=(1, 1)),
        replace(spec, image_digest="another"), replace(spec, disk_size=128 * MIB),
        replace(spec, boot=replace(spec.boot, append="console=ttyS0")), replace(spec, boot=replace(spec.boot, digest="new agent")),
    ):  # fmt: skip
        assert guests.hypervisor.find_template(other) is None


async def test_a_template_whose_memory_was_touched_is_not_used(guests: Tiny) -> None:
    spec = guests.spec(new_id(), image_digest="to be touched")
    template = await guests.template(spec)
    touch(template.folder / "ram", 64 * MIB, b"a secret way in")
    assert guests.hypervisor.find_template(spec) is None
    assert "ram has changed since it was made" in guests.hypervisor.verify_template(template)


def touch(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


async def test_a_device_state_that_does_not_load_is_an_error_and_no_hang(guests: Tiny) -> None:
    template = await guests.template(guests.spec(new_id(), image_digest="damaged"))
    state = template.folder / "state"
    state.chmod(0o600)
    content = state.read_bytes()
    for damaged in (content[: len(content) // 2], b"\0" * len(content)):
        state.write_bytes(damaged)
        clone = guests.clone(guests.spec(new_id(), image_digest="damaged"), template)
        try:
            async with asyncio.timeout(tiny.LONGEST):
                with pytest.raises(HypervisorError):
                    await clone.domain.connect()
        finally:
            await clone.end()


async def test_root_may_keep_templates_for_a_user_without_rights(guests: Tiny) -> None:
    spec = guests.spec(new_id(), owner=NOBODY)
    template = await guests.template(spec)
    facts = {path.name: path.stat() for path in template.folder.iterdir()}
    assert {name for name, fact in facts.items() if fact.st_uid != 0} <= {"ram"}
    clone = guests.clone(guests.spec(new_id(), owner=NOBODY), template)
    try:
        assert await clone.ask("hello") == "heard hello"
    finally:
        await clone.end()
    assert guests.hypervisor.verify_template(template) == []


async def test_a_template_whose_qemu_is_killed_while_it_boots_is_none(guests: Tiny) -> None:
    spec = guests.spec(new_id(), image_digest="killed")
    spec.folder.mkdir()
    await guests.hypervisor.prepare_template(spec, guests.base)
    domain = guests.hypervisor.start_template(spec)
    guests.hypervisor.discard(spec.id)
    with pytest.raises((TemplateError, DomainDied)):
        await guests.hypervisor.save_template(spec, domain)
    domain.channel.close()
    domain.console.close()
    assert guests.hypervisor.find_template(spec) is None


@pytest.mark.parametrize("changes", [{"cpus": 2}, {"memory": 4096 * MIB}], ids=["two processors", "four gibibytes"])
async def test_larger_machines_clone_as_well(guests: Tiny, changes: dict[str, int]) -> None:
    template = await guests.template(guests.spec(new_id(), **changes))
    clone = guests.clone(guests.spec(new_id(), **changes), template)
    try:
        assert (await clone.do("busybox nproc"))[0] == [str(changes.get("cpus", 1))]
    finally:
        await clone.end()


def test_an_ordinary_user_has_templates_of_their_own(tmp_path: Path) -> None:
    """Made and cloned by a process without any right: what is loaded is loaded before it becomes that user."""
    from belljar.hypervisor.qemu import proof
    from belljar.hypervisor.qemu.template import making

    folder = Path(tempfile.mkdtemp(prefix="belljar-user-"))  # pytest's own folders are closed to others
    try:
        os.chown(folder, *NOBODY)
        guests = tiny.make(folder, copy_kernel=True)
        for path in folder.iterdir():
            os.chown(path, *NOBODY)
        assert making and proof
        child = os.fork()
        if child == 0:
            os._exit(as_nobody(guests))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (folder_of_template,) = [path for path in (folder / "store/templates").iterdir() if path.is_dir()]
        assert {path.stat().st_uid for path in folder_of_template.iterdir()} == {NOBODY[0]}
    finally:
        shutil.rmtree(folder)


def as_nobody(guests: Tiny) -> int:
    """Become nobody, make a template, clone it. The exit code of the process."""

    async def work() -> None:
        template = await guests.template(guests.spec(new_id()))
        clone = guests.clone(guests.spec(new_id()), template)
        assert await clone.ask("hello") == "heard hello"
        assert os.stat(f"/proc/{clone.domain.pid}").st_uid == NOBODY[0]
        await clone.end()

    try:
        os.setgroups([])
        os.setgid(NOBODY[1])
        os.setuid(NOBODY[0])
        asyncio.run(work())
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
