"""Usage records from the ledger to the archive, the outgoing queue and the logs: each machine once, whatever is killed.

A record's name comes from its machine, so a second pass makes the same files. The order of its three steps tells how far the
first one came: it is *staged* (a file that is to be sent), *archived* (it counts from now on), and the staged file is moved to
the queue. One that is archived and no longer staged was sent. One pass at a time: a lock."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from belljar.accounting import CloudRecord, Settings, UsageRecord, word
from belljar.accounting.apel import blah_file, blah_line, cloud, message, name_of, pbs_file, pbs_line, sync, sync_name
from belljar.errors import PositionLost
from belljar.host.files import append_line, private_folder, read_capped, write_whole
from belljar.host.files import sync as sync_names
from belljar.host.locks import locked
from belljar.host.values import amount
from belljar.journal import Ledger
from belljar.model import Outcome
from belljar.records import dataclass, replace

POSITION, LOCK = "position", "lock"
LARGEST_RECORD = 1 << 14
REPORTABLE = "ServiceLevel"  # the key that only records have that were to be sent
PATIENCE = 60.0  # seconds for another pass to end
BEGAN = "run"  # the phase that a guest at work has
# Label, and its name in a record; the first that is there counts.
BENCHMARKS = (("hepscore", "HEPscore23"), ("hs06", "HEPSPEC"))


@dataclass(frozen=True)
class Pass:
    """What one pass did."""

    rows: int  # that were looked at
    archived: int
    queued: int
    unreported: int  # archived only: no site name, or nobody measured the processors


class Publisher:
    """The files of one accounting folder."""

    def __init__(self, settings: Settings, step: Callable[[str], None] = lambda name: None) -> None:
        """*step* is called with the name of each step before it is done; tests end there."""
        self._settings, self._step = settings, step
        self.folder = settings.folder

    def publish(self, ledger: Ledger, *, from_start: bool = False) -> Pass:
        """Account every row behind the last position; with *from_start* behind none: what was accounted is not accounted again.
        Raises PositionLost, NoSpace."""
        rows = archived = queued = unreported = 0
        with self._locked():
            logs = dict[Path, bytes]()
            for row, position in self._rows(ledger, from_start):
                rows += 1
                if (record := record_of(row)) is not None:
                    text = message(record, self._settings.version)
                    is_new, is_sent = self._keep(name_of(record), text, record.is_reportable)
                    archived, queued = archived + is_new, queued + is_sent
                    unreported += is_new and not record.is_reportable
                    if self._settings.logs:
                        self._step("log")
                        _log(self.folder / "logs", record, logs)
                self._step("position")
                write_whole(self.folder / POSITION, position.encode(), durable=True)
        return Pass(rows, archived, queued, unreported)

    def publish_cloud(self, source: Callable[[str], Iterator[tuple[CloudRecord | None, str]]]) -> Pass:
        """Account leased machines that ended behind the last position, in `cloud/` with an archive and a queue of its own. *source*:
        from a position, each with the one behind it; None for a position alone."""
        rows = archived = queued = 0
        site, here = self._settings.site, Publisher(replace(self._settings, folder=self.folder / "cloud"), self._step)
        with here._locked():
            for record, position in source(here._position()):
                if record is not None:
                    is_new, is_sent = here._keep(name_of(record), cloud(record, site or "unknown"), bool(site))
                    rows, archived, queued = rows + 1, archived + is_new, queued + is_sent
                here._step("position")
                write_whole(here.folder / POSITION, position.encode(), durable=True)
        return Pass(rows, archived, queued, 0 if site else archived)

    def _position(self) -> str:
        with suppress(FileNotFoundError):
            return read_capped(self.folder / POSITION, 4096).decode()
        return ""

    def _rows(self, ledger: Ledger, from_start: bool) -> Iterator[tuple[dict[str, Any], str]]:
        try:
            yield from ledger.since("" if from_start else self._position())
        except PositionLost as exc:
            raise PositionLost(
                f"{self.folder / POSITION}: {exc.message}",
                hint="`belljar accounting publish --from-start` reads all of it. What is archived is not accounted again.",
            ) from exc

    def _keep(self, name: str, message: str, is_reportable: bool) -> tuple[bool, bool]:
        """Is it new in the archive; was it moved to the queue?"""
        text, kept = message.encode(), self.folder / "archive" / name
        is_new = not kept.exists()
        if is_new and is_reportable:
            self._step("stage")
            write_whole(self._staged(name), text, mode=0o644, durable=True)
        if is_new:
            self._step("archive")
            private_folder(kept.parent, mode=0o755)
            write_whole(kept, text, mode=0o644, durable=True)
        is_sent = self._staged(name).exists()
        if is_sent:
            self._step("queue")
            self._queue(name)
        return is_new, is_sent

    def _staged(self, name: str) -> Path:
        return self.folder / "staged" / name.replace("/", "-")

    def _queue(self, name: str, text: bytes | None = None) -> Path:
        """What is staged by this name, or this text."""
        if text is not None:
            write_whole(self._staged(name), text, mode=0o644, durable=True)
        place = self.folder / "outgoing" / name
        private_folder(place.parent, mode=0o755)
        os.rename(self._staged(name), place)
        sync_names(place.parent)
        sync_names(self._staged(name).parent)
        return place

    def count(self, month: str, now: float) -> list[Path]:
        """Queue messages that say how many records of this month (YYYYMM) were sent, one for each site and factory in it. Empty:
        there were none."""
        with self._locked():
            sent = [record for record in self.records(month) if REPORTABLE in record]
            counts = Counter((record.get("Site", ""), record.get("SubmitHost", "")) for record in sent)
            return [
                self._queue(sync_name(now + number / 1000), sync(*place, jobs, int(month[:4]), int(month[4:])).encode())
                for number, (place, jobs) in enumerate(sorted(counts.items()))
            ]

    def republish(self, month: str) -> int:
        """Queue again what was sent of a month (YYYYMM); receivers replace what they had. Returns how many there are."""
        with self._locked():
            paths = [path for path in self._archived(month) if REPORTABLE in _facts(path)]
            for path in paths:
                self._queue(f"{path.parent.name}/{path.name}", read_capped(path, LARGEST_RECORD))
        return len(paths)

    def records(self, month: str) -> list[dict[str, str]]:
        """The archived records of a month (YYYYMM), oldest first, by APEL's keys."""
        return [_facts(path) for path in self._archived(month)]

    def _archived(self, month: str) -> Iterator[Path]:
        for day in sorted((self.folder / "archive").glob(f"{month}[0-9][0-9]")):
            yield from sorted(path for path in day.iterdir() if not path.name.startswith("."))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        private_folder(self.folder, mode=0o755)
        for name in ("archive", "staged", "outgoing", "logs"):
            private_folder(self.folder / name, mode=0o755)
        with locked(self.folder / LOCK, timeout=PATIENCE, what="write usage records"):
            yield


