"""RunInstances. What only tunes a feature of Amazon's is let through; what would make another machine than was asked for is refused."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any

from belljar.lease import LARGEST_USER_DATA, LONGEST_TOKEN
from belljar.lease.ec2.actions.instances import Answer, reservation
from belljar.lease.ec2.call import DURATION, Call, specified
from belljar.lease.ec2.desk import Image, Size, Wanted
from belljar.lease.ec2.refusals import Refused

TOKEN = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_TOKEN}}}")
# What we would have to do, and do not.
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "LaunchTemplate": bool,
    "KernelId": bool,
    "RamdiskId": bool,
    "BlockDeviceMappings": bool,
    "CpuOptions": bool,
    "PrivateIpAddress": bool,
    "Ipv6Addresses": bool,
    "ElasticGpuSpecification": bool,
    "ElasticInferenceAccelerators": bool,
    "HibernationOptions": lambda given: bool(given.get("Configured")),
    "EnclaveOptions": lambda given: bool(given.get("Enabled")),
    "DisableApiTermination": bool,
    "InstanceInitiatedShutdownBehavior": lambda given: given != "terminate",
    "Placement": lambda given: given.get("Tenancy", "default") != "default" or "HostId" in given,
}
# https://en.wikipedia.org/wiki/ISO_8601#Durations, as far as it says seconds.
ISO = re.compile(r"P(?:(\d{1,4})D)?(?:T(?:(\d{1,5})H)?(?:(\d{1,6})M)?(?:(\d{1,8})S)?)?")


def run(call: Call) -> Answer:
    for name, is_meant in UNSUPPORTED.items():
        if name in call.asked and is_meant(call.asked[name]):
            raise Refused("UnsupportedOperation", f"{name} is not supported here")
    wanted = _wanted(call)
    if call.asked.get("DryRun"):
        call.desk.may_run(call.owner, wanted)
    call.check_dry()
    made = call.desk.run(call.owner, wanted)
    return reservation(call, made[0].lease, made)


def _wanted(call: Call) -> Wanted:
    least, most = call.asked["MinCount"], call.asked["MaxCount"]
    if not 1 <= least <= most:
        raise Refused("InvalidParameterValue", f"MinCount and MaxCount: 1 <= {least} <= {most} does not hold")
    tags = specified(call, ("instance", "reservation", "spot-instances-request", "volume", "network-interface"))
    bid, options = _market(call)
    minutes = options.get("BlockDurationMinutes", 0)
    duration = tags.pop(DURATION, str(minutes * 60) if minutes > 0 else "")
    token = call.asked.get("ClientToken", "")
    if token and not TOKEN.fullmatch(token):
        raise Refused("InvalidParameterValue", f"ClientToken has 1 to {LONGEST_TOKEN} characters of ASCII")
    return Wanted(
        image=_image(call),
        size=_size(call),
        least=least,
        most=most,
        seconds=seconds_of(duration) if duration else call.desk.usual_seconds,
        zone=_zone(call),
        key_name=_key_name(call),
        user_data=_user_data(call),
        token=token,
        bid=bid,
        deadline=options.get("ValidUntil", 0.0),
        tags=tuple(tags.items()),
    )


def seconds_of(text: str) -> float:
    """`7200` or `PT2H`. Raises Refused."""
    parts = ISO.fullmatch(text)
    if re.fullmatch(r"[0-9]{1,8}", text):
        seconds = float(text)
    elif parts and any(parts.groups()):
        seconds = sum(float(part or 0) * unit for part, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))
    else:
        seconds = 0.0
    if seconds <= 0:
        raise Refused("InvalidParameterValue", f"{DURATION}={text[:40]}: give seconds, or as in PT2H")
    return seconds


def _market(call: Call) -> tuple[float | None, Mapping[str, Any]]:
    """The bid, None for what is not on the spot, and what else is said of it."""
    given = call.asked.get("InstanceMarketOptions")
    if not given:
        return None, {}
    options = given.get("SpotOptions") or {}
    if given.get("MarketType") != "spot":
        raise Refused("UnsupportedOperation", "InstanceMarketOptions.MarketType is spot, or not given")
    if options.get("SpotInstanceType", "one-time") != "one-time":
        raise Refused("UnsupportedOperation", "SpotInstanceType is one-time here")
    if options.get("InstanceInterruptionBehavior", "terminate") != "terminate":
        raise Refused("UnsupportedOperation", "InstanceInterruptionBehavior is terminate here")
    price = options.get("MaxPrice", "1")  # as much as on demand
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", price):
        raise Refused("InvalidParameterValue", f"MaxPrice: {price[:40]!r} is no price")
    return float(price), options


def _image(call: Call) -> Image:
    """By its id, or by its name."""
    asked = call.asked.get("ImageId")
    if not asked:
        raise Refused("MissingParameter", "The request must contain the parameter ImageId")
    for one in call.desk.images(call.owner):
        if asked in (one.id, one.name):
            return one
    if not re.fullmatch(r"ami-[0-9a-f]{8,17}", asked):
        raise Refused("InvalidAMIID.Malformed", f'Invalid id: "{asked[:60]}": neither ami-... nor the name of an image')
    raise Refused("InvalidAMIID.NotFound", f"The image id '[{asked}]' does not exist")


def _size(call: Call) -> Size:
    sizes, asked = call.desk.sizes(call.owner), call.asked.get("InstanceType")
    for one in sizes:
        if asked in (None, one.name):
            return one
    known = ", ".join(one.name for one in sizes)
    raise Refused("InvalidParameterValue", f"Invalid value '{str(asked)[:60]}' for InstanceType: one of {known}")


def _zone(call: Call) -> str:
    asked, zones = (call.asked.get("Placement") or {}).get("AvailabilityZone"), call.desk.zones()
    if asked and asked not in zones:
        raise Refused("InvalidParameterValue", f"Invalid availability zone: [{asked[:60]}]")
    return asked or next(iter(zones), "")


def _key_name(call: Call) -> str:
    name: str = call.asked.get("KeyName", "")
    if name and name not in {one.name for one in call.desk.key_pairs(call.owner)}:
        raise Refused("InvalidKeyPair.NotFound", f"The key pair '{name[:60]}' does not exist")
    return name


def _user_data(call: Call) -> bytes:
    try:
        data = base64.b64decode("".join(call.asked.get("UserData", "").split()), validate=True)
    except (binascii.Error, ValueError):
        raise Refused("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from None
    if len(data) > LARGEST_USER_DATA:
        raise Refused("InvalidUserData.Malformed", f"User data is limited to {LARGEST_USER_DATA} bytes")
    return data


ACTIONS = {"RunInstances": run}
