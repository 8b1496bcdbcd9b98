"""What is not clearly meant is refused, and nothing that is sent costs much."""

import time

import pytest

from belljar.lease.ec2.refusals import Refused
from belljar.lease.ec2.request import MOST_FIELDS, fields_of
from belljar.service.http.server import Sent

FORM = (("content-type", "application/x-www-form-urlencoded; charset=utf-8"),)


def get(query: str, path: str = "/") -> Sent:
    return Sent("GET", f"{path}?{query}", ())


def refused(sent: Sent) -> str:
    with pytest.raises(Refused) as caught:
        fields_of(sent)
    return caught.value.code


def test_a_query_and_a_body_are_one() -> None:
    assert fields_of(Sent("POST", "/?A=1", FORM, b"B=a+b%20c%2Bd&C=")) == {"A": "1", "B": "a b c+d", "C": ""}
    assert fields_of(get("Name=%C3%A9~*", "/ec2/")) == {"Name": "é~*"}


@pytest.mark.parametrize(
    "sent",
    [
        get("A=1&A=2"), get("A=%ff"), get("A=%00"), get("A=%EF%BF%BE"), Sent("POST", "/?A=1", FORM, b"A=1"),
        Sent("POST", "/", FORM, "A=é".encode()), Sent("POST", "/", (("content-type", "application/json"),), b"{}"),
        get("", "/../etc"), get("", "//"), get("", "http://host/"), get("", "*"), get("", "/%2e"), get("&".join(f"A.{one}=1" for one in range(MOST_FIELDS + 1))),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_can_be_read_in_two_ways_is_refused(sent: Sent) -> None:
    assert refused(sent) == "MalformedQueryString"


@pytest.mark.parametrize("name", ["A" * 257, "A" + ".1" * 8, "A..B", ".A", "A.", "A b", "A%0a", "%C3%A9", ""])
def test_a_name_that_no_parameter_has_is_refused(name: str) -> None:
    assert refused(get(f"{name}=1")) == "UnknownParameter"


def test_other_methods_are_refused() -> None:
    assert refused(Sent("DELETE", "/", ())) == "InvalidAction"


def test_the_largest_query_is_read_soon() -> None:
    text = "&".join(f"InstanceId.{one}=i-{one:017x}" for one in range(1, MOST_FIELDS))
    begun = time.process_time()
    assert len(fields_of(get(text))) == MOST_FIELDS - 1
    assert time.process_time() - begun < 1.0
