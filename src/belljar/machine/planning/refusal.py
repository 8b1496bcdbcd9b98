"""The record of a request that never became a machine: it was refused, or this host could not even begin one."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from dataclasses import replace

from belljar.errors import BelljarError, about
from belljar.host.files import private_folder, write_whole
from belljar.journal import Ledger, Record
from belljar.machine import OUTCOME, REQUEST, Folders
from belljar.machine.states import class_of_error
from belljar.model import Outcome, dumps, to_json


def outcome_of(error: BelljarError) -> Outcome:
    """What came of a request that *error* ended before there was a machine. It has an id as every outcome has."""
    now, id = time.time(), os.urandom(6).hex()
    return Outcome(
        id=id, cause=error.cause, klass=class_of_error(error), reason=error.message, hint=about(error.hint, id),
        error=type(error).__name__, started=now, ended=now,
    )  # fmt: skip


def put_on_record(outcome: Outcome, requester: str, image: str, folders: Folders) -> Outcome:
    """Keep it where the records of machines are kept, so that whoever asks for the job finds it, and the node's own
    faults are counted. A host that cannot even write that has told so on the way."""
    outcome = replace(outcome, name=requester, image=image, requester=requester, uid=os.geteuid())
    request = {
        "id": outcome.id,
        "name": requester,
        "requester": requester,
        "created": outcome.started,
        "machine": {"image": image},
    }
    with suppress(OSError, BelljarError):
        private_folder(folders.logs)
        folder = private_folder(folders.ended(outcome.id))
        with closing(Record(folder)) as record:
            record.write("refused", requester=requester, reason=outcome.reason)
        write_whole(folder / REQUEST, dumps(request))
        write_whole(folder / OUTCOME, dumps(outcome))
        Ledger(folders.logs).append(to_json(outcome), time.time())
    return outcome
