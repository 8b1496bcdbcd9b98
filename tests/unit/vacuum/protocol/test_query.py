"""VacQuery: packets of the original are understood and answered with the fields it looks for; broken ones are refused.

`packets.json` was recorded from Vac 00.21.05 (VacQuery 0.3), 01.00.01 (0.4), 02.00.03 (01.02), 03.00.01post10 and 03.01+pre00 (both
01.03), run on loopback with made-up machines; `queries.json` has what these versions' daemons and commands ask. Only moments, cookies,
the space's and the kernel's name were changed. Vcycle and the draft of 2.0: by their documents.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.records import replace
from belljar.vacuum import FactoryStatus, MachineStatus, TypeStatus, is_abort
from belljar.vacuum.protocol.fields import LONGEST, Refused, Why
from belljar.vacuum.protocol.query import (
    LONGEST_QUERY,
    Kind,
    Snapshot,
    answer,
    bodies,
    cookie,
    query,
    read_query,
    read_reply,
    reply,
    site_of,
)

LONGEST_REPLY = 10240  # bytes; all that the original's clients read of one
SPACE, NOW, KEY = "vac02.batch.example.org", 1767268800.0, b"a secret of this space"
RECORDED: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "packets.json").read_text())
ASKED_BY_VAC: list[str] = json.loads((Path(__file__).parent / "queries.json").read_text())
MODERN = [name for name in RECORDED if name.endswith("01.03")]
KINDS = {"machine_status": Kind.MACHINES, "machinetype_status": Kind.MACHINETYPES, "factory_status": Kind.FACTORIES}
ASKED = "5be1" * 16
QUERIES = [  # as Vac 00.20 asked, with a method alone
    ({"vac_version": "Vac 00.20.01 -", "method": "machines"}, Kind.MACHINES),
    ({"method": "machinetypes"}, Kind.MACHINETYPES),
    ({"method": "factories", "message_type": None}, Kind.FACTORIES),
]
RUNNING = MachineStatus(
    "vf07.example.org", "vf07-00.example.org", "Running", "lhcb-prod", "1234", "vm-raw", 1767268000, 1767268010, 1767268790,
    4, 42, 87.5, 42.0, fqan="/lhcb/Role=pilot",
)  # fmt: skip
ENDED = replace(RUNNING, machine="vf07-01.example.org", state="Shut down", message="200 Done", message_time=1767268700)
LHCB = TypeStatus(
    "vf07.example.org", "lhcb-prod", 90.0, 2, 8.0, 1, "300 Nothing to do", 1767268100, "vf07-03.example.org", 1767268100,
    1767260000, 2.0, 2621440000, 86400, 8, fqan="/lhcb/Role=pilot/Capability=NULL",
)  # fmt: skip
OWN = FactoryStatus(
    "vf07.example.org", running_machines=3, running_processors=12.0, running_hs06=126.0, max_machines=16,
    max_processors=16, max_hs06=168.0, load_average=3.5, root_free_kb=1000, kernel="6.1.0", system="Debian 12",
)  # fmt: skip
SNAPSHOT = Snapshot(
    SPACE, "vf07.example.org", "EXAMPLE-T2", (RUNNING, ENDED, MachineStatus("", "vf07-02.example.org")), (LHCB,), OWN
)


def packet(message: Any) -> bytes:
    return json.dumps(message).encode()


def asked(**changes: Any) -> dict[str, Any]:
    return {"message_type": "machinetypes_query", "space": SPACE, "cookie": ASKED} | changes


def replies(kind: Kind, snapshot: Snapshot, cookie: Any, now: float, key: bytes = b"") -> list[bytes]:
    return [answer(one, cookie, now, key) for one in bodies(kind, snapshot, now)]


def told(kind: Kind, **facts: Any) -> list[dict[str, Any]]:
    return [json.loads(one) for one in replies(kind, replace(SNAPSHOT, **facts), ASKED, NOW)]


def refusal(data: bytes, key: bytes = b"", **options: bool) -> Why:
    with pytest.raises(Refused) as refused:
        read_query(data, SPACE, NOW, key, **options)
    return refused.value.why


# -- queries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "kind"), QUERIES)
def test_queries_of_every_version_are_understood(message: dict[str, Any], kind: Kind) -> None:
    found = read_query(packet(message | {"space": SPACE, "cookie": ASKED}), SPACE, NOW)
    assert (found.kind, found.cookie) == (kind, ASKED)


@pytest.mark.parametrize("text", ASKED_BY_VAC)
def test_what_vac_asks_is_answered_with_what_it_looks_for(text: str) -> None:
    found = read_query(text.encode(), SPACE, NOW)
    assert found.kind is {one.question: one for one in Kind}[json.loads(text)["message_type"]] and found.cookie == ASKED
    for one in replies(found.kind, SNAPSHOT, found.cookie, NOW):
        assert json.loads(one)["cookie"] == ASKED and len(one) <= LONGEST_REPLY


@pytest.mark.parametrize("value", ["x" * 800, {"a": [1, None, {"b": 2.5}]}, [], 0, None, "\u2028é\U0001f514"])
def test_a_cookie_of_any_kind_comes_back_as_it_was(value: Any) -> None:
    found = read_query(packet(asked(cookie=value)), SPACE, NOW)
    assert [json.loads(one)["cookie"] for one in replies(found.kind, SNAPSHOT, found.cookie, NOW)] == [value]


def test_our_query_has_what_any_version_looks_for_and_room_to_spare() -> None:
    for kind, (word, method) in {one: one.value[:2] for one in Kind}.items():
        data = query(kind, SPACE, ASKED, NOW, client="factory", key=KEY)
        message = json.loads(data)
        assert (message["message_type"], message["method"], message["cookie"]) == (word, method, ASKED)
        assert (message["space"], message["vacquery_version"]) == (SPACE, "VacQuery 01.03")
        assert len(data) < LONGEST_QUERY / 2
        assert read_query(data, SPACE, NOW).kind is kind


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"42", Why.NOT_JSON),
        (b"[]", Why.NOT_JSON),
        (b"null", Why.NOT_JSON),
        (b"", Why.NOT_JSON),
        (b"\x00" * 100, Why.NOT_JSON),
        (packet(asked()).decode().encode("utf-16"), Why.NOT_JSON),
        (packet(asked(cookie="x")).replace(b'"x"', b'"\xff\xfe"'), Why.NOT_JSON),
        (packet(asked(cookie="x")).replace(b'"x"', b"NaN"), Why.NOT_JSON),
        (packet(asked(cookie="half of a character: \ud800")), Why.NOT_JSON),
        (packet(asked(cookie="x")).replace(b'"x"', b"-Infinity"), Why.NOT_JSON),
        (packet(asked(cookie="x")).replace(b'"x"', b"1e999"), Why.NOT_JSON),
        (b'{"space":"other",' + packet(asked())[1:], Why.NOT_JSON),
        (packet(asked(cookie="x")).replace(b'"x"', b'{"a":1,"a":1}'), Why.NOT_JSON),
        (b"[" * 1024, Why.NOT_JSON),
        (packet(asked())[:-1], Why.NOT_JSON),
        (packet(asked(more="x" * 1024)), Why.TOO_LONG),
        (packet(asked(space="another")), Why.OTHER_SPACE),
        (packet(asked(space=[SPACE])), Why.OTHER_SPACE),
        (packet({"message_type": "machines_query"}), Why.OTHER_SPACE),
        (packet({"message_type": "machines_query", "space": SPACE}), Why.NO_COOKIE),
        (packet(asked(message_type="machine_status")), Why.UNKNOWN),
        (packet(asked(message_type=["machines_query"])), Why.UNKNOWN),
        (packet(asked(message_type="status", method="machines")), Why.UNKNOWN),
        (packet({"space": SPACE, "cookie": "1", "method": "status"}), Why.UNKNOWN),  # as Vac 0.14 asked
    ],
)
def test_a_broken_query_is_refused_with_its_reason(data: bytes, why: Why) -> None:
    assert refusal(data) is why


def test_a_query_of_1024_bytes_is_read_and_one_of_1025_is_not() -> None:
    fitting = asked(more="")
    fitting["more"] = "x" * (LONGEST_QUERY - len(packet(fitting)))
    assert len(packet(fitting)) == 1024
    assert read_query(packet(fitting), SPACE, NOW).cookie == ASKED
    assert refusal(packet(fitting | {"more": fitting["more"] + "x"})) is Why.TOO_LONG


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
NAMES = st.sampled_from(sorted({name for one in RECORDED.values() for message in one for name in message}))


@given(st.binary(max_size=1100) | JSON.map(packet))
def test_whatever_arrives_is_a_query_or_refused(data: bytes) -> None:
    assert isinstance(refusal(data), Why)


@given(st.dictionaries(NAMES | st.text(), JSON))
def test_a_query_with_any_other_fields_is_a_query_or_refused(more: dict[str, Any]) -> None:
    try:
        found = read_query(packet(more | asked()), SPACE, NOW, KEY)
    except Refused:
        return
    assert all(len(one) <= LONGEST_REPLY for one in replies(found.kind, SNAPSHOT, found.cookie, NOW, KEY))


@given(JSON.map(packet).filter(lambda data: len(data) < 800))
def test_whatever_the_cookie_an_answer_is_one_a_client_can_read(value: bytes) -> None:
    long = replace(LHCB, message="\x1b[31m" + "ü😀" * 10_000, machinetype="t" * 900, fqan="f" * 900)
    for one in replies(Kind.MACHINETYPES, replace(SNAPSHOT, types=(long,)), json.loads(value), NOW, KEY):
        assert len(one) <= LONGEST_REPLY


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", MODERN)
def test_our_answers_have_each_field_of_the_original_in_its_type(version: str) -> None:
    """Numbers are numbers: the original's own processors are 2.0 or 1. Clients of it stop with an error where a name is missing."""
    ours = {one["message_type"]: one for kind in Kind for one in told(kind)[:1]}
    for theirs in RECORDED[version]:
        mine = ours[theirs["message_type"]]
        assert theirs.keys() <= mine.keys()
        for name, value in theirs.items():
            if value is not None and mine[name] is not None:
                assert sort_of(mine[name]) is sort_of(value), name


