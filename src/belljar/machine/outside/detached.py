"""Ask for a machine that lives on its own: the request goes to a new process, which answers when the machine is
claimed.

`belljar internal keep` reads the request as one line of JSON from its standard input, so that no file or command line
has it, forks the keeper, and prints one line: {"id": ...}, or {"error": class, "message": ..., "hint": ...}.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import belljar
from belljar import errors
from belljar.errors import BelljarError, HostError
from belljar.model import MachineId, Request, dumps

PATIENCE = 600.0  # seconds until a machine is claimed: an image that is missing is fetched before
LONGEST_ANSWER = 1 << 16
ENTRY = "import sys; sys.path.append(sys.argv.pop(1)); from belljar.cli import entry; entry()"


class Keeper:
    """A process that waits for a request: what was made before need not be waited for. It is to be released."""

    def __init__(
        self, *, config_file: Path | None = None, stdin: int | None = None, tied: bool = False, count: int = 1
    ) -> None:
        """*stdin*: the payload's. *count*: of the requests that it waits for; all of them are tied, or none."""
        words = ["--config", str(config_file)] if config_file is not None else []
        words += ["internal", "keep"] + (["--tied"] if tied else []) + (["--count", str(count)] if count > 1 else [])
        self.count = count
        copies = [] if stdin is None else [os.dup(stdin)]  # its own 0 carries the request
        words += ["--stdin", str(copies[0])] if copies else []
        pipe, self._is_tied, self._is_taken = subprocess.PIPE, tied, False
        try:
            self._process = subprocess.Popen([*command(), *words], stdin=pipe, stdout=pipe, pass_fds=copies)
        finally:
            for copy in copies:
                os.close(copy)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def take(self, request: Request, patience: float = PATIENCE) -> MachineId:
        """Return when its machine is claimed. Raises what kept it from being claimed."""
        (answer,) = self.take_all([request], patience)
        if isinstance(answer, BelljarError):
            raise answer
        return answer

    def take_all(self, requests: Sequence[Request], patience: float = PATIENCE) -> list[MachineId | BelljarError]:
        """As many as it was made for: return when each is claimed, or with what kept it from being claimed."""
        keeper, self._is_taken = self._process, True
        assert keeper.stdin is not None and keeper.stdout is not None
        with keeper.stdout:
            try:
                with suppress(BrokenPipeError):  # then its answer says why
                    keeper.stdin.write(b"".join(dumps(request) + b"\n" for request in requests))
                    keeper.stdin.flush()
                answers = _answers(keeper, len(requests), patience)
            except BaseException:  # re-raised: Ctrl-C leaves no keeper behind either
                keeper.stdin.close()
                keeper.terminate()
                keeper.wait()
                raise
        keeper.wait()
        if not self._is_tied or not any("id" in answer for answer in answers):
            self.release()
        return [str(answer["id"]) if "id" in answer else error_of(answer) for answer in answers]

    def release(self) -> None:
        """Let go of it: a tied machine ends now; one that was asked for nothing has made nothing."""
        if not self._is_taken:
            with self._process as process:
                process.kill()
        elif self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


def command() -> list[str]:
    """How this very belljar is run again, by this Python, and by nothing that the caller's folder or variables say."""
    flags = ["-I", *(["-S"] if sys.flags.no_site else [])]
    return [sys.executable, *flags, "-c", ENTRY, str(Path(belljar.__file__).parent.parent)]


def _answers(keeper: subprocess.Popen[bytes], count: int, patience: float) -> list[dict[str, Any]]:
    assert keeper.stdout is not None
    poller, output = select.poll(), b""
    poller.register(keeper.stdout, select.POLLIN)
    while output.count(b"\n") < count:
        if not poller.poll(patience * 1000):
            raise HostError(f"waited {patience:g} s for a keeper to claim its machine", hint="Look at `belljar ps`.")
        if not (part := os.read(keeper.stdout.fileno(), LONGEST_ANSWER)):
            break
        output += part
    lines = output.splitlines()
    return [_read(line) for line in lines + [b""] * (count - len(lines))]


def _read(line: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    return answer_of(HostError(f"the keeper did not say what became of its machine (it said {line[:80]!r})"))


def answer_of(error: BelljarError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def error_of(answer: dict[str, Any]) -> BelljarError:
    """The error that was told, as the class it was."""
    kind = getattr(errors, str(answer.get("error")), None)
    kind = kind if isinstance(kind, type) and issubclass(kind, BelljarError) else HostError
    return kind(str(answer.get("message") or "no reason was given"), hint=str(answer.get("hint") or "") or None)
