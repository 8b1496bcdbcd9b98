"""User data made from a template: Vac's `##user_data_...##` patterns, replaced by what is known of one machine.

Replacing is one pass: a value that looks like a pattern stays as it is. Vac replaces one pattern after the other, so there a
value may be replaced again. As there, a pattern for which nothing is known is taken out, and a name with capital letters
or a hyphen is not a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from belljar.context import About
from belljar.errors import BadOption

LARGEST = 1 << 20
PATTERN = re.compile(rb"##user_data_([a-z0-9_,]*)##")
OPTION = re.compile(r"[a-z0-9_]+")
PACKED = b"\x1f\x8b"  # gzip


def patterns(about: About, options: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The value of each pattern, by the name behind `user_data_`: both spellings, and that of HSF-TN-2016-04."""
    known = {
        "url": about.url, "space": about.space, "site": about.site, "uuid": about.uuid,
        "machinetype": about.machinetype, "vmtype": about.machinetype,
        "machine_hostname": about.hostname, "vm_hostname": about.hostname,
        "manager_version": about.manager, "vmlm_version": about.manager,
        "manager_hostname": about.manager_hostname, "vmlm_hostname": about.manager_hostname,
        "root_image_url": about.image_url,
    }  # fmt: skip
    for name in ("machinefeatures", "jobfeatures", "joboutputs"):
        known[f"{name}_url"] = known[f"manager_{name}_url"] = getattr(about, name)
    values = {name: text.encode() for name, text in known.items()}
    values |= {f"option_{name}": data for name, data in {**files, **options}.items()}
    return values | {f"file_{name}": data for name, data in files.items()}


def fill_in(template: bytes, values: Mapping[str, bytes]) -> bytes:
    """The user data of one machine. Raises BadOption when it, or the template, is larger than a MiB."""
    check_size(template, "the template")
    if template.startswith(PACKED):
        return template  # nothing can be replaced in it, and nothing of it may be
    data = PATTERN.sub(lambda match: values.get(match[1].decode(), b""), template)
    check_size(data, "with its values filled in, it")
    return data


def check_size(data: bytes, what: str) -> None:
    if len(data) > LARGEST:
        hint = "A short script can fetch the rest."
        raise BadOption(f"user data: {what} has {len(data)} bytes; at most {LARGEST}", hint=hint)


def check_option(name: str) -> None:
    """Raises BadOption for a name that no pattern can have."""
    if not OPTION.fullmatch(name):
        raise BadOption(f"user data: {name[:80]!r} is no name of an option: small letters, digits and _ only")