def sort_of(value: Any) -> type:
    return float if isinstance(value, int | float) else type(value)


def test_old_names_are_sent_beside_the_new_ones() -> None:
    (machine, *_), (kind,), (own,) = (told(kind) for kind in Kind)
    assert machine["num_cpus"] == machine["num_processors"] == 4
    assert kind["running_cpus"] == kind["running_processors"] == 8.0
    assert kind["total_hs06"] == kind["running_hs06"] == 90.0
    assert own["running_cpus"] == own["running_processors"] == 12.0
    assert own["total_cpus"] == own["max_cpus"] == own["max_processors"] == 16
    assert own["total_machines"] == own["max_machines"] == 16
    assert own["vac_disk_avail_kb"] == own["daemon_disk_avail_kb"]
    assert own["vac_version"] == own["daemon_version"] != ""


def test_there_is_an_answer_for_each_slot_and_an_empty_one_is_all_null() -> None:
    messages = told(Kind.MACHINES)
    assert [one["num_machines"] for one in messages] == [3, 3, 3]
    empty = messages[2]
    assert (empty["state"], empty["num_processors"]) == ("Shut down", 0)
    nulls = "machinetype uuid machine_model created_time started_time heartbeat_time shutdown_message shutdown_time"
    assert all(empty[name] is None for name in nulls.split())


