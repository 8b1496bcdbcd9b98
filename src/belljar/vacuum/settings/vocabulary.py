"""Vac's words for a machinetype, in vac.conf and in vacuum pipes, as keys of `[machinetype.NAME]`. Pure; says of each word what
became of it.

https://github.com/vacproject/vac, vac.conf(5)"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from belljar.host.service.tables import OPTION
from belljar.host.values import PLAIN_FILE, is_url, number, whole
from belljar.records import dataclass, replace

Words = Mapping[str, tuple[str, Callable[[str], Any]]]  # Vac's name -> (key, how its value is read)
GB = 10**9
CONTAINERS = "it is about a container; machines are virtual machines here"


class SetsNothing(ValueError):
    """A word that has no meaning here; why not."""


class Fate(str, Enum):
    """What became of a word."""

    MAPPED = "mapped"
    CHANGED = "changed"  # mapped, and it does not mean quite the same
    IGNORED = "ignored"  # there is nothing it could set
    REFUSED = "refused"  # it asks for something that cannot be done, or cannot be understood


@dataclass(frozen=True)
class Line:
    """One word, and what became of it."""

    section: str  # as in the file it stands in
    option: str
    value: str
    fate: Fate
    key: str = ""  # in the table; "options.queue" is one of an inner table
    raw: Any = None  # the value there, as TOML has it
    why: str = ""


@dataclass(frozen=True)
class Places:
    """Where names of files are looked for. "": they cannot be named."""

    files: str  # folder of user_data and user_data_file_*
    certificates: str  # folder of x509cert.pem and x509key.pem
    is_trusted: bool  # paths of this host may be named, too


def is_yes(text: str) -> bool:
    return text.strip().lower() in ("true", "yes")


WORDS: Words = {
    "accounting_fqan": ("fqan", str), "machinegroup": ("group", str), "target_share": ("share", number),
    "heartbeat_file": ("heartbeat_file", str), "heartbeat_seconds": ("heartbeat", number),
    "backoff_seconds": ("backoff", number), "fizzle_seconds": ("fizzle", number),
    "max_wallclock_seconds": ("max_wallclock", number), "min_wallclock_seconds": ("min_wallclock", number),
    "min_processors": ("min_processors", whole), "max_processors": ("max_processors", whole),
}  # fmt: skip
KEYS = {option: key for option, (key, _) in WORDS.items()} | {
    "root_image": "image", "user_data": "user_data", "disk_gb_per_processor": "disk", "user_data_proxy": "proxy",
}  # fmt: skip
IGNORED = {
    "container_command": CONTAINERS, "tmp_binds": CONTAINERS,
    "cvmfs_repositories": "a machine mounts CernVM-FS itself",
    "root_device": "the disk is vda", "scratch_device": "there is one disk", "scratch_volume": "there is one disk",
    "mac": "each machine has one of its own",
    "image_signing_dn": "set image.trust, or import the image with --signer",
    "cernvm_signing_dn": "set image.trust, or import the image with --signer",
    "root_public_key": "`belljar console` and `belljar exec` reach a machine",
    "rootpublickey": "`belljar console` and `belljar exec` reach a machine",
    "log_machineoutputs": "`belljar logs` has what a machine left", "machineoutputs_days": "set machine.keep_days",
    "machines_dir_days": "set machine.keep_days",
    "prolog": "user_data does all of it", "epilog": "user_data does all of it",
    "shutdown_command": "a machine leaves the file shutdown_message",
}  # fmt: skip
CERTIFICATE = "write `user_data_proxy = true`, with x509cert.pem and x509key.pem; or set the key proxy"
GONE = {"user_data_proxy_cert": CERTIFICATE, "user_data_proxy_key": CERTIFICATE}  # refused
MODELS = ("cernvm3", "cernvm4", "cernvm2", "vm-raw")
# With any name behind it: keys of an inner table.
FREE = {"user_data_option_": "options", "user_data_file_": "option_files"}
FROM_PIPES = frozenset(WORDS) - {"machinegroup"} | {
    "container_command", "cvmfs_repositories", "disk_gb_per_processor", "image_signing_dn", "legacy_proxy", "machine_model",
    "root_device", "root_image", "scratch_device", "tmp_binds", "user_data", "user_data_proxy",
}  # fmt: skip


def translate(section: str, options: Mapping[str, str], places: Places) -> Iterator[Line]:
    """What becomes of each word that is said of a machinetype."""
    words: dict[str, tuple[str, Callable[[str], Any]]] = {
        **WORDS,
        "user_data": ("user_data", lambda text: text if is_url(text) else _file(places, text)),
        "root_image": ("image", partial(_image, places)),
        "machine_model": ("", _model), "vm_model": ("", _model),
        "disk_gb_per_processor": ("disk", _disk),
        "user_data_proxy": ("proxy", partial(_proxy, places)),
        "legacy_proxy": ("legacy_proxy", partial(_legacy, places)),
    }  # fmt: skip
    for option, text in options.items():
        if before := next((one for one in FREE if option.startswith(one)), ""):
            words[option] = _free(before, option.removeprefix(before), places)
        yield line_of(section, option, text, words, IGNORED, GONE)


Told = Mapping[str, str]  # words, and why they are not taken


def line_of(section: str, option: str, text: str, words: Words, ignored: Told, gone: Told) -> Line:
    """What becomes of one word."""
    line = Line(section, option, text, Fate.MAPPED)
    try:
        if option in gone:
            raise ValueError(gone[option])
        if option not in words:
            raise SetsNothing(ignored.get(option, "no such word"))
        key, read = words[option]
        return replace(line, key=key, raw=read(text.strip()))
    except SetsNothing as exc:
        return replace(line, fate=Fate.IGNORED, why=str(exc))
    except ValueError as exc:
        return replace(line, fate=Fate.REFUSED, why=str(exc))


def _free(before: str, name: str, places: Places) -> tuple[str, Callable[[str], Any]]:
    def read(text: str) -> str:
        if not OPTION.fullmatch(name):
            raise ValueError(f"{name[:40]!r} can be no option: small letters, digits and _ only")
        return _file(places, text) if before == "user_data_file_" else text

    return f"{FREE[before]}.{name}", read


def _model(text: str) -> None:
    if text in ("docker", "singularity"):
        raise ValueError(CONTAINERS)
    if text not in MODELS:
        raise ValueError(f"{text[:40]!r} is no model of a machine")
    raise SetsNothing("the image says what it is")


def _disk(text: str) -> int:
    if not number(text):
        raise SetsNothing("0 means: as the image")
    return int(number(text) * GB)


def _proxy(places: Places, text: str) -> list[str]:
    if not is_yes(text):
        raise SetsNothing("no proxy is asked for")
    if not places.certificates:
        raise SetsNothing("it asks for a proxy; the site gives one by the key proxy")
    return [f"{places.certificates}/x509cert.pem", f"{places.certificates}/x509key.pem"]


def _legacy(places: Places, text: str) -> bool:
    if not is_yes(text) or not places.certificates:
        raise SetsNothing("proxies are as RFC 3820 has them")
    return True


def _file(places: Places, text: str) -> str:
    """The path of a file on this host."""
    if places.is_trusted and text.startswith("/"):
        return str(PurePosixPath(text))
    PLAIN_FILE.check(text)
    if not places.files:
        raise ValueError(f"{text[:60]!r} is a file of the site's, which has to say where such are, by the key files")
    return f"{places.files}/{text}"


def _image(places: Places, text: str) -> str:
    if re.match(r"docker://|/cvmfs/", text):
        raise ValueError(CONTAINERS)
    if is_url(text):
        return text
    if not places.is_trusted:
        raise ValueError(f"{text[:60]!r} is no address; the site names an image of its own by the key image")
    return text if text.startswith("/") else f"{places.certificates}/{text}"
