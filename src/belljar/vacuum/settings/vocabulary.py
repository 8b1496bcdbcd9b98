"""Vac's words for a machinetype, in vac.conf and in vacuum pipes, as keys of `[machinetype.NAME]`. Pure; says of each word what
became of it.

https://github.com/vacproject/vac, vac.conf(5); names of older versions are taken too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from belljar.host.tables import OPTION
from belljar.records import dataclass
from belljar.vacuum.settings.settings import FILE_NAME, is_url

GB = 10**9
CONTAINERS = "it is about a container; machines are virtual machines here"


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


def number(text: str) -> float | int:
    """A number that is not negative. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text[:40]!r} is no number that could be meant")
    return int(value) if value.is_integer() else value


def whole(text: str) -> int:
    """Raises ValueError."""
    value = number(text)
    if not isinstance(value, int):
        raise ValueError(f"{text[:40]!r} is no whole number")
    return value


def is_yes(text: str) -> bool:
    return text.strip().lower() in ("true", "yes")


# Vac's name -> (key, how its value is read).
WORDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "accounting_fqan": ("fqan", str), "machinegroup": ("group", str), "target_share": ("share", number),
    "heartbeat_file": ("heartbeat_file", str), "heartbeat_seconds": ("heartbeat", number),
    "backoff_seconds": ("backoff", number), "fizzle_seconds": ("fizzle", number),
    "max_wallclock_seconds": ("max_wallclock", number), "min_wallclock_seconds": ("min_wallclock", number),
    "min_processors": ("min_processors", whole), "max_processors": ("max_processors", whole),
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
KEYS = {option: key for option, (key, _) in WORDS.items()} | {
    "root_image": "image", "user_data": "user_data", "disk_gb_per_processor": "disk", "user_data_proxy": "proxy",
}  # fmt: skip
MODEL = ("machine_model", "vm_model")
MODELS = ("cernvm3", "cernvm4", "cernvm2", "vm-raw")
FREE = ("user_data_option_", "user_data_file_")  # with any name behind it
FROM_PIPES = frozenset(WORDS) - {"machinegroup"} | {
    "container_command", "cvmfs_repositories", "disk_gb_per_processor", "image_signing_dn", "legacy_proxy", "machine_model",
    "root_device", "root_image", "scratch_device", "tmp_binds", "user_data", "user_data_proxy",
}  # fmt: skip


def translate(section: str, options: Mapping[str, str], places: Places) -> Iterator[Line]:
    """What becomes of each word that is said of a machinetype."""
    for option, text in options.items():
        fate, key, raw, why = Fate.MAPPED, "", None, ""
        try:
            if option in IGNORED:
                fate, why = Fate.IGNORED, IGNORED[option]
            else:
                key, raw, why = _one(option, text.strip(), options, places)
                fate = Fate.MAPPED if key else Fate.IGNORED
                fate = Fate.CHANGED if key and why else fate
        except ValueError as exc:
            fate, why = Fate.REFUSED, str(exc)
        yield Line(section, option, text, fate, key, raw, why)


def _one(option: str, text: str, options: Mapping[str, str], places: Places) -> tuple[str, Any, str]:
    """(key, value, why it is not the same, or is ignored). Raises ValueError."""
    if option in WORDS:
        key, read = WORDS[option]
        return key, read(text), ""
    if option.startswith("user_data_option_"):
        return f"options.{_option(option, 'user_data_option_')}", text, ""
    if option in ("user_data_proxy_cert", "user_data_proxy_key"):
        return _certificate(option, options, places)
    if option.startswith("user_data_file_"):
        return f"option_files.{_option(option, 'user_data_file_')}", _file(text, places), ""
    if option == "user_data":
        return "user_data", text if is_url(text) else _file(text, places), ""
    if option == "root_image":
        return "image", _image(text, places), ""
    if option in MODEL:
        if text in ("docker", "singularity"):
            raise ValueError(CONTAINERS)
        if text not in MODELS:
            raise ValueError(f"{text[:40]!r} is no model of a machine")
        return "", None, "the image says what it is"
    if option == "disk_gb_per_processor":
        return ("disk", int(number(text) * GB), "") if number(text) else ("", None, "0 means: as the image")
    if option == "user_data_proxy":
        if not is_yes(text) or "user_data_proxy_cert" in options:
            return "", None, "no proxy is asked for" if not is_yes(text) else "user_data_proxy_cert says it"
        if not places.certificates:
            return "", None, "it asks for a proxy; the site gives one by the key proxy"
        return "proxy", [f"{places.certificates}/x509cert.pem", f"{places.certificates}/x509key.pem"], ""
    if option == "legacy_proxy":
        is_meant = is_yes(text) and bool(places.certificates)
        return ("legacy_proxy", True, "") if is_meant else ("", None, "proxies are as RFC 3820 has them")
    return "", None, "no such word"


def _option(option: str, before: str) -> str:
    name = option.removeprefix(before)
    if not OPTION.fullmatch(name):
        raise ValueError(f"{name[:40]!r} can be no option: small letters, digits and _ only")
    return name


def _file(text: str, places: Places) -> str:
    """The path of a file on this host."""
    if places.is_trusted and text.startswith("/"):
        return str(PurePosixPath(text))
    if not FILE_NAME.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is no file's name")
    if not places.files:
        raise ValueError(f"{text[:60]!r} is a file of the site's, which has to say where such are, by the key files")
    return f"{places.files}/{text}"


def _image(text: str, places: Places) -> str:
    if re.match(r"docker://|/cvmfs/", text):
        raise ValueError(CONTAINERS)
    if is_url(text):
        return text
    if not places.is_trusted:
        raise ValueError(f"{text[:60]!r} is no address; the site names an image of its own by the key image")
    return text if text.startswith("/") else f"{places.certificates}/{text}"


def _certificate(option: str, options: Mapping[str, str], places: Places) -> tuple[str, Any, str]:
    """Up to 01.00 the two had names of their own; the key alone says nothing."""
    if not places.is_trusted:
        raise ValueError("only the site says where its certificate is")
    if option == "user_data_proxy_key":
        return (
            "",
            None,
            "user_data_proxy_cert says it" if "user_data_proxy_cert" in options else "without a certificate",
        )
    both = [options[name].strip() for name in ("user_data_proxy_cert", "user_data_proxy_key") if name in options]
    return "proxy", [_file(one, places) for one in both], ""
