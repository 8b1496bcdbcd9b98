"""A disc with user data for guests that have no agent, in the forms of several clouds at once.

    user-data, meta-data            cloud-init's NoCloud (the label is `cidata`)
    openstack/latest/user_data      a config drive; uCernVM looks for it on any disc
    openstack/latest/meta_data.json
    context.sh                      OpenNebula: the same in base64, as amiconfig and Vac 0.x have it

https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html
"""

from __future__ import annotations

import base64
import io
import json
import os
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from belljar.context.nocloud import LABEL, meta_data
from belljar.host.files import no_space_as_error, write_all


@dataclass(frozen=True)
class UserSeed:
    """Implements `Seed`."""

    user_data: bytes
    instance_id: str
    hostname: str

    @cached_property
    def digest(self) -> str:
        words = (self.instance_id.encode(), self.hostname.encode(), self.user_data)
        return sha256(b"user" + b"".join(b"%d:%s," % (len(word), word) for word in words)).hexdigest()

    def files(self) -> dict[str, bytes]:
        document = {"uuid": self.instance_id, "hostname": self.hostname, "name": self.hostname, "launch_index": 0}
        packed = base64.b64encode(self.user_data).decode()
        return {
            "user-data": self.user_data,
            "meta-data": meta_data(self.instance_id, self.hostname, {}),
            "openstack/latest/user_data": self.user_data,
            "openstack/latest/meta_data.json": json.dumps(document).encode(),
            "context.sh": f"EC2_USER_DATA='{packed}'\nCONTEXT_UUID='{self.instance_id}'\n".encode(),
        }

    def write(self, path: Path) -> None:
        data = _iso(self.files())
        with no_space_as_error(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                write_all(descriptor, data)
            finally:
                os.close(descriptor)


def _iso(files: dict[str, bytes]) -> bytes:
    import pycdlib

    disc = pycdlib.PyCdlib()
    disc.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    for short, name, long in (("/D0", "openstack", "/openstack"), ("/D0/D1", "latest", "/openstack/latest")):
        disc.add_directory(short, rr_name=name, joliet_path=long)
    for number, (path, data) in enumerate(files.items()):
        folder, _, name = path.rpartition("/")
        short = f"{'/D0/D1' if folder else ''}/FILE{number}.;1"
        disc.add_fp(io.BytesIO(data), len(data), short, rr_name=name, joliet_path=f"/{path}", file_mode=0o100444)
    made = io.BytesIO()
    disc.write_fp(made)
    disc.close()
    return made.getvalue()
