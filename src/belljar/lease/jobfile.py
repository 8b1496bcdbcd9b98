"""The file that a pilot is started with: which lease it is for, where its service is, and the key that both know. It is the only place
where the key is: no command line, environment or record of the batch system has it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from belljar.errors import BadSetting
from belljar.reading import from_json, strict_json
from belljar.records import dataclass

LARGEST = 1 << 16  # bytes
HEX, PORTS = r"[0-9a-f]{64}", r"([0-9]{1,5}(-[0-9]{1,5})?)?"
FORMS = {"lease": r"r-[0-9a-f]{17}", "pin": HEX, "key": HEX, "ports": PORTS}


@dataclass(frozen=True)
class JobFile:
    """Durations in seconds. The pilot counts them from its own start, by its monotonic clock."""

    lease: str
    attempt: int
    nodes: int
    service: tuple[str, ...]  # HOST:PORT each
    pin: str  # SHA-256 of the service's certificate, hexadecimal
    key: str  # of this lease, hexadecimal
    deadline: float  # after which nothing of it may be left
    claim: float  # in which the service has answered
    barrier: float  # in which all nodes of a group have come
    grace: float  # for a guest to shut down
    notice: float  # that the batch system leaves between TERM and KILL
    report: float = 2.0  # for the last words to the service
    heartbeat: float = 20.0
    ports: str = ""  # FIRST-LAST, or 0 for any: where pilots take each other's connections; "": they take none

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)


def read(path: Path) -> JobFile:
    """Raises BadSetting for a file that somebody else could have read or written, and for one that says something else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status, data = os.fstat(descriptor), file.read(LARGEST)
    except OSError as exc:
        hint = "The service writes it to `lease.jobs`; nodes must see it."
        raise BadSetting(f"{path}: {exc.strerror}", hint=hint) from exc
    if status.st_uid != os.geteuid():
        what = f"belongs to uid {status.st_uid}, and this pilot runs as {os.geteuid()}"
        raise BadSetting(f"{path}: {what}", hint="The batch system has to run pilots as the service's own account.")
    if status.st_mode & 0o077:
        hint = "Its key is known now: release the lease. Files in `lease.jobs` are written with mode 0600."
        raise BadSetting(f"{path}: others may read it (mode {stat.S_IMODE(status.st_mode):04o})", hint=hint)
    try:
        job: JobFile = from_json(JobFile, strict_json(data), least={"deadline": 1})
        wrong = [name for name, form in FORMS.items() if not re.fullmatch(form, getattr(job, name))]
        if wrong or not job.service:
            raise ValueError(f"{wrong[0] if wrong else 'service'}: not as the service writes it")
    except (ValueError, TypeError) as exc:
        raise BadSetting(f"{path}: {exc}", hint="The service writes it anew with the next lease.") from exc
    return job
