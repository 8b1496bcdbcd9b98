"""This node: its systems' commands; taken out of service and put back; whether a machine works on it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar import batch
from belljar.batch import node as faults
from belljar.batch.install import commands as client
from belljar.batch.install.commands import Client
from belljar.batch.job import policy
from belljar.batch.job.terms import Dialect, one_line, one_node
from belljar.errors import BelljarError, CommandFailed, UnsafeFolder
from belljar.host.files import PRIVATE_FOLDER, is_missing, opened, private_folder
from belljar.host.privileges import User, user_of
from belljar.hypervisor.devices import share_kind
from belljar.jobs import Runtime
from belljar.jobs.shares import of_site
from belljar.model import Outcome, Payload, RunPayload, Share, Start, StdinKind
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.batch.job.verdict import Run

TEST_TIMEOUT = 300.0  # seconds for the self-check's machine: it may have to boot a template first
LAUNCHERS = "libexec"  # below a prefix: a folder for each system
OUR_WORD = "belljar"  # begins every reason of ours


def runner(runtime: Runtime, system: str) -> Run:
    """How a command of the system is run; where they are is looked up when there is one."""
    return lambda argv: client_of(runtime, system).run(argv, runtime.settings.batch.ask_timeout)


def client_of(runtime: Runtime, system: str) -> Client:
    """By the list that `batch install` made. Without one, by PATH: then a person asks."""
    launcher = runtime.commands or own_prefix() / LAUNCHERS / system / "belljar"
    known = client.read(client.path_of(launcher), system)
    return known or client.find(system, batch.load(system).site.needs, None, os.environ)


def own_prefix() -> Path:
    """Where this installation has its files: PREFIX of PREFIX/lib-*/belljar, else of the Python that runs it."""
    lib = Path(__file__).resolve().parents[2]
    if lib.name.partition("-")[0] == "lib":
        return lib.parent
    return Path(sys.prefix) if sys.prefix != "/usr" else Path("/usr/local")


def memory_folder(runtime: Runtime) -> Path:
    """Where root remembers this node: below the node's folder where only root can put something, else in the store."""
    paths = runtime.settings.paths
    if paths.node is not None and paths.node.is_dir() and not os.stat(paths.node).st_mode & 0o022:
        return paths.node / "batch"
    return paths.store / "batch"


def make_folder(runtime: Runtime, user: User) -> None:
    """`NODE/UID`, 0700, the user's. NODE is root's, so nobody else can put anything there; where everybody may write to
    NODE, a link or another user's folder is refused."""
    node = runtime.settings.paths.node
    assert node is not None
    if is_missing(node):
        private_folder(node, mode=0o711)
    path = node / str(user.uid)
    with suppress(FileExistsError):
        os.mkdir(path, PRIVATE_FOLDER)
    with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid not in (0, user.uid):
            raise UnsafeFolder(f"{path}: belongs to uid {status.st_uid}, not to {user.name}")
        os.fchown(descriptor, user.uid, user.gid)
        os.fchmod(descriptor, PRIVATE_FOLDER)


class Known:
    """The node by its name in one system, with what is remembered of it, and a way to run that system's commands."""

    def __init__(self, runtime: Runtime, dialect: Dialect, name: str) -> None:
        """Raises ValueError for what is no name of one node."""
        self.dialect, self.name, self.run = dialect, one_node(name), runner(runtime, dialect.name)
        self.memory = faults.Memory(memory_folder(runtime), dialect.name, name)

    def is_closed_by_us(self) -> bool:
        """Asked of the system: it knows what an administrator did meanwhile."""
        command = self.dialect.why_closed(self.name)
        return bool(command) and self.dialect.closed_by_us(self.run(command))

    def close(self, reason: str) -> None:
        """Take the node out of service. It is remembered as closed only when the system took it."""
        for argv in self.dialect.close_node(self.name, reason):
            self.run(argv)
        self._remember(closed=time.time(), reason=reason)

    def reopen(self) -> None:
        """Put the node into service again and begin to count from nothing."""
        for argv in self.dialect.open_node(self.name):
            self.run(argv)
        self._remember(closed=0.0, faults=0, jobs=())

    def _remember(self, **changes: Any) -> None:
        with self.memory.locked():
            self.memory.write(replace(self.memory.read(), passes=0, **changes))


