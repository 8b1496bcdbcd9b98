"""Usage records: what a row of the ledger becomes, byte for byte, and that each machine is accounted once."""

import calendar
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.accounting import CloudRecord, Settings, UsageRecord, Version
from belljar.accounting.apel import blah_line, cloud, message, name_of, pbs_line, sync, sync_name
from belljar.accounting.publish import Publisher, record_of
from belljar.cli import parser_of
from belljar.cli.vacuum.accounting import DAY, month_of
from belljar.errors import BadOption, PositionLost
from belljar.journal import Ledger
from belljar.model import GIB, MIB
from belljar.records import replace

END = 1767268800.0
LABELS = {
    "space": "vac02.batch.example.org", "factory": "vf07.batch.example.org", "machinetype": "lhcb-prod", "site": "EXAMPLE-T2",
    "fqan": "/lhcb/Role=pilot/Capability=NULL", "hs06": "11.25", "slot": "3", "fizzle": "600", "wall_limit": "86400",
}  # fmt: skip


def row(id: str = "0123456789ab", end: float = END, wall: float = 43200, **changes: Any) -> dict[str, Any]:
    labels = {**LABELS, **changes.pop("labels", {})}
    return {
        "id": id, "cause": "finished", "class": "payload", "started": end - wall, "ended": end, "phases": {"run": wall - 5},
        "host": {"user": 158000.4, "system": 976.0, "peak_memory": 9 * GIB}, "guest": {"user": 0, "system": 0, "peak_memory": 0},
        "cpus": 4, "memory": 4 * 2500 * MIB, "labels": [[k, v] for k, v in labels.items() if v is not None], **changes,
    }  # fmt: skip


def record(**changes: Any) -> UsageRecord:
    made = record_of(row(**changes))
    assert made is not None
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": {"space": None}}, {"labels": {"machinetype": None}}, {"labels": {"factory": None}},
        {"wall": 599}, {"phases": {"boot": 3.0}}, {"ended": 5.0}, {"cause": "no such cause"}, {"id": 7},
    ],
    ids=["not of a space", "no type", "no factory", "fizzled", "never began", "ended before it began", "torn", "no id"],
)  # fmt: skip
def test_what_is_not_accounted(changes: dict[str, Any]) -> None:
    assert record_of(row(**changes)) is None


def test_a_record_as_apel_reads_it() -> None:
    assert message(record(), Version.V03) == (
        "APEL-individual-job-message: v0.3\n"
        "Site: EXAMPLE-T2\n"
        "SubmitHost: vac02.batch.example.org/belljar-vf07.batch.example.org\n"
        "LocalJobId: 0123456789ab\n"
        "LocalUserId: vf07.batch.example.org\n"
        "Queue: lhcb-prod\n"
        "GlobalUserName: /DC=org/DC=example/DC=batch/DC=vac02\n"
        "FQAN: /lhcb/Role=pilot/Capability=NULL\n"
        "WallDuration: 43200\n"
        "CpuDuration: 158976\n"
        "Processors: 4\n"
        "NodeCount: 1\n"
        "InfrastructureDescription: BELLJAR-VACUUM\n"
        "InfrastructureType: grid\n"
        "StartTime: 1767225600\n"
        "EndTime: 1767268800\n"
        "MemoryReal: 9437184\n"
        "MemoryVirtual: 10240000\n"
        "ServiceLevelType: HEPSPEC\n"
        "ServiceLevel: 11.25\n"
        "%%\n"
    )


def test_type_and_value_of_the_benchmark_are_one_field_in_version_04() -> None:
    text = message(record(labels={"hepscore": "20.5"}), Version.V04)
    assert "ServiceLevel: {HEPscore23: 20.5}\n" in text and "ServiceLevelType" not in text
    assert text.startswith("APEL-individual-job-message: v0.4\n")


def test_the_guests_own_times_are_taken_where_they_are_known() -> None:
    assert record(guest={"user": 100.0, "system": 1.4, "peak_memory": 5}).cpu == 101


