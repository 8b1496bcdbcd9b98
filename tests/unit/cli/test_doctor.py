"""`belljar doctor`: each check finds what is wrong, none takes the others down."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.cli.host import doctor
from belljar.errors import BadOption, CommandFailed, HostError, ImageUnknown
from belljar.findings import Finding, Grade, examine, ok, warn
from belljar.host import commands, room
from belljar.host.commands import Finished
from belljar.hypervisor.qemu.abilities import DEVICES  # before a test has `which` lie
from belljar.jobs.site import doctor as checks
from belljar.machine.cleaning.reaper import Undone
from belljar.model import GIB, MIB, Cause, Outcome, OutcomeClass, Start
from belljar.records import replace


def test_a_check_that_breaks_is_a_failed_check_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, call: Any, capsys: Any
) -> None:
    def broken(runtime: object) -> Finding:
        raise KeyError("x")

    monkeypatch.setattr(doctor, "CHECKS", (broken, lambda runtime: ok("fine", "good")))
    assert call("doctor") == 1
    assert "fail  broken: the check broke" in (shown := capsys.readouterr().out) and "ok    fine: good\n" in shown


def test_warnings_alone_are_no_failure_and_come_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, call: Any, capsys: Any
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda runtime: warn("slow", "slow", "buy another"),))
    assert call("doctor") == 0
    assert "-> buy another" in capsys.readouterr().out


def test_json_tells_everything_about_each_check(monkeypatch: pytest.MonkeyPatch, call: Any, capsys: Any) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda runtime: warn("a", "b", "c"),))
    call("doctor", "--format", "json")
    findings = [{"name": "a", "grade": "warn", "text": "b", "remedy": "c"}]
    assert json.loads(capsys.readouterr().out) == {"ok": True, "findings": findings}


def test_one_check_can_be_asked_for_and_an_unknown_one_is_refused(call: Any, capsys: Any) -> None:
    assert call("doctor", "--only", "memory") == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "memory" in line]) == 1
    with pytest.raises(BadOption, match="nosuch"):
        call("doctor", "--only", "nosuch")


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr(
        "belljar.host.commands.which", lambda name: None if name in ("qemu-img", "mmdebstrap") else "/x"
    )
    finding = checks.programs(runtime)
    assert finding.grade is Grade.FAIL
    assert "qemu-img is missing" in finding.text and finding.remedy.endswith("mmdebstrap qemu-utils")
    monkeypatch.setattr("belljar.host.commands.which", lambda name: None if name == "mmdebstrap" else "/x")
    assert checks.programs(runtime).grade is Grade.WARN
    monkeypatch.setattr(
        "belljar.host.commands.which",
        lambda name: None if name in ("apt-get", "qemu-img", "mmdebstrap", "mke2fs") else "/x",
    )
    assert checks.programs(runtime).remedy == "dnf install e2fsprogs qemu-img (some are in EPEL)"


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "apt-get install --no-install-recommends e2fsprogs qemu-system-x86 squashfs-tools"),
        ("zypper", "zypper install e2fsprogs qemu-x86 squashfs"),
        ("apk", "apk add e2fsprogs qemu-system-x86_64 squashfs-tools"),
        ("pacman", "pacman -S e2fsprogs qemu-system-x86 squashfs-tools"),
    ],
)
def test_each_distribution_has_one_command_for_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, manager: str, command: str
) -> None:
    there = {manager, *(program for program, *_ in commands.PROGRAMS)} - {"mkfs.ext4", "mke2fs", "mksquashfs"}
    monkeypatch.setattr("belljar.host.commands.which", lambda name: "/x" if name in there else None)
    assert commands.remedy(commands.QEMU) == command


@pytest.mark.parametrize(
    ("version", "devices", "grade", "text"),
    [
        ("QEMU emulator version 8.0.1", 'name "vmgenid"', Grade.WARN, "lacks virtio-blk-pci"),
        (
            "QEMU emulator version 8.0.1",
            "".join(f'name "{name}"' for name in (*DEVICES, "virtio-9p-pci")),
            Grade.OK,
            "version 8.0.1, with all devices (belljar was tried with 7.2, 10.0, 11.1)",
        ),
        (
            "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)",
            "".join(f'name "{name}"' for name in (*DEVICES, "virtio-9p-pci")),
            Grade.OK,
            "version 11.1.3, with all devices",
        ),
    ],
)
def test_qemu_is_judged_by_version_and_devices(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, version: str, devices: str, grade: Grade, text: str
) -> None:
    def run(argv: list[str], **_: Any) -> Finished:
        out = {"--version": version, "-device": devices, "-M": "user\n"}[argv[1]]
        return Finished(tuple(argv), 0, out.encode(), b"")

    monkeypatch.setattr("belljar.host.commands.which", lambda name: "/x")
    monkeypatch.setattr("belljar.host.commands.run", run)
    monkeypatch.setattr("belljar.hypervisor.qemu.abilities.run", run)
    finding = checks.qemu(runtime)
    assert finding.grade is grade and text in finding.text


@pytest.mark.parametrize(
    ("clones", "boots", "grade", "text"),
    [
        (True, True, Grade.OK, "a clone of debian12 was ready in 1.5 s"),
        (False, True, Grade.WARN, "no clone can be started: QEMU refused: use file: instead; every job boots its guest, which took 1.5 s"),
        (False, False, None, "QEMU refused"),
    ],
)  # fmt: skip
def test_that_jobs_can_be_cloned_is_proved_and_not_believed(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, clones: bool, boots: bool, grade: Grade | None, text: str
) -> None:
    def self_check(_: object, image: str, start: Start) -> Outcome:
        if not (clones if start is Start.CLONE else boots):
            raise CommandFailed("QEMU refused: use file: instead")
        return Outcome(
            "aaaaaaaaaaaa",
            Cause.FINISHED,
            OutcomeClass.PAYLOAD,
            phases={"prepare": 9.0, "start": 0.5, "boot": 0.75, "identify": 0.25},
        )

    monkeypatch.setattr("belljar.jobs.node.self_check", self_check)
    paper = SimpleNamespace(images=SimpleNamespace(resolve=lambda name: None), settings=runtime.settings)
    if grade is None:
        with pytest.raises(CommandFailed, match=text):
            checks.clone(paper)  # type: ignore[arg-type]
    else:
        finding = checks.clone(paper)  # type: ignore[arg-type]
        assert (finding.grade, finding.text) == (grade, text)


def test_a_folder_open_to_others_fails(runtime: Any) -> None:
    runtime.settings.paths.run.mkdir()
    assert checks.folders(runtime).grade is Grade.OK
    runtime.settings.paths.run.chmod(0o777)
    finding = checks.folders(runtime)
    assert finding.grade is Grade.FAIL and "others may write" in finding.text


def test_little_space_names_the_setting_that_moves_it(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr("belljar.host.files.free_bytes", lambda path: 5 * GIB if path.name != "store" else 1 << 20)
    finding = checks.space(runtime)
    assert finding.grade is Grade.WARN and "paths.store" in finding.remedy


def test_a_missing_default_image_is_no_failure_as_it_is_built_on_first_use(
    monkeypatch: pytest.MonkeyPatch, runtime: Any
) -> None:
    def resolve(name: str) -> None:
        raise ImageUnknown(f"{name}: no image")

    images = SimpleNamespace(images=lambda: [], resolve=resolve)
    paper = SimpleNamespace(images=images, settings=runtime.settings)
    assert checks.images(paper).grade is Grade.WARN  # type: ignore[arg-type]
    assert checks.accelerator(paper).grade is Grade.WARN  # type: ignore[arg-type]


def test_without_its_image_a_check_names_what_helps(runtime: Any) -> None:
    """`belljar run` builds an image of the default name; any other one has to be made or named."""

    def resolve(name: str) -> None:
        raise ImageUnknown(f"no image is called {name!r}", hint="Make one.")

    for default, remedy in (("debian12", checks.BUILT), ("el9", "Make one.")):
        image = replace(runtime.settings.image, default=default)
        settings = SimpleNamespace(image=image, machine=runtime.settings.machine)
        paper = SimpleNamespace(images=SimpleNamespace(images=lambda: [], resolve=resolve), settings=settings)
        for check in (checks.accelerator, checks.clone):
            found = check(paper)  # type: ignore[arg-type]
            assert found.remedy == remedy and f"no image is called {default!r}" in found.text


def test_no_package_is_named_for_a_program_that_a_setting_names(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr("belljar.host.commands.which", lambda name: "/x")
    qemu = replace(runtime.settings.qemu, binary="/usr/bin/nosuch")
    paper = SimpleNamespace(settings=SimpleNamespace(qemu=qemu))
    assert checks.programs(paper).grade is Grade.OK  # type: ignore[arg-type]
    told = examine("qemu", lambda: checks.qemu(paper))  # type: ignore[arg-type]
    assert told.grade is Grade.FAIL and told.remedy == "Correct `qemu.binary` in the settings."
    qemu = replace(runtime.settings.qemu, binary="/usr/bin/nosuch", virtiofsd="/usr/bin/nosuch")
    monkeypatch.setattr("belljar.host.commands.which", lambda name: "/x" if name != "mmdebstrap" else None)
    found = checks.programs(SimpleNamespace(settings=SimpleNamespace(qemu=qemu)))  # type: ignore[arg-type]
    assert found.remedy == "apt-get install --no-install-recommends mmdebstrap"


def test_a_program_that_is_no_qemu_is_told_to_be_none(tmp_path: Path, runtime: Any) -> None:
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    paper = SimpleNamespace(settings=SimpleNamespace(qemu=replace(runtime.settings.qemu, binary=str(program))))
    found = examine("qemu", lambda: checks.qemu(paper))  # type: ignore[arg-type]
    assert found.grade is Grade.FAIL and found.remedy == "Set `qemu.binary` to a qemu-system-x86_64 or qemu-kvm."


def test_leftovers_are_listed_with_the_verb_that_clears_them(runtime: Any) -> None:
    runtime.reaper.found = [Undone("aaaaaaaaaaaa", "domain without a machine", "pid 7")]
    finding = checks.leftovers(runtime)
    assert finding.grade is Grade.WARN and "aaaaaaaaaaaa" in finding.text and "belljar reap" in finding.remedy


def test_a_tight_limit_on_address_space_is_found(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (256 << 20, -1) if which == resource.RLIMIT_AS else (-1, -1)
    )
    finding = checks.limits(runtime)
    assert finding.grade is Grade.WARN and "RLIMIT_AS" in finding.text


def test_memory_tells_how_many_machines_there_is_room_for(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr(room, "host_memory", lambda proc: (8 * GIB, 2 * GIB + 256 * MIB))
    monkeypatch.setattr(room, "own_groups", lambda proc: ())
    assert "room for 3 machines of 512 MiB" in checks.memory(runtime).text
    monkeypatch.setattr(room, "host_memory", lambda proc: (8 * GIB, 1 << 20))
    assert checks.memory(runtime).grade is Grade.WARN


def test_wrong_settings_are_a_failed_check_not_a_crash(runtime: Any, tmp_path: Path) -> None:
    runtime.config_file = tmp_path / "wrong.toml"
    runtime.config_file.write_text("[machine]\ncpus = 'x'")
    finding = doctor.settings(runtime)
    assert finding.grade is Grade.FAIL and "machine.cpus" in finding.text


def test_no_check_sends_to_the_doctor_who_asks(runtime: Any) -> None:
    def fails() -> Finding:
        raise HostError("no room")

    assert "belljar doctor" not in examine("a", fails).remedy


def test_examine_turns_an_error_of_ours_into_its_message_and_hint(runtime: Any) -> None:
    def fails() -> Finding:
        raise ImageUnknown("x")

    finding = examine("a", fails)
    assert (finding.grade, finding.text, finding.remedy) == (Grade.FAIL, "x", ImageUnknown.hint)
