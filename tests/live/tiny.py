"""The smallest guest: the default image's kernel and drivers, and a shell script in place of everything else.

It says `ready` on the agent's port and then does what each line asks. It is up in two seconds and clones in a tenth.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.live.conftest import STORE

from belljar.hypervisor import Accelerator, Boot, Domain, DomainSpec, Hypervisor, Settings, Template
from belljar.hypervisor.qemu.driver import QemuHypervisor
from belljar.image.boot import cpio
from belljar.model import MIB

LONGEST = 60.0  # seconds any one answer may take on a busy host
DISK_SIZE = 64 * MIB
INIT = b"""#!/bin/sh
PATH=/bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
case "$(busybox cat /proc/cmdline)" in *belljar.probe*) echo belljar-probe-ok; poweroff -f;; esac
for group in always pvpanic 9p; do
    [ -e /modules/$group ] && while read -r module; do insmod /modules/$module 2>/dev/null; done < /modules/$group
done
while set -- /dev/vport*p1; [ ! -e "$1" ]; do :; done
until command exec 3<>$1; do :; done 2>/dev/null
echo ready >&3
while read -r word rest <&3; do
    case $word in
    off) poweroff -f;;
    reboot) busybox reboot -f;;
    panic) echo c > /proc/sysrq-trigger;;
    shout) echo "$rest" > /dev/console; echo shouted >&3;;
    do) eval "$rest" >&3 2>&1; echo "done $?" >&3;;
    *) echo "heard $word $rest" >&3;;
    esac
done
"""


@dataclass
class Tiny:
    """Tiny guests in one folder."""

    folder: Path
    boot: Boot
    hypervisor: Hypervisor
    base: Path

    def spec(self, id: str, **changes: Any) -> DomainSpec:
        """A domain of this kind. Its folder and its disk's overlay do not exist yet."""
        folder = self.folder / id
        return replace(
            DomainSpec(
                id=id, cpus=1, memory=256 * MIB, image_digest="tiny", boot=self.boot, disk=folder / "overlay.qcow2",
                disk_size=DISK_SIZE, accelerator=Accelerator.TCG, folder=folder, owner=(os.geteuid(), os.getegid()),
            ),
            **changes,
        )  # fmt: skip

    def fresh(self, id: str, **changes: Any) -> DomainSpec:
        """A domain with its folder and a disk of its own."""
        spec = self.spec(id, **changes)
        spec.folder.mkdir(mode=0o700, exist_ok=True)
        qemu_img(
            "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(self.base), str(spec.disk), str(spec.disk_size)
        )
        return spec

    async def template(self, spec: DomainSpec) -> Template:
        """The template for this kind of domain, made now."""
        spec.folder.mkdir(mode=0o700, exist_ok=True)
        await self.hypervisor.prepare_template(spec, self.base)
        domain = self.hypervisor.start_template(spec)
        guest = Talk(domain)
        assert await guest.line() == "ready"
        guest.close()
        try:
            return await self.hypervisor.save_template(spec, domain)
        finally:
            guest.hang_up()

    async def guest(self) -> "Talk":
        """A guest that is ready, by the shortest way: a clone of the template of this kind, which is made at first."""
        spec = self.spec(os.urandom(6).hex())
        return self.clone(spec, self.hypervisor.find_template(spec) or await self.template(spec))

    def clone(self, spec: DomainSpec, template: Template) -> "Talk":
        spec.folder.mkdir(mode=0o700, exist_ok=True)
        self.hypervisor.clone_disk(template, spec)
        return Talk(self.hypervisor.start(spec, template))


class Talk:
    """A domain whose guest is spoken with, line by line. Its console is read, or it would stop."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.console = bytearray()
        self._heard = asyncio.Event()
        self._buffer = b""
        self._reading = asyncio.ensure_future(self._read_console())

    async def line(self) -> str:
        async with asyncio.timeout(LONGEST):
            while b"\n" not in self._buffer:
                data = await asyncio.get_running_loop().sock_recv(self.domain.channel, 4096)
                if not data:
                    raise EOFError(f"the guest is gone; its console: {self.console[-500:].decode(errors='replace')}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").strip()

    async def say(self, text: str) -> None:
        await asyncio.get_running_loop().sock_sendall(self.domain.channel, text.encode() + b"\n")

    async def ask(self, text: str) -> str:
        await self.say(text)
        return await self.line()

    async def do(self, command: str) -> tuple[list[str], int]:
        """Run a shell command in the guest: its output, and its exit code."""
        await self.say(f"do {command}")
        lines = []
        while not (line := await self.line()).startswith("done "):
            lines.append(line)
        return lines, int(line.split()[1])

    async def heard(self, words: bytes) -> None:
        """Wait until these words were on the console."""
        async with asyncio.timeout(LONGEST):
            while words not in self.console:
                self._heard.clear()
                await self._heard.wait()

    def close(self) -> None:
        """Stop reading the console."""
        self._reading.cancel()

    async def end(self) -> None:
        self.close()
        self.domain.kill()
        await self.domain.quit(grace=0.0)
        self.hang_up()

    def hang_up(self) -> None:
        self.domain.channel.close()
        self.domain.console.close()

    async def _read_console(self) -> None:
        with suppress(OSError):
            while data := await asyncio.get_running_loop().sock_recv(self.domain.console, 4096):
                self.console += data
                self._heard.set()


def qemu_img(*words: str) -> None:
    subprocess.run(["qemu-img", *words], check=True, capture_output=True, timeout=60)


def make(folder: Path, settings: Settings | None = None, *, copy_kernel: bool = False) -> Tiny:
    """Tiny guests under *folder*, which is made if need be. The default image is taken from the store of the live tests."""
    folder.mkdir(mode=0o700, exist_ok=True)
    kernel, initrd = _boot_files()
    if copy_kernel:
        kernel = Path(shutil.copy(kernel, folder / "kernel"))
    archive = cpio.archive([cpio.file("init", INIT, 0o755)])
    (folder / "initrd").write_bytes(initrd.read_bytes() + archive)
    (folder / "initrd").chmod(0o644)
    base = folder / "base.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", str(base), str(DISK_SIZE))
    boot = Boot(kernel, folder / "initrd", "console=ttyS0 quiet panic=-1 no_timer_check", "tiny")
    return Tiny(folder, boot, QemuHypervisor(settings or Settings(), folder / "store"), base)


def _boot_files() -> tuple[Path, Path]:
    """Kernel and initial ramdisk of the default image."""
    code = "from belljar.assembly import Runtime; h = Runtime().images; h.ensure('debian12'); i = h.resolve('debian12'); print(i.kernel, i.initrd)"
    env = {**os.environ, "BELLJAR_PATHS_STORE": str(STORE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True)
    kernel, initrd = done.stdout.split()
    return Path(kernel), Path(initrd)
