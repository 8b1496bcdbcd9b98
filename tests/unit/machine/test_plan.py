"""Refusals before anything is made, and who QEMU runs as."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.errors import NoMemory, NotPermitted, OverLimit, UsageError
from belljar.image import Image
from belljar.machine.planning import refusal
from belljar.machine.planning.boot_plan import qemu_owner
from belljar.model import GIB, MIB, Account, MachineSpec, Payload, Request, RunPayload, Share

ROOT = Account("root", 0, 0, "root")
ALICE = Account("alice", 1000, 1001, "alice")
IMAGE = Image("d" * 64, ("debian12",), Path("disk"), 64 * MIB, None, None, "", "build", 0.0)
SPEC = MachineSpec("debian12", cpus=1, memory=512 * MIB)


def request(spec: MachineSpec = SPEC, account: Account = ROOT) -> Request:
    return Request("0123456789ab", spec, RunPayload(Payload((b"true",), account)))


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "host_memory", lambda: (4 * GIB, 1 * GIB))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"cpus": 0}, OverLimit, "0 cpus"),
        ({"cpus": 5}, OverLimit, "this host has 4"),
        ({"memory": 1 * MIB}, OverLimit, "at least 64 MiB"),
        ({"memory": 5 * GIB}, OverLimit, "this host has 4096 MiB"),
        ({"memory": 2 * GIB}, NoMemory, "only 1024 MiB are free"),
        ({"cache": 0}, OverLimit, "at least 16 MiB"),
        ({"cache": 16 * MIB - 1}, OverLimit, "a cache disk of 16777215 bytes"),
        ({"cache": 1 << 60}, OverLimit, "at most 4096 GiB"),
        ({"scratch": 1 << 60}, OverLimit, "a scratch disk"),
    ],
)
@pytest.mark.usefixtures("small_host")
def test_a_size_that_cannot_be_had_is_refused_with_what_could(
    changes: dict[str, int], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        refusal.check_size(request(replace(SPEC, **changes)))


def test_an_image_that_knows_its_least_memory_is_given_no_less() -> None:
    image = IMAGE
    known = replace(image, facts={"least_memory": 96 * MIB})
    refusal.check_least(request(replace(SPEC, memory=96 * MIB)), known)
    refusal.check_least(request(replace(SPEC, memory=64 * MIB)), image)  # an older manifest does not know
    with pytest.raises(
        OverLimit, match="64 MiB of memory: the image debian12 needs at least 1 cpus and 96 MiB"
    ) as caught:
        refusal.check_least(request(replace(SPEC, memory=64 * MIB, image="debian12")), known)
    assert "more" in caught.value.hint


@pytest.mark.usefixtures("small_host")
def test_a_size_that_fits_passes() -> None:
    refusal.check_size(request(replace(SPEC, cpus=4, memory=1 * GIB)))


def test_a_share_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for source, says in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(UsageError, match=says):
            refusal.check_shares(request(replace(SPEC, shares=(Share(str(source), "/x"),))), IMAGE)


def test_an_ordinary_users_qemu_is_the_users() -> None:
    assert qemu_owner(request(account=ALICE), "auto", 1000) == (1000, os.getegid())


def test_roots_qemu_runs_as_the_payloads_user_or_as_nobody_but_never_as_root_without_a_share() -> None:
    assert qemu_owner(request(account=ALICE), "auto", 0) == (1000, 1001)
    assert qemu_owner(request(), "auto", 0)[0] not in (0,)
    shared = replace(SPEC, shares=(Share("/srv", "/srv"),))
    assert qemu_owner(request(shared), "auto", 0) == (0, 0)
    assert qemu_owner(request(shared, ALICE), "auto", 0) == (1000, 1001)


def test_a_user_of_the_settings_that_does_not_exist_is_named() -> None:
    with pytest.raises(NotPermitted, match="no-such-user"):
        qemu_owner(request(), "no-such-user", 0)
