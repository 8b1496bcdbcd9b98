"""Where the agent runs: a rehearsal on the host."""

import os

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Family
from belljar.agent.guest.system import Refused, libc, now
from belljar.agent.wire import Words, hello_of, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from belljar.agent.roles import Late, Work  # noqa: F401


class Rehearsal:
    """An ordinary process on the host: the payload really runs, everything else is only said to have happened. Implements `World`."""

    quiet = 0.0

    def __init__(self) -> None:
        self.boot_nonce = os.urandom(16).hex().encode("ascii")
        self.folders = []  # type: list[str]
        self.kept = {}  # type: dict[bytes, int]
        self.calls = {
            b"identify": self.identify, b"set_clock": lambda words: now(), b"prepare": lambda words: b"", b"renew_keys": lambda words: b"",
            b"mount": self.mount,
        }  # type: dict[bytes, Callable[[Words], bytes]]  # fmt: skip
        self.errands = {}  # type: dict[bytes, Callable[[Words], tuple[int, Late, Work]]]

    def prepare(self) -> None:
        libc().adopt_orphans()

    def describe(self) -> bytes:
        return hello_of(self.boot_nonce, "rehearsal", False)

    def identify(self, words: Words) -> bytes:
        name, machine_id, nonce, mac = words.next(), words.next(), words.next(), words.next()
        return join(name, machine_id, nonce, mac, os.urandom(32).hex().encode("ascii"), now())

    def mount(self, words: Words) -> bytes:
        raise Refused("no-9p", "a rehearsal mounts nothing")

    def growth(self) -> bytes:
        return b""

    def add_account(self, account: Account) -> None:
        account.check()

    def new_folder(self, account: Account) -> bytes:
        import tempfile

        self.folders.append(tempfile.mkdtemp(prefix="belljar-rehearsal-"))
        return self.folders[-1].encode()

    def box(self) -> Family:
        return Family()

    def warm(self, fork: "Callable[[], None]") -> None:
        fork()

    def has_remote(self) -> bool:
        return False

    def release(self) -> None:
        import shutil

        while self.folders:
            shutil.rmtree(self.folders.pop(), ignore_errors=True)

    def make_place(self, path: bytes, account: Account) -> None:
        pass

    def after_payload(self) -> None:
        pass

    def give(self, what: "int | bytes", account: Account, group: "int | None" = None) -> None:
        pass

    def leave_agent(self) -> None:
        pass

    def become(self, account: Account) -> None:
        pass

    def forget_mounts(self) -> None:
        pass
