"""Key pairs: made here, or brought along. A private key is answered once and kept nowhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from belljar.host.credentials import ssh_keys
from belljar.lease import key_id
from belljar.lease.ec2.actions.instances import Answer
from belljar.lease.ec2.call import Call, shown, specified
from belljar.lease.ec2.desk import KeyPair
from belljar.lease.ec2.filters import TAG, select
from belljar.lease.ec2.refusals import Refused

LARGEST_KEY = 16 << 10
NAME = re.compile(r"[\x20-\x7e]{1,255}")
FILTERS: dict[str, Callable[[KeyPair], Any]] = {
    "key-name": lambda one: (one.name,),
    "key-pair-id": lambda one: (one.id,),
    "fingerprint": lambda one: (one.fingerprint,),
    "tag-key": lambda one: tuple(key for key, _ in one.tags),
    TAG: lambda one: one.tags,
}


def create(call: Call) -> Answer:
    kind = call.asked.get("KeyType", "rsa")
    if kind not in ssh_keys.KINDS:
        raise Refused("InvalidParameterValue", f"KeyType is {' or '.join(ssh_keys.KINDS)}")
    if call.asked.get("KeyFormat", "pem") != "pem":
        raise Refused("UnsupportedOperation", "KeyFormat is pem here: puttygen makes a .ppk of it")
    tags = _checked(call)
    call.check_dry()
    made = ssh_keys.make(kind)
    return _kept(call, made.public, made.fingerprint, tags) | {"KeyMaterial": made.private}


def import_(call: Call) -> Answer:
    material: bytes = call.asked["PublicKeyMaterial"]
    tags = _checked(call)
    try:
        public, fingerprint = ssh_keys.read_public(material if len(material) <= LARGEST_KEY else b"")
    except ValueError as exc:
        raise Refused("InvalidKey.Format", f"Key is not in valid OpenSSH public key format: {exc}") from None
    call.check_dry()
    return _kept(call, public, fingerprint, tags)


def _checked(call: Call) -> dict[str, str]:
    """The new pair's tags, when its name is a free one."""
    name, tags = call.asked["KeyName"], specified(call, ("key-pair",))
    if not NAME.fullmatch(name) or name != name.strip():
        raise Refused("InvalidParameterValue", "KeyName has 1 to 255 characters of ASCII, no blanks at its ends")
    if any(one.name == name for one in call.desk.key_pairs(call.owner)):
        raise Refused("InvalidKeyPair.Duplicate", f"The keypair '{name}' already exists.")
    return tags


def _kept(call: Call, public: str, fingerprint: str, tags: dict[str, str]) -> dict[str, Any]:
    id = key_id()
    one = KeyPair(id, call.asked["KeyName"], public, fingerprint, call.now, tuple(tags.items()))
    call.desk.add_key_pair(call.owner, one)
    return {"KeyName": one.name, "KeyPairId": id, "KeyFingerprint": fingerprint, "Tags": shown(one.tags)}


def describe(call: Call) -> Answer:
    found = list(call.desk.key_pairs(call.owner))
    for parameter, known in (("KeyNames", {one.name for one in found}), ("KeyPairIds", {one.id for one in found})):
        asked = call.asked.get(parameter) or ()
        missing = [one for one in asked if one not in known]
        if missing:
            raise Refused("InvalidKeyPair.NotFound", f"The key pair '{missing[0][:255]}' does not exist")
        found = [one for one in found if not asked or one.name in asked or one.id in asked]
    with_public = call.asked.get("IncludePublicKey", False)
    return {"KeyPairs": [_shown(one, with_public) for one in select(found, call.filters(), FILTERS)]}


def _shown(one: KeyPair, with_public: bool) -> Answer:
    return {
        "KeyPairId": one.id, "KeyName": one.name, "KeyFingerprint": one.fingerprint, "CreateTime": one.created,
        "KeyType": ssh_keys.kind_of(one.public), "PublicKey": one.public if with_public else None, "Tags": shown(one.tags),
    }  # fmt: skip


def delete(call: Call) -> Answer:
    """One that is not there is deleted, too."""
    name, id = call.asked.get("KeyName"), call.asked.get("KeyPairId")
    if not name and not id:
        raise Refused("MissingParameter", "The request must contain the parameter KeyName or KeyPairId")
    found = [one for one in call.desk.key_pairs(call.owner) if one.name == name or one.id == id]
    call.check_dry()
    for one in found:
        call.desk.remove_key_pair(call.owner, one.name)
    return {"Return": True, "KeyPairId": found[0].id if found else id}


ACTIONS = {"CreateKeyPair": create, "ImportKeyPair": import_, "DescribeKeyPairs": describe, "DeleteKeyPair": delete}
