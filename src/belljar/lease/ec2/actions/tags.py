"""Tags of instances and key pairs. Those that begin with `lease:` are the service's: it says there how a lease stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from belljar.lease.ec2.actions.instances import Answer
from belljar.lease.ec2.call import DURATION, HEX_ID, MOST_TAGS, Call, tags_of
from belljar.lease.ec2.filters import select
from belljar.lease.ec2.refusals import Refused

KINDS = {"i": "instance", "key": "key-pair"}
ID = re.compile(rf"({'|'.join(KINDS)})-{HEX_ID}")
Row = tuple[str, str, str, str]  # resource, its kind, key, value
FILTERS: dict[str, Callable[[Row], Any]] = {
    "resource-id": lambda row: (row[0],),
    "resource-type": lambda row: (row[1],),
    "key": lambda row: (row[2],),
    "value": lambda row: (row[3],),
}


def _tags(call: Call) -> dict[str, dict[str, str]]:
    """Of each resource of the owner's."""
    found = {one.id: dict(one.tags) for one in call.desk.instances(call.owner)}
    return found | {one.id: dict(one.tags) for one in call.desk.key_pairs(call.owner)}


def _resources(call: Call) -> list[str]:
    known, ids = _tags(call), list(dict.fromkeys(call.asked["Resources"]))
    for one in ids:
        if not ID.fullmatch(one):
            raise Refused("InvalidID", f"The ID '{one[:60]}' is not valid: instances and key pairs have tags here")
        if one not in known:
            raise Refused(
                "InvalidInstanceID.NotFound" if one.startswith("i-") else "InvalidKeyPair.NotFound",
                f"{one} does not exist",
            )
    return ids


def create(call: Call) -> Answer:
    tags, ids = tags_of(call.asked["Tags"]), _resources(call)
    if DURATION in tags:
        raise Refused(
            "InvalidParameterValue",
            f"{DURATION} is given when instances are launched; `belljar lease extend` changes it",
        )
    known = _tags(call)
    for one in ids:
        if len([key for key in known[one] | tags if not key.startswith("lease:")]) > MOST_TAGS:
            raise Refused("TagLimitExceeded", f"{one} would have more than {MOST_TAGS} tags")
    call.check_dry()
    call.desk.tag(call.owner, ids, tags)
    return {}


def delete(call: Call) -> Answer:
    """Without tags, all; with a key alone, whatever its value."""
    ids, given = _resources(call), call.asked.get("Tags")
    tags_of(given or ())
    call.check_dry()
    known = _tags(call)
    for one in ids:
        keys = {tag["Key"]: tag.get("Value") for tag in given} if given else dict.fromkeys(known[one])
        call.desk.untag(call.owner, [one], keys)
    return {}


def describe(call: Call) -> Answer:
    rows: list[Row] = [
        (one, KINDS[one.partition("-")[0]], key, value)
        for one, tags in _tags(call).items()
        for key, value in tags.items()
    ]
    readers: dict[str, Callable[[Row], Any]] = FILTERS | {"tag:": lambda row: ((row[2], row[3]),)}
    page, after = call.page(sorted(select(rows, call.filters(), readers)), list)
    shown = [{"ResourceId": one, "ResourceType": kind, "Key": key, "Value": value} for one, kind, key, value in page]
    return {"Tags": shown, "NextToken": after}


ACTIONS: dict[str, Callable[[Call], Answer]] = {"CreateTags": create, "DeleteTags": delete, "DescribeTags": describe}