def test_a_machine_that_starts_has_the_moments_the_original_counts_from() -> None:
    """It computes with null and stops with an error otherwise."""
    bare = replace(RUNNING, created=None, started=None)
    running, starting, ended = told(
        Kind.MACHINES, machines=(bare, replace(bare, state="Starting"), replace(bare, state="Shut down"))
    )
    assert (running["created_time"], running["started_time"]) == (NOW, NOW)
    assert (starting["created_time"], starting["started_time"]) == (NOW, None)
    assert (ended["created_time"], ended["started_time"]) == (None, None)


def test_an_answer_as_the_reference_shows_it() -> None:
    (one,) = told(Kind.MACHINETYPES)
    assert one | {"daemon_version": "", "vac_version": ""} == {
        "message_type": "machinetype_status", "daemon_version": "", "vac_version": "", "vacquery_version": "VacQuery 01.03",
        "cookie": ASKED, "space": SPACE, "site": "EXAMPLE-T2", "factory": "vf07.example.org", "time_sent": 1767268800,
        "num_machinetypes": 1, "machinetype": "lhcb-prod", "bytes_per_processor": 2621440000, "running_hs06": 90.0,
        "total_hs06": 90.0, "running_machines": 2, "total_machines": 2, "running_processors": 8.0, "running_cpus": 8.0,
        "num_before_fizzle": 1, "max_wallclock_seconds": 86400, "max_processors": 8, "shutdown_message": "300 Nothing to do",
        "shutdown_time": 1767268100, "shutdown_machine": "vf07-03.example.org", "last_abort_time": 1767268100,
        "proved_time": 1767260000, "room_processors": 2.0, "fqan": "/lhcb/Role=pilot/Capability=NULL",
    }  # fmt: skip


