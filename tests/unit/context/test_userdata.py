"""User data from a template: what is replaced, by what, and what is left alone."""

import pytest

from belljar.context import About
from belljar.context.userdata import LARGEST, check_option, fill_in, patterns
from belljar.errors import BadOption

ABOUT = About(
    uuid="0f0e", hostname="belljar-0f", machinetype="prod", manager="belljar 1", manager_hostname="node1", space="vac.example",
    site="UKI-EX", url="https://example.org/ud", image_url="https://example.org/cernvm.iso",
    machinefeatures="http://m/machinefeatures", jobfeatures="http://m/jobfeatures", joboutputs="http://m/joboutputs",
)  # fmt: skip
VALUES = patterns(ABOUT, {"queue": b"night"}, {"cert": b"PEM\nlines\n"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uuid", "0f0e"), ("url", "https://example.org/ud"), ("space", "vac.example"), ("site", "UKI-EX"),
        ("machinetype", "prod"), ("vmtype", "prod"), ("machine_hostname", "belljar-0f"), ("vm_hostname", "belljar-0f"),
        ("manager_version", "belljar 1"), ("vmlm_version", "belljar 1"), ("manager_hostname", "node1"),
        ("vmlm_hostname", "node1"), ("root_image_url", "https://example.org/cernvm.iso"),
        ("machinefeatures_url", "http://m/machinefeatures"), ("jobfeatures_url", "http://m/jobfeatures"),
        ("joboutputs_url", "http://m/joboutputs"), ("manager_joboutputs_url", "http://m/joboutputs"),
        ("option_queue", "night"), ("option_cert", "PEM\nlines\n"), ("file_cert", "PEM\nlines\n"),
        ("file_queue", ""), ("heartbeat_machines_url", ""), ("option_other", ""), ("", ""), ("a,b", ""),
    ],
)  # fmt: skip
def test_each_pattern_has_its_value_and_an_unknown_one_is_taken_out(name: str, value: str) -> None:
    assert fill_in(f"<##user_data_{name}##>".encode(), VALUES) == f"<{value}>".encode()


@pytest.mark.parametrize(
    "text", [b"##user_data_UUID##", b"##user_data_a-b##", b"#user_data_uuid#", b"##user_data_uuid#"]
)
def test_what_is_no_pattern_stays(text: bytes) -> None:
    assert fill_in(text, VALUES) == text


def test_a_value_is_not_replaced_again() -> None:
    values = patterns(ABOUT, {"a": b"##user_data_uuid##", "cvmfs_proxy": b"http://p1:3128|http://p2:3128;DIRECT"}, {})
    assert fill_in(b"##user_data_option_a## ##user_data_option_cvmfs_proxy##", values) == (
        b"##user_data_uuid## http://p1:3128|http://p2:3128;DIRECT"
    )


def test_bytes_that_are_no_text_pass_through_and_packed_data_is_left_alone() -> None:
    assert fill_in(b"\xff\x00##user_data_uuid##\n", VALUES) == b"\xff\x000f0e\n"
    packed = b"\x1f\x8b##user_data_uuid##"
    assert fill_in(packed, VALUES) == packed


def test_an_option_stands_before_a_file_of_its_name() -> None:
    values = patterns(ABOUT, {"x": b"option"}, {"x": b"file"})
    assert fill_in(b"##user_data_option_x## ##user_data_file_x##", values) == b"option file"


def test_a_mebibyte_is_taken_and_a_byte_more_is_not() -> None:
    assert len(fill_in(b"x" * LARGEST, VALUES)) == LARGEST
    with pytest.raises(BadOption, match="the template has 1048577 bytes"):
        fill_in(b"x" * (LARGEST + 1), VALUES)
    with pytest.raises(BadOption, match="filled in"):
        fill_in(b"##user_data_option_big##" * 2, patterns(ABOUT, {"big": b"x" * (LARGEST // 2 + 1)}, {}))


@pytest.mark.parametrize("name", ["", "A", "a-b", "a b", "a##", "ä"])
def test_a_name_that_no_pattern_can_have_is_refused(name: str) -> None:
    with pytest.raises(BadOption):
        check_option(name)
