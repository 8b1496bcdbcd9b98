"""What `--publish` and `belljar port` may say."""

from __future__ import annotations

import pytest

from belljar.errors import BadOption
from belljar.jobs.asked import understood
from belljar.jobs.shares import port_of
from belljar.model import Port


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("80", Port(80)), ("0:80", Port(80)), (":80", Port(80)), ("8080:80", Port(80, 8080)),
        ("0.0.0.0:8080:80", Port(80, 8080, "0.0.0.0")), ("127.0.0.2::80", Port(80, 0, "127.0.0.2")),
        ("[::1]:8080:80", Port(80, 8080, "::1")), ("65535:65535", Port(65535, 65535)),
    ],
)  # fmt: skip
def test_a_port_is_read(text: str, port: Port) -> None:
    assert port_of(text) == port


@pytest.mark.parametrize(
    "text",
    ["", ":", "80:", "http", "80:http", "-1", "1:2:3:4", "::1:80:80", "[::1]80", "localhost:80:80", "8\u0660", "80\n"],
)
def test_bad_words_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(BadOption, match=r"not of the form \[\[ADDR:\]HOST:\]GUEST") as caught:
        port_of(text)
    assert "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("text", ["0", "80:0", "65536", "65536:80", "99999999999"])
def test_what_is_not_a_port_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="a port is a number from 1 to 65535"):
        port_of(text)


def test_a_place_is_written_as_an_address_is() -> None:
    assert (Port(1, 2).place, Port(1, 2, "::1").place) == ("127.0.0.1:2", "[::1]:2")


def test_programs_may_say_it_in_either_way() -> None:
    assert understood({"ports": ["0:80", Port(81)]})["ports"] == (Port(80), Port(81))
    assert understood({}).get("ports", ()) == ()
