"""One request that is known to be its owner's: what every action is given, and what they share (ids, pages, tags, DryRun)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from belljar.lease.desk import Owner
from belljar.lease.ec2.desk import Desk
from belljar.lease.ec2.refusals import Refused
from belljar.records import dataclass

SMALLEST_PAGE, LARGEST_PAGE = 5, 1000
MOST_TAGS, LONGEST_KEY, LONGEST_VALUE = 50, 127, 255
RESERVED = ("aws:", "lease:")
DURATION = "lease:duration"  # the one that an owner may set: for how long, when instances are launched
HEX_ID = r"(?:[0-9a-f]{8}|[0-9a-f]{17})"


@dataclass(frozen=True)
class Call:
    """An action that an owner asked for, with its parameters under the names of EC2's model."""

    desk: Desk
    owner: Owner
    action: str
    asked: Mapping[str, Any]
    secret: bytes  # what tokens of pages are sealed with
    endpoint: str  # host and port, as the client named them
    now: float

    def filters(self) -> Sequence[Mapping[str, Any]]:
        return self.asked.get("Filters") or []

    def check_dry(self) -> None:
        """To be called when all is checked and nothing is done yet."""
        if self.asked.get("DryRun"):
            raise Refused("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")

    # -- pages ---------------------------------------------------------------------------------------------------------

    def page(
        self, items: Sequence[Any], key: Callable[[Any], list[Any]], *, ids: str = ""
    ) -> tuple[list[Any], str | None]:
        """What of *items*, which are in the order of *key*, is on this page, and the token for the next one. A token says after
        what it goes on, so nothing is lost or seen twice when items come and go meanwhile."""
        most = self.asked.get("MaxResults") or LARGEST_PAGE
        if not SMALLEST_PAGE <= most <= LARGEST_PAGE:
            raise Refused("InvalidParameterValue", f"MaxResults is {SMALLEST_PAGE} to {LARGEST_PAGE}, not {most}")
        if ids and self.asked.get(ids) and "MaxResults" in self.asked:
            raise Refused("InvalidParameterCombination", f"MaxResults and {ids} exclude each other")
        token = self.asked.get("NextToken")
        after = self._opened(token) if token else None
        rest = [one for one in items if after is None or key(one) > after]
        return rest[:most], self._sealed(key(rest[most - 1])) if len(rest) > most else None

    def _seal(self, text: bytes) -> bytes:
        """Bound to who asks, and for what."""
        rest = {name: value for name, value in self.asked.items() if name not in ("NextToken", "MaxResults")}
        about = json.dumps([self.owner.name, self.action, rest], sort_keys=True, default=str).encode()
        return hmac.digest(self.secret, b"page\n" + hashlib.sha256(about).digest() + text, "sha256")

    def _sealed(self, after: list[Any]) -> str:
        text = json.dumps(after).encode()
        return base64.urlsafe_b64encode(self._seal(text) + text).decode()

    def _opened(self, token: str) -> list[Any]:
        try:
            data = base64.b64decode(token, b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if not hmac.compare_digest(data[:32], self._seal(data[32:])):
            raise Refused("InvalidPaginationToken", "NextToken is none of ours, or belongs to another request")
        found: list[Any] = json.loads(data[32:])
        return found

    # -- ids and tags --------------------------------------------------------------------------------------------------

    def of_ids(self, name: str, known: Mapping[str, Any], prefix: str, code: str) -> list[Any]:
        """The things with the ids in that parameter, each once; all or none. *code*: as in InvalidInstanceID."""
        ids = dict.fromkeys(self.asked.get(name) or ())
        for one in ids:
            if not re.fullmatch(f"{prefix}-{HEX_ID}", one):
                raise Refused(f"{code}.Malformed", f'Invalid id: "{one[:60]}"')
        missing = [one for one in ids if one not in known]
        if missing:
            raise Refused(f"{code}.NotFound", f"These ids do not exist: {', '.join(missing[:10])}")
        return [known[one] for one in ids]


def tags_of(items: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The tags that an owner gives. Raises Refused."""
    found = {one.get("Key", ""): one.get("Value", "") for one in items}
    if len(found) > MOST_TAGS:
        raise Refused("TagLimitExceeded", f"a resource has at most {MOST_TAGS} tags")
    for key, value in found.items():
        if not 1 <= len(key) <= LONGEST_KEY or len(value) > LONGEST_VALUE:
            raise Refused(
                "InvalidParameterValue", f"A tag's key has 1 to {LONGEST_KEY} characters, its value {LONGEST_VALUE}"
            )
        if key.startswith(RESERVED) and key != DURATION:
            raise Refused("InvalidParameterValue", f"Tag keys starting with {' or '.join(RESERVED)} are reserved")
    return found


def specified(call: Call, kinds: tuple[str, ...]) -> dict[str, str]:
    """The tags of TagSpecifications. All are for what the action makes."""
    found: list[Mapping[str, str]] = []
    for one in call.asked.get("TagSpecifications") or ():
        if one.get("ResourceType") not in kinds:
            raise Refused("InvalidParameterValue", f"TagSpecification.ResourceType is {' or '.join(kinds)} here")
        found += one.get("Tags") or ()
    return tags_of(found)


def shown(tags: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags]
