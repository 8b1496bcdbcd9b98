"""What `belljar batch check` looks at on every node, whatever the batch system: can a user's job really get a machine?"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar import batch
from belljar.batch.install.commands import Client
from belljar.batch.install.pieces import Place
from belljar.batch.job import policy
from belljar.errors import BelljarError
from belljar.findings import Finding, examine, expect, fail, fail_if, ok
from belljar.host.commands import run
from belljar.host.files import only_root_writes
from belljar.host.privileges import as_user, user_of
from belljar.hypervisor import Accelerator
from belljar.jobs import Runtime
from belljar.jobs.node import tester, without_template
from belljar.jobs.shares import of_site
from belljar.jobs.site.doctor import KVM, closed_folders, node, of_users, qemu
from belljar.network import shortfalls

FIRST_USER = 1000  # below are system users
QUEUES = "batch.queue_images"
LAUNCH = 10.0  # seconds for a launcher to start on a busy node


def findings(runtime: Runtime, place: Place) -> Iterator[Finding]:
    """All of them, in the order a job meets them."""
    yield from _entered_by_all("the launcher", place.wrapper)
    yield from _entered_by_all("belljar itself", Path(__file__).resolve().parents[2])
    if runtime.config_file is not None:
        yield from _entered_by_all("the settings file", runtime.config_file.absolute())
        yield from _is_the_sites(Path(os.path.realpath(runtime.config_file)))
    yield examine("node", lambda: node(runtime))
    yield examine("qemu", lambda: qemu(runtime))
    settings, file = runtime.settings, str(runtime.config_file or "the settings")
    # Nobody else notices that jobs run in software: the payload's own words say nothing of it.
    is_used = settings.qemu.accelerator is not Accelerator.TCG
    yield of_users() if is_used else ok(KVM, "not used: qemu.accelerator is tcg")
    yield from _images(runtime, place)
    yield from _shares(runtime, file)
    yield from _bridges(runtime, file)
    yield examine("batch.allow", lambda: ok("batch.allow", f"{len(policy.rules(settings.batch))} rules"))
    yield examine(QUEUES, lambda: ok(QUEUES, f"{len(policy.queue_images(settings.batch))} queues"))


def commands(ours: Client, place: Place) -> Iterator[Finding]:
    """What the launchers will run, run by one of them, as a job's user would."""
    system = ours.system
    remedy = f"`belljar batch install {system}` where they are in PATH, or with --commands DIR."
    missing = ours.missing(batch.load(system).site.needs)
    where = " ".join(dict.fromkeys(os.path.dirname(path) for path in ours.programs.values()))
    text = f"not found: {', '.join(missing)}" if missing else where
    yield expect(f"commands of {system}", not missing, text, remedy)
    if place.belljar.exists():
        yield _asked(system, place)
    yield from _queues(system, place)


def _queues(system: str, place: Place) -> Iterator[Finding]:
    """A queue of `batch.queue_images` that the system does not have: its jobs would run without a machine."""
    command, pattern = batch.load(system).site.needs.queues
    with suppress(BelljarError):  # told with the commands, or with the rules
        named = policy.queue_images(place.settings) if command else {}
        known = re.findall(pattern, place.output(*command)) if named else []
        remedy = f"Correct the name; there are: {', '.join(known)}."
        yield from (fail(QUEUES, f"{system} has no queue {queue}", remedy) for queue in sorted({*named} - {*known}))


def _asked(system: str, place: Place) -> Finding:
    name, argv = f"a job's user can ask {system}", [str(place.belljar), "internal", "ask", system]
    timeout = place.settings.ask_timeout + LAUNCH
    user = tester() if os.geteuid() == 0 else user_of(str(os.geteuid()))
    try:
        ask = lambda: run(argv, timeout=timeout, env={}).out[:1000]  # noqa: E731
        printed = as_user(user, ask, timeout=timeout + LAUNCH, what="ask")
    except BelljarError as exc:
        why = exc.message.removeprefix(f"ask as {user.name}: ")
        return fail(name, f"as {user.name}: {why}", f"Try as {user.name}: {' '.join(argv)}")
    return ok(name, f"as {user.name}: {printed.decode(errors='replace').partition(chr(10))[0]}")


def _entered_by_all(what: str, path: Path) -> Iterator[Finding]:
    """A job runs as its user: each folder on the way must let everybody through. Another check says what is not there."""
    if closed := closed_folders(path):
        remedy = "Open those folders (chmod o+x), or install belljar elsewhere (--prefix)."
        yield fail(what, f"{path}: users cannot pass {closed}", remedy)
    elif os.path.exists(path) and not os.stat(path).st_mode & stat.S_IROTH:
        yield fail(what, f"{path}: users cannot read it", f"chmod o+r {path}")


def _is_the_sites(path: Path) -> Iterator[Finding]:
    """In a job, a settings file that a user could change is a user's."""
    if not only_root_writes(path):
        text = "others than root can change it, or a folder on the way: jobs take nothing from it that is locked"
        remedy = f"chown root {path}; chmod go-w {path}, and its folders likewise."
        yield fail("the settings file", f"{path}: {text}", remedy)


def _images(runtime: Runtime, place: Place) -> Iterator[Finding]:
    names, test = list[str](), place.wrapper.name.replace("wrap-", "belljar batch node ", 1)
    with suppress(BelljarError):  # told with the rules
        names = policy.images_of(place.settings)
    with suppress(BelljarError):  # told here
        for name in without_template(runtime):
            yield ok(f"template of {name}", f"none yet: each user's first job boots; `{test} test` makes one")
    remedy = "Build or import it as root (`belljar image build`, `belljar image import`)."
    for name in names:
        is_here = os.path.lexists(place.store / "images/names" / name)
        yield fail_if(f"image {name}", "" if is_here else f"not in {place.store}", remedy)


def _shares(runtime: Runtime, file: str) -> Iterator[Finding]:
    """What every job would be refused for, or go without. Templates and users' images are read with the user's rights on the node: no
    machine may write them."""
    what, missing, node = "batch.shares", list[str](), runtime.settings.paths.node
    try:
        shares = of_site(runtime.settings.batch.shares, missing.append)
    except BelljarError as exc:
        yield fail(what, f"{file}: {exc.message}", exc.hint)
        return
    text = f"{file}: no such folder on this host: {', '.join(missing)}; jobs run without, and say so"
    remedy = "Make or mount it, or take it out of the setting."
    there = ", ".join(f"{share.source} on {share.target}" for share in shares) or "none"
    yield expect(what, not missing, text if missing else there, remedy)
    homes = (user.pw_dir for user in pwd.getpwall() if user.pw_uid >= FIRST_USER)  # of those who may submit jobs
    places = [str(node)] if node else [home for home in homes if home.startswith("/")]
    what = f"paths.node = {node}" if node else "the folders of users' templates and images, in their homes,"
    remedy = "Set `paths.node` to a local folder outside of all shares."
    for source in [share.source for share in shares if not share.readonly]:
        if any(f"{os.path.realpath(place)}/".startswith(f"{source.rstrip('/')}/") for place in places):
            text = f"{what} can be written by every machine, as a part of the share {source}"
            yield fail("folders out of reach", text, remedy)


def _bridges(runtime: Runtime, file: str) -> Iterator[Finding]:
    """Jobs' machines are made without root's rights."""
    for text in shortfalls(runtime.settings.network, is_root=False):
        yield fail("network.anti_spoofing", f"{file}: {text}", 'Set it to "required" or to "off".')
