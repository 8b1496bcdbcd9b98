"""What a clone that failed says of its template: that it is no good, or nothing much.

A template is minutes of work where an image boots its own init, and other jobs start from it. So it is removed when the
failure is surely its own; a clone that was only silent may as well have been on a busy host, and then it takes as many in a
row as DOUBTS_ENOUGH. The count is a file beside the template's, and a clone that comes up takes it away.
"""

from __future__ import annotations

import os
from contextlib import suppress

from belljar.errors import AgentLost, BelljarError, BootTimeout, HostKeysRefused, PlugRefused
from belljar.hypervisor import DomainSpec, Hypervisor, Template, cloning_of
from belljar.machine import DOUBTS

DOUBTS_ENOUGH = 2


def judge(error: BelljarError, template: Template, spec: DomainSpec, hypervisor: Hypervisor) -> None:
    """Remove the template, or remember what is held against it. One that was made anew meanwhile is left alone."""
    found = cloning_of(hypervisor).find_template(spec)
    if isinstance(found, Template) and found.created != template.created:
        return
    if isinstance(error, (HostKeysRefused, PlugRefused)):
        return  # the image lacks something, or the host; the next template would be no better
    if not isinstance(error, (BootTimeout, AgentLost)) or _doubt(template) >= DOUBTS_ENOUGH:
        hypervisor.remove_template(template.key)


def _doubt(template: Template) -> int:
    """How often in a row, this time included."""
    with suppress(OSError):  # it is gone already, or the disk is full: the next failure says more
        descriptor = os.open(template.folder / DOUBTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b".")
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return 0