def record_of(row: Mapping[str, Any]) -> UsageRecord | None:
    """The usage record of a row of the ledger; None for one that is not accounted, or not a machine's.

    A machine is accounted when its row has the labels `space`, `factory` and `machinetype`, its guest began to work, and it did not
    end within its type's fizzle time. Other labels: `site`, `fqan`, `hs06` or `hepscore` (of one processor), `fizzle`
    (seconds), `wall_limit` (seconds)."""
    try:
        outcome = Outcome.from_json(row)
    except ValueError:
        return None
    labels = {name: word(text) for name, text in outcome.labels}
    start, end = int(outcome.started), int(outcome.ended)
    is_counted = labels.get("space") and labels.get("factory") and labels.get("machinetype") and BEGAN in outcome.phases
    if not is_counted or end < start or end - start < amount(labels.get("fizzle")):
        return None
    measured = ((name, amount(labels.get(label))) for label, name in BENCHMARKS)
    benchmark, power = next((measure for measure in measured if measure[1] > 0), ("", 1.0))
    guest, host = outcome.guest, outcome.host
    return UsageRecord(
        outcome.id, labels["machinetype"], labels["space"], labels["factory"], start, end,
        cpu=round(guest.user + guest.system or host.user + host.system), processors=outcome.cpus, memory=outcome.memory,
        memory_used=host.peak_memory, site=labels.get("site", ""), fqan=labels.get("fqan", ""),
        benchmark=benchmark, power=power, wall_limit=int(amount(labels.get("wall_limit"))),
    )  # fmt: skip


def _log(folder: Path, record: UsageRecord, known: dict[Path, bytes]) -> None:
    """A line in each log, unless it is there. *known*: the logs that were read."""
    for name, line in ((pbs_file(record), pbs_line(record)), (blah_file(record), blah_line(record))):
        path = folder / name
        if path not in known:
            known[path] = _whole_lines(path) if path.exists() else b""
        if record.id.encode() not in known[path]:
            known[path] += append_line(path, line.encode(), mode=0o644, durable=True)


def _whole_lines(path: Path) -> bytes:
    """What is in the log. The part of a line that was being written in a power cut, or when the disk was full, is
    taken out of it."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole


def _facts(path: Path) -> dict[str, str]:
    """Key and value of each line of an archived record."""
    lines = read_capped(path, LARGEST_RECORD).decode("ascii", "replace").splitlines()
    return {key: value for key, _, value in (line.partition(": ") for line in lines[1:]) if value}
