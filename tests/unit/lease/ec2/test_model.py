"""Parameters and answers, by botocore's own model of EC2."""

from typing import Any

import pytest
from botocore.parsers import EC2QueryParser
from botocore.serialize import EC2Serializer
from botocore.session import get_session
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.lease.ec2.front import ACTIONS, ENVELOPE
from belljar.lease.ec2.model import model, text_of
from belljar.lease.ec2.refusals import Refused

SERVICE = get_session().get_service_model("ec2")
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=10)


def refused(action: str, **fields: str) -> str:
    with pytest.raises(Refused) as caught:
        model().read(action, {name.replace("__", "."): value for name, value in fields.items()})
    return caught.value.code


def values(shape: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Any value of a shape; in depth, of its required members alone."""
    kind = shape.type_name
    if kind == "structure":
        chosen = {
            name: one for name, one in shape.members.items() if depth < 3 or one.type_name not in ("structure", "list")
        }
        return st.fixed_dictionaries({}, optional={name: values(one, depth + 1) for name, one in chosen.items()})
    if kind == "list":
        return st.lists(values(shape.member, depth + 1), min_size=1, max_size=2)
    simple = {
        "boolean": st.booleans(), "integer": st.integers(-(2**31), 2**31), "long": st.integers(-(2**40), 2**40),
        "timestamp": st.integers(1, 2**31).map(float), "float": st.integers(0, 99).map(float), "double": st.integers(0, 99).map(float),
        "blob": st.binary(max_size=20),
    }  # fmt: skip
    return simple.get(kind, WORDS)


@given(
    st.sampled_from(sorted(ACTIONS)).flatmap(
        lambda name: st.tuples(st.just(name), values(SERVICE.operation_model(name).input_shape))
    )
)
@settings(max_examples=80, deadline=None)
def test_what_botocore_sends_is_read(case: tuple[str, dict[str, Any]]) -> None:
    action, given_ = case
    operation = SERVICE.operation_model(action)
    required = set(operation.input_shape.required_members)
    if not required <= given_.keys():
        return
    sent = dict(EC2Serializer().serialize_to_request(given_, operation)["body"])
    fields = {name: str(value) for name, value in sent.items() if name not in ENVELOPE}
    try:
        assert without_empty_lists(model().read(action, fields)) == without_empty_lists(given_)
    except Refused as exc:
        assert exc.code == "MissingParameter"  # of a structure further in


@given(st.sampled_from(sorted(ACTIONS)).flatmap(lambda name: st.tuples(st.just(name), answers(name))))
@settings(max_examples=80, deadline=None)
def test_what_is_written_botocore_reads(case: tuple[str, dict[str, Any]]) -> None:
    action, answer = case
    shape = SERVICE.operation_model(action).output_shape
    body = model().write(action, "2016-11-15", "an-id", answer)
    parser = EC2QueryParser(timestamp_parser=lambda text: text)
    parsed = parser.parse({"status_code": 200, "headers": {}, "body": body}, shape)
    assert parsed.pop("ResponseMetadata")["RequestId"] == "an-id"
    if shape is not None:
        assert without_empty_lists(parsed) == without_empty_lists(as_parsed(answer, shape))
        assert {name for name, one in shape.members.items() if one.type_name == "list"} <= parsed.keys()


def answers(action: str) -> st.SearchStrategy[Any]:
    shape = SERVICE.operation_model(action).output_shape
    return st.just({}) if shape is None else values(shape, 1)


def as_parsed(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure":
        return {name: as_parsed(one, shape.members[name]) for name, one in value.items()}
    if shape.type_name == "list":
        return [as_parsed(one, shape.member) for one in value]
    return text_of("timestamp", value) if shape.type_name == "timestamp" else value


def without_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: without_empty_lists(one) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one not in ([], {})}
    return [known for one in value if (known := without_empty_lists(one)) != {}] if isinstance(value, list) else value


def test_an_answer_that_the_shape_does_not_have_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="Colour"):
        model().write("DescribeInstances", "2016-11-15", "x", {"Colour": "red"})


def test_what_xml_cannot_say_is_not_said() -> None:
    body = model().write("DescribeRegions", "2016-11-15", "x", {"Regions": [{"RegionName": "a\x00<b>&\ud800"}]})
    assert b"<regionName>a?&lt;b&gt;&amp;?</regionName>" in body


def test_lists_may_have_gaps_and_are_in_order() -> None:
    assert model().read("DescribeTags", {"Filter.0.Name": "a", "Filter.0.Value": "b"}) == {
        "Filters": [{"Name": "a", "Values": ["b"]}]
    }
    assert model().read("DescribeInstances", {"InstanceId.10": "b", "InstanceId.002": "a"}) == {
        "InstanceIds": ["a", "b"]
    }


def test_wrong_parameters_are_refused_by_name() -> None:
    assert refused("DescribeInstances", Colour="red") == "UnknownParameter"
    assert refused("DescribeInstances", InstanceId__x="a") == "UnknownParameter"
    assert refused("RunInstances", MinCount="1", MaxCount="1", Placement="a") == "InvalidParameterValue"
    assert refused("DescribeInstances", MaxResults="ten") == "InvalidParameterValue"
    assert refused("DescribeInstances", MaxResults="9" * 400) == "InvalidParameterValue"
    assert refused("DescribeInstances", MaxResults__1="1") == "UnknownParameter"
    assert refused("DescribeInstances", DryRun="yes") == "InvalidParameterValue"
    assert refused("RunInstances", MinCount="1") == "MissingParameter"
    assert refused("ImportKeyPair", KeyName="a", PublicKeyMaterial="%%%") == "InvalidParameterValue"
    assert refused("DescribeInstances", InstanceId__1="a", InstanceId__1__b="a") == "InvalidParameterCombination"


@pytest.mark.parametrize("version", ["", "2016-11-16", "2099-01-01", "2006-06-26", "2016", "x" * 500])
def test_unknown_versions_are_refused(version: str) -> None:
    with pytest.raises(Refused, match="NoSuchVersion"):
        model().check_version(version)
    model().check_version("2012-10-01")
