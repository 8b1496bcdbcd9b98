"""Machines that take commands without being there, and what the frameworks hand over, in place of the frameworks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from belljar import api
from belljar.errors import AgentLost
from belljar.machine.states import CLASSES
from belljar.model import Account, Cause, Outcome

PASSWD = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/bash\n"
GROUP = b"root:x:0:\nagent:x:1000:\ndocker:x:99:agent\n"


def outcome(cause: Cause = Cause.FINISHED, reason: str = "the payload ended") -> Outcome:
    return Outcome("0123456789ab", cause, CLASSES[cause], reason=reason, hint="Look.")


@dataclass
class FakeMachine:
    """Does what *script* says of a command: an answer, or what is raised."""

    options: dict[str, Any]
    script: Callable[[tuple[str, ...]], Any]
    id: str = "0123456789ab"
    end: Outcome | None = None
    commands: list[dict[str, Any]] = field(default_factory=list)
    copies: list[tuple[str, str, str]] = field(default_factory=list)
    is_released: bool = False
    is_left: bool = False

    @property
    def view(self) -> Any:
        end = self.end
        told = {"class": end.klass.value} if end else None
        return SimpleNamespace(ended=1.0 if end else None, alive=end is None, outcome=told)

    async def aexec(self, argv: list[str], stdin: bytes, account: Account, most: int, **beside: Any) -> Any:
        if argv[0] == "cat":
            return 0, PASSWD + GROUP, b""
        self.commands.append({"argv": tuple(argv), "account": account, **beside})
        answer = self.script(tuple(argv))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def aput(self, outside: str, inside: str, account: Account) -> None:
        self.copies.append(("put", outside, inside))

    async def aget(self, inside: str, outside: str, account: Account) -> None:
        self.copies.append(("get", inside, outside))

    async def await_end(self, timeout: float | None = None) -> Outcome:
        if self.end is None:
            raise TimeoutError
        return self.end

    def wait(self) -> Outcome:
        return asyncio.run(self.await_end())

    def release(self) -> None:
        self.is_released = True

    async def aleave(self) -> Outcome:
        self.is_left, self.end = True, self.end or outcome(Cause.CANCELLED)
        return self.end


class Machines:
    """Those that were made; `script` is what the next ones do, `trouble` what their start raises."""

    def __init__(self) -> None:
        self.made: list[FakeMachine] = []
        self.trouble: BaseException | None = None
        self.script: Callable[[tuple[str, ...]], Any] = lambda argv: (0, b"out", b"err")

    async def begin(self, argv: list[str], **options: Any) -> FakeMachine:
        if self.trouble is not None:
            raise self.trouble
        self.made.append(FakeMachine({"argv": tuple(argv), **options}, self.script))
        return self.made[-1]

    def lose(self, cause: Cause, reason: str = "gone") -> None:
        """From now on each command finds its machine ended so."""

        def script(argv: tuple[str, ...]) -> Any:
            self.made[-1].end = outcome(cause, reason)
            return AgentLost("no answer")

        for machine in self.made:
            machine.script = script
        self.script = script


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines()
    monkeypatch.setattr(api, "abegin", made.begin)
    monkeypatch.setattr(api, "image_digest", lambda name: "digest")
    return made


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a module with these names where an import finds it, for as long as the test."""

    def stand_in(name: str, **names: Any) -> None:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(names)

    yield stand_in
