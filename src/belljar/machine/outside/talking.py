"""Talk to the guest of a machine that somebody else keeps, beside its payload."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from belljar.guest import Guest
from belljar.machine import MachineView
from belljar.machine.life import control
from belljar.model import Account


@asynccontextmanager
async def talk(view: MachineView, converse: Callable[[socket.socket], Guest]) -> AsyncIterator[Guest]:
    """Its agent, by a relay of its keeper's. What was begun there ends with the conversation. Raises NoSuchMachine,
    MachineBusy."""
    connection = control.connect(view.folder)
    try:
        control.ask(connection, "relay")
        connection.setblocking(False)
        guest = converse(connection)
    except BaseException:
        connection.close()
        raise
    try:
        await guest.greet()
        yield guest
    finally:
        guest.close()


def account_of(view: MachineView) -> Account | None:
    """Whose payload the machine runs, as its record tells; None where there is none."""
    try:
        value = view.payload["account"]
        groups = tuple((int(gid), str(name)) for gid, name in value["groups"])
        return Account(**{**value, "groups": groups})
    except (KeyError, TypeError, ValueError):
        return None
