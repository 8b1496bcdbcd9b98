"""A guest without an agent, behind its own ssh server: implements `Guest` as far as a shell can carry it.

Nothing of a request is ever part of a command: commands are fixed words and numbers of ours, the rest travels as files.
How a payload ended is read from a record the guest's script wrote (ssh_scripts.py), never from ssh's own status, so a
connection that broke is made anew and the record read again. What a shell cannot carry is listed in docs/contexts.md.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from belljar.agent.guest.accounts import Account as GuestAccount
from belljar.agent.guest.accounts import free_name, with_groups, with_shadow, with_user
from belljar.agent.guest.system import Refused
from belljar.agent.wire import Words
from belljar.errors import AgentLost, GuestRefused, NoDisk, NoNfs, NoNineP, NoPackedFolders, NoVirtiofs
from belljar.guest import OWN_SSH_PORT, Hello, Identity, IdentityProof, Settings, Sink, SshKeys, Streams
from belljar.guest.conversation import account_words
from belljar.guest.process import one_line
from belljar.guest.ssh_archive import archive, sorted_files, unpacking
from belljar.guest.ssh_link import Link, Patience, Tell, library, lost
from belljar.guest.ssh_process import SshProcess
from belljar.guest.ssh_scripts import JOBS, PROBE, Means, job_files, text
from belljar.model import Account, FileServer, Payload, PlainFile

if TYPE_CHECKING:
    from belljar.guest.ssh_link import Answer
    from belljar.guest.ssh_process import Watcher

LONGEST_WORD = 128 * 1024 - 1  # of one argument or variable, for Linux
WHOLE_COMMAND = 2 * 1024 * 1024 - 64 * 1024
ACCOUNT_FILES = ("/etc/passwd", "/etc/shadow", "/etc/group")


class SshGuest:
    """One guest. Closing it makes every waiting call raise AgentLost; it does not come back."""

    def __init__(
        self,
        dial: Callable[[int], Awaitable[socket.socket]],
        keys: SshKeys,
        settings: Settings,
        tell: Tell,
        patience: Patience | None = None,
    ) -> None:
        self.link = Link(dial, keys, settings, tell, patience)
        self.means = Means()
        self._settings, self._tell, self._kernel = settings, tell, ""
        self._number = 0
        self._processes: list[SshProcess] = []
        self._accounts: dict[Account, str] = {}  # the names they have in the guest

    # -- begin and end

    async def greet(self) -> Hello:
        await self.link.open(patiently=True)
        said = facts_of((await self._done(PROBE, "look around in the guest")).out)
        yes = {name for name, value in said.items() if value == "yes"}
        self._kernel = said.get("kernel", "")
        self.means = Means(
            waiter=said.get("waiter", "sh"), dropper=said.get("dropper", ""),
            **{name: name in yes for name in ("prlimit", "cgroup", "setsid", "gnu_tar", "nanoseconds")},
        )  # fmt: skip
        return Hello(1, "ssh", said.get("boot", ""), said.get("os", ""), self._kernel, "", "nine_p" in yes)

    def close(self) -> None:
        error = AgentLost("the conversation with the guest was closed")
        for process in self._processes:
            process.fail(error)
        self.link.close()

    # -- who it is

    async def identify(self, identity: Identity) -> IdentityProof:
        from belljar.guest.ssh_identity import fresh_host_key, identity_script, read_proof

        private, public = fresh_host_key()
        answer = await self._done(
            identity_script(identity, private, public, is_told=not self.link.is_by_ours), "take its identity"
        )
        self.link.trust(public)
        said = facts_of(answer.out)
        return read_proof(said, identity, await self.set_clock())

    async def grow(self, cpus: int, *, plugged: int, surplus: int, disk: int) -> tuple[int, int]:
        raise GuestRefused("a guest without an agent does not grow")

    async def settle(self) -> frozenset[str]:
        """A clone's keys are only as good as its kernel's random numbers: where it cannot be given new ones for sure there is
        no template. Raises GuestRefused."""
        from belljar.guest.ssh_identity import SETTLE, UP

        more = 9 * self._settings.call_timeout
        await self._done(UP, "come up", more=more)
        await self._leave_server()
        await self._done(SETTLE, "settle", more=more)
        await self.link.hang_up()
        return frozenset()

    async def _leave_server(self) -> None:
        """A server of ours, which costs a clone less than the image's own. Where there can be none that one does."""
        from belljar.guest.ssh_identity import NO_SERVER, server_script

        started = await self.link.script(
            server_script(self.link.public, OWN_SSH_PORT), more=self._settings.call_timeout
        )
        why = await self.link.move() if started.code == 0 else "it cannot be started"
        if why:
            self._tell(f"no server of belljar's own at its second port: {why}")
            await self._done(NO_SERVER, "end a server")

    async def set_clock(self) -> float:
        from belljar.guest.ssh_identity import TELL, steer_clock

        async def ask(script: str) -> bytes:
            return (await self._done(f"{TELL}{script}", "tell the time")).out

        return await steer_clock(ask, precise=self.means.nanoseconds)

    # -- places

    async def mount(self, tag: str, target: str, *, readonly: bool) -> None:
        how = "ro" if readonly else "rw"
        script = (
            f"T={text(target)}; mkdir -p \"$T\" || exit 5\n"
            "grep -q 9p /proc/filesystems || modprobe -a 9p 9pnet_virtio 2> /dev/null || modprobe 9p 2> /dev/null\n"
            "modprobe 9pnet_virtio 2> /dev/null\n"
            "grep -q 9p /proc/filesystems || exit 6\n"
            f"exec mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,nosuid,nodev,{how} {text(tag)} \"$T\"\n"
        )  # fmt: skip
        answer = await self.link.script(script)
        if answer.code == 6:
            raise NoNineP(
                "the guest's kernel has no 9p",
                hint="Copy files with `--in` and `--out`, or use an image whose kernel has 9p.",
            )
        check(answer, f"mount {target}")

    async def mount_virtiofs(self, tag: str, target: str, *, readonly: bool) -> None:
        raise NoVirtiofs("folders by virtiofs are not mounted over ssh", hint="Share them without `virtiofs:`.")

    async def mount_nfs(self, server: FileServer, target: str, *, readonly: bool) -> None:
        raise NoNfs(
            "exports of a file server are not mounted over ssh", hint="Use an image with Python, or a host folder."
        )

    async def find_disks(self, names: Sequence[str]) -> list[str]:
        script = (
            "[ -w /sys/bus/pci/rescan ] && echo 1 > /sys/bus/pci/rescan\n"
            "look() { for s in /sys/block/*/serial; do [ -r \"$s\" ] || continue\n"
            "read -r v < \"$s\" || [ -n \"$v\" ] || continue; d=${s%/serial}; echo \"disk-$v /dev/${d##*/}\"; done; }\n"
            "tries=0\n"
            f"until look > /run/belljar/disks; [ $(wc -l < /run/belljar/disks) -ge {len(names)} ] || [ $tries -gt 100 ]; do\n"
            "tries=$((tries + 1)); sleep 0.1; done\ncat /run/belljar/disks\n"
        )  # fmt: skip
        said = facts_of((await self._done(script, "look for its disks", more=15)).out)
        found = [said.get(f"disk-{name}", "") for name in names]
        if missing := [name for name, device in zip(names, found, strict=True) if not device]:
            raise NoDisk(f"the guest does not see its disk {missing[0]}")
        return found

    async def mount_scratch(self, device: str, target: str, account: Account) -> None:
        where = f'T={text(target)}; mkdir -p "$T" && mount -t ext4 -o nosuid,nodev,noatime {text(device)} "$T"'
        await self._done(f'{where} && chown {account.uid}:{account.gid} "$T" && chmod 0700 "$T"', f"mount {target}")

    async def mount_packed(self, name: str, device: str, inside: str, account: Account, cwd: bytes | None) -> None:
        raise NoPackedFolders("folders that come as disks are not mounted over ssh")

    async def renew_keys(self) -> None:
        """`identify` has done that."""

    async def prepare_for(self, what: str) -> None:
        raise GuestRefused(f"{what}: not over ssh")

    # -- accounts and files

    async def add_account(self, account: Account) -> None:
        """By the same rules as the agent's, worked out here: the guest sends its files and gets them back."""
        if account in self._accounts:
            return
        words = account_words(account)
        user = GuestAccount(Words(words))
        try:
            user.check()
        except Refused as exc:
            raise GuestRefused(str(exc)) from exc
        self._accounts[account] = account.name
        if user.is_plain_root():
            return
        said = await self._read(ACCOUNT_FILES)
        name = free_name(said[0], user.name, user.uid)
        new = [with_user(said[0], user), with_shadow(said[1], name), with_groups(said[2], user, name)]
        lines = ["umask 077"]
        for path, old, text_now in zip(ACCOUNT_FILES, said, new, strict=True):
            if old != text_now:
                mode = "0640" if path == "/etc/shadow" else "0644"
                lines.append(f"printf %s {text(text_now)} > {path}.belljar && chmod {mode} {path}.belljar || exit 5")
                lines.append(f"mv {path}.belljar {path} || exit 5")
        lines.append(
            f'umask 022; H={text(account.home)}; [ -d "$H" ] || {{ mkdir -p "$H" && chmod 0700 "$H" &&'
            f' chown {account.uid}:{account.gid} "$H"; }}'
        )
        await self._done("\n".join(lines), f"make the account {name} with its home folder {account.home}")
        self._accounts[account] = name

    async def place(self, files: Sequence[PlainFile], account: Account) -> None:
        from belljar.guest.ssh_files import place_script

        await self.add_account(account)
        folder = self._next_folder()
        contents = {str(number): file.data for number, file in enumerate(files) if file.data is not None}
        await self._send(folder, contents)
        await self._done(place_script(files, account, folder), "make the payload's files")

    async def put(
        self, outside: str, inside: str, account: Account, cwd: bytes | None, *, skip: tuple[str, ...] = ()
    ) -> None:
        from belljar.guest.ssh_files import put

        await self.add_account(account)
        await put(self, outside, inside, account, cwd, skip)

    async def get(
        self,
        inside: str,
        outside: str,
        account: Account,
        cwd: bytes | None,
        *,
        skip: tuple[str, ...] = (),
        changed_only: bool = False,
    ) -> None:
        from belljar.guest.ssh_files import get

        await self.add_account(account)
        await get(self, inside, outside, account, cwd, skip=skip, changed_only=changed_only)

    async def collect(self, paths: Sequence[str], sink: Sink) -> None:
        from belljar.guest.ssh_files import collect

        await collect(self, paths, sink)

    # -- payloads

    async def start(self, payload: Payload, streams: Streams) -> SshProcess:
        refuse_what_no_kernel_takes(payload)
        await self.add_account(payload.account)
        quick, slow = sorted_files(payload.files)
        if slow:
            await self.place(slow, payload.account)
        folder = self._next_folder()
        script = None
        if payload.script is not None:
            name = os.path.basename((payload.argv[0] if payload.argv else b"").rstrip(b"/")) or b"script"
            script = f"{folder}/script/".encode() + name
        files = job_files(payload, self.means, folder, self._number, script=script)
        contents: dict[str, bytes] = dict(files)
        if payload.script is not None and script is not None:
            contents["script/" + os.fsdecode(os.path.basename(script))] = payload.script
        watcher = await self._make_ready(folder, contents, quick, f"{payload.account.uid}:{payload.account.gid}")
        process = SshProcess(self.link, folder, names_of(payload), streams, watcher)
        self._processes.append(process)
        await process.begin(payload.terminal)
        return process

    async def _make_ready(
        self, folder: str, contents: dict[str, bytes], files: Sequence[PlainFile], owner: str
    ) -> Watcher:
        """Put a payload's files there; returns the session that tells what becomes of it."""
        own = f"chown {owner} error become && chmod 0600 error && chmod 0400 become"
        script = f"[ ! -d script ] || {{ chmod 0711 script && chown {owner} script/* && chmod 0700 script/*; }}"
        more = f"cd {folder} && mkfifo -m 0600 started && : > error && {own} && {{ {script}; }} && : > {JOBS}/began"
        watcher = await self.link.process(f"sh -c '{unpacking(folder)} && {more} && exec sh {folder}/watch'")
        with suppress(OSError):
            watcher.stdin.write(archive(folder, contents, files))
            watcher.stdin.write_eof()
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                if await watcher.stdout.readline() == b"ready\n":
                    return watcher
                why = one_line((await watcher.stderr.read(500)).decode(errors="replace"))
        except TimeoutError as exc:
            raise AgentLost(f"the guest did not make a payload ready within {self._settings.call_timeout:g} s") from exc
        except (library().Error, OSError) as exc:
            raise lost(exc) from exc
        raise GuestRefused(f"the guest could not make a payload ready: {why}")

    async def end_payload(self) -> None:
        """Kill what is left of the payloads, unmount what was mounted for them, write everything out."""
        for process in self._processes:
            if not process.is_over:
                await process.signal(9)
        script = (
            "for g in /sys/fs/cgroup/belljar/*/; do [ -d \"$g\" ] && echo 1 > \"$g/cgroup.kill\"; done 2> /dev/null\n"
            "while read -r tag where kind rest; do [ \"$kind\" = 9p ] && umount \"$where\"; done < /proc/mounts\nsync\nexit 0\n"
        )  # fmt: skip
        await self._done(script, "end the payload", more=30)
        running = [process.wait() for process in self._processes if not process.is_over]
        await asyncio.gather(*running, return_exceptions=True)

    # -- small helps

    async def _read(self, paths: Sequence[str]) -> list[str]:
        """Text files of the guest; one that is not there is empty."""
        end = f"--{os.urandom(8).hex()}--"
        script = "\n".join(f"[ ! -e {path} ] || cat {path}; echo; echo {end}" for path in paths)
        said = (await self._done(script, "read its files")).out.decode("utf-8", "surrogateescape")
        return [part.removeprefix("\n") for part in said.split(f"\n{end}")[: len(paths)]]

    def _next_folder(self) -> str:
        self._number += 1
        return f"{JOBS}/{self._number}"

    async def _send(self, folder: str, contents: dict[str, bytes]) -> None:
        """Files into a folder of ours in the guest, which is made for them."""
        check(
            await self.link.run(f"sh -c '{unpacking(folder)}'", archive(folder, contents)), "take the payload's files"
        )

    async def _done(self, script: str, what: str, *, more: float = 0.0) -> Answer:
        answer = await self.link.script(script, more=more)
        check(answer, what)
        return answer


