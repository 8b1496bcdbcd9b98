"""The words of a vacuum pipe's document for a machinetype, which are Vac's, as keys of `[machinetype.NAME]`. Pure.

https://github.com/vacproject/vac, vac.conf(5)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from belljar.host.values import PLAIN_FILE, is_url, number, whole
from belljar.service.tables import OPTION

GB = 10**9
MODELS = ("cernvm3", "cernvm4", "cernvm2", "vm-raw")
CONTAINERS = "it is about a container; machines are virtual machines here"
PROXIES = "a proxy is the site's to give, by the key proxy"


class SetsNothing(ValueError):
    """A word that has no meaning here; why not."""


def _model(text: str) -> None:
    if text in ("docker", "singularity"):
        raise ValueError(CONTAINERS)
    if text not in MODELS:
        raise ValueError(f"{text[:40]!r} is not a model of a machine")
    raise SetsNothing("the image says what it is")


def _disk(text: str) -> int:
    if not number(text):
        raise SetsNothing("0 means: as the image")
    return int(number(text) * GB)


def _image(text: str) -> str:
    if not is_url(text):
        raise ValueError(f"{text[:60]!r} is not an address; the site names an image of its own by the key image")
    return text


WORDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {  # Vac's name -> (key, how its value is read)
    "accounting_fqan": ("fqan", str), "target_share": ("share", number),
    "heartbeat_file": ("heartbeat_file", str), "heartbeat_seconds": ("heartbeat", number),
    "backoff_seconds": ("backoff", number), "fizzle_seconds": ("fizzle", number),
    "max_wallclock_seconds": ("max_wallclock", number), "min_wallclock_seconds": ("min_wallclock", number),
    "min_processors": ("min_processors", whole), "max_processors": ("max_processors", whole),
    "root_image": ("image", _image), "user_data": ("user_data", str),
    "disk_gb_per_processor": ("disk", _disk), "machine_model": ("", _model),
}  # fmt: skip
IGNORED = {
    "container_command": CONTAINERS, "tmp_binds": CONTAINERS,
    "cvmfs_repositories": "a machine mounts CernVM-FS itself",
    "root_device": "the disk is vda", "scratch_device": "there is one disk",
    "image_signing_dn": "import the image with --signer",
    "user_data_proxy": PROXIES, "legacy_proxy": PROXIES,
}  # fmt: skip
FREE = {
    "user_data_option_": "options",
    "user_data_file_": "option_files",
}  # with any name behind it: keys of an inner table


def translate(option: str, value: object, files: Path | None) -> tuple[str, str, Any]:
    """The key that a word sets, the inner key where that is a table (else ""), and the value as TOML has it. *files*: the folder of the
    files that may be named. Raises SetsNothing for a word that is not taken, ValueError for a wrong value."""
    if option in IGNORED:
        raise SetsNothing(IGNORED[option])
    before = next((word for word in FREE if option.startswith(word)), "")
    if not before and option not in WORDS:
        raise SetsNothing("is not taken from a pipe")
    if not isinstance(value, (str, int, float)):
        raise ValueError("is neither text nor a number")
    text = str(value).strip()
    if not before:
        key, read = WORDS[option]
        return key, "", _file(text, files) if key == "user_data" and not is_url(text) else read(text)
    name = option.removeprefix(before)
    if not OPTION.fullmatch(name):
        raise ValueError(f"{name[:40]!r} cannot be an option: small letters, digits and _ only")
    return FREE[before], name, _file(text, files) if FREE[before] == "option_files" else text


def _file(text: str, files: Path | None) -> str:
    """The path of a file on this host."""
    PLAIN_FILE.check(text)
    if files is None:
        raise ValueError(f"{text[:60]!r} is a file of the site's, which has to say where such are, by the key files")
    return f"{files}/{text}"
