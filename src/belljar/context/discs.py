"""Discs that tell a guest's own init what to do: by cloud-init the agent, or the user's own data alone.

https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html
https://docs.cloud-init.io/en/latest/explanation/format.html

The agent comes as a boothook, which no list of the user's own cloud-config can replace, and which runs before
anything else of the user-data. What only spares time stands in the vendor-data, where the user-data may overrule it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from belljar.errors import BadOption
from belljar.host.files import write_whole
from belljar.host.python.interpreter import Interpreter, command
from belljar.host.quick_imports import sha256
from belljar.records import dataclass

if TYPE_CHECKING:
    from email.message import Message

LABEL = "cidata"
NO_NETWORK = "version: 1\nconfig: disabled\n"
FOLDER = "/usr/lib/belljar"  # of the guest
LARGEST_USER_DATA = 16 << 20
NOBODY = "belljar-000000000000"  # the hostname of a guest before it gets its own
WHOLE_MESSAGES = (b"content-type: multipart", b"mime-version:", b"from nobody ")

# A job's machine needs no host keys of each kind and no locale of its own, and without a larger disk nothing has to grow.
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
[ -e /usr/lib/belljar/agent.pyc ] && [ -e /run/systemd/system/belljar-agent.service ] && exit 0
mkdir -p /run/belljar-disc /usr/lib/belljar /run/systemd/system
mount -t iso9660 -o ro LABEL=cidata /run/belljar-disc
tar -x -p -f /run/belljar-disc/agent.tar -C /usr/lib/belljar
umount /run/belljar-disc
cat > /run/belljar-cloud-init << 'END'
{check}END
cat > /run/systemd/system/belljar-agent.service << 'END'
{unit}END
systemctl --no-block start belljar-agent.service && exit 0
systemctl daemon-reload && systemctl --no-block start belljar-agent.service
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

    agent: Interpreter
    unit: str
    user_data: bytes
    grows: bool  # the disk is larger than the image's

    @cached_property
    def digest(self) -> str:
        words = (BOOTHOOK, CHECK, VENDOR, self.agent.digest, self.unit, str(self.grows))
        return _digest(*(word.encode() for word in words), self.user_data)

    def write(self, path: Path) -> None:
        meta = {"instance-id": f"belljar-{self.digest[:16]}", "local-hostname": NOBODY}  # it gets its name later
        vendor = VENDOR.format(growpart="auto" if self.grows else "off", resize=str(self.grows).lower())
        files = {
            "meta-data": _yaml(meta),
            "user-data": multipart(boothook(self.unit), self.user_data),
            "vendor-data": vendor.encode(),
            "network-config": NO_NETWORK.encode(),
            "agent.tar": self.agent.path.read_bytes(),
        }
        write_disc(path, files)


@dataclass(frozen=True)
class UserSeed:
    """A disc with user data for guests that have no agent, in the forms of several clouds at once. Implements `Seed`.

    user-data, meta-data            cloud-init's NoCloud (the label is `cidata`)
    openstack/latest/user_data      a config drive; uCernVM looks for it on any disc
    openstack/latest/meta_data.json
    context.sh                      OpenNebula: the same in base64, as amiconfig and Vac 0.x have it
    """

    user_data: bytes
    instance_id: str
    hostname: str

    @cached_property
    def digest(self) -> str:
        return _digest(b"user", self.instance_id.encode(), self.hostname.encode(), self.user_data)

    def write(self, path: Path) -> None:
        document = {"uuid": self.instance_id, "hostname": self.hostname, "name": self.hostname, "launch_index": 0}
        packed = base64.b64encode(self.user_data).decode()
        files = {
            "user-data": self.user_data,
            "meta-data": _yaml({"instance-id": self.instance_id, "local-hostname": self.hostname}),
            "openstack/latest/user_data": self.user_data,
            "openstack/latest/meta_data.json": json.dumps(document).encode(),
            "context.sh": f"EC2_USER_DATA='{packed}'\nCONTEXT_UUID='{self.instance_id}'\n".encode(),
        }
        write_disc(path, files)


def write_disc(path: Path, files: Mapping[str, bytes]) -> None:
    """Make an ISO 9660 disc (0600) labelled `cidata`, as cloud-init's NoCloud reads it. Raises NoSpace, HostError."""
    import pycdlib

    disc, image, folders = pycdlib.PyCdlib(), io.BytesIO(), {PurePosixPath("."): ""}
    disc.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    for number, (name, data) in enumerate(files.items()):
        place = PurePosixPath(name)
        for folder in reversed(place.parents):
            if folder not in folders:
                folders[folder] = f"{folders[folder.parent]}/D{len(folders)}"
                disc.add_directory(folders[folder], rr_name=folder.name, joliet_path=f"/{folder}")
        short = f"{folders[place.parent]}/FILE{number}.;1"
        disc.add_fp(io.BytesIO(data), len(data), short, rr_name=place.name, joliet_path=f"/{name}", file_mode=0o100444)
    disc.write_fp(image)
    disc.close()
    write_whole(path, image.getvalue())


def _yaml(value: object) -> bytes:
    """JSON is YAML, and has one way to quote."""
    return json.dumps(value).encode() + b"\n"


def _digest(*words: bytes) -> str:
    return sha256(b"".join(b"%d:%s," % (len(word), word) for word in words)).hexdigest()


def boothook(unit: str) -> bytes:
    """The script that installs the agent, which lies on the same disc."""
    return BOOTHOOK.format(unit=waiting_for_cloud_init(unit), check=CHECK).encode()


def waiting_for_cloud_init(unit: str) -> str:
    """The agent's unit, to be started when cloud-init has ended and only if it ended well; without, the guest goes off."""
    after = "After=cloud-final.service\nFailureAction=poweroff-force\n"
    check = f"ExecStartPre={command(FOLDER)} /run/belljar-cloud-init\n"
    text = unit.replace("[Service]\n", f"[Service]\n{check}", 1).replace("[Unit]\n", f"[Unit]\n{after}", 1)
    return text.replace("Restart=always\n", "Restart=no\n")


def multipart(ours: bytes, users: bytes) -> bytes:
    """One MIME message: our boothook, then the user's data in any form; cloud-init recognizes it by its first bytes."""
    from email import message_from_bytes
    from email.mime.multipart import MIMEMultipart

    if len(users) > LARGEST_USER_DATA:
        raise BadOption(f"user-data of {len(users)} bytes: at most {LARGEST_USER_DATA}")
    boundary = sha256(ours + b"\0" + users).hexdigest()[:40]  # the same for the same data, and in none of the parts
    whole = MIMEMultipart(boundary=boundary)
    whole.attach(_part("cloud-boothook", ours))
    if users[:4096].lstrip().lower().startswith(WHOLE_MESSAGES):
        whole.attach(message_from_bytes(users.lstrip()))  # a message of several parts is a part as it is
    elif users.strip():
        whole.attach(_part("plain", users))
    return whole.as_bytes()


def _part(kind: str, data: bytes) -> Message:
    from email.mime.nonmultipart import MIMENonMultipart

    part = MIMENonMultipart("text", kind, charset="utf-8")
    part.set_payload(base64.encodebytes(data).decode())
    part["Content-Transfer-Encoding"] = "base64"
    return part
