"""The disc that lets belljar in by ssh."""

import io
import json
from pathlib import Path

import pycdlib

from belljar.context import ssh_seed


def read(path: Path, name: str) -> bytes:
    disc, found = pycdlib.PyCdlib(), io.BytesIO()
    disc.open(str(path))
    disc.get_file_from_iso_fp(found, joliet_path=f"/{name}")
    disc.close()
    return found.getvalue()


def test_the_disc_brings_the_key_to_the_user_and_the_server_its_own(tmp_path: Path) -> None:
    ssh_seed("debian", "ssh-ed25519 AAAA ours", "PRIVATE\nKEY\n", "ssh-ed25519 BBBB").write(tmp_path / "seed")
    head, _, body = read(tmp_path / "seed", "user-data").partition(b"\n")
    config = json.loads(body)
    assert head == b"#cloud-config"
    assert {"name": "debian", "ssh_authorized_keys": ["ssh-ed25519 AAAA ours"]} in config["users"]
    assert config["ssh_keys"] == {"ed25519_private": "PRIVATE\nKEY\n", "ed25519_public": "ssh-ed25519 BBBB"}
    assert config["disable_root"] is False
    assert (tmp_path / "seed").stat().st_mode & 0o777 == 0o600


def test_keys_are_no_part_of_what_a_template_is_known_by_and_the_user_is() -> None:
    one, same = ssh_seed("root", "a", "b", "c"), ssh_seed("root", "x", "y", "z")
    assert one.digest == same.digest
    assert (
        len({one.digest, ssh_seed("debian", "a", "b", "c").digest, ssh_seed("root", "a", "b", "c", grows=True).digest})
        == 3
    )
