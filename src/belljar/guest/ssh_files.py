"""Files and folders to and from an ssh guest: tar streams, read and written there by the guest's own tar as the user.

What comes from the guest is unpacked here by the same code that unpacks what an agent sends: nothing in it is trusted.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from belljar.agent.guest.system import shown
from belljar.agent.transfer.tar import ROOT as TOP
from belljar.agent.transfer.tar import Packer, TransferError
from belljar.agent.transfer.untar import Unpacker
from belljar.errors import AgentLost, GuestRefused, InputMissing, OutputMissing, ProtocolViolation
from belljar.guest import Sink
from belljar.guest.files import BROKEN_OFF, SAFE_MODE, Giver, Taker, _about_output, _name_of
from belljar.guest.process import one_line
from belljar.guest.ssh_link import library, lost, whole
from belljar.guest.ssh_scripts import JOBS, become, make_place, quote, text
from belljar.host.threads import in_thread
from belljar.model import Account, PlainFile

if TYPE_CHECKING:
    from belljar.guest.ssh import SshGuest

MISSING, NO_SPACE_WORDS = 66, (b"No space left", b"Disk quota exceeded")
PATIENCE = 120.0  # seconds a copy may stand still


class PlainPacker(Packer):
    """Without holes, which only GNU tar understands."""

    def _content(self, fd: int, path: bytes, name: str, facts: os.stat_result) -> None:
        self._header(name, facts, self.tarfile.REGTYPE, size=facts.st_size)
        self._copy(fd, path, 0, facts.st_size)
        self.write(bytes(-facts.st_size % 512))


class ForeignUnpacker(Unpacker):
    """Of a stream whose members are named as `tar -c .` names them, or are the one file `r`."""

    def _parts(self, name: str) -> list[bytes]:
        if name != "." and not name.startswith("./"):
            return super()._parts(name)
        inner = name[2:].rstrip("/")
        return super()._parts(f"{TOP}/{inner}" if inner else TOP)

    @staticmethod
    def _times(member: Any) -> tuple[int, int]:
        if "mtime" in member.pax_headers:
            return Unpacker._times(member)
        return (int(member.mtime) * 10**9,) * 2


def place_script(files: Sequence[PlainFile], account: Account, folder: str) -> str:
    """Puts the contents that lie in *folder* by number in their places."""
    lines = ["umask 022"]
    for number, file in enumerate(files):
        target = quote(file.path).decode("utf-8", "surrogateescape")
        owner = f"{account.uid}:{account.gid}" if file.is_users else "0:0"
        lines.append(f'T={target}; D=${{T%/*}}; own() {{ chown {owner} "$1"; }}')
        made = 'make() { [ -d "$1" ] || [ -z "$1" ] || { make "${1%/*}" && mkdir "$1" && own "$1"; }; }'
        lines.append(f'{made}; make "$D" || exit 5')
        if file.data is None:
            lines.append(f'make "$T" && chmod {file.mode:04o} "$T" || exit 5')
        else:
            lines.append(f'rm -f "$T" && cp {folder}/{number} "$T" && chmod {file.mode:04o} "$T" && own "$T" || exit 5')
    return "\n".join([*lines, f"rm -rf {folder}", "exit 0", ""])


async def put(
    guest: SshGuest, outside: str, inside: str, account: Account, cwd: bytes | None, skip: tuple[str, ...]
) -> None:
    """See `Guest.put`."""
    source = os.fsencode(outside)
    try:
        facts = os.stat(source)
    except OSError as exc:
        raise InputMissing(f"{outside}: {exc.strerror}") from exc
    target = os.path.join(cwd or os.fsencode(account.home), os.fsencode(inside))
    script = (_put_folder if stat.S_ISDIR(facts.st_mode) else _put_file)(target, _name_of(source), facts)
    kind = Packer if guest.means.gnu_tar else PlainPacker
    bridge = Giver()
    packing = asyncio.ensure_future(in_thread(lambda: _pack(kind(bridge.give, map(os.fsencode, skip)), source, bridge)))
    try:
        code, err = await _copy(guest, script, account, source=bridge, cwd=cwd)
        bridge.break_off()
        trouble = await packing
    finally:
        bridge.break_off()
    if trouble is not None and trouble.kind != BROKEN_OFF:
        raise InputMissing(trouble.message)
    _check(code, err, f"{shown(target)} in the guest")


def _put_folder(target: bytes, name: bytes, facts: os.stat_result) -> bytes:
    return (
        b"T=" + quote(target) + b"; [ -d \"$T\" ] || { mkdir -p \"$T\" && new=yes; } || exit 5\n"
        b"tar -x -p -f - --strip-components=1 -C \"$T\" || exit 5\n"
        b"[ -z \"$new\" ] || { chmod %04o \"$T\"; touch -d @%d \"$T\" 2> /dev/null; }\nexit 0\n"
        % (stat.S_IMODE(facts.st_mode), int(facts.st_mtime))
    )  # fmt: skip


def _put_file(target: bytes, name: bytes, facts: os.stat_result) -> bytes:
    return (
        b"T=" + quote(target) + b"; N=" + quote(name) + b"\n"
        b'if [ -d "$T" ]; then T=$T/$N; fi\ncase $T in */*) D=${T%/*} ;; *) D=. ;; esac\n'
        b'if [ -e "$T" ] && [ ! -f "$T" ]; then echo "$T: neither a file nor a link, so it is not replaced" >&2; exit 5; fi\n'
        b'mkdir -p "${D:-/}" && X=$(mktemp -d "$D/.belljar.XXXXXX") || exit 5\n'
        b'tar -x -p -f - -C "$X" && mv -f "$X/r" "$T"; code=$?; rm -rf "$X"; exit $code\n'
    )


async def get(
    guest: SshGuest, inside: str, outside: str, account: Account, cwd: bytes | None, *, skip: tuple[str, ...],
    changed_only: bool,
) -> None:  # fmt: skip
    """See `Guest.get`. Only GNU tar leaves out what did not change; others send everything."""
    source, target = os.path.join(cwd or os.fsencode(account.home), os.fsencode(inside)), os.fsencode(outside)
    bridge = Taker()
    unpacking = asyncio.ensure_future(in_thread(lambda: _unpack(target, _name_of(source), bridge)))
    unpacking.add_done_callback(lambda _: bridge.break_off())
    exact = b"--format=posix" if guest.means.gnu_tar else b""
    is_chosen = (changed_only or skip) and guest.means.gnu_tar
    script = _get_chosen(source, skip, changed_only) if is_chosen else _get(source, exact)
    try:
        code, err = await _copy(guest, script, account, sink=bridge)
        trouble = await unpacking
    finally:
        bridge.break_off()
    if trouble is not None and trouble.kind not in (BROKEN_OFF, "broken"):
        raise _about_output(trouble)
    _check(code, err, f"{shown(source)} in the guest")
    if trouble is not None:
        raise _about_output(trouble)


def _get(source: bytes, exact: bytes = b"--format=posix") -> bytes:
    """A file goes out by the name of a folder's root: it is copied beside nothing, in a folder of links."""
    return (
        b"S=" + quote(source) + b"\n[ -e \"$S\" ] || { echo \"$S: No such file or directory\" >&2; exit %d; }\n" % MISSING
        + b'if [ -d "$S" ]; then exec tar %s -c -f - -C "$S" .; fi\n' % exact
        + b'[ -f "$S" ] || { echo "$S: neither a file nor a folder" >&2; exit 5; }\n'
        b'X=$(mktemp -d /tmp/.belljar.XXXXXX) || exit 5\n'
        + b'ln -s "$S" "$X/r" && tar %s -c -h -f - -C "$X" r; code=$?; rm -rf "$X"; exit $code\n' % exact
    )  # fmt: skip


