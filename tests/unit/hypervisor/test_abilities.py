"""What QEMU says of itself, from recordings, and how long the answer is believed."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from belljar.errors import CommandFailed, CommandMissing, HostError
from belljar.host import commands
from belljar.host.files import read_json
from belljar.hypervisor.qemu import abilities

LISTING = """\
Storage devices:
name "virtio-blk-pci-non-transitional", bus PCI
name "nvme", bus PCI, desc "Non-Volatile Memory Express"
Misc devices:
name "vmgenid"
name "virtio-rng-pci-non-transitional", bus PCI
name "virtio-serial-pci-non-transitional", bus PCI
"""


# What `query-qmp-schema` answers, as far as it matters here: on 7.2, and what 8.2 and 11.1 added to it.
ADDRESSES = {"name": "1", "meta-type": "enum", "values": ["socket", "exec", "rdma", "fd"]}
RAM = {
    "name": "2",
    "meta-type": "object",
    "members": [{"name": "mem-path", "type": "str"}, {"name": "share", "type": "bool"}],
}
MONITORS = {"name": "7", "meta-type": "enum", "members": [{"name": "rng-builtin"}, {"name": "monitor-qmp"}]}
OBJECTS = {"name": "3", "meta-type": "enum", "members": [{"name": "rng-builtin"}, {"name": "memory-backend-file"}]}
WITH_FILES = {**ADDRESSES, "values": [*ADDRESSES["values"], "file"]}
WITH_ROM = {**RAM, "members": [*RAM["members"], {"name": "rom", "type": "4", "default": None}]}
LOOP = {"name": "5", "meta-type": "object", "members": [{"name": "thread-pool-max", "default": None}]}  # from 7.1 on
SLOTS = {
    "name": "6",
    "meta-type": "object",
    "members": [{"name": n} for n in ("type", "vcpus-count", "props", "qom-path")],
}
OLD, LATER = (ADDRESSES, RAM, OBJECTS), (WITH_FILES, WITH_ROM, OBJECTS, LOOP)
MOVES = {"name": "8", "meta-type": "enum", "members": [{"name": "auto-converge"}, {"name": "mapped-ram"}]}
NEW = (*LATER, SLOTS, MONITORS, MOVES)


def answers(schema: Sequence[object]) -> bytes:
    lines = ({"QMP": {"version": {}}}, {"return": {}}, {"return": schema}, {"event": "SHUTDOWN"}, {"return": {}})
    return b"\r\n".join(json.dumps(line).encode() for line in lines)


def fake_qemu(
    path: Path,
    version: str = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)",
    listing: str = LISTING,
    schema: Sequence[object] = OLD,
) -> str:
    path.write_text(
        f'#!/bin/sh\necho asked >> {path}.log\ncase $1 in --version) echo "{version}";; -device) cat <<"X"\n{listing}X\n;;\n'
        f'*) cat <<"X"\n{answers(schema).decode()}\nX\n;; esac\n'
    )
    path.chmod(0o755)
    return str(path)


def test_only_devices_we_ask_about_are_kept() -> None:
    assert abilities.read_devices(LISTING) == {
        "virtio-blk-pci-non-transitional", "virtio-rng-pci-non-transitional", "virtio-serial-pci-non-transitional", "vmgenid",
    }  # fmt: skip


def test_qemu_is_asked_once_until_its_file_changes(tmp_path: Path) -> None:
    qemu, memory = fake_qemu(tmp_path / "qemu"), tmp_path / "memory.json"
    first = abilities.ask(qemu, memory)
    assert (first.name, abilities.ask(qemu, memory)) == ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)", first)
    assert (tmp_path / "qemu.log").read_text().count("asked") == 3  # version, devices and schema, once each
    fake_qemu(tmp_path / "qemu", "QEMU emulator version 8.2.1 (another one)", schema=LATER)
    assert abilities.READONLY_RAM in abilities.ask(qemu, memory).features
    assert abilities.READONLY_RAM not in first.features


def test_a_qemu_that_quits_before_its_answer_is_read_is_heard_to_the_end(tmp_path: Path) -> None:
    """Its answer is larger than a pipe, and it waits for no reader: on a busy host it lacked what its clones grow by."""
    qemu, answer = tmp_path / "qemu", tmp_path / "answer"
    fake_qemu(qemu)
    answer.write_bytes(answers([*({"name": str(n), "meta-type": "enum", "values": []} for n in range(9000)), *NEW]))
    assert answer.stat().st_size > 1 << 18
    once = f"import os; os.set_blocking(1, False); os.write(1, open({str(answer)!r}, 'rb').read())"
    text = qemu.read_text().replace("*) cat", f'-nodefaults) exec {sys.executable} -c "{once}" ;;\n*) cat')
    qemu.write_text(text)
    assert abilities.ask(str(qemu), tmp_path / "memory.json").features == set(abilities.FEATURES)


def test_what_a_qemu_could_not_say_to_the_end_is_asked_again(tmp_path: Path) -> None:
    qemu, memory, busy = tmp_path / "qemu", tmp_path / "memory.json", tmp_path / "busy"
    text = Path(fake_qemu(qemu, schema=NEW)).read_text()
    qemu.write_text(text.replace("*) cat", f"*) [ -e {busy} ] && kill -9 $$; cat"))
    busy.touch()
    with pytest.raises(CommandFailed):
        abilities.ask(str(qemu), memory)
    busy.unlink()
    assert abilities.ask(str(qemu), memory).features == set(abilities.FEATURES)


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[]", b"{}", b'{"identity": 1}', b"\0" * 100])
def test_a_broken_memory_is_no_memory(tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / "memory.json").write_bytes(rubbish)
    assert "version 7.2.22" in abilities.ask(fake_qemu(tmp_path / "qemu"), tmp_path / "memory.json").name
    assert "version 7.2.22" in read_json(tmp_path / "memory.json")["name"]


@pytest.mark.parametrize("line", ["bash, version 5.2", ""])
def test_a_program_that_is_no_qemu_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(HostError, match="is not QEMU") as caught:
        abilities.ask(fake_qemu(tmp_path / "qemu", line), tmp_path / "memory.json")
    assert "qemu.binary" in caught.value.hint


@pytest.mark.parametrize(
    ("said", "features"),
    [
        (answers(OLD), set()),
        (answers(LATER), {"file-migration", "readonly-ram", "few-threads"}),
        (answers(NEW), set(abilities.FEATURES)),
        (b"", set()),
        (b"qemu: -qmp: no such option\n", set()),
        (b'[]\n{"return": [1, "x", {"values": 3}, {"members": [{}, 5]}]}\n{"return": null}', set()),
    ],
)
def test_what_a_qemu_has_is_read_from_its_schema_and_not_from_its_version(said: bytes, features: set[str]) -> None:
    assert abilities.read_schema(said) == features


def test_the_version_is_no_condition(tmp_path: Path) -> None:
    found = abilities.ask(fake_qemu(tmp_path / "qemu", "QEMU emulator version 4.2.1", schema=NEW), tmp_path / "memory")
    assert found.features == set(abilities.FEATURES)


def test_a_qemu_without_a_device_we_need_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="has no virtio-serial"):
        abilities.ask(
            fake_qemu(
                tmp_path / "qemu",
                listing='name "virtio-blk-pci-non-transitional"\nname "virtio-rng-pci-non-transitional"\n',
            ),
            tmp_path / "m",
        )


def test_a_missing_qemu_is_named_with_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandMissing, match="/no/such/qemu"):
        abilities.find("/no/such/qemu")
    with pytest.raises(CommandMissing, match="qemu-of-mine"):
        abilities.find("qemu-of-mine")
    monkeypatch.setattr(abilities, "NAMES", ("qemu-that-is-not-here",))
    with pytest.raises(CommandMissing) as caught:
        abilities.find("")
    assert "apt-get install --no-install-recommends" in caught.value.hint and "qemu-system-x86" in caught.value.hint
    assert abilities.find(fake_qemu(tmp_path / "mine")) == os.fspath(tmp_path / "mine")


def test_the_qemu_of_el_is_found_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/usr/libexec/qemu-kvm is in no PATH. A folder stands in for /usr/libexec."""
    monkeypatch.setattr(commands, "which", lambda name: None)
    monkeypatch.setattr(abilities, "PLACES", (str(tmp_path),))
    qemu = fake_qemu(tmp_path / "qemu-kvm", "QEMU emulator version 6.2.0 (qemu-kvm-6.2.0-53.module+el8)")
    assert abilities.find("") == qemu
    assert "version 6.2.0" in abilities.ask(qemu, tmp_path / "memory").name
