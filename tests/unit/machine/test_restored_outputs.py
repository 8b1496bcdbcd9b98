"""Where the files go that a machine brings out which goes on from a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

from belljar.machine.checkpoints import Checkpoint
from belljar.model import Account, MachineSpec, Payload, Request, RunPayload, Transfer

ALICE = Account("alice", 1000, 1000, "alice")


def asked(id: str, *outputs: Transfer) -> Request:
    return Request(id, MachineSpec("debian12", 1, 1 << 30), RunPayload(Payload((b"x",), ALICE, outputs=outputs)))


def test_a_directory_that_has_another_name_now_is_where_they_go() -> None:
    """HTCondor gives each start of a job a directory of its own; in the guest the first one's name stays."""
    before = asked("1" * 12, Transfer("/execute/dir_1", "/execute/dir_1", ("stdout",), changed_only=True))
    now = asked("2" * 12, Transfer("/execute/dir_2", "/execute/dir_2", ("_condor_stdout",), changed_only=True))
    checkpoint = SimpleNamespace(request=before, spec=SimpleNamespace(image_digest="sha256:1"))
    request = Checkpoint.asked(checkpoint, now)  # type: ignore[arg-type]
    assert request.id == now.id and isinstance(request.work, RunPayload)
    (output,) = request.work.payload.outputs
    assert output == Transfer("/execute/dir_2", "/execute/dir_1", ("_condor_stdout",), changed_only=True)