def test_answers_fit_into_a_frame() -> None:
    for kind in Kind:
        assert max(map(len, replies(kind, SNAPSHOT, ASKED, NOW, KEY))) < 1472


def test_a_site_without_a_name_is_the_space_without_its_first_label() -> None:
    assert (site_of("vac02.batch.example.org"), site_of("vac02")) == ("batch.example.org", "vac02")
    assert told(Kind.FACTORIES, site="")[0]["site"] == "batch.example.org"


def test_a_machines_own_words_are_one_short_line_of_ascii() -> None:
    evil = replace(LHCB, message="300 \x1b[2Jgone \u202e\x9b31m\x07 ü\nsecond line" + "x" * 20_000)
    (one,) = told(Kind.MACHINETYPES, types=(evil,))
    assert one["shutdown_message"] == "300 ?[2Jgone ??31m? ?"
    assert (
        len(told(Kind.MACHINETYPES, types=(replace(LHCB, message="300 " + "x" * 20_000),))[0]["shutdown_message"])
        == LONGEST
    )


# -- answers of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", RECORDED)
def test_answers_of_the_original_are_understood(version: str) -> None:
    for message in RECORDED[version]:
        kind = KINDS[message["message_type"]]
        back, status = read_reply(packet(message), kind, SPACE, NOW)
        assert (back, status.factory) == (ASKED, message["factory"])
        if isinstance(status, MachineStatus):
            assert (status.machine, status.state, status.of) == (message["machine"], message["state"], 4)
            assert status.message == message["shutdown_message"]
            assert status.processors == message.get("num_processors", 1 if message["machinetype"] else 0)
        elif isinstance(status, TypeStatus):
            assert (status.machinetype, status.of) == (message["machinetype"], 3)
            assert status.running_hs06 == message["total_hs06" if version.endswith("0.3") else "running_hs06"]
            assert (
                status.running_machines == message["total_machines" if version.endswith("0.3") else "running_machines"]
            )
            assert status.young == message["num_before_fizzle"]
            assert is_abort(status.message) is (message["shutdown_message"] == "300 Nothing to do")
        else:
            assert isinstance(status, FactoryStatus)
            assert (status.running_machines, status.running_processors, status.max_processors) == (2, 3, 4)
            assert (status.version, status.site) == (message["vac_version"], message["site"])
            assert status.daemon_free_kb == message["vac_disk_avail_kb"]


def test_what_we_tell_is_what_is_understood() -> None:
    for kind, sent in (
        (Kind.MACHINES, RUNNING),
        (Kind.MACHINES, ENDED),
        (Kind.MACHINETYPES, LHCB),
        (Kind.FACTORIES, OWN),
    ):
        back, found = read_reply(reply(sent, SNAPSHOT, ASKED, NOW, KEY), kind, SPACE, NOW, KEY, signed_only=True)
        facts = {"time_sent": int(NOW)}
        facts |= {"of": 3} if kind is Kind.MACHINES else {}
        facts |= {"site": "EXAMPLE-T2", "version": found.version} if isinstance(found, FactoryStatus) else {}
        assert (back, found) == (ASKED, replace(sent, **facts))


VCYCLE = {
    "daemon_version": "Vcycle 03.00 vcycled", "vacquery_version": "VacQuery 01.02", "cookie": "0", "space": SPACE,
    "site": "batch.example.org", "factory": "vcycle01.example.org", "time_sent": 1767268799,
}  # fmt: skip