def _get_chosen(source: bytes, skip: tuple[str, ...], changed_only: bool) -> bytes:
    tests = b"".join(b" -path " + quote(b"./" + _plain(os.fsencode(path))) + b" -prune -o" for path in skip)
    wanted = b" \\( -type d -o -type f -o -type l \\)"
    if changed_only:
        wanted = b" \\( -type d -o \\( \\( -type f -o -type l \\) -cnewer %s/began \\) \\)" % JOBS.encode()
    head, _, tail = _get(source).partition(b'exec tar --format=posix -c -f - -C "$S" .;')
    chosen = (
        b'cd "$S" && find .'
        + tests
        + wanted
        + b" -print0 | tar --format=posix -c -f - --null --no-recursion -T -; exit $?;"
    )
    return head + chosen + tail


def _plain(pattern: bytes) -> bytes:
    """A path as a pattern that fits nothing else."""
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[\\" else bytes([byte]) for byte in pattern)


async def collect(guest: SshGuest, paths: Sequence[str], sink: Sink) -> None:
    """See `Guest.collect`."""
    words = " ".join(text("./" + path.lstrip("/")) for path in paths)
    script = f'cd /; set -- {words}; for p; do shift; [ -e "$p" ] && set -- "$@" "$p"; done; [ $# -gt 0 ] || set -- -T /dev/null\n'
    more = "--ignore-failed-read --warning=none" if guest.means.gnu_tar else ""
    code, err = await _copy(guest, f'{script}tar -c {more} -f - "$@"\nexit 0\n'.encode(), None, sink=sink)
    if code not in (0, None):
        raise GuestRefused(f"the archive in the guest: {err.decode(errors='replace')[:300]}")


async def _copy(
    guest: SshGuest,
    script: bytes,
    account: Account | None,
    *,
    source: Giver | None = None,
    sink: Sink | None = None,
    cwd: bytes | None = None,
) -> tuple[int | None, bytes]:
    """Run a script of ours as the account, with a stream in or out. The exit code (None: it was broken off), and what it
    complained of."""
    folder = guest._next_folder()
    owner = f"{account.uid}:{account.gid}" if account else "0:0"
    await guest._send(folder, {"copy": script})
    place = make_place(cwd, account) if account else ":"
    await guest._done(f"{place}\nchown {owner} {folder}/copy && chmod 0400 {folder}/copy", "prepare a copy")
    command = f"sh {folder}/copy"
    process = await guest.link.process(
        f"sh -c {text('exec ' + become(account, guest.means, command))}" if account else command
    )
    asyncssh = library()
    erring = asyncio.ensure_future(whole(process.stderr))
    try:
        await asyncio.gather(_give(process.stdin, source), _take(process.stdout, sink))
        if sink is not None:
            await sink.close()
        async with asyncio.timeout(PATIENCE):
            await process.wait_closed()
        return process.exit_status, bytes(await erring)
    except _Stopped:
        return None, b""
    except TimeoutError as exc:
        raise AgentLost(f"a copy in the guest did not end within {PATIENCE:g} s") from exc
    except (asyncssh.Error, OSError) as exc:
        raise lost(exc) from exc
    finally:
        erring.cancel()
        process.channel.abort()
        with suppress(AgentLost, GuestRefused):
            await guest._done(f"rm -rf {folder}", "tidy up")


class _Stopped(Exception):
    """Whoever took the stream takes no more."""


async def _give(stdin: Any, source: Giver | None) -> None:
    with suppress(BrokenPipeError, library().Error):
        while source is not None and (data := await source.read(1 << 16)):
            stdin.write(data)
            await stdin.drain()
        stdin.write_eof()


async def _take(stdout: Any, sink: Sink | None) -> None:
    while data := await stdout.read(1 << 16):
        if sink is not None:
            try:
                await sink.write(data)
            except OSError as exc:
                raise _Stopped from exc


def _pack(packer: Packer, source: bytes, bridge: Giver) -> TransferError | None:
    """In the thread."""
    try:
        packer.pack(source)
        return None
    except TransferError as exc:
        return exc
    except OSError as exc:
        return TransferError("refused", f"{shown(source)}: {exc.strerror}")
    finally:
        with suppress(TransferError):
            bridge.end()


def _unpack(target: bytes, name: bytes, bridge: Taker) -> TransferError | None:
    """In the thread."""
    reader: Callable[[int], bytes] = bridge.take
    try:
        ForeignUnpacker(reader, target, name, SAFE_MODE).unpack()
        return None
    except TransferError as exc:
        return exc


def _check(code: int | None, err: bytes, what: str) -> None:
    message = one_line(err.decode("utf-8", "replace").strip().splitlines()[0]) if err.strip() else what
    if code == MISSING:
        raise OutputMissing(message)
    if code and any(word in err for word in NO_SPACE_WORDS):
        raise GuestRefused(f"{message} (in the guest)", hint="Ask for a larger disk with `--disk`.")
    if code:
        raise GuestRefused(message)
    if code is None:
        raise ProtocolViolation(f"{what}: the copy was broken off")