def test_words_from_outside_cannot_make_lines_of_their_own() -> None:
    text = message(record(labels={"fqan": "/a\nSite: EVIL\x1b[1m", "machinetype": "a;b c"}), Version.V03)
    assert "FQAN: /a?Site: EVIL?[1m\n" in text and text.count("Site:") == 2 and "\nSite: EVIL" not in text
    assert message(record(labels={"fqan": "/a%%%"}), Version.V03).count("%%") == 1
    assert "user=a_b_c " in pbs_line(record(labels={"machinetype": "a;b c"}))
    assert blah_line(record(labels={"fqan": '/a" "userDN=x'})).count('"') == 16


@pytest.mark.parametrize(
    ("end", "id", "name"),
    [(END, "0123456789ab", "20260101/12000001234567"), (END + 0.000001, "ffffffffffff", "20260101/120000ffffffff")],
)
def test_names_in_the_queue_are_8_and_14_hexadecimal_digits(end: float, id: str, name: str) -> None:
    assert name_of(record(end=end, id=id)) == name
    assert [len(part) for part in name.split("/")] == [8, 14] and int(name.replace("/", ""), 16)


@pytest.mark.parametrize("moment", [END, END + 1e-9, END + 0.999999])
def test_names_of_counts_never_have_another_form(moment: float) -> None:
    folder, _, file = sync_name(moment).partition("/")
    assert (len(folder), len(file)) == (8, 14) and set(folder + file) <= set("0123456789abcdef")


def test_a_line_as_pbs_writes_it() -> None:
    line = pbs_line(record())
    head, kind, id, rest = line.split(";")
    facts = dict(one.split("=", 1) for one in rest.split())
    assert (kind, id, len(head)) == ("E", "0123456789ab", 19) and "\n" not in line
    assert facts["exec_host"] == "+".join(f"vf07.batch.example.org/{n}" for n in range(4))
    assert facts["resources_used.cput"] == "44:09:36" and facts["resources_used.walltime"] == "12:00:00"
    assert facts["resources_used.mem"] == "9437184kb" and facts["resources_used.vmem"] == "10240000kb"
    assert facts["Resource_List.walltime"] == "24:00:00" and facts["start"] == "1767225600"


def test_a_line_as_blah_writes_it() -> None:
    assert blah_line(record()) == (
        '"timestamp=2026-01-01 12:00:00" "userDN=/DC=org/DC=example/DC=batch/DC=vac02" '
        '"userFQAN=/lhcb/Role=pilot/Capability=NULL" "ceID=vac02.batch.example.org/belljar-vf07.batch.example.org" '
        '"jobID=0123456789ab" "lrmsID=0123456789ab" "clientID=0123456789ab" "localUser=99"'
    )


# -- files -----------------------------------------------------------------------------------------------------------------


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(folder=folder / "accounting", **{"logs": True, **changes})


def with_rows(folder: Path, *rows: dict[str, Any]) -> Ledger:
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    for one in rows:
        ledger.append(one, one["ended"])
    return ledger


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_machine_is_archived_queued_and_logged_once(tmp_path: Path) -> None:
    ledger = with_rows(
        tmp_path / "rows",
        row("aaaaaaaaaaaa"), row("bbbbbbbbbbbb", labels={"hs06": None}), row("cccccccccccc", wall=3), {**row("dd"), "labels": []},
    )  # fmt: skip
    ours = settings(tmp_path)
    first, second = Publisher(ours).publish(ledger), Publisher(ours).publish(ledger)
    assert (first.rows, first.archived, first.queued, first.unreported) == (4, 2, 1, 1)
    assert (second.rows, second.archived, second.queued) == (0, 0, 0)
    assert files(ours.folder / "archive") == ["20260101/120000aaaaaaaa", "20260101/120000bbbbbbbb"]
    assert files(ours.folder / "outgoing") == ["20260101/120000aaaaaaaa"] and files(ours.folder / "staged") == []
    logs = {path.name: path.read_text().count("\n") for path in (ours.folder / "logs").iterdir()}
    assert sorted(logs.values()) == [2, 2] and any(name.startswith("blahp.log-") for name in logs)


