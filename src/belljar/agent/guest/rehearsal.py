"""Where the agent runs: a rehearsal on the host."""

import os

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Family
from belljar.agent.guest.libc import libc
from belljar.agent.guest.system import Refused, now
from belljar.agent.payload.zygote import Zygote
from belljar.agent.wire import Words, hello_of, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable


class Rehearsal:
    """An ordinary process on the host: the payload really runs, everything else is only said to have happened."""

    quiet = 0.0

    def __init__(self) -> None:
        self.boot_nonce = os.urandom(16).hex().encode("ascii")
        self.jobs = ""
        self.zygote = None  # type: Zygote | None
        self.kept = {}  # type: dict[bytes, int]

    def prepare(self) -> None:
        libc().adopt_orphans()

    def describe(self) -> bytes:
        return hello_of(self.boot_nonce, "rehearsal", False)

    def identify(self, words: Words) -> bytes:
        name, machine_id, nonce, mac = words.next(), words.next(), words.next(), words.next()
        return join(name, machine_id, nonce, mac, os.urandom(32).hex().encode("ascii"), now())

    def set_clock(self, words: Words) -> bytes:
        return now()

    def mount(self, words: Words) -> bytes:
        raise Refused("no-9p", "a rehearsal mounts nothing")

    def mount_virtiofs(self, words: Words) -> bytes:
        raise Refused("no-virtiofs", "a rehearsal mounts nothing")

    def prepare_for(self, words: Words) -> bytes:
        return b""

    def renew_keys(self) -> "Callable[[], None]":
        return lambda: None

    def growth(self) -> bytes:
        return b""

    def grow(self, words: Words) -> "Callable[[], bytes]":
        raise Refused("refused", "a rehearsal does not grow")

    def find_disks(self, words: Words) -> bytes:
        raise Refused("no-disk", "a rehearsal has no disks")

    def mount_scratch(self, words: Words) -> bytes:
        raise Refused("refused", "a rehearsal mounts nothing")

    def mount_packed(self, words: Words) -> "Callable[[], None]":
        raise Refused("no-overlay", "a rehearsal mounts nothing")

    def mount_nfs(self, words: Words) -> "Callable[[], None]":
        raise Refused("no-nfs", "a rehearsal mounts nothing")

    def has_remote(self) -> bool:
        return False

    def forget_mounts(self) -> None:
        pass

    def add_account(self, account: Account) -> None:
        account.check()

    def make_place(self, path: bytes, account: Account) -> None:
        pass

    def box(self) -> "Family":
        return Family()

    def take_zygote(self) -> "Zygote | None":
        zygote, self.zygote = self.zygote, None
        return zygote

    def after_payload(self) -> None:
        pass

    def give(self, fd: int, account: Account, group: "int | None" = None) -> None:
        pass

    def leave_agent(self) -> None:
        pass

    def become(self, account: Account) -> None:
        pass

    def release(self) -> None:
        if self.jobs:
            import shutil

            shutil.rmtree(self.jobs, ignore_errors=True)
            self.jobs = ""

    def warm(self) -> None:
        self.zygote = self.zygote or Zygote(self, self.box())
