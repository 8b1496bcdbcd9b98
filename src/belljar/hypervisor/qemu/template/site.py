"""Root's base templates serve the users of the site: mapped as they are where QEMU can read memory that it may not write, and
copied into the user's own store where it cannot. A copy by reflink, where the file system has that, takes no room and no time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, TemplateError
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import DomainSpec, Template
from belljar.hypervisor.qemu.template.folders import CLONE, FILES, RAM, SEED, TemplateStore
from belljar.hypervisor.qemu.template.making import publish
from belljar.hypervisor.qemu.template.memory import copy_data

FICLONE = 0x40049409
OWNER = "owner"  # the one fact in which templates of several users differ


def find(store: TemplateStore, facts: Mapping[str, Any]) -> Template | None:
    """A template of the site with these facts, whoever its QEMU ran as, that is whole and can be read by us."""
    wanted = {name: value for name, value in facts.items() if name != OWNER}
    try:
        there = store.all()
    except OSError:  # root's alone
        return None
    for one in there:
        if {name: value for name, value in one.facts.items() if name != OWNER} == wanted and one.grows:
            with suppress(BelljarError, OSError, ValueError, KeyError):
                if isinstance(store.find(one.key), Template) and os.access(one.folder / RAM, os.R_OK):
                    return one
    return None


async def adopt(
    site: TemplateStore, template: Template, store: TemplateStore, key: str, facts: Mapping[str, Any], spec: DomainSpec,
    *, ram_is_read: bool,
) -> Template:  # fmt: skip
    """A copy of the site's template in a user's own store. Raises TemplateError, NoSpace."""
    booted = spec.of_template
    draft = await wholly_in_thread(lambda: store.begin(key, booted.memory, spec.owner))
    await wholly_in_thread(lambda: copy(site, template, draft))
    return await publish(store, key, facts, booted, template.grows, ram_is_read=ram_is_read)


def copy(site: TemplateStore, template: Template, draft: Path) -> None:
    """Its files into a draft that has its memory's file already. Raises TemplateError for one that changed meanwhile."""
    try:
        for name in (*(one for one in FILES if one != CLONE), SEED):
            if name != SEED or (template.folder / SEED).exists():
                _copy_file(template.folder / name, draft / name)
        changed = site.changes(template)
    except (OSError, ValueError, KeyError, BelljarError) as exc:
        raise TemplateError(f"the site's template {template.key} cannot be copied: {exc}") from exc
    if changed:
        raise TemplateError(f"the site's template {template.key} changed while it was copied: {changed[0]}")


def _copy_file(source: Path, target: Path) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(reading).st_size
            try:
                fcntl.ioctl(writing, FICLONE, reading)
            except OSError:  # another file system, or one that cannot
                os.ftruncate(writing, size)
                copy_data(reading, writing, size)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