def test_packets_of_vcycle_are_understood() -> None:
    """They have no `vac_version`, no message where there is none, and no HS06 where nobody measured."""
    kind = VCYCLE | {
        "message_type": "machinetype_status", "num_machinetypes": 2, "machinetype": "lhcb", "bytes_per_processor": 2147483648,
        "running_machines": 3, "running_processors": 12,
    }  # fmt: skip
    _, found = read_reply(packet(kind), Kind.MACHINETYPES, SPACE, NOW)
    assert found == TypeStatus(
        "vcycle01.example.org", "lhcb", 12.0, 3, 12, memory=2147483648, of=2, time_sent=1767268799
    )
    machine = VCYCLE | {
        "message_type": "machine_status", "num_machines": 1, "machine": "vcycle-lhcb-abcdefghij", "state": "Deleting",
        "uuid": None, "created_time": 1767260000, "started_time": None, "heartbeat_time": None, "num_processors": 4,
        "cpu_seconds": 0, "cpu_percentage": 100.0, "machinetype": "lhcb",
    }  # fmt: skip
    _, found = read_reply(packet(machine), Kind.MACHINES, SPACE, NOW)
    assert isinstance(found, MachineStatus)
    assert (found.state, found.hs06, found.message, found.of) == ("Deleting", 4.0, None, 1)
    own = VCYCLE | {"message_type": "factory_status", "running_processors": 12, "running_machines": 3, "max_processors": None, "max_machines": None}  # fmt: skip
    _, found = read_reply(packet(own), Kind.FACTORIES, SPACE, NOW)
    assert isinstance(found, FactoryStatus)
    assert (found.max_processors, found.version) == (0, "Vcycle 03.00 vcycled")


def test_names_of_the_draft_alone_and_of_the_first_versions_alone_are_understood() -> None:
    draft = {
        "message_type": "machinetype_status", "daemon_version": "Other 2", "vacquery_version": "VacQuery 02.00", "cookie": ASKED,
        "space": SPACE, "factory": "f1.example.org", "num_machinetypes": 1, "machinetype": "atlas", "running_hs06": 21.0,
        "running_machines": 2, "running_processors": 2, "num_before_fizzle": 0, "site": "S", "fqan": "/atlas",
    }  # fmt: skip
    assert read_reply(packet(draft), Kind.MACHINETYPES, SPACE, NOW)[1] == TypeStatus(
        "f1.example.org", "atlas", 21.0, 2, 2, fqan="/atlas"
    )
    first = {
        "method": "machinetype", "vac_version": "Vac 0.19.0", "cookie": ASKED, "space": SPACE, "factory": "f1.example.org",
        "num_vmtypes": 2, "vmtype": "atlas", "total_hs06": 21.0, "num_before_fizzle": 1, "shutdown_message": "600 x",
        "shutdown_time": 1767268000, "shutdown_machine": "m",
    }  # fmt: skip
    assert read_reply(packet(first), Kind.MACHINETYPES, SPACE, NOW)[1] == TypeStatus(
        "f1.example.org", "atlas", 21.0, young=1, message="600 x", message_time=1767268000, message_machine="m", of=2
    )


GOOD = next(one for one in RECORDED[MODERN[0]] if one["message_type"] == "machinetype_status")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running_hs06", "90"),
        ("running_hs06", True),
        ("running_hs06", -1.0),
        ("running_hs06", [90]),
        ("running_hs06", 10**400),
        ("num_before_fizzle", {}),
        ("num_machinetypes", "3"),
        ("num_machinetypes", None),
        ("machinetype", ["atlas"]),
        ("machinetype", ""),
        ("machinetype", "x" * 256),
        ("machinetype", "a\x1b[31m"),
        ("factory", 7),
        ("factory", None),
        ("shutdown_message", 300),
        ("shutdown_time", "yesterday"),
        ("time_sent", []),
    ],
)
def test_a_value_of_a_wrong_type_or_size_refuses_the_answer(name: str, value: Any) -> None:
    with pytest.raises(Refused) as refused:
        read_reply(packet(GOOD | {name: value}), Kind.MACHINETYPES, SPACE, NOW)
    assert refused.value.why is Why.BAD_FIELD


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"running_processors": 2.5, "running_cpus": 2}, "running_processors", 2.5),
        ({"running_processors": None, "running_cpus": 3}, "running_processors", 3),
        ({"num_before_fizzle": None}, "young", 0),
        ({"running_machines": 2.0}, "running_machines", 2),
        ({"shutdown_message": None, "shutdown_time": None}, "message", None),
        ({"num_machinetypes": 10**9}, "of", 10_000),
        ({"shutdown_time": 1767268800 + 10**6}, "message_time", 1767268800),
        ({"last_abort_time": 10**12}, "last_abort", 1767268800),
        ({"shutdown_message": "300 \x1b[2J\x9b1m"}, "message", "300 ?[2J?1m"),
        ({"shutdown_message": "300 " + "x" * 20_000}, "message", "300 " + "x" * 196),
        ({"shutdown_message": "300 no work\nrm -rf"}, "message", "300 no work"),
    ],
)
def test_what_may_be_odd_is_taken(changes: dict[str, Any], attribute: str, value: Any) -> None:
    _, found = read_reply(packet(GOOD | changes), Kind.MACHINETYPES, SPACE, NOW)
    assert getattr(found, attribute) == value


