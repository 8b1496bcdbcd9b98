"""Devices of this host for machines: who has which, what stands in the way, and which of them a batch job was given."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.errors import BadSetting, HostError
from belljar.findings import Finding, expect, fail, ok, warn
from belljar.host.devices.binding import DRIVER, GROUPS, IOMMU, Bindings, is_loaded, obstacle, open_group
from belljar.host.devices.pci import Device, Site, class_of, read
from belljar.host.locks import is_locked
from belljar.host.privileges import user_of
from belljar.jobs import Runtime
from belljar.model import GIB, MIB

ROOT = Path("/")
MATCH = "Correct `match` or `ids` of the class in devices.toml; `belljar device list --all` shows all devices."


def rows(runtime: Runtime, *, every: bool, root: Path = ROOT) -> Iterator[dict[str, object]]:
    """The devices of the site's classes, or *every* one: the machine, the job or the user that holds each. Raises BadSetting."""
    jobs = {binding.address: binding.job for binding in bindings(runtime, root).all()}
    for device in read(root).values():
        if (class_ := class_of(device, runtime.devices)) or every:
            lock = runtime.folders.devices / f"{device.address}.lock"
            holder = lock.read_text() if is_locked(lock) else jobs.get(device.address) or _user(device, root)
            names = {"class": class_.name if class_ else "", "id": f"{device.vendor}:{device.device}"}
            more = {word: getattr(device, word) for word in ("kind", "group", "driver", "node")}
            yield {"address": device.address, **names, **more, "held_by": holder}


def bindings(runtime: Runtime, root: Path = ROOT) -> Bindings:
    return Bindings(runtime.folders.devices, root)


def _user(device: Device, root: Path) -> str:
    """To whom its group was given."""
    with suppress(OSError, HostError):
        if uid := os.stat(root / GROUPS / (device.group or "none")).st_uid:
            return user_of(str(uid)).name
    return ""


def findings(site: Site, root: Path = ROOT) -> Iterator[Finding]:
    """What stands in the way: of the host first, then of each device."""
    known, hard = read(root), resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    yield expect("IOMMU", any(device.group for device in known.values()), "", IOMMU)
    yield expect(DRIVER, is_loaded(root), "", f"Load it at each start of the host: `modprobe {DRIVER}`.")
    text, is_enough = f"{hard // MIB} MiB", hard == resource.RLIM_INFINITY or hard >= GIB or os.geteuid() == 0
    remedy = "Raise `memlock` in limits.conf: a machine with a device locks all its memory."
    yield expect("locked memory", is_enough, text if hard != resource.RLIM_INFINITY else "no limit", remedy)
    if not site:
        yield warn("devices.toml", "no classes: machines get no devices", "docs/batch/devices.md has an example.")
    for class_ in site:
        count, ids = len(class_.devices(known.values())), f", {len(class_.ids)} ids" if class_.ids else ""
        is_right = count > 0 and len(class_.ids) in (0, count)
        yield expect(f"class {class_.name}", is_right, f"{count} devices{ids}", MATCH)
    for device in known.values():
        if (whose := class_of(device, site)) is None:
            continue
        where = f"group {device.group}, {device.driver or 'no driver'}"
        if wrong := obstacle(device, known, whose):
            yield fail(device.address, f"{where}: {wrong[0]}", wrong[1])
            continue
        try:
            open_group(device, root)
            yield ok(device.address, where)
        except HostError as exc:
            yield warn(device.address, exc.message.removeprefix(f"{device.address}: "), exc.hint)


def of_job(given: Mapping[str, Sequence[str]], runtime: Runtime, title: str, root: Path = ROOT) -> tuple[str, ...]:
    """The addresses of what the batch system gave by class and by its own names: the site's `ids`, or the number in the order of
    addresses. Other resources than the site's classes are no devices. Raises HostError: a job never runs without what it was given."""
    try:
        addresses, classes = list[str](), {class_.name: class_ for class_ in runtime.devices}
    except BadSetting as exc:
        raise HostError(exc.message, hint="The site has to correct devices.toml.") from exc
    known = read(root).values()
    if "gpu" in given and "gpu" not in classes:
        raise HostError(f"{title} gave the job a GPU, and devices.toml has no class gpu", hint=MATCH)
    for name in given.keys() & classes.keys():
        devices = classes[name].devices(known)
        places = dict(zip(classes[name].ids or map(str, range(len(devices))), devices, strict=False))
        if strange := [id[:60] for id in given[name] if id not in places]:
            what = f"{title} gave the job the {name} {strange[0]!r}, which devices.toml does not know"
            raise HostError(what, hint=MATCH)
        addresses += [places[id].address for id in given[name]]
    return tuple(addresses)
