"""Filters of describing actions: values of one filter are alternatives, filters are conditions; `*` and `?` stand for what they do
in a shell, a backslash takes their meaning away. Pure.

A filter is named after the element of the answer that it looks at (`instance-state-name`: `<instanceState><name>`), so EC2's model
says which there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

from belljar.lease.ec2.model import Shape, elements, text_of
from belljar.lease.ec2.refusals import Refused

MOST_VALUES = 200  # as EC2
# Names that are not those of elements: what to look for in place of each, in this order.
OTHERWISE = {
    "state": ("imagestate", "zonestate"), "ownerid": ("imageownerid",), "owneralias": ("imageowneralias",), "endpoint": ("regionendpoint",),
    "fingerprint": ("keyfingerprint",), "launchindex": ("amilaunchindex",), "availabilityzone": ("placementavailabilityzone",), "availabilityzoneid": ("placementavailabilityzoneid",), "tenancy": ("placementtenancy",),
    "manifestlocation": ("imagelocation",),
    **dict.fromkeys(("groupid", "instancegroupid"), ("groupgroupid",)), **dict.fromkeys(("groupname", "instancegroupname"), ("groupgroupname",)),
    "systemstatusreachability": ("systemstatusdetailsstatus",), "instancestatusreachability": ("instancestatusdetailsstatus",),
}  # fmt: skip
ENDINGS = ("", "s", "es", "set", "sset")  # of lists
Test = Callable[[Any, Any], bool]  # of a thing and its answer
Readers = Mapping[str, Callable[[Any], str]]


def passing(filters: Iterable[Mapping[str, Any]], shape: Shape, also: Readers, reference: str) -> Test:
    """For a thing and its answer, which has this shape: do they pass every filter? *also*: filters of what is no element of the answer,
    by the thing. *reference*: names others, as botocore has them: what they look at, nothing here has. Raises Refused."""
    tests = [_test_of(given, shape, also, reference) for given in filters]
    return lambda thing, answer: all(test(thing, answer) for test in tests)


def _test_of(given: Mapping[str, Any], shape: Shape, also: Readers, reference: str) -> Test:
    """One filter. Raises Refused for one that there is not."""
    name, values = given.get("Name", ""), given.get("Values", [])
    if not values:
        raise Refused("InvalidParameterValue", f"The filter '{name[:100]}' has no values")
    if len(values) > MOST_VALUES:
        raise Refused("FilterLimitExceeded", f"The filter '{name[:100]}' has more than {MOST_VALUES} values")
    matches, key = matcher(values), name.removeprefix("tag:")
    if key not in ("", name) and {"Tags", "Key"} & shape.members.keys():
        return lambda _, item: any(tag.get("Key") == key and matches(tag["Value"]) for tag in item.get("Tags", [item]))
    if reader := also.get(name.replace("-", "_")):
        return lambda thing, _: matches(reader(thing))
    plain = re.sub(r"[.-]", "", re.sub(r"^launch\.", "launch-specification.", name)).lower()
    path = next(filter(None, (_path(shape, element) for element in (plain, *OTHERWISE.get(plain, ())))), ())
    if not path and f"<li> <p> <code>{name}</code>" in reference:
        return lambda *_: False
    if not path:
        raise Refused("InvalidParameterValue", f"The filter '{name[:100]}' is invalid")
    return lambda _, item: any(matches(text) for text in _texts(item, shape, path))


def _path(shape: Shape, element: str) -> tuple[str, ...]:
    """Names of members, from the outer one to that with this *element*, in small letters; (): there is none."""
    for name, tag, member in elements(shape):
        inner, stems = member, [tag.lower()]
        if member.type_name == "list":  # <tagSet> of `tag-key`, <supportedArchitectures> of `supported-architecture`
            inner, stems = member.member, [stems[0].removesuffix(end) for end in ENDINGS]
        for stem in stems:
            if inner.type_name != "structure":
                if element == stem:
                    return (name,)
            elif element.startswith(stem) and (rest := _path(inner, element[len(stem) :])):
                return (name, *rest)
    return ()


def _texts(value: Any, shape: Shape, path: tuple[str, ...]) -> Iterator[str]:
    """What stands there, as the answer has it."""
    if value is None or value == "":
        return
    if shape.type_name == "list":
        for item in value:
            yield from _texts(item, shape.member, path)
    elif path:
        yield from _texts(value.get(path[0]), shape.members[path[0]], path[1:])
    else:
        yield text_of(shape.type_name, value)


def matcher(values: Sequence[str]) -> Callable[[str], bool]:
    plain = {value for value in values if not re.search(r"[*?\\]", value)}
    # Python's translation of `*` does not go back (atomic groups), so no pattern takes long.
    patterns = [re.compile(translate(re.sub(r"\\(.)|\[", _literal, value))) for value in values if value not in plain]
    return lambda text: text in plain or any(pattern.match(text) for pattern in patterns)


def _literal(match: re.Match[str]) -> str:
    """As a class of characters of its own. A class cannot begin with `!`, and need not: that has no meaning outside."""
    char = match[1] or "["
    return char if char in "!]" else f"[{char}]"