def test_an_answer_that_tells_no_use_at_all_is_refused() -> None:
    left = {
        name: value for name, value in GOOD.items() if not name.startswith(("running_hs06", "running_p", "running_c"))
    }
    with pytest.raises(Refused):
        read_reply(packet(left), Kind.MACHINETYPES, SPACE, NOW)


def test_a_cut_answer_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        read_reply(packet(GOOD | {"shutdown_message": "300 " + "x" * 20_000})[:10240], Kind.MACHINETYPES, SPACE, NOW)
    assert refused.value.why is Why.NOT_JSON


@given(st.sampled_from(list(Kind)), st.sampled_from([one for all in RECORDED.values() for one in all]), NAMES, JSON)
def test_an_answer_with_any_value_in_any_field_is_clean_or_refused(
    kind: Kind, message: dict[str, Any], name: str, value: Any
) -> None:
    try:
        _, found = read_reply(packet(message | {name: value}), kind, SPACE, NOW)
    except Refused:
        return
    texts = [one for one in vars(found).values() if isinstance(one, str)]
    assert all(one.isprintable() and len(one) <= 255 for one in texts)


# -- cookies and signatures --------------------------------------------------------------------------------------------


def test_a_cookie_is_of_one_factory_and_one_salt() -> None:
    import hashlib

    assert cookie("salt", "f1") == hashlib.sha256(b"saltf1").hexdigest()
    assert len({cookie(salt, factory) for salt in ("s", "t") for factory in ("f", "g")}) == 4


def test_a_signed_query_is_taken_signed_or_not_but_where_only_signed_ones_are() -> None:
    signed, plain = (query(Kind.MACHINES, SPACE, ASKED, NOW, client="x", key=key) for key in (KEY, b""))
    for data in (signed, plain):
        assert read_query(data, SPACE, NOW).kind is Kind.MACHINES
        assert read_query(data, SPACE, NOW, KEY).kind is Kind.MACHINES
    assert read_query(signed, SPACE, NOW, KEY, signed_only=True).kind is Kind.MACHINES
    assert refusal(plain, KEY, signed_only=True) is Why.UNSIGNED
    assert refusal(signed, b"another", signed_only=False) is Why.FORGED


def test_a_signature_holds_for_the_whole_message_however_it_is_written() -> None:
    message = json.loads(query(Kind.MACHINES, SPACE, ASKED, NOW, client="x", key=KEY))
    mixed = dict(reversed(message.items()))
    assert read_query(json.dumps(mixed, indent=2).encode(), SPACE, NOW, KEY, signed_only=True)
    assert refusal(packet(message | {"message_type": "factory_query"}), KEY) is Why.FORGED
    assert refusal(packet(message | {"more": 1}), KEY) is Why.FORGED
    assert refusal(packet(message | {"hmac": 5}), KEY) is Why.FORGED
    assert refusal(packet(message | {"hmac": "é\u2028"}), KEY) is Why.FORGED


def test_a_signed_query_grows_stale() -> None:
    for moment, is_stale in ((NOW - 301, True), (NOW - 299, False), (NOW + 299, False), (NOW + 301, True)):
        data = query(Kind.MACHINES, SPACE, ASKED, moment, client="x", key=KEY)
        assert (refusal(data, KEY) is Why.STALE) if is_stale else read_query(data, SPACE, NOW, KEY)


def test_a_forged_answer_is_refused() -> None:
    data = reply(LHCB, SNAPSHOT, ASKED, NOW, KEY)
    with pytest.raises(Refused) as refused:
        read_reply(data.replace(b'"running_hs06":90.0', b'"running_hs06":0.0'), Kind.MACHINETYPES, SPACE, NOW, KEY)
    assert refused.value.why is Why.FORGED
    assert read_reply(data, Kind.MACHINETYPES, SPACE, NOW)[0] == ASKED  # who has no key does not look
