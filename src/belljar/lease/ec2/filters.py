"""Filters of describing actions: values of one filter are alternatives, filters are conditions; `*` and `?` stand for what they do
in a shell, a backslash takes their meaning away. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from typing import Any

from belljar.lease.ec2.refusals import Refused

MOST_VALUES = 200  # as EC2
TAG = "tag:"
Reader = Callable[[Any], Iterable[Any]]  # what of one thing a filter looks at; of `tag:`, its tags as pairs
Test = Callable[[str], bool]


def select(items: Iterable[Any], filters: Sequence[Mapping[str, Any]], readers: Mapping[str, Reader]) -> list[Any]:
    """Those that pass every filter."""
    tests = [test_of(one, readers) for one in filters]
    return [item for item in items if all(test(item) for test in tests)]


def test_of(given: Mapping[str, Any], readers: Mapping[str, Reader]) -> Callable[[Any], bool]:
    """One filter. Raises Refused for one that nothing here has."""
    name, values = given.get("Name", ""), given.get("Values", [])
    if not values:
        raise Refused("InvalidParameterValue", f"The filter '{name[:100]}' has no values")
    if len(values) > MOST_VALUES:
        raise Refused("FilterLimitExceeded", f"The filter '{name[:100]}' has more than {MOST_VALUES} values")
    matches = matcher(values)
    if name.startswith(TAG) and TAG in readers:
        key, tags = name.removeprefix(TAG), readers[TAG]
        return lambda item: any(matches(value) for known, value in tags(item) if known == key)
    reader = readers.get(name) if name != TAG else None
    if reader is None:
        raise Refused("InvalidParameterValue", f"The filter '{name[:100]}' is invalid")
    return lambda item: any(matches(text) for text in reader(item))


def matcher(values: Sequence[str]) -> Test:
    plain = {value for value in values if not re.search(r"[*?\\]", value)}
    # Python's translation of `*` does not go back (atomic groups), so no pattern takes long.
    patterns = [re.compile(translate(re.sub(r"\\(.)|\[", _literal, one))) for one in values if one not in plain]
    return lambda text: text in plain or any(pattern.match(text) for pattern in patterns)


def _literal(found: re.Match[str]) -> str:
    """As a class of characters of its own. A class cannot begin with `!`, and need not: that has no meaning outside."""
    char = found[1] or "["
    return char if char in "!]" else f"[{char}]"