def check(answer: Answer, what: str) -> None:
    """Raise GuestRefused for a command that did not work."""
    if answer.code:
        why = one_line(answer.err.decode("utf-8", "replace").strip().replace("\n", "; ")) or f"exit code {answer.code}"
        raise GuestRefused(f"the guest could not {what}: {why[:300]}")


def facts_of(said: bytes) -> dict[str, str]:
    """Lines of a word and its value, each fit to be shown; what was said first counts."""
    found: dict[str, str] = {}
    for line in said.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(one_line(name), one_line(value.strip()))
    return found


def refuse_what_no_kernel_takes(payload: Payload) -> None:
    """Raises GuestRefused. A shell would fail in the middle, with words of its own."""
    words = [*payload.argv, *(key + b"=" + value for key, value in payload.env)]
    if any(b"\0" in word for word in (*words, payload.cwd or b"", payload.program or b"")):
        raise GuestRefused("a NUL byte in a name, an argument or the environment")
    if any(len(word) > LONGEST_WORD for word in words) or sum(len(word) + 9 for word in words) > WHOLE_COMMAND:
        raise GuestRefused(
            "arguments and environment are more than the guest's kernel takes",
            hint="Give the payload its data in a file (`--in`) or on its standard input.",
        )


def names_of(payload: Payload) -> dict[str, str]:
    """What a payload's failure to start is about, by its kind."""
    name = payload.program or (payload.argv[0] if payload.argv else b"")
    where = os.fsdecode(payload.cwd) if payload.cwd else payload.account.home
    return {"no-cwd": one_line(where), "": one_line(os.fsdecode(name))}
