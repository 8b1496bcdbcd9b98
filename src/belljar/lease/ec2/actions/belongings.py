"""Key pairs, made here or brought along, and tags of instances and key pairs. A private key is answered once and kept nowhere; tags that begin
with `lease:` are the service's: it says there how a lease stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from belljar.lease import KeyPair, Tag, belongings, new_id
from belljar.lease.ec2.actions import instances
from belljar.lease.ec2.call import DURATION, HEX_ID, Answer, Call, shown, specified, tags_of
from belljar.lease.ec2.refusals import Refused
from belljar.service.credentials import ssh_keys

LARGEST_KEY = 16 << 10
NAME = re.compile(r"[\x20-\x7e]{1,255}")
PAIR = "InvalidKeyPair"
KINDS = {"i": ("instance", instances.CODE), "key": ("key-pair", PAIR)}  # what has tags, by the beginnings of ids
Tags = dict[str, str]

# -- key pairs ---------------------------------------------------------------------------------------------------------


def create(call: Call) -> Answer:
    kind = call.asked.get("KeyType", "rsa")
    if kind not in ssh_keys.KINDS:
        raise Refused("InvalidParameterValue", f"KeyType is {' or '.join(ssh_keys.KINDS)}")
    if call.asked.get("KeyFormat", "pem") != "pem":
        raise Refused("UnsupportedOperation", "KeyFormat is pem here: puttygen makes a .ppk of it")
    tags = _checked(call)
    made = ssh_keys.make(kind)
    return _kept(call, made.public, made.fingerprint, tags) | {"KeyMaterial": made.private}


def import_(call: Call) -> Answer:
    material: bytes = call.asked["PublicKeyMaterial"]
    try:
        public, fingerprint = ssh_keys.read_public(material if len(material) <= LARGEST_KEY else b"")
    except ValueError as exc:
        raise Refused("InvalidKey.Format", f"Key is not in valid OpenSSH public key format: {exc}") from None
    return _kept(call, public, fingerprint, _checked(call))


def _checked(call: Call) -> Tags:
    """The new pair's tags, when its name is one."""
    name, tags = call.asked["KeyName"], specified(call, "key-pair")
    if not NAME.fullmatch(name) or name != name.strip():
        raise Refused("InvalidParameterValue", "KeyName has 1 to 255 characters of ASCII, no blanks at its ends")
    return tags


def _kept(call: Call, public: str, fingerprint: str, tags: Tags) -> dict[str, Any]:
    owner, kind = call.owner.name, ssh_keys.kind_of(public)
    pair = KeyPair(new_id("key"), owner, call.asked["KeyName"], public, fingerprint, kind, call.now)
    call.write(lambda book: belongings.add_key_pair(book, pair, tags))
    return {"KeyName": pair.name, "KeyPairId": pair.id, "KeyFingerprint": fingerprint, "Tags": shown(tags.items())}


def describe(call: Call) -> Answer:
    pairs, tags = _pairs(call), _tags(call)
    for name, of in (("KeyNames", "name"), ("KeyPairIds", "id")):
        if call.asked.get(name):
            pairs = call.of_names(name, {getattr(pair, of): pair for pair in pairs}, f"{PAIR}.NotFound")
    return call.listing("KeyPairs", [
        {
            "KeyPairId": pair.id, "KeyName": pair.name, "KeyFingerprint": pair.fingerprint, "CreateTime": pair.created,
            "KeyType": ssh_keys.kind_of(pair.public), "Tags": shown(tags[pair.id].items()), "PublicKey": pair.public if call.asked.get("IncludePublicKey") else None,
        }
        for pair in pairs
    ], "KeyName")  # fmt: skip


def delete(call: Call) -> Answer:
    """One that is not there is deleted, too."""
    name, id = call.asked.get("KeyName"), call.asked.get("KeyPairId")
    if not name and not id:
        raise Refused("MissingParameter", "The request must contain the parameter KeyName or KeyPairId")
    pairs = [pair for pair in _pairs(call) if name in (None, "", pair.name) and id in (None, "", pair.id)]
    call.write(lambda book: belongings.remove_key_pairs(book, call.owner.name, *(pair.name for pair in pairs)))
    return {"Return": True, "KeyPairId": pairs[0].id if pairs else id}


def _pairs(call: Call) -> list[KeyPair]:
    return call.read(lambda book: book.find(KeyPair, owner=call.owner.name))


# -- tags --------------------------------------------------------------------------------------------------------------


def _tags(call: Call) -> dict[str, Tags]:
    """By id of each machine and key pair of the owner's. The service's own are not among them: tools would take them off."""
    tags: dict[str, Tags] = {id: {} for id in (*call.office.machines(call.owner), *(pair.id for pair in _pairs(call)))}
    for tag in call.read(lambda book: book.find(Tag, owner=call.owner.name)):
        if tag.resource in tags:
            tags[tag.resource][tag.key] = tag.value
    return tags


def _resources(call: Call) -> list[str]:
    """Ids of those that are named, which are all there."""
    known, ids = _tags(call), call.asked["Resources"]
    for id in ids:
        if not re.fullmatch(rf"({'|'.join(KINDS)})-{HEX_ID}", id):
            raise Refused("InvalidID", f"The ID '{id[:60]}' is not valid: instances and key pairs have tags here")
        if id not in known:
            raise Refused(f"{KINDS[id.partition('-')[0]][1]}.NotFound", f"{id} does not exist")
    return list(ids)


def tag(call: Call) -> Answer:
    tags, ids = tags_of(call.asked["Tags"]), _resources(call)
    if DURATION in tags:
        how = "is given when instances are launched; `belljar lease extend` changes it"
        raise Refused("InvalidParameterValue", f"{DURATION} {how}")
    call.write(lambda book: belongings.tag(book, call.owner.name, ids, tags))
    return {}


def untag(call: Call) -> Answer:
    """Without tags, all; with a key alone, whatever its value."""
    ids, given = _resources(call), call.asked.get("Tags") or ()
    tags_of(given)
    taken = {tag["Key"]: tag.get("Value") for tag in given}
    call.write(lambda book: belongings.untag(book, call.owner.name, ids, taken))
    return {}


def describe_tags(call: Call) -> Answer:
    rows = [
        {"ResourceId": id, "ResourceType": KINDS[id.partition("-")[0]][0], "Key": key, "Value": value}
        for id, tags in _tags(call).items() for key, value in tags.items()
    ]  # fmt: skip
    return call.listing("Tags", rows, "ResourceId", "ResourceType", "Key", "Value")


ACTIONS: dict[str, Callable[[Call], Answer]] = {
    "CreateKeyPair": create, "ImportKeyPair": import_, "DescribeKeyPairs": describe, "DeleteKeyPair": delete,
    "CreateTags": tag, "DeleteTags": untag, "DescribeTags": describe_tags,
}  # fmt: skip
