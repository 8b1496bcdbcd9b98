"""User data of a vacuum's machine, byte for byte."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.errors import BadOption
from belljar.vacuum import MachineType, Space
from belljar.vacuum.factory.materials import PROXY, TOKEN, user_data

SPACE = Space("vac01.example.org", "wn01.example.org", site="UKI-EXAMPLE")
TYPE = MachineType(
    "lhcb-prod", image="https://example.org/cernvm3.iso", user_data="https://example.org/user_data",
    options=(("cvmfs_proxy", "http://p1:3128|http://p2:3128;DIRECT"), ("nested", "##user_data_uuid##")),
    option_files=(("hostcert", Path("/etc/cert")),),
)  # fmt: skip
CREDENTIALS = {PROXY: b"PEM\n", TOKEN: b"ey.J.x"}


def told(
    template: bytes, one: MachineType = TYPE, credentials: dict[str, bytes] = CREDENTIALS,
    base_url: str = "http://169.254.169.253",
) -> bytes:  # fmt: skip
    return user_data(
        SPACE, one, template, credentials, {"hostcert": b"-----BEGIN\nx\n"}, uuid="0f0e", hostname="wn01-03.example.org",
        manager="belljar 1.0", base_url=base_url,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("url", "https://example.org/user_data"), ("space", "vac01.example.org"), ("site", "UKI-EXAMPLE"),
        ("machinetype", "lhcb-prod"), ("vmtype", "lhcb-prod"),
        ("machine_hostname", "wn01-03.example.org"), ("vm_hostname", "wn01-03.example.org"),
        ("manager_version", "belljar 1.0"), ("vmlm_version", "belljar 1.0"),
        ("manager_hostname", "wn01.example.org"), ("vmlm_hostname", "wn01.example.org"),
        ("machinefeatures_url", "http://169.254.169.253/machinefeatures"),
        ("manager_machinefeatures_url", "http://169.254.169.253/machinefeatures"),
        ("jobfeatures_url", "http://169.254.169.253/jobfeatures"),
        ("manager_jobfeatures_url", "http://169.254.169.253/jobfeatures"),
        ("joboutputs_url", "http://169.254.169.253/joboutputs"),
        ("manager_joboutputs_url", "http://169.254.169.253/joboutputs"),
        ("root_image_url", "https://example.org/cernvm3.iso"), ("uuid", "0f0e"),
        ("option_cvmfs_proxy", "http://p1:3128|http://p2:3128;DIRECT"), ("option_x509_proxy", "PEM\n"), ("option_token", "ey.J.x"),
        ("option_hostcert", "-----BEGIN\nx\n"), ("file_hostcert", "-----BEGIN\nx\n"),
        ("option_nested", "##user_data_uuid##"),
        ("heartbeat_machines_url", ""), ("option_unknown", ""), ("a,b", ""),
    ],
)  # fmt: skip
def test_each_pattern_of_the_original_has_its_value(pattern: str, value: str) -> None:
    assert told(f"a=##user_data_{pattern}##;".encode()) == f"a={value};".encode()


@pytest.mark.parametrize(
    "text", ["##user_data_UUID##", "##user_data_a-b##", "#user_data_uuid##", "##user_data_ uuid##"]
)
def test_what_is_no_pattern_survives(text: str) -> None:
    assert told(text.encode()) == text.encode()


def test_a_path_is_no_url() -> None:
    one = MachineType("a", image="debian12", user_data="/etc/ud")
    assert told(b"[##user_data_url##][##user_data_root_image_url##]", one) == b"[][]"


def test_without_a_metadata_service_there_are_no_places() -> None:
    assert told(b"[##user_data_joboutputs_url##]", base_url="") == b"[]"


def test_a_proxy_stands_before_an_option_of_its_name() -> None:
    one = MachineType("a", options=(("x509_proxy", "mine"),))
    assert told(b"##user_data_option_x509_proxy##", one) == b"PEM\n"
    assert told(b"##user_data_option_x509_proxy##", one, {}) == b"mine"


def test_more_than_a_mebibyte_is_refused() -> None:
    with pytest.raises(BadOption):
        told(b"##user_data_option_x509_proxy##", credentials={PROXY: b"x" * (1 << 20) + b"x"})


def test_the_example_of_the_guide_is_a_script_when_it_is_filled_in() -> None:
    page = (Path(__file__).parents[4] / "docs/operate/vacuum/experiments.md").read_text()
    template = page.partition("```sh\n")[2].partition("```")[0]
    made = told(template.encode())
    assert b"##user_data_" not in made and b"<<'PROXY'\nPEM\n" in made
    done = subprocess.run(["sh", "-n"], input=made, capture_output=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, b"")


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_what_has_no_pattern_is_left_byte_for_byte_and_no_value_is_read_again(around: bytes, value: bytes) -> None:
    around = around.replace(b"#", b"")
    made = told(around + b"##user_data_option_x509_proxy##" + around, credentials={PROXY: value})
    assert made == (around + value + around if not around.startswith(b"\x1f\x8b") else made)
