"""A container provider of OpenEnv: `EchoEnv.from_docker_image(image, provider=BelljarProvider())`.

The image's own command is the server, in a machine whose port is forwarded to loopback. A machine that cannot be started or
ends before its server answers raises InfrastructureFailure or TaskFailure, which are RuntimeErrors.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from belljar.adapters.sandbox import Sandbox, Unfit, blocking, failure
from belljar.errors import BelljarError

PORT = 8000  # where the servers of OpenEnv's images listen
AGAIN = 0.2  # seconds between two questions to a server that comes up
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BelljarProvider:
    """Implements `ContainerProvider`. Its *options* are those of `belljar.api` that the machine is to have; *command* replaces
    the image's own, *guest_port* is where it listens; *ready_timeout_s* is for a client that gives its server 30 seconds."""

    def __init__(
        self, *, command: Sequence[str] = (), guest_port: int = PORT, ready_timeout_s: float = 0.0, **options: Any
    ) -> None:
        self._command, self._guest_port, self._patience, self._options = command, guest_port, ready_timeout_s, options
        self._sandbox: Sandbox | None = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Returns the server's address. Raises RuntimeError."""
        options = {"argv": self._command, "env": env_vars, **self._options, **kwargs}
        self.stop_container()
        self._sandbox = blocking(Sandbox.create(image, **options))
        try:
            published = self._sandbox.machine.forward(self._guest_port, port or 0)
        except BelljarError as exc:
            self.stop_container()
            raise Unfit(f"{exc} ({exc.hint})") from exc
        return f"http://{published.address}:{published.host}"

    def stop_container(self) -> None:
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            blocking(sandbox.close())

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Raises TimeoutError, RuntimeError where the machine ended."""
        patience = max(timeout_s, self._patience)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError), DIRECTLY.open(f"{base_url}/health", timeout=2.0):
                return
            if self._sandbox is not None and self._sandbox.machine.view.ended is not None:
                raise failure(blocking(self._sandbox.machine.await_end()))
            time.sleep(AGAIN)
        raise TimeoutError(f"{base_url}: no answer within {patience:g} s")