def test_a_line_of_a_log_that_was_cut_is_written_whole(tmp_path: Path) -> None:
    ledger, ours = with_rows(tmp_path / "rows", row("aaaaaaaaaaaa"), row("bbbbbbbbbbbb")), settings(tmp_path)
    Publisher(ours).publish(ledger)
    logs = sorted((ours.folder / "logs").iterdir())
    before = [path.read_bytes() for path in logs]
    for path in logs:
        os.truncate(path, path.stat().st_size - 5)
    (ours.folder / "position").unlink()
    Publisher(ours).publish(ledger)
    assert [path.read_bytes() for path in logs] == before and len(logs) == 2


def test_what_was_sent_is_not_queued_again(tmp_path: Path) -> None:
    ledger, ours = with_rows(tmp_path / "rows", row()), settings(tmp_path)
    Publisher(ours).publish(ledger)
    (ours.folder / "outgoing/20260101/12000001234567").unlink()  # as ssmsend does
    (ours.folder / "position").unlink()
    assert Publisher(ours).publish(ledger).queued == 0
    assert Publisher(ours).republish("202601") == 1 and files(ours.folder / "outgoing") == ["20260101/12000001234567"]


def test_a_ledger_that_was_cut_is_told_with_its_remedy(tmp_path: Path) -> None:
    ledger, ours = with_rows(tmp_path / "rows", row()), settings(tmp_path)
    Publisher(ours).publish(ledger)
    (tmp_path / "rows/ledger-2026-01.jsonl").write_bytes(b"")
    with pytest.raises(PositionLost, match="position") as caught:
        Publisher(ours).publish(ledger)
    assert "--from-start" in caught.value.hint
    ledger.append(row("eeeeeeeeeeee"), END)
    assert Publisher(ours).publish(ledger, from_start=True).archived == 1


def test_counts_are_of_what_was_sent_in_a_month(tmp_path: Path) -> None:
    other = {"factory": "vf08.batch.example.org"}
    ledger = with_rows(
        tmp_path / "rows",
        row("aaaaaaaaaaaa"), row("bbbbbbbbbbbb"), row("cccccccccccc", labels=other), row("dddddddddddd", labels={"site": None}),
        row("eeeeeeeeeeee", end=END + 40 * 86400),
    )  # fmt: skip
    ours = settings(tmp_path)
    publisher = Publisher(ours)
    publisher.publish(ledger)
    texts = [path.read_text() for path in publisher.count("202601", END + 0.5)]
    assert texts == [
        sync("EXAMPLE-T2", f"vac02.batch.example.org/belljar-vf0{n}.batch.example.org", jobs, 2026, 1)
        for n, jobs in ((7, 2), (8, 1))
    ]
    assert texts[0].splitlines()[3:6] == ["NumberOfJobs: 2", "Month: 1", "Year: 2026"]
    assert publisher.count("202512", END) == []
    assert [one["LocalJobId"] for one in publisher.records("202602")] == ["eeeeeeeeeeee"]


@pytest.mark.parametrize("month", ["202613", "2026", "2026-1", "../../x", ""])
def test_what_is_no_month_is_refused(month: str) -> None:
    for act in ("list", "sync", "republish"):
        with pytest.raises(BadOption, match="not a month"):
            parser_of("accounting").parse_args([act, month])


def test_the_month_of_a_moment() -> None:
    assert month_of(calendar.timegm((2026, 3, 1, 12, 0, 0)) - DAY) == "202602"


KILLED = """
import os, signal, sys
from pathlib import Path
from belljar.accounting import Settings
from belljar.accounting.publish import Publisher
from belljar.journal import Ledger
folder, wanted = Path(sys.argv[1]), int(sys.argv[2])
seen = 0
def step(name):
    global seen
    if seen == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
    seen += 1
Publisher(Settings(folder=folder / "accounting", logs=True), step).publish(Ledger(folder / "rows"))
print(seen)
"""


