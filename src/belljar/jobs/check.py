"""What `belljar batch check` looks at on every node, whatever the batch system: can a user's job really get a machine?"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from belljar import batch
from belljar.batch.install.commands import Client
from belljar.batch.install.pieces import Place
from belljar.batch.job import policy
from belljar.errors import BelljarError
from belljar.findings import Finding, examine, expect, fail, ok
from belljar.host.commands import run
from belljar.host.files import only_root_writes
from belljar.host.privileges import as_user, user_of
from belljar.jobs.doctor import node, qemu
from belljar.jobs.node import KVM, of_users, tester, without_template
from belljar.jobs.shares import of_site
from belljar.model import Share
from belljar.network import shortfalls

if TYPE_CHECKING:
    from belljar.jobs import House

EVERYBODY_ENTERS = stat.S_IXOTH
FIRST_USER = 1000  # below are system users
LAUNCH = 10.0  # seconds for a launcher to start on a busy node


def findings(house: House, place: Place) -> Iterator[Finding]:
    """All of them, in the order a job meets them."""
    yield from _entered_by_all("the launcher", place.wrapper)
    yield from _entered_by_all("belljar itself", Path(__file__).resolve().parents[1])
    if house.config_file is not None:
        yield from _entered_by_all("the settings file", house.config_file.absolute())
        yield from _is_the_sites(Path(os.path.realpath(house.config_file)))
    yield examine("node", lambda: node(house))
    yield examine("qemu", lambda: qemu(house))
    yield _kvm(house)
    yield from _images(house, place)
    yield _shares(house)
    yield from _out_of_shares(house)
    yield from _bridges(house)
    yield from _rules(house)


def commands(ours: Client, place: Place) -> Iterator[Finding]:
    """What the launchers will run, run by one of them, as a job's user would."""
    system = ours.system
    remedy = f"`belljar batch install {system}` where they are in PATH, or with --commands DIR."
    missing = ours.missing(batch.load(system).site.needs)
    where = " ".join(dict.fromkeys(os.path.dirname(path) for path in ours.programs.values()))
    detail = f"not found: {', '.join(missing)}" if missing else where
    yield expect(f"commands of {system}", not missing, detail, remedy)
    if place.belljar.exists():
        yield _asked(system, place)
    yield from _queues(system, place)


def _queues(system: str, place: Place) -> Iterator[Finding]:
    """A queue of `batch.queue_images` that the system does not have: its jobs would run without a machine."""
    command, pattern = batch.load(system).site.needs.queues
    with suppress(BelljarError):  # told with the commands, or with the rules
        wanted = policy.queue_images(place.settings) if command else {}
        known = re.findall(pattern, place.output(*command)) if wanted else []
        for queue in sorted({*wanted} - {*known}):
            detail, remedy = f"{system} has no queue {queue}", f"Correct the name; there are: {', '.join(known)}."
            yield fail("batch.queue_images", detail, remedy)


def _asked(system: str, place: Place) -> Finding:
    what, argv = f"a job's user can ask {system}", [str(place.belljar), "internal", "ask", system]
    timeout = place.settings.ask_timeout + LAUNCH
    user = tester() if os.geteuid() == 0 else user_of(str(os.geteuid()))

    def ask() -> bytes:
        done = run(argv, timeout=timeout, env={}, check=False)
        return (b"-" + done.err if done.code else b"+" + done.out)[:1000]

    try:
        said = as_user(user, ask, timeout=timeout + LAUNCH, what="ask").decode(errors="replace")
    except BelljarError as exc:
        said = f"-{exc.message}"
    detail = f"as {user.name}: {said[1:].partition(chr(10))[0]}"
    return expect(what, said.startswith("+"), detail, f"Try as {user.name}: {' '.join(argv)}")


def _entered_by_all(what: str, path: Path) -> Iterator[Finding]:
    """A job runs as its user: each folder on the way must let everybody through."""
    closed = [one for one in path.parents if _mode(one) is not None and not (_mode(one) or 0) & EVERYBODY_ENTERS]
    if closed:
        detail = f"{path}: users cannot pass {', '.join(map(str, reversed(closed)))}"
        yield fail(what, detail, "Open those folders (chmod o+x), or install belljar elsewhere (--prefix).")
    elif (mode := _mode(path)) is not None and not mode & stat.S_IROTH:
        yield fail(what, f"{path}: users cannot read it", f"chmod o+r {path}")


