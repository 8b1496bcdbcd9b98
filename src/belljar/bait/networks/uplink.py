"""How much of a bridge's way out is free, by this host's own counters and the speed of the card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

NETS = Path("/sys/class/net")
SPAN = 5.0  # seconds over which traffic is counted, at least


class Uplinks:
    """For these bridges. `free`: bytes a second on the fullest one; None where no card tells its speed."""

    def __init__(
        self, bridges: tuple[str, ...], nets: Path = NETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bridges, self._nets, self._clock = bridges, nets, clock
        self._counted: dict[str, tuple[float, int, int]] = {}  # card -> when, received, sent
        self._used: dict[str, float] = {}

    def free(self) -> int | None:
        cards = {card: speed for bridge in self._bridges for card, speed in self._cards(bridge)}
        return min((max(int(speed - self._traffic(card)), 0) for card, speed in cards.items()), default=None)

    def _cards(self, bridge: str) -> Iterator[tuple[str, int]]:
        """For a bridge's ports those that are not a machine's, with what they can do."""
        with suppress(OSError):
            for port in sorted((self._nets / bridge / "brif").iterdir()):
                is_machines = (self._nets / port.name / "tun_flags").exists()
                if not is_machines and (megabits := self._number(port.name, "speed")) > 0:
                    yield port.name, megabits * 125_000

    def _traffic(self, card: str) -> float:
        """In the fuller direction."""
        now, received, sent = self._clock(), *(self._number(card, f"statistics/{way}_bytes") for way in ("rx", "tx"))
        at, before, out = self._counted.setdefault(card, (now, received, sent))
        if now - at >= SPAN:
            self._used[card] = max(received - before, sent - out, 0) / (now - at)
            self._counted[card] = (now, received, sent)
        return self._used.get(card, 0.0)

    def _number(self, card: str, name: str) -> int:
        with suppress(OSError, ValueError):  # a card that is down tells no speed
            return int((self._nets / card / name).read_text())
        return 0
