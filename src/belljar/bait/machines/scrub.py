"""What is done in a machine between two jobs, by root over the agent's own channel: it is cleaned, and proved to be what it was.

Before its first job can come, BASELINE notes the moment, and takes the rights of root from every program that has them by its set-user-ID
bit or a capability: no user becomes root. So nobody can hide from the proof: a change of a file, and a file that goes, leave a ctime that
only the kernel writes, and only root has processes, mounts or files that the proof does not know.

What a job left is whatever belongs to no system account of the image (https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes),
or lies where everybody may write. The proof prints what else is not as it was; a machine that says anything but CLEAN is destroyed. What changes in the folders of the node's daemons is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PLACE = "/run/belljar-node"
SHARED = "/tmp /var/tmp /dev/shm /run/lock /run/user /var/spool/cron/crontabs /var/spool/cron/atjobs"
CLEAN = b"clean\n"
LOCAL, BASELINE, SCRUB, ADMIT = (
    Path(__file__).with_name(f"{name}.sh").read_text() for name in ("local", "baseline", "scrub", "admit")
)


def baseline() -> bytes:
    return _filled(LOCAL + BASELINE)


def scrub(own: Iterable[str]) -> bytes:
    """*own*: folders that the node's daemons write to."""
    theirs = [f"! -path {folder} ! -path '{folder}/*'" for folder in own]
    changed = [f"! -path {path}" for path in ("/etc/passwd", "/etc/group", *SHARED.split())]
    within = [f"! -path '{folder}/*'" for folder in SHARED.split()]  # by name
    return _filled(LOCAL + SCRUB.replace("{outside}", " ".join((*theirs, *changed, *within))))


def why_not(code: int, out: bytes, err: bytes) -> str:
    """What the proof found; "" where it found nothing."""
    if code == 0 and out == CLEAN and not err:
        return ""
    text = (out if out != CLEAN else b"") + err
    return f"exit {code}: {text[:400].decode('ascii', 'replace')}".strip()


def _filled(script: str) -> bytes:
    return script.replace("{place}", PLACE).replace("{shared}", SHARED).encode()