def test(runtime: Runtime, node: Known) -> dict[str, Any]:
    """Start a small machine. Enough passes in a row reopen a node that belljar closed; too many failures in a row close
    it. Returns whether it passed, and why or why not; whether the node was opened; how many passes there were in a row."""
    settings, begin = runtime.settings.batch, time.monotonic()
    try:
        as_a_job(runtime, settings.check_image or runtime.settings.image.default)
        passed, reason = True, f"a machine ran in {time.monotonic() - begin:.1f} s"
    except (BelljarError, OSError) as exc:
        passed, reason = False, str(exc)
    with node.memory.locked():
        now, may_open = faults.checked(node.memory.read(), passed, reason, settings.node_passes)
        node.memory.write(now)
    if faults.is_hopeless(now, settings.node_faults):
        node.close(f"{OUR_WORD}: self-check: {one_line(reason)}")
    opened = may_open and node.is_closed_by_us()
    if opened:
        node.reopen()
    return {"passed": passed, "reason": reason, "opened": opened, "passes": now.passes}


def as_a_job(runtime: Runtime, image: str) -> None:
    """The self-check, as root by an ordinary user in a folder below `paths.node`, where that is set: once root has the
    templates of the site's jobs. Raises CommandFailed when no machine could be started."""
    for name in without_template(runtime):
        with suppress(BelljarError):  # then each user's first job boots one
            self_check(runtime, name, shares=of_site(runtime.settings.batch.shares))
    from belljar.jobs.users import asked_as

    user = tester() if os.geteuid() == 0 and runtime.settings.paths.node is not None else None
    if user is not None:
        make_folder(runtime, user)
    asked_as(runtime, user, lambda own: self_check(own, image).id, timeout=TEST_TIMEOUT + 30, what="start a machine")


def tester() -> User:
    """belljar's own user where there is one, else nobody."""
    with suppress(BelljarError):
        return user_of("belljar").with_groups()
    return user_of("nobody").with_groups()


def without_template(runtime: Runtime) -> Iterator[str]:
    """Images of the site's jobs of which root has no template that serves all users. Raises BelljarError."""
    settings = runtime.settings
    serves = settings.qemu.site_templates and settings.paths.site_store is None and os.geteuid() == 0
    if not serves or settings.machine.hypervisor != "qemu" or settings.machine.start is Start.COLD:
        return
    kinds = [share_kind(share.kind).name for share in of_site(settings.batch.shares)]
    templates = [template.facts for template in runtime.hypervisor.templates() if template.grows]
    there = {template["image_digest"] for template in templates if template.get("shares", []) == kinds}
    for name in policy.images_of(settings.batch) or [settings.image.default]:
        with suppress(BelljarError):  # one that is not here
            if runtime.images.resolve(name).digest not in there:
                yield name


def self_check(runtime: Runtime, image: str, start: Start | None = None, shares: tuple[Share, ...] = ()) -> Outcome:
    """A machine of this image that ran `true`, started as the settings say unless told how. Raises CommandFailed."""
    from belljar.host.caller import caller
    from belljar.jobs.attend import attend
    from belljar.jobs.starting import make_request, widen_limits

    null = StdinKind.NULL
    payload = Payload((b"true",), caller(), cwd=b"/", stdin=null, stdout=null, stderr=null)
    request = make_request(
        runtime.settings, RunPayload(payload), image=image, cpus=1, start=start, name="self-check", requester="node test",
        timeout=TEST_TIMEOUT, grace=1.0, shares=shares,
    )  # fmt: skip
    widen_limits()
    runtime.reaper.quick()
    outcome = attend(runtime, request)
    if outcome.exit_code != 0 or outcome.error:
        raise CommandFailed(outcome.reason or f"the machine ended with {outcome.exit_code}", hint=outcome.hint)
    return outcome
