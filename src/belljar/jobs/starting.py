"""What comes before a machine: its request, made by the settings of this host, the streams and limits of this process, and
clearing away what dead supervisors left. What a batch job asks for is read in `belljar.batch.job.request`."""

from __future__ import annotations

import os
import resource
import stat
import time
from contextlib import suppress
from pathlib import Path

from belljar import __version__
from belljar.context import About, filled_in
from belljar.errors import BadOption, BelljarError, HostError, ImageError, ImageTooLarge, NoStore, UnsafeFolder
from belljar.hints import TYPE_CHECKING, Any, Unpack
from belljar.host.caller import umask
from belljar.host.descriptors import CLOSED
from belljar.host.files import private_folder, read_named
from belljar.hypervisor import guest_uuid
from belljar.image import Image, is_container
from belljar.jobs import Runtime, complain
from belljar.machine import BASE_URL
from belljar.model import PLACING, Container, MachineSpec, Request, RunPayload, StdinKind, Work
from belljar.records import fields, replace

if TYPE_CHECKING:
    from belljar.jobs.asked import Asked

START_PATIENCE = 2.0  # seconds a start spends on what dead supervisors left, at most
SMALL_STACK = 2 << 20  # bytes, for threads of QEMU where a limit counts them


def make_request(settings: Any, work: Work, **asked: Unpack[Asked]) -> Request:
    """A new request for this work."""
    given = {name: value for name, value in asked.items() if value is not None}
    values: dict[str, Any] = {"image": settings.image.default, "grace": settings.machine.grace}
    values |= {**usual(settings.machine), **given}
    values["labels"] = tuple(asked.get("labels", {}).items())
    if values.get("allow") or values.get("secrets"):
        from belljar.jobs.reach import understood

        work = understood(work, values, values["network"] if "network" in given else None)
    machine = {field.name: values.pop(field.name) for field in fields(MachineSpec) if field.name in values}
    return Request(os.urandom(6).hex(), MachineSpec(**machine), work, created=time.time(), **values)


def usual(settings: Any) -> dict[str, Any]:
    """What of a machine its settings decide, where nobody asks for anything else."""
    return {name: getattr(settings, name) for name in ("cpus", "memory", "network", "start", "context", *PLACING)}


def restored_request(folder: str, name: str) -> Request:
    """For the machine that goes on from the newest checkpoint in this folder. Raises BelljarError."""
    from belljar.machine.checkpoints import newest

    path = Path(os.path.abspath(folder))
    checkpoint, complaints = newest(path)
    if checkpoint is None:
        problem = "; ".join((f"{path}: no checkpoint is there", *complaints))
        raise BelljarError(problem, hint="`belljar checkpoint ID DIR` writes one.")
    before, id, now = checkpoint.request, os.urandom(6).hex(), time.time()
    return checkpoint.asked(replace(before, id=id, name=name or before.name, created=now, restore=str(path)))


def kind(number: int) -> StdinKind:
    """What the caller's descriptor is, as far as the payload can tell the difference."""
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
    """See `Images.ensure`. Says on stderr why a newer image could not be fetched."""
    if problem := runtime.images.ensure(reference, public_only=public_only):
        complain(f"{problem}; the image that was imported before is used")


def image_of(runtime: Runtime, reference: str | None, *, brings: bool = False) -> Image | None:
    """The image, whatever its files are now; None of one that is not here. *brings*: a container image that is named by its
    source is imported first."""
    if brings and reference and is_container(reference):
        ensure_image(runtime, reference)
    with suppress(ImageError, NoStore):
        return runtime.images.find(reference or runtime.settings.image.default)
    return None


def container_of(runtime: Runtime, reference: str | None) -> Container | None:
    """What a container image says of its processes; None of other images, and of one that is not here."""
    image = image_of(runtime, reference)
    return image.container if image else None


def environment_of(container: Container | None) -> dict[bytes, bytes]:
    """The variables of a container image."""
    return {os.fsencode(name): os.fsencode(value) for name, value in container.env} if container else {}


def finish_the_dead(runtime: Runtime) -> None:
    """What dead supervisors left is cleared away at every start; what cannot be is not a reason not to start."""
    stuck = {end.machine for end in runtime.reaper.quick(START_PATIENCE) if end.error}
    if stuck:
        complain(f"what is left of {', '.join(sorted(stuck)[:3])} cannot be cleared away; see `belljar reap`")


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


# -- `--user-data`: the template is read or fetched, and filled in for one machine --------------------------------------------

SCHEMES = ("http://", "https://")


def with_user_data(
    request: Request, template: str, named_options: list[str], named_files: list[str], runtime: Runtime
) -> Request:
    """The request with its user data. Raises BadOption, DownloadFailed."""
    from belljar.context.userdata import check_option
    from belljar.machine.extras.network import has_metadata

    def with_data(data: bytes) -> Request:
        return replace(request, work=replace(request.work, user_data=data))

    settings = runtime.settings.context
    url = template if template.startswith(SCHEMES) else ""
    image = runtime.images.resolve(request.machine.image)
    base = BASE_URL if has_metadata(with_data(b""), settings.metadata) else ""
    place = base or ("/etc" if isinstance(request.work, RunPayload) else "")
    about = About(
        uuid=guest_uuid(request.id), hostname=f"belljar-{request.id}", machinetype=request.name or request.machine.image,
        manager=f"belljar {__version__}", manager_hostname=os.uname().nodename, space=settings.space, site=settings.site,
        url=url, image_url=image.source if image.source.startswith(SCHEMES) else "", joboutputs=base and f"{base}/joboutputs",
        **{name: place and f"{place}/{name}" for name in ("machinefeatures", "jobfeatures")},
    )  # fmt: skip
    options, files = dict[str, bytes](), dict[str, bytes]()
    for option, words, values in (("option", named_options, options), ("file", named_files, files)):
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name in options or name in files:
                raise BadOption(f"--user-data-{option} {name[:80]}: not of the form K=..., or K is given twice")
            check_option(name)
            values[name] = _read(value, "--user-data-file") if values is files else os.fsencode(value)
    if settings.cvmfs_proxy and "cvmfs_proxy" not in files:
        options.setdefault("cvmfs_proxy", settings.cvmfs_proxy.encode())
    return with_data(filled_in(_read(template, "--user-data", runtime), about, options, files))


def _read(place: str, option: str, runtime: Runtime | None = None) -> bytes:
    """A file, or what a pipe or an http server says: of more than a MiB, a byte more than that, which is refused later."""
    from belljar.context.userdata import LARGEST
    from belljar.image.intake.fetch import small_file

    try:
        if runtime is not None and place.startswith(SCHEMES):
            return small_file(place, LARGEST, patience=runtime.settings.image.stall_timeout)
        return read_named(place, LARGEST)
    except ImageTooLarge as exc:
        raise BadOption(f"{option} {exc.message}") from exc
    except OSError as exc:
        raise BadOption(f"{option} {place}: {exc.strerror}") from exc
