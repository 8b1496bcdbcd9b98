"""What comes before a machine: its request, made by the settings of this host, the streams and limits of this process, and
clearing away what dead supervisors left. What a batch job asks for is read in `belljar.batch.job.request`."""

from __future__ import annotations

import os
import resource
import stat
import time
from contextlib import suppress

from belljar.errors import HostError, ImageError, NoStore, UnsafeFolder
from belljar.hints import TYPE_CHECKING, Any, Unpack
from belljar.host.caller import umask
from belljar.host.files import private_folder
from belljar.image import is_container
from belljar.jobs import complain
from belljar.model import Container, MachineSpec, Request, StdinKind, Work
from belljar.records import fields

if TYPE_CHECKING:
    from belljar.jobs import Runtime
    from belljar.jobs.asked import Asked

START_PATIENCE = 2.0  # seconds a start spends on what dead supervisors left, at most
SMALL_STACK = 2 << 20  # bytes, for threads of QEMU where a limit counts them


def make_request(settings: Any, work: Work, **asked: Unpack[Asked]) -> Request:
    """A new request for this work."""
    ours = settings.machine
    usual = {name: getattr(ours, name) for name in ("cpus", "memory", "network", "start", "context", "grace")}
    given = {name: value for name, value in asked.items() if value is not None}
    values: dict[str, Any] = {"image": settings.image.default, **usual, **given}
    values["labels"] = tuple(asked.get("labels", {}).items())
    if values.get("allow") or values.get("secrets"):
        from belljar.jobs.reach import understood

        work = understood(work, values, values["network"] if "network" in given else None)
    machine = {field.name: values.pop(field.name) for field in fields(MachineSpec) if field.name in values}
    return Request(os.urandom(6).hex(), MachineSpec(**machine), work, created=time.time(), **values)


def kind(number: int) -> StdinKind:
    """What the caller's descriptor is, as far as the payload can tell the difference."""
    from belljar.host.descriptors import CLOSED

    if number in CLOSED:
        return StdinKind.CLOSED
    status = os.fstat(number)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3):
        return StdinKind.NULL
    is_stdout = number == 2 and 1 not in CLOSED and os.path.samestat(status, os.fstat(1))
    return StdinKind.STDOUT if is_stdout else StdinKind.STREAM


def check_folder(runtime: Runtime) -> None:
    """Raises HostError where this user cannot enter or make their folder below `paths.node`: that is the site's to mend."""
    paths = runtime.settings.paths
    for path in (paths.run, paths.scratch, paths.store, paths.logs):
        if paths.node in path.parents:
            try:
                private_folder(path.parent)
            except UnsafeFolder as exc:
                raise HostError(exc.message, hint="`belljar doctor --only node` says what is wrong with it.") from exc


def ensure_image(runtime: Runtime, reference: str, *, public_only: bool = False) -> None:
    """See `Images.ensure`. Says on stderr why a newer image could not be had."""
    if problem := runtime.images.ensure(reference, public_only=public_only):
        complain(f"{problem}; the image that was imported before is used", "")


def container_of(runtime: Runtime, reference: str | None) -> Container | None:
    """What a container image says of its processes; None of other images, and of one that is not here."""
    with suppress(ImageError, NoStore):
        return runtime.images.find(reference or runtime.settings.image.default).container
    return None


def brought_container(runtime: Runtime, reference: str | None) -> Container | None:
    """The same; an image that is named by its source is imported first."""
    if reference and is_container(reference):
        ensure_image(runtime, reference)
    return container_of(runtime, reference)


def environment_of(container: Container | None) -> dict[bytes, bytes]:
    """The variables of a container image."""
    return {os.fsencode(name): os.fsencode(value) for name, value in container.env} if container else {}


def finish_the_dead(runtime: Runtime) -> None:
    """What dead supervisors left is cleared away at every start; what cannot be is not a reason not to start."""
    stuck = {end.machine for end in runtime.reaper.quick(START_PATIENCE) if end.error}
    if stuck:
        complain(f"what is left of {', '.join(sorted(stuck)[:3])} cannot be cleared away; see `belljar reap`", "")


def widen_limits() -> None:
    """The caller's soft limits and umask are the payload's, inside. We and QEMU, with its large files, take what we may have."""
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    os.umask(umask() & 0o077)  # what we make we must be able to open
    if resource.getrlimit(resource.RLIMIT_DATA)[1] != resource.RLIM_INFINITY:  # which counts the stack of each thread
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        if soft == resource.RLIM_INFINITY or soft > SMALL_STACK:
            resource.setrlimit(resource.RLIMIT_STACK, (SMALL_STACK, hard))
