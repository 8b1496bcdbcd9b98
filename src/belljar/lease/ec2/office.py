"""What actions work with: what is written down of leases, and what the site has to offer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

from belljar.lease import Instance, Lease, Order, Pairs, Settings, Size
from belljar.lease.desk import Desk, Owner, Shown
from belljar.records import dataclass

# The one network that clients see, by which they find their machines. The class of a machine says what its network really is.
VPC, SUBNET = (f"{kind}-{1:017x}" for kind in ("vpc", "subnet"))
TAG = re.compile(r"[A-Za-z0-9._~:@!$&'()*+,;=-]+")  # keys that can be a part of a path
DEFAULT = {"GroupId": f"sg-{1:017x}", "GroupName": "default"}


@dataclass(frozen=True)
class Office:
    """*wake*, and *order* to the pilot of a slot, may be called in any thread. *known*: names of images on this host, with the moments
    at which they were made."""

    leases: Desk
    settings: Settings
    types: Mapping[str, Size]  # the first is the default
    wake: Callable[[], object]
    order: Callable[[str, Order], object]
    known: Callable[[], Mapping[str, float]] = dict
    console: Callable[[str, str], Any] = lambda slot, instance: None  # returns when the pilot has sent it, or does not

    def images(self) -> dict[str, str]:
        """Ids and names of those that may be leased."""
        patterns = self.settings.images
        plain = [pattern for pattern in patterns if not any(char in pattern for char in "*?[")]
        known = [name for name in self.known() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return {image_id(name): name for name in (*plain, *known)}

    def machines(self, owner: Owner) -> dict[str, Shown]:
        """Those that live, and those that ended a while ago, by launch, lease and index."""
        return {machine.instance.id: machine for machine in self.leases.machines(owner)}


def metadata(lease: Lease, machine: Instance, keys: Sequence[str], zone: str) -> Pairs:
    """What a machine reads about itself at 169.254.169.254, below meta-data."""
    asked = dict(lease.wanted.metadata)
    texts = {
        "ami-id": image_id(lease.wanted.image_of(machine.index)), "ami-launch-index": str(machine.index), "instance-id": machine.id,
        "instance-life-cycle": "spot" if lease.wanted.preemptible else "on-demand", "instance-type": lease.wanted.type,
        "placement/availability-zone": zone, "placement/region": zone, "reservation-id": lease.id, "http-tokens": asked.get("HttpTokens", ""),
    }  # fmt: skip
    if asked.get("InstanceMetadataTags") == "enabled":
        texts |= {f"tags/instance/{key}": value for key, value in lease.wanted.tags if TAG.fullmatch(key)}
    return (*texts.items(), *((f"public-keys/{number}/openssh-key", key) for number, key in enumerate(keys)))


def image_id(name: str) -> str:
    """Always the same for a name: images have no other."""
    return f"ami-{sha256(name.encode()).hexdigest()[:17]}"