def _is_the_sites(path: Path) -> Iterator[Finding]:
    """In a job, a settings file that a user could change is a user's."""
    if not only_root_writes(path):
        detail = (
            f"{path}: others than root can change it, or a folder on the way: jobs take nothing from it that is locked"
        )
        remedy = f"chown root {path}; chmod go-w {path}, and its folders likewise."
        yield fail("the settings file", detail, remedy)


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def _kvm(house: House) -> Finding:
    """Nobody else notices that jobs run in software: the payload's own words say nothing of it."""
    from belljar.hypervisor import Accelerator

    is_used = house.settings.qemu.accelerator is not Accelerator.TCG
    return of_users() if is_used else ok(KVM, "not used: qemu.accelerator is tcg")


def _images(house: House, place: Place) -> Iterator[Finding]:
    wanted, lacking, test = list[str](), list[str](), place.wrapper.name.replace("wrap-", "belljar batch node ", 1)
    with suppress(BelljarError):  # told with the rules
        wanted = policy.images_of(place.settings)
    with suppress(BelljarError):  # told here
        lacking = without_template(house)
    for name in lacking:
        yield ok(f"template of {name}", f"none yet: each user's first job boots; `{test} test` makes one")
    for name in wanted:
        found = os.path.lexists(place.store / "images/names" / name)
        remedy = "Build or import it as root (`belljar image build`, `belljar image import`)."
        yield expect(f"image {name}", found, "" if found else f"not in {place.store}", remedy)


def _shares(house: House) -> Finding:
    """What every job would be refused for, or go without."""
    what, missing = "batch.shares", list[str]()
    try:
        shares = of_site(house.settings.batch.shares, missing.append)
    except BelljarError as exc:
        return fail(what, f"{_file(house)}: {exc.message}", exc.hint)
    if missing:
        detail = f"{_file(house)}: no such folder on this host: {', '.join(missing)}; jobs run without, and say so"
        return fail(what, detail, "Make or mount it, or take it out of the setting.")
    return ok(what, ", ".join(f"{share.source} on {share.target}" for share in shares) or "none")


def _out_of_shares(house: House) -> Iterator[Finding]:
    """Templates and users' images are read with the user's rights on the node: no machine may write them."""
    paths, shares = house.settings.paths, list[Share]()
    with suppress(BelljarError):  # told with the shares
        shares += of_site(house.settings.batch.shares)
    places = [str(paths.node)] if paths.node is not None else _homes()
    what = f"paths.node = {paths.node}" if paths.node else "the folders of users' templates and images, in their homes,"
    for source in [share.source for share in shares if not share.readonly]:
        if any(f"{os.path.realpath(place)}/".startswith(f"{source.rstrip('/')}/") for place in places):
            detail = f"{what} can be written by every machine, as a part of the share {source}"
            remedy = "Set `paths.node` to a local folder outside of all shares."
            yield fail("folders out of reach", detail, remedy)


def _homes() -> list[str]:
    """For those who may submit jobs."""
    import pwd

    return [one.pw_dir for one in pwd.getpwall() if one.pw_uid >= FIRST_USER and one.pw_dir.startswith("/")]


def _bridges(house: House) -> Iterator[Finding]:
    """Jobs' machines are made without root's rights."""
    for text in shortfalls(house.settings.network, is_root=False):
        yield fail("network.anti_spoofing", f"{_file(house)}: {text}", 'Set it to "required" or to "off".')


def _file(house: House) -> str:
    return str(house.config_file or "the settings")


def _rules(house: House) -> Iterator[Finding]:
    allow, queues, settings = "batch.allow", "batch.queue_images", house.settings.batch
    yield examine(allow, lambda: ok(allow, f"{len(policy.rules(settings))} rules"))
    yield examine(queues, lambda: ok(queues, f"{len(policy.queue_images(settings))} queues"))
