"""The users of this node, for root: those with a folder below `paths.node`; and how root gets at one of their machines.

A user may write anything into their folder, links too, so root never looks into it: a child that became the user does.
To work with one of their machines, this process becomes the user for good."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from belljar.errors import BelljarError, CommandFailed, HostError, NoSuchMachine, UsageError
from belljar.host.privileges import User, as_user, become, user_of
from belljar.jobs import Runtime
from belljar.machine import MachineView

MOST_ROWS = 1000  # of one user's machines, the newest
LOOK_TIMEOUT = 10.0  # seconds for a look into one user's folders


def users_of(runtime: Runtime) -> list[User]:
    """Everybody with a folder of their own below `paths.node`; nobody, where that is not set or this is not root."""
    node = runtime.settings.paths.node
    if node is None or os.geteuid() != 0:
        return []
    users = dict[int, User]()
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(node)):
            status = os.lstat(node / name)
            is_named_so = name.partition("-")[0] == str(status.st_uid)  # `UID-WORD` where a stranger has made `UID`
            if stat.S_ISDIR(status.st_mode) and is_named_so and (uid := status.st_uid) != 0:
                users[uid] = User(uid, status.st_gid, str(uid), "/nonexistent")  # a deleted user still has a number
                with suppress(HostError):
                    users[uid] = user_of(str(uid))
    return list(users.values())


def reach(runtime: Runtime, reference: str) -> tuple[Runtime, MachineView]:
    """The machine, and the runtime it is in. Root finds the machines of all users of this node (`USER/ID`: of one), live
    ones first, and becomes that user. Raises NoSuchMachine, UsageError."""
    users = users_of(runtime)
    if not users:
        return runtime, runtime.machines.find(reference)
    owner, _, name = reference.rpartition("/")

    def look(theirs: Runtime) -> list[object]:
        view = theirs.machines.find(name)
        return [view.id, view.alive]

    fits = list[tuple[User | None, str, bool]]()
    for user in (*users, None):
        if not owner or owner in _names(user):
            with suppress(CommandFailed, NoSuchMachine):
                match asked_as(runtime, user, look, what="look for a machine"):
                    case [str(id), bool(alive)]:
                        fits.append((user, id[:100], alive))
    chosen = [fit for fit in fits if fit[2]] or fits
    if len(chosen) > 1:
        names = ", ".join(f"{_names(user)[0]}/{name}" for user, *_ in chosen[:5])
        raise UsageError(f"{reference}: fits {names}", hint="Give the user too, as written above.")
    if not chosen:
        raise NoSuchMachine(f"{reference}: no machine of this id or name, of any user of this node")
    user, id, _ = chosen[0]
    if user is not None:
        become(user.with_groups())
        runtime = runtime.of_user(user.uid, user.home)
    return runtime, runtime.machines.find(id)


def _names(user: User | None) -> tuple[str, str]:
    return (user.name, str(user.uid)) if user else ("root", "0")


def asked_as(
    runtime: Runtime, user: User | None, look: Callable[[Runtime], object], *, what: str, timeout: float = LOOK_TIMEOUT
) -> Any:
    """What *look* finds as this user, in a child: JSON that the user may have forged. Without a user it looks here.
    Raises BelljarError."""
    if user is None:
        return look(runtime)

    def work() -> bytes:
        return json.dumps(look(runtime.of_user(user.uid, user.home))).encode()

    try:
        return json.loads(as_user(user, work, timeout=timeout, what=what))
    except (ValueError, RecursionError) as exc:
        raise CommandFailed(f"{what}: what {user.name}'s process said is no JSON") from exc


def rows_of_all(
    runtime: Runtime, describe: Callable[[MachineView], dict[str, Any]], *, ended: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """(what `ps` shows of every user's machines, what could not be looked at). Only text and numbers come back."""
    rows, trouble = list[dict[str, Any]](), list[str]()

    def look(theirs: Runtime) -> list[dict[str, Any]]:
        return [describe(view) for view in theirs.machines.list(ended=ended)[-MOST_ROWS:]]

    for user in users_of(runtime):
        try:
            listed = asked_as(runtime, user, look, what="list machines")
            listed = listed if isinstance(listed, list) else []
            rows += [{**row, "USER": user.name} for row in listed if isinstance(row, dict)]
        except BelljarError as exc:
            trouble.append(f"{user.name}: {exc}")
    return rows, trouble
