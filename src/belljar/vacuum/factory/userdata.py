"""What one machine is told: its type's template with each pattern filled in. Pure: values in, bytes out.

The patterns and their spellings are those of user data everywhere in belljar (`context.filled_in`): one pass, so that no value is
read as a pattern again, and whatever is not known is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.context import About, filled_in
from belljar.records import dataclass, field
from belljar.vacuum import MachineType, Space

PROXY, TOKEN = "x509_proxy", "token"  # `##user_data_option_x509_proxy##`


@dataclass(frozen=True)
class Material:
    """What was read and made for one machine."""

    template: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)  # by the names in `option_files`
    credentials: Mapping[str, bytes] = field(default_factory=dict)  # PROXY, TOKEN


def user_data(
    space: Space, one: MachineType, material: Material, *, uuid: str, hostname: str, manager: str, base_url: str
) -> bytes:
    """The user data of one machine. *base_url*: where it finds its features and leaves its outputs; "": nowhere. *manager*: name and
    version of belljar. Raises BadUserData."""
    about = About(
        uuid=uuid, hostname=hostname, machinetype=one.name, manager=manager, manager_hostname=space.factory,
        space=space.name, site=space.site, url=one.user_data if "://" in one.user_data else "",
        image_url=one.image if "://" in one.image else "",
        machinefeatures=base_url and f"{base_url}/machinefeatures", jobfeatures=base_url and f"{base_url}/jobfeatures",
        joboutputs=base_url and f"{base_url}/joboutputs",
    )  # fmt: skip
    options = {name: text.encode() for name, text in one.options}
    return filled_in(material.template, about, {**options, **material.credentials}, material.files)
