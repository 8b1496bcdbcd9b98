"""The disc with user data for guests without an agent: what each kind of guest finds on it."""

import base64
import json
from pathlib import Path

from belljar.context import user_seed

DATA = b"#!/bin/sh\necho '\xff'\n"


def read(path: Path, name: str) -> bytes:
    import io

    import pycdlib

    disc = pycdlib.PyCdlib()
    disc.open(str(path))
    found = io.BytesIO()
    disc.get_file_from_iso_fp(found, rr_path=name)
    again = io.BytesIO()
    disc.get_file_from_iso_fp(again, joliet_path=name)
    assert again.getvalue() == found.getvalue()
    label = disc.pvd.volume_identifier.strip()
    disc.close()
    assert label == b"cidata"
    return found.getvalue()


def test_each_kind_of_guest_finds_the_user_data(tmp_path: Path) -> None:
    path = tmp_path / "seed.iso"
    user_seed(DATA, "u-u-i-d", "belljar-0f").write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path, "/user-data") == read(path, "/openstack/latest/user_data") == DATA
    assert json.loads(read(path, "/meta-data"))["instance-id"] == "u-u-i-d"
    assert json.loads(read(path, "/openstack/latest/meta_data.json"))["uuid"] == "u-u-i-d"
    shell = read(path, "/context.sh").decode()
    assert base64.b64decode(shell.partition("EC2_USER_DATA='")[2].partition("'")[0]) == DATA


def test_a_mebibyte_fits_and_every_change_is_another_disc(tmp_path: Path) -> None:
    path = tmp_path / "seed.iso"
    user_seed(b"x" * (1 << 20), "u", "h").write(path)
    assert read(path, "/user-data") == b"x" * (1 << 20)
    digests = {
        user_seed(*words).digest for words in ((b"a", "u", "h"), (b"b", "u", "h"), (b"a", "v", "h"), (b"au", "", "h"))
    }
    assert len(digests) == 4
