"""Vacuum pipes: what is taken from a document, what stands before it, and what happens while it cannot be had."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.image.http_server import serving

from belljar.errors import BelljarError, DownloadFailed
from belljar.host.toml import Mistake
from belljar.image import Settings
from belljar.image.images import Images
from belljar.records import replace
from belljar.service.http.copies import RETRY, Copy, may_name
from belljar.vacuum import MachineType, Pipe, Space
from belljar.vacuum.factory.keeper import Living, request_for
from belljar.vacuum.factory.materials import make_user_data
from belljar.vacuum.settings.pipes import (
    LARGEST,
    fetch,
    kept,
    lasting,
    machinetypes,
    read_document,
    refresh,
    strange_addresses,
    with_pipes,
)

NOW = 1_800_000_000.0
URL = "https://gds.example.org/pipe.json"
PIPE = Pipe("gds", URL, share=6.0)
SPACE = Space("vac01.example.org", "a.example.org", options=(("queue", "short"),))
ENTRY = {
    "suffix": "prod", "backoff_seconds": 900, "fizzle_seconds": 300.0, "machine_model": "cernvm3", "max_processors": "8",
    "min_wallclock_seconds": 9000, "max_wallclock_seconds": 86400, "root_image": "https://gds.example.org/cernvm3.iso",
    "target_share": 3, "user_data": "https://gds.example.org/user_data", "accounting_fqan": "/gds/Role=pilot",
    "user_data_option_site_arg": "x=1", "disk_gb_per_processor": 10, "heartbeat_file": "vm-heartbeat", "heartbeat_seconds": 600,
}  # fmt: skip


def document(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"machinetypes": list(entries), **more}


def made(*entries: dict[str, Any], pipe: Pipe = PIPE) -> tuple[dict[str, MachineType], list[str]]:
    notes: list[Mistake] = []
    types = machinetypes(pipe, document(*entries), SPACE, notes)
    return {one.name: one for one in types}, [str(note).removeprefix(f"{URL}, ") for note in notes]


# -- values ------------------------------------------------------------------------------------------------------------


def test_an_entry_becomes_a_machinetype() -> None:
    types, notes = made(ENTRY)
    assert types["gds-prod"] == MachineType(
        "gds-prod", share=6.0, image="https://gds.example.org/cernvm3.iso", max_processors=8, min_wallclock=9000.0,
        max_wallclock=86400.0, disk=10 * 10**9, backoff=900.0, fizzle=300.0, fqan="/gds/Role=pilot",
        user_data="https://gds.example.org/user_data", options=(("queue", "short"), ("site_arg", "x=1")),
        heartbeat_file="vm-heartbeat", heartbeat=600.0, pipe="gds",
    )  # fmt: skip
    assert notes == ["gds-prod.machine_model: the image says what it is (ignored)"]


def test_the_share_is_split_as_the_document_says() -> None:
    types, _ = made({**ENTRY, "target_share": 3}, {**ENTRY, "suffix": "b", "target_share": "1"})
    assert {name: one.share for name, one in types.items()} == {"gds-prod": 4.5, "gds-b": 1.5}


def test_without_shares_in_the_document_none_is_started() -> None:
    types, _ = made({key: value for key, value in ENTRY.items() if key != "target_share"})
    assert types["gds-prod"].share == 0.0


def test_the_site_stands_before_the_pipe_and_the_machinetype_before_both() -> None:
    pipe = Pipe(
        "gds", URL, 6.0, given=(("backoff", 60.0), ("fizzle", 60.0), ("options", (("queue", "mid"), ("site_arg", "mine")))),
        own=(("gds-prod", (("fizzle", 30.0), ("share", 4.0), ("options", (("queue", "long"),)))),),
    )  # fmt: skip
    types, _ = made(ENTRY, {**ENTRY, "suffix": "b", "target_share": 1}, pipe=pipe)
    one, other = types["gds-prod"], types["gds-b"]
    assert (one.share, one.backoff, one.fizzle, one.max_processors, one.min_processors) == (4.0, 60.0, 30.0, 8, 1)
    assert dict(one.options) == {"queue": "long", "site_arg": "mine"}
    assert (other.share, other.backoff, other.fizzle) == (1.5, 60.0, 60.0)
    assert dict(other.options) == {"queue": "mid", "site_arg": "mine"}


@pytest.mark.parametrize(
    "key", ["machinegroup", "vacuum_pipe_url", "machinetype_path", "proxy", "token_file", "network"]
)
def test_a_key_that_is_not_a_pipe_s_to_set_is_ignored(key: str) -> None:
    types, notes = made({**ENTRY, key: "/etc/shadow"})
    assert types["gds-prod"] == made(ENTRY)[0]["gds-prod"]
    assert f"gds-prod.{key}: is not taken from a pipe (ignored)" in notes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("user_data", "/etc/shadow"), ("user_data", "../x"), ("user_data", "ftp://gds.example.org/x"), ("user_data", "file"),
        ("user_data", "http://127.0.0.1:631/"), ("user_data", "https://169.254.169.254/latest"), ("user_data", "http://[::1]/"),
        ("root_image", "/etc/shadow"), ("root_image", "http://10.0.0.1/x"), ("root_image", "docker://x/y"),
        ("root_image", "debian12"), ("root_image", "http://localhost/x"), ("root_image", "http://2130706433/x"),
        ("user_data_file_x", "/etc/shadow"), ("user_data_file_x", "..") , ("user_data_file_x", "key.pem"),
        ("user_data_file_X", "a"), ("user_data_option_A", "a"), ("user_data_option_a", "two\nlines"), ("user_data_option_a", "\x1b[2J"),
        ("heartbeat_file", "../x"), ("heartbeat_file", "a/b"), ("machine_model", "docker"), ("machine_model", "toaster"),
        ("max_processors", 0), ("max_processors", "many"), ("max_processors", 1.5), ("backoff_seconds", -1),
        ("backoff_seconds", "inf"), ("backoff_seconds", None), ("backoff_seconds", [600]), ("max_wallclock_seconds", 100),
        ("accounting_fqan", "no-slash"), ("min_processors", 9),
    ],
)  # fmt: skip
def test_a_type_with_a_wrong_value_is_left_out_and_its_neighbour_is_not(key: str, value: object) -> None:
    types, notes = made({**ENTRY, key: value}, {**ENTRY, "suffix": "b"})
    assert list(types) == ["gds-b"]
    assert [note for note in notes if note.startswith("gds-prod.") and note.endswith("(it is left out)")]


def test_what_the_site_says_itself_is_not_looked_at_in_the_document() -> None:
    pipe = Pipe(
        "gds", URL, 6.0, given=(("image", "sl6"), ("user_data", "/etc/ud"), ("proxy", (Path("/c"), Path("/k"))))
    )
    types, _ = made({**ENTRY, "root_image": "/etc/shadow", "user_data": "../x", "user_data_proxy": True}, pipe=pipe)
    one = types["gds-prod"]
    assert (one.image, one.user_data, one.proxy) == ("sl6", "/etc/ud", (Path("/c"), Path("/k")))


def test_files_are_named_only_where_the_site_has_a_folder_for_them() -> None:
    pipe = Pipe("gds", URL, 6.0, files=Path("/etc/gds"))
    types, _ = made({**ENTRY, "user_data": "ud", "user_data_file_cert": "cert.pem"}, pipe=pipe)
    assert types["gds-prod"].user_data == "/etc/gds/ud"
    assert types["gds-prod"].option_files == (("cert", Path("/etc/gds/cert.pem")),)
    assert made({**ENTRY, "user_data_file_cert": "../shadow"}, pipe=pipe)[0] == {}


def test_a_proxy_is_the_site_s_to_give() -> None:
    types, notes = made({**ENTRY, "user_data_proxy": True})
    assert types["gds-prod"].proxy == ()
    assert (
        "gds-prod.user_data_proxy: a proxy is the site's to give, by the keys proxy and legacy_proxy (ignored)" in notes
    )


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("container_command", "/x", "container"), ("tmp_binds", "/x", "container"), ("cvmfs_repositories", "x", "itself"),
        ("root_device", "hda", "vda"), ("scratch_device", "hdb", "one disk"), ("image_signing_dn", "/CN=x", "--signer"),
        ("legacy_proxy", True, "legacy_proxy"), ("disk_gb_per_processor", 0, "as the image"),
    ],
)  # fmt: skip
def test_a_word_without_a_meaning_here_is_ignored_with_the_reason(word: str, value: object, why: str) -> None:
    types, notes = made({**ENTRY, word: value})
    assert list(types) == ["gds-prod"] and types["gds-prod"].legacy_proxy is False
    assert any(note.startswith(f"gds-prod.{word}: ") and why in note and note.endswith("(ignored)") for note in notes)


@pytest.mark.parametrize("suffix", [None, "", "A", "a_b", "../x", "a" * 42, 7, "-a", ["a"]])
def test_an_entry_without_a_name_is_left_out(suffix: object) -> None:
    types, notes = made({**ENTRY, "suffix": suffix}, {**ENTRY, "suffix": "b"})
    assert list(types) == ["gds-b"] and any("no suffix" in note for note in notes)


def test_of_two_of_one_name_the_first_counts() -> None:
    types, notes = made(ENTRY, {**ENTRY, "backoff_seconds": 1})
    assert types["gds-prod"].backoff == 900.0 and types["gds-prod"].share == 6.0
    assert notes[0] == "machinetypes[1]: prod is there twice (the first one counts)"


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://cern.ch/x", True), ("https://a.b-c.example.org:8443/x", True), ("http://8.8.8.8/", True),
        ("http://10.1.2.3/", False), ("http://0x7f.1/", False), ("http://127.1/", False), ("http://intranet/", False),
        ("http://a.localhost/", False), ("http://printer.local/", False), ("http://[fe80::1]/", False), ("http://[x/", False),
        ("http://192.0.2.7/", False), ("http://user@127.0.0.1/", False),
    ],
)  # fmt: skip
def test_a_document_names_no_address_that_only_this_host_reaches(url: str, may: bool) -> None:
    assert may_name(url, URL) is may


def test_a_document_may_name_the_host_it_came_from() -> None:
    assert may_name("http://127.0.0.1:8000/ud", "http://127.0.0.1:9000/pipe.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8), lambda one: st.lists(one) | st.dictionaries(st.text(max_size=8), one), max_leaves=10
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from([*ENTRY, "user_data_file_a", "x"]), JSON) | JSON, max_size=5))
def test_no_document_makes_it_fail_or_gives_more_than_the_pipe_s_share(entries: list[Any]) -> None:
    types = machinetypes(PIPE, {"machinetypes": entries}, SPACE, [])
    assert sum(one.share for one in types) <= 6.0 + 1e-9
    assert all(one.name.startswith("gds-") for one in types)


# -- documents and their copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"7", b"[]", b"{}", b'{"machinetypes": {}}', b'{"machinetypes": [NaN]}', b'{"machinetypes": [], "machinetypes": []}',
        b'{"machinetypes": [\xff]}', b"[" * 100_000, b'{"machinetypes": [' + b"{}," * 200 + b"{}]}", b"<html>login</html>",
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_document(data)


class Origin:
    """A server, as `refresh` sees it."""

    def __init__(self) -> None:
        self.document: dict[str, Any] | bytes | None = document(ENTRY, cache_seconds=600)
        self.asked = 0

    def __call__(self, url: str, largest: int) -> bytes:
        self.asked += 1
        assert (url, largest) == (URL, LARGEST)
        if self.document is None:
            raise DownloadFailed(f"{url}: no route to host")
        return self.document if isinstance(self.document, bytes) else json.dumps(self.document).encode()


def test_a_copy_is_used_until_it_expires(tmp_path: Path) -> None:
    origin = Origin()
    assert refresh(PIPE, tmp_path, NOW, origin).document == origin.document
    assert refresh(PIPE, tmp_path, NOW + 599, origin).age(NOW + 599) == 599
    assert origin.asked == 1
    assert refresh(PIPE, tmp_path, NOW + 600, origin).fetched == NOW + 600
    assert origin.asked == 2


@pytest.mark.parametrize("broken", [None, b"<html>", b'{"machinetypes": 3}'])
def test_a_stale_copy_is_used_when_a_refresh_fails_and_its_age_is_told(tmp_path: Path, broken: bytes | None) -> None:
    origin = Origin()
    first = refresh(PIPE, tmp_path, NOW, origin)
    origin.document = broken
    copy = refresh(PIPE, tmp_path, NOW + 700, origin)
    assert copy.document == first.document
    assert copy.told("pipe gds", NOW + 700).startswith("pipe gds: https://gds.example.org/pipe.json: ")
    assert copy.told("pipe gds", NOW + 700).endswith("; a copy of 700 s ago is used")
    space, _ = with_pipes(Space("v", "f", pipes=(PIPE,)), {"gds": copy})
    assert [one.name for one in space.types] == ["gds-prod"]


def test_after_a_failure_it_is_not_asked_at_once_again(tmp_path: Path) -> None:
    origin = Origin()
    origin.document = None
    copy = refresh(PIPE, tmp_path, NOW, origin)
    assert copy.document is None and copy.told("pipe gds", NOW).endswith("; there is no copy of it")
    refresh(PIPE, tmp_path, NOW + RETRY - 1, origin)
    assert origin.asked == 1
    origin.document = document(ENTRY)
    assert refresh(PIPE, tmp_path, NOW + RETRY, origin).told("pipe gds", NOW + RETRY) == ""


def test_a_clock_that_was_set_back_does_not_keep_an_old_copy(tmp_path: Path) -> None:
    origin = Origin()
    refresh(PIPE, tmp_path, NOW + 1e6, origin)
    refresh(PIPE, tmp_path, NOW, origin)
    assert origin.asked == 2


def test_a_copy_of_another_address_or_a_damaged_one_is_none(tmp_path: Path) -> None:
    refresh(PIPE, tmp_path, NOW, Origin())
    assert kept(PIPE, tmp_path).fetched == NOW
    assert kept(Pipe("gds", "https://other.example.org/"), tmp_path) == Copy()
    for damage in (b"", b"{", b'{"url": "%s"}' % URL.encode(), b"[]"):
        (tmp_path / "gds.json").write_bytes(damage)
        assert kept(PIPE, tmp_path) == Copy()


@pytest.mark.parametrize(("said", "lasts"), [(1, 60), ("7200", 7200), (1e12, 7 * 86400), ("soon", 3600), (None, 3600)])
def test_cache_seconds_are_kept_within_reason(tmp_path: Path, said: object, lasts: float) -> None:
    copy = Copy(document(cache_seconds=said), NOW, NOW)
    assert [copy.is_due(NOW + age, lasting(copy.document)) for age in (lasts - 1, lasts)] == [False, True]


def test_a_type_of_the_site_s_own_stays_while_its_pipe_is_silent() -> None:
    own = MachineType("gds-prod", image="sl6")
    space = Space("v", "f", types=(own, MachineType("x", image="y")), pipes=(PIPE,))
    assert with_pipes(space, {})[0].types == space.types
    names = {one.name: one.pipe for one in with_pipes(space, {"gds": Copy(document(ENTRY), NOW, NOW)})[0].types}
    assert names == {"gds-prod": "gds", "x": ""}


def test_over_http_with_a_size_cap_and_redirects(tmp_path: Path) -> None:
    with serving() as server:
        url = server.put("/pipe.json", json.dumps(document(ENTRY)).encode())
        pipe = Pipe("gds", server.put("/moved", redirect=url), 6.0)
        assert refresh(pipe, tmp_path, NOW).document == document(ENTRY)
        server.put("/moved", b"x" * (LARGEST + 1))
        copy = refresh(pipe, tmp_path, NOW + 3600)
        assert copy.document == document(ENTRY) and "1048576 bytes" in copy.problem
        server.put("/moved", status=500)
        assert "500" in refresh(pipe, tmp_path, NOW + 3600 + RETRY).problem
        with pytest.raises(DownloadFailed):
            fetch(server.address.replace("http:", "gopher:") + "/x", LARGEST)


@pytest.mark.parametrize("key", ["image", "user_data"])
def test_what_a_document_names_is_fetched_from_public_hosts_only(key: str) -> None:
    url, own = "https://images.example.org/a.img", "https://gds.example.org/u"
    one = replace(MachineType("gds-a", image="b", pipe="gds"), **{key: url})
    assert strange_addresses(one, Space("v", "f", pipes=(PIPE,))) == {url}
    said = replace(PIPE, own=(("gds-a", ((key, url),)),))
    assert strange_addresses(one, Space("v", "f", pipes=(said,))) == set()  # the site says so itself
    assert strange_addresses(replace(one, pipe=""), Space("v", "f", pipes=(PIPE,))) == set()
    one = replace(one, **{key: own})
    assert strange_addresses(one, Space("v", "f", pipes=(PIPE,))) == {own}  # also where the document came from
    assert strange_addresses(one, Space("v", "f", pipes=(replace(PIPE, inside=True),))) == set()
    assert strange_addresses(replace(one, **{key: "debian12"}), Space("v", "f", pipes=(PIPE,))) == set()


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the name server says of *.example.org, the last first; then it is this host. 127.0.0.2 counts as public."""
    answers: list[str] = []

    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        address = host if not host.endswith(".example.org") else answers.pop() if answers else "127.0.0.1"
        return [(0, 0, 0, "", (address, port))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("belljar.image.intake.fetch.is_public", lambda address: address == "127.0.0.2")
    return answers


def test_a_pipe_s_name_that_turns_leads_nowhere_inside(tmp_path: Path, turning: list[str]) -> None:
    """Its owner's answers of the name server are judged at each connection: of the document, of a template, of an image."""
    disk = b"\0" * 510 + b"\x55\xaa" + b"\0" * 4096 + b"data" * 1024
    with serving("127.0.0.2") as outside, serving("127.0.0.1", int(outside.address.rpartition(":")[2])) as inside:
        for server in (outside, inside):
            server.put("/pipe.json", json.dumps(document(ENTRY)).encode())
            server.put("/template", b"a template")
            server.put("/disk", disk)
        at = f"http://pipe.example.org:{outside.address.rpartition(':')[2]}"
        pipe = Pipe("gds", f"{at}/pipe.json", 6.0)
        space = Space("v", "f", types=(), pipes=(pipe,))
        one = MachineType("gds-a", image=f"{at}/disk", pipe="gds", user_data=f"{at}/template")
        order = Living("gds-a", 1, NOW + 3600, 64 << 20, 0, id="0123456789ab")
        request = request_for(space, one, order, b"", NOW)
        store = Images(tmp_path / "store", None, Settings(reserve=0))

        def fetch_all(now: float) -> list[str]:
            problems = [refresh(pipe, tmp_path, now).problem]
            for act in (
                lambda: make_user_data(space, one, "0123456789ab", NOW, NOW + 1),
                lambda: store.ensure(request.machine.image, public_only=request.machine.public_image, now=NOW),
            ):
                try:
                    act()
                except BelljarError as exc:
                    problems.append(exc.message)
            return problems

        refusals = fetch_all(NOW)
        assert len(refusals) == 3 and all("leads to 127.0.0.1, which is an address of" in text for text in refusals)
        # Public for the document, the template and the image's version, and this host's for the image itself.
        turning += ["127.0.0.1", *["127.0.0.2"] * 3]
        document_s, image_s = fetch_all(NOW + RETRY)
        assert document_s == "" and "leads to 127.0.0.1" in image_s
        assert [path for path, *_ in outside.requests] == ["/pipe.json", "/template", "/disk"]
        assert inside.requests == []


def test_what_the_site_says_is_inside_may_be(tmp_path: Path, turning: list[str]) -> None:
    with serving() as server:
        port = server.put("/pipe.json", json.dumps(document(ENTRY)).encode()).rpartition(":")[2].partition("/")[0]
        server.put("/secret", b"of this host")
        at = f"http://pipe.example.org:{port}"
        pipe = Pipe("gds", f"{at}/pipe.json", 6.0, inside=True)
        one = MachineType("gds-a", image="b", pipe="gds", user_data=f"{at}/secret")
        assert refresh(pipe, tmp_path, NOW).document == document(ENTRY)
        space = Space("v", "f", types=(), pipes=(pipe,))
        assert make_user_data(space, one, "0123456789ab", NOW, NOW + 1) == b"of this host"