def test_each_machine_is_sent_once_wherever_it_is_killed(tmp_path: Path) -> None:
    """What is queued is taken away at once, as ssmsend may do at any moment."""
    at, ends = 0, False
    while not ends:
        folder = tmp_path / str(at)
        folder.mkdir()
        with_rows(folder / "rows", row("aaaaaaaaaaaa"), row("bbbbbbbbbbbb"))
        sent = []
        for wanted in (at, 10_000):
            done = subprocess.run(
                [sys.executable, "-c", KILLED, str(folder), str(wanted)], capture_output=True, text=True
            )
            ends = ends or (wanted == at and done.returncode == 0)
            for path in (folder / "accounting/outgoing").rglob("*"):
                if path.is_file():
                    sent.append(path.name)
                    path.unlink()
        assert sorted(sent) == ["120000aaaaaaaa", "120000bbbbbbbb"], f"killed before step {at}"
        assert all(path.read_text().count("\n") == 2 for path in (folder / "accounting/logs").iterdir())
        assert files(folder / "accounting/staged") == []
        at += 1
    assert at == 11  # five steps for each of the two, and a pass that nobody killed


# -- leases ------------------------------------------------------------------------------------------------------------

LEASED = CloudRecord(
    "i-0123456789abcdef0", "head.example.org", "ada", "physics", "debian12", int(END) - 90, int(END), 90, 4, 5 * GIB // 2,
    10 * GIB,
)  # fmt: skip


def test_a_cloud_record_as_apel_reads_it() -> None:
    assert cloud(LEASED, "EXAMPLE-T2") == (
        "APEL-cloud-message: v0.4\n"
        "VMUUID: i-0123456789abcdef0\n"
        "SiteName: EXAMPLE-T2\n"
        "CloudComputeService: head.example.org\n"
        "MachineName: i-0123456789abcdef0\n"
        "LocalUserId: ada\n"
        "LocalGroupId: physics\n"
        "Status: completed\n"
        "StartTime: 1767268710\n"
        "EndTime: 1767268800\n"
        "WallDuration: 90\n"
        "CpuCount: 4\n"
        "Memory: 2560\n"
        "Disk: 10\n"
        "ImageId: debian12\n"
        "CloudType: belljar\n"
        "%%\n"
    )
    assert name_of(LEASED) == "20260101/12000001234567"
    assert cloud(replace(LEASED, image="a\nSiteName: EVIL%%"), "X").count("\nSiteName") == 1


@pytest.mark.parametrize("last", ["", "stage", "archive", "queue", "position"])
def test_leased_machines_are_accounted_once_whatever_is_killed(tmp_path: Path, last: str) -> None:
    class Killed(Exception):
        pass

    def step(name: str) -> None:
        if name == last:
            raise Killed

    settings = Settings(folder=tmp_path, site="EXAMPLE-T2")
    other = replace(LEASED, id="i-fedcba9876543210f")

    def source(position: str) -> Iterator[tuple[CloudRecord | None, str]]:
        if position != "7":
            yield LEASED, position
            yield other, position
            yield None, "7"

    if last:
        with pytest.raises(Killed):
            Publisher(settings, step).publish_cloud(source)
    done = Publisher(settings).publish_cloud(source)
    assert Publisher(settings).publish_cloud(source).rows == 0
    sent = sorted(path.name for path in (tmp_path / "cloud/outgoing").rglob("*") if path.is_file())
    assert sent == ["12000001234567", "120000fedcba98"] and done.rows == 2
    assert not (tmp_path / "outgoing").exists()


def test_without_a_site_leased_machines_are_archived_and_not_sent(tmp_path: Path) -> None:
    done = Publisher(Settings(folder=tmp_path)).publish_cloud(lambda position: iter([(LEASED, "7")]))
    assert (done.archived, done.queued, done.unreported) == (1, 0, 1)
