"""cloud-init's NoCloud disc: four small files in a file system labelled `cidata`.

https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

from belljar.host.files import no_space_as_error, write_all

LABEL = "cidata"


def write_disc(
    path: Path,
    instance_id: str,
    hostname: str,
    user_data: bytes,
    meta: Mapping[str, str],
    network_config: str | None,
    vendor_data: bytes = b"",
    more: Mapping[str, bytes] | None = None,
) -> None:
    """See `belljar.context.seed_disc`."""
    files = {
        "meta-data": meta_data(instance_id, hostname, meta),
        "user-data": user_data,
        "vendor-data": vendor_data,
        **({} if network_config is None else {"network-config": network_config.encode()}),
        **(more or {}),
    }
    data = _iso(files)
    with no_space_as_error(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)


def meta_data(instance_id: str, hostname: str, more: Mapping[str, str]) -> bytes:
    """YAML; JSON is YAML, and has one way to quote."""
    return json.dumps({"instance-id": instance_id, "local-hostname": hostname, **more}).encode() + b"\n"


def _iso(files: Mapping[str, bytes]) -> bytes:
    import pycdlib

    disc = pycdlib.PyCdlib()
    disc.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    for number, (name, data) in enumerate(files.items()):
        disc.add_fp(
            io.BytesIO(data), len(data), f"/FILE{number}.;1", rr_name=name, joliet_path=f"/{name}", file_mode=0o100444
        )
    made = io.BytesIO()
    disc.write_fp(made)
    disc.close()
    return made.getvalue()
