"""What a guest finds at 169.254.169.254, as one table of paths: EC2's tree, OpenStack's files, machine and job features.

A pure function of what is known of the machine; metadata.py speaks HTTP.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html
https://docs.openstack.org/nova/latest/user/metadata.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from urllib.parse import unquote_to_bytes

from belljar.context import Features, Instance
from belljar.records import dataclass

EC2_DATES = ("1.0", "2007-01-19", "2008-02-01", "2009-04-04", "2011-01-01", "2016-09-02", "2021-03-23", "latest")
OPENSTACK_DATES = ("2012-08-10", "2013-04-04", "2013-10-17", "2015-10-15", "2016-10-06", "2018-08-27", "latest")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}|1\.0|latest")
PLAIN_PATH = re.compile(r"[A-Za-z0-9._~/:@!$&'()*+,;=-]*")
TEXT, JSON, HTML, BYTES = "text/plain", "application/json", "text/html", "application/octet-stream"
KEYS = "public-keys"
IDENTITY = {
    "instanceId": "instance-id", "imageId": "ami-id", "instanceType": "instance-type", "privateIp": "local-ipv4",
    "availabilityZone": "placement/availability-zone", "region": "placement/region",
}  # fmt: skip
FEATURES = ("machinefeatures", "jobfeatures")


@dataclass(frozen=True)
class Page:
    """One answer's body."""

    data: bytes
    kind: str = TEXT


def split(target: bytes) -> list[str] | None:
    """The parts of a request's path, without empty ones (`//` is `/`); None for a path that is not accepted."""
    path = target.partition(b"?")[0]
    if path[:7].lower() == b"http://":  # RFC 9112, 3.2.2: a server takes this form too
        path = b"/" + path[7:].partition(b"/")[2]
    text = unquote_to_bytes(path).decode("latin-1")
    if not path.startswith(b"/") or b"%2f" in path.lower() or not PLAIN_PATH.fullmatch(text):
        return None
    parts = [part for part in text.split("/") if part]
    return None if "." in parts or ".." in parts else parts


def find(parts: list[str], instance: Instance, features: Features) -> Page | None:
    """The page at a path; None: there is none."""
    match parts:
        case []:
            return _list((*EC2_DATES, "openstack"))
        case [folder, *rest] if folder in FEATURES:
            return _feature(rest, features.get(folder, {}))
        case ["openstack"]:
            return _list(OPENSTACK_DATES)
        case ["openstack", date, *rest] if DATE.fullmatch(date):
            return _openstack(rest, instance)
        case [date, *rest] if DATE.fullmatch(date):
            return _ec2(rest, instance)
    return None


def _feature(rest: list[str], values: Mapping[str, str]) -> Page | None:
    if not rest:
        links = "".join(f'<a href="{escape(key)}">{escape(key)}</a><br>\n' for key in sorted(values))
        return Page(f"<html><body>\n{links}</body></html>\n".encode(), HTML)
    value = values.get(rest[0]) if len(rest) == 1 else None
    return None if value is None else Page(value.encode())


def _ec2(rest: list[str], instance: Instance) -> Page | None:
    match rest:
        case []:
            return _list(("dynamic", "meta-data", *(() if instance.user_data is None else ("user-data",))))
        case ["user-data"]:
            return _user_data(instance)
        case ["meta-data.json"]:
            return Page(json.dumps(document(instance)).encode(), JSON)
        case ["meta-data", *path]:
            return _leaf_or_list(path, leaves(instance))
        case ["dynamic", *path]:
            return _leaf_or_list(path, {"instance-identity/document": _identity(leaves(instance))})
    return None


def _identity(known: Mapping[str, str]) -> str:
    """As far as it is known; nobody signs it."""
    identity = {name: known[leaf] for name, leaf in IDENTITY.items() if leaf in known}
    return json.dumps({**identity, "architecture": "x86_64", "version": "2017-09-30"})


def leaves(instance: Instance) -> dict[str, str]:
    """What is below `meta-data/`."""
    card = f"network/interfaces/macs/{instance.mac}"
    tree = {
        "ami-id": instance.uuid, "ami-launch-index": "0", "hostname": instance.hostname, "instance-action": "none",
        "instance-id": instance.uuid, "instance-type": instance.size, "local-hostname": instance.hostname,
        "local-ipv4": instance.address, "placement/availability-zone": instance.zone,
        "reservation-id": instance.uuid, "security-groups": "default", "mac": instance.mac,
        f"{card}/mac": instance.mac, f"{card}/device-number": "0" if instance.mac else "", f"{card}/local-ipv4s": instance.address if instance.mac else "",
    }  # fmt: skip
    return {path: text for path, text in (tree | dict(instance.told)).items() if text}


def _leaf_or_list(path: list[str], known: Mapping[str, str]) -> Page | None:
    name = "/".join(path)
    if name in known:
        return Page(known[name].encode())
    before = f"{name}/" if name else ""
    below = [leaf.removeprefix(before) for leaf in known if leaf.startswith(before)]
    if below and name == KEYS:  # as EC2 lists them; cloud-init goes from `0=NAME` to 0/openssh-key
        numbers = (leaf.partition("/")[0] for leaf in below)
        return _list(f"{number}=key-{number}" for number in numbers)
    return _list(dict.fromkeys("".join(leaf.partition("/")[:2]) for leaf in below)) if below else None


def _openstack(rest: list[str], instance: Instance) -> Page | None:
    """Nova's own names have an underscore, Vac's a hyphen."""
    match rest:
        case []:
            return _list(("meta_data.json", *(() if instance.user_data is None else ("user_data",))))
        case ["user_data" | "user-data"]:
            return _user_data(instance)
        case ["meta-data", *path]:
            return _leaf_or_list(path, leaves(instance))
        case ["meta_data.json" | "meta-data.json"]:
            return Page(json.dumps(document(instance)).encode(), JSON)
    return None


def document(instance: Instance) -> dict[str, object]:
    """OpenStack's meta_data.json."""
    places = {name: f"{instance.base_url}/{name}" for name in (*FEATURES, "joboutputs")} if instance.base_url else {}
    return {
        "uuid": instance.uuid, "name": instance.hostname, "hostname": instance.hostname, "launch_index": 0,
        "availability_zone": instance.zone, "meta": {**places, "machinetype": instance.machinetype},
    }  # fmt: skip


def _user_data(instance: Instance) -> Page | None:
    return None if instance.user_data is None else Page(instance.user_data, BYTES)


def _list(names: Iterable[str]) -> Page:
    return Page("\n".join(names).encode())
