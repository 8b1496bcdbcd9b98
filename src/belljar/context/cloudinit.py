"""What cloud-init is told on belljar's behalf: install the agent, start it when all else is done, spare what takes time.

https://docs.cloud-init.io/en/latest/explanation/format.html

The agent comes as a boothook, which no list of the user's own cloud-config can replace, and which runs before
anything else of the user-data. What only spares time stands in the vendor-data, where the user-data may overrule it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.context import NO_NETWORK, seed_disc
from belljar.context.nocloud import LABEL
from belljar.errors import BadOption
from belljar.host.interpreter import GUESTS_OWN, Interpreter, command

if TYPE_CHECKING:
    from email.message import Message

FOLDER = "/usr/lib/belljar"  # of the guest
LARGEST_USER_DATA = 16 << 20
NOBODY = "belljar-000000000000"  # the hostname of a guest that waits for its own
WHOLE_MESSAGES = (b"content-type: multipart", b"mime-version:", b"from nobody ")

# A job's machine has no use for a fresh host key of each kind or a locale made for it, and without a larger disk nothing
# is to grow.
VENDOR = """\
#cloud-config
growpart: {{mode: '{growpart}'}}
resize_rootfs: {resize}
ssh_genkeytypes: [ed25519]
locale: false
apt_preserve_sources_list: true
manage_etc_hosts: false
"""

BOOTHOOK = """\
#!/bin/sh
# Installs belljar's agent. It starts once cloud-init has finished, and reports what failed.
[ -e /usr/lib/belljar/agent.py ] && [ -e /run/systemd/system/belljar-agent.service ] && exit 0
mkdir -p /usr/lib/belljar /run/systemd/system
{python}base64 -d << 'END' | gzip -dc > /usr/lib/belljar/agent.py
{agent}
END
cat > /run/belljar-cloud-init << 'END'
{check}END
cat > /run/systemd/system/belljar-agent.service << 'END'
{unit}END
systemctl --no-block start belljar-agent.service && exit 0
systemctl daemon-reload && systemctl --no-block start belljar-agent.service
"""

# Where the image's own Python does not fit, ours lies on the same disc.
PYTHON = f"""\
mkdir -p /run/belljar-disc {FOLDER}/python
mount -t iso9660 -o ro LABEL={LABEL} /run/belljar-disc
tar -x -p -f /run/belljar-disc/python.tar -C {FOLDER}/python
umount /run/belljar-disc
"""

# Runs before the agent, when cloud-init has ended: with errors the machine is of no use, and its console says why.
CHECK = """\
import json, sys
log = open('/dev/console', 'w')
try:
    errors = json.load(open('/run/cloud-init/result.json'))['v1']['errors']
except (OSError, ValueError, KeyError) as exc:
    errors = ['it left no result: %s' % exc]
if errors:
    try:
        tail = open('/var/log/cloud-init-output.log', errors='replace').read()[-4000:]
    except OSError:
        tail = ''
    log.write('\\n%s\\nbelljar: cloud-init failed: %s\\n' % (tail, '; '.join(str(one) for one in errors)[:1000]))
    log.flush()
    sys.exit(1)
"""


@dataclass(frozen=True)
class AgentSeed:
    """A disc that brings *agent* and its systemd *unit*, and what the user gave. Implements `Seed`."""

    agent: str
    unit: str
    user_data: bytes
    grows: bool  # the disk is larger than the image's
    python: Interpreter | None = None  # brought where the image's own does not fit

    @cached_property
    def digest(self) -> str:
        carried = f"{PYTHON}{self.python.digest}" if self.python else ""
        words = (BOOTHOOK, CHECK, VENDOR, self.agent, self.unit, str(self.grows), carried)
        parts = [*(word.encode() for word in words), self.user_data]
        return sha256(b"".join(b"%d:%s," % (len(part), part) for part in parts)).hexdigest()

    def write(self, path: Path) -> None:
        vendor = VENDOR.format(growpart="auto" if self.grows else "off", resize=str(self.grows).lower())
        seed_disc(
            path, instance_id=f"belljar-{self.digest[:16]}", hostname=NOBODY, meta={}, network_config=NO_NETWORK,
            user_data=multipart(boothook(self.agent, self.unit, is_carried=self.python is not None), self.user_data),
            vendor_data=vendor.encode(), more={"python.tar": self.python.path.read_bytes()} if self.python else {},
        )  # fmt: skip


def boothook(agent: str, unit: str, *, is_carried: bool = False) -> bytes:
    """The script that installs the agent; *is_carried*: with the interpreter that *unit* starts it by."""
    import gzip

    packed = base64.encodebytes(gzip.compress(agent.encode(), 9, mtime=0)).decode().strip()
    unit, python = waiting_for_cloud_init(unit, is_carried=is_carried), PYTHON if is_carried else ""
    return BOOTHOOK.format(agent=packed, unit=unit, check=CHECK, python=python).encode()


def waiting_for_cloud_init(unit: str, *, is_carried: bool = False) -> str:
    """The agent's unit, to be started when cloud-init has ended and only if it ended well; without, the guest goes off."""
    after = "After=cloud-final.service\nFailureAction=poweroff-force\n"
    python = command(f"{FOLDER}/python") if is_carried else GUESTS_OWN
    check = f"ExecStartPre={python} /run/belljar-cloud-init\n"
    text = unit.replace("[Service]\n", f"[Service]\n{check}", 1).replace("[Unit]\n", f"[Unit]\n{after}", 1)
    return text.replace("Restart=always\n", "Restart=no\n")


def multipart(ours: bytes, users: bytes) -> bytes:
    """One MIME message: our boothook, then what the user gave, whatever it is: cloud-init looks at its first bytes."""
    from email.mime.multipart import MIMEMultipart

    if len(users) > LARGEST_USER_DATA:
        raise BadOption(f"user-data of {len(users)} bytes: at most {LARGEST_USER_DATA}")
    boundary = sha256(ours + b"\0" + users).hexdigest()[:40]  # the same at each time, and in no message within
    whole = MIMEMultipart(boundary=boundary)
    whole.attach(_part("cloud-boothook", ours))
    if users.strip():
        whole.attach(_users_part(users))
    return whole.as_bytes()


def _users_part(users: bytes) -> Message:
    from email import message_from_bytes

    if users[:4096].lstrip().lower().startswith(WHOLE_MESSAGES):
        return message_from_bytes(users.lstrip())  # a message of several parts is a part as it is
    return _part("plain", users)


def _part(kind: str, data: bytes) -> Message:
    from email.mime.nonmultipart import MIMENonMultipart

    part = MIMENonMultipart("text", kind, charset="utf-8")
    part.set_payload(base64.encodebytes(data).decode())
    part["Content-Transfer-Encoding"] = "base64"
    return part
