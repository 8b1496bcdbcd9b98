"""`--user-data` and what belongs to it: the template is read or fetched, and filled in for one machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from belljar.errors import BadOption
from belljar.host.files import read_named
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.jobs import Runtime
    from belljar.model import Request

SCHEMES = ("http://", "https://")


def with_user_data(
    request: Request, template: str, named_options: list[str], named_files: list[str], runtime: Runtime
) -> Request:
    """The request with its user data. Raises BadOption, DownloadFailed."""
    from belljar import __version__
    from belljar.context import About, filled_in
    from belljar.hypervisor import guest_uuid
    from belljar.machine import BASE_URL
    from belljar.machine.extras.network import has_metadata
    from belljar.model import RunPayload

    with_data: Callable[[bytes], Request] = lambda data: replace(request, work=replace(request.work, user_data=data))  # noqa: E731
    settings = runtime.settings.context
    url = template if template.startswith(SCHEMES) else ""
    image = runtime.images.resolve(request.machine.image)
    base = BASE_URL if has_metadata(with_data(b""), settings.metadata) else ""
    has_files = isinstance(request.work, RunPayload)
    about = About(
        uuid=guest_uuid(request.id), hostname=f"belljar-{request.id}", machinetype=request.name or request.machine.image,
        manager=f"belljar {__version__}", manager_hostname=os.uname().nodename, space=settings.space, site=settings.site,
        url=url, image_url=image.source if image.source.startswith(SCHEMES) else "",
        machinefeatures=f"{base}/machinefeatures" if base else "/etc/machinefeatures" if has_files else "",
        jobfeatures=f"{base}/jobfeatures" if base else "/etc/jobfeatures" if has_files else "",
        joboutputs=f"{base}/joboutputs" if base else "",
    )  # fmt: skip
    files = {name: _read(path, "--user-data-file") for name, path in _pairs("--user-data-file", named_files).items()}
    options = {name: os.fsencode(text) for name, text in _pairs("--user-data-option", named_options).items()}
    for name in files.keys() & options.keys():
        raise BadOption(f"--user-data-option {name} and --user-data-file {name}: one of them only")
    if settings.cvmfs_proxy and "cvmfs_proxy" not in files:
        options.setdefault("cvmfs_proxy", settings.cvmfs_proxy.encode())
    text = _fetch(url, runtime) if url else _read(template, "--user-data")
    return with_data(filled_in(text, about, options, files))


def _pairs(option: str, words: list[str]) -> dict[str, str]:
    from belljar.context.userdata import check_option

    pairs = dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise BadOption(f"{option} {word[:80]}: not of the form K=...")
        check_option(name)
        if name in pairs:
            raise BadOption(f"{option} {name}: given twice")
        pairs[name] = value
    return pairs


def _read(path: str, option: str) -> bytes:
    """A file of at most a MiB, or what a pipe says."""
    from belljar.context.userdata import LARGEST, check_size

    try:
        data = read_named(path, LARGEST)
    except OSError as exc:
        raise BadOption(f"{option} {path}: {exc.strerror}") from exc
    check_size(data, path)
    return data


def _fetch(url: str, runtime: Runtime) -> bytes:
    from belljar.context.userdata import LARGEST
    from belljar.errors import ImageTooLarge
    from belljar.image.intake.fetch import small_file

    try:
        return small_file(url, LARGEST, patience=runtime.settings.image.stall_timeout)
    except ImageTooLarge as exc:
        raise BadOption(f"--user-data {exc.message}") from exc
