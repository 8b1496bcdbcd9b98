"""The disc that brings the agent to a guest with cloud-init: read back with other tools, its scripts run here."""

import io
import json
import os
import subprocess
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path

import pytest

from belljar.context import cloud_init_seed
from belljar.context.discs import CHECK, NO_NETWORK, NOBODY, AgentSeed, boothook, multipart, waiting_for_cloud_init
from belljar.errors import BadOption
from belljar.host.python.interpreter import Interpreter, archive_of, interpreter
from belljar.image import agent_unit

AGENT = Path(__file__)  # its content does not matter here
SEED = AgentSeed(Interpreter("0" * 64, AGENT), "[Unit]\n[Service]\nRestart=always\n", b"", grows=False)
USERS = b"#cloud-config\nwrite_files: []\nruncmd: [[touch, /ran]]\n"


def read_disc(path: Path) -> dict[str, bytes]:
    """By its long names, as Linux reads them."""
    import pycdlib

    disc = pycdlib.PyCdlib()
    disc.open(str(path))
    found = {}
    for child in disc.list_children(rr_path="/"):
        if child.is_file():
            name = child.rock_ridge.name().decode()
            data = io.BytesIO()
            disc.get_file_from_iso_fp(data, rr_path=f"/{name}")
            found[name] = data.getvalue()
    disc.close()
    return found


def parts(user_data: bytes) -> list[tuple[str, bytes]]:
    message = message_from_bytes(user_data)
    return [
        (part.get_content_type(), part.get_payload(decode=True)) for part in message.walk() if not part.is_multipart()
    ]


def test_a_disc_has_the_four_files_and_the_label_that_cloud_init_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "seed.iso"
    seed = replace(SEED, user_data=b"\xff\0any")
    seed.write(path)
    found = read_disc(path)
    assert set(found) == {"meta-data", "user-data", "vendor-data", "network-config", "agent.tar"}
    assert parts(found["user-data"])[1][1] == b"\xff\0any" and found["network-config"] == NO_NETWORK.encode()
    meta = json.loads(found["meta-data"])  # JSON is YAML
    assert meta == {"instance-id": f"belljar-{seed.digest[:16]}", "local-hostname": NOBODY}
    assert path.read_bytes()[0x8001:0x8006] == b"CD001"
    assert path.read_bytes()[0x8028:0x8048].strip() == b"cidata"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_disc_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "seed.iso"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    SEED.write(path)
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert victim.read_bytes() == b"precious"


def test_seeds_of_one_digest_are_for_the_same_guest_and_others_are_not() -> None:
    same = AgentSeed(SEED.agent, SEED.unit, SEED.user_data, grows=False)
    assert same.digest == SEED.digest
    others = [
        replace(SEED, agent=Interpreter("x", AGENT)), replace(SEED, unit="x"), replace(SEED, user_data=b"x"), replace(SEED, grows=True),
        AgentSeed(Interpreter(SEED.agent.digest + SEED.unit, AGENT), "", b"", grows=False),
    ]  # fmt: skip
    assert len({one.digest for one in (SEED, *others)}) == len(others) + 1


def test_the_instance_is_new_to_cloud_init_whenever_its_seed_is(tmp_path: Path) -> None:
    ids = set()
    for number, seed in enumerate((SEED, replace(SEED, user_data=USERS))):
        seed.write(tmp_path / str(number))
        ids.add(json.loads(read_disc(tmp_path / str(number))["meta-data"])["instance-id"])
    assert len(ids) == 2


@pytest.mark.parametrize(("grows", "mode"), [(True, "auto"), (False, "off")])
def test_a_disk_grows_only_where_it_was_made_larger(tmp_path: Path, grows: bool, mode: str) -> None:
    replace(SEED, grows=grows).write(tmp_path / "seed")
    vendor = read_disc(tmp_path / "seed")["vendor-data"].decode()
    assert vendor.startswith("#cloud-config\n")
    assert f"growpart: {{mode: '{mode}'}}" in vendor


# -- the user's own user-data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "users",
    [USERS, b"#!/bin/sh\necho hello\n", b"#include\nhttp://example.org/x\n", b"\x1f\x8b\x08any\0bytes", b"\xff\xfe"],
)
def test_the_users_own_data_arrives_unchanged_and_cloud_init_is_left_to_see_what_it_is(users: bytes) -> None:
    (ours, hook), (kind, data) = parts(multipart(b"#!/bin/sh\n", users))
    assert (ours, hook) == ("text/cloud-boothook", b"#!/bin/sh\n")
    assert (kind, data) == ("text/plain", users)


def test_a_message_of_several_parts_keeps_its_parts() -> None:
    whole = multipart(b"theirs", USERS)
    assert parts(multipart(b"ours", whole)) == [
        ("text/cloud-boothook", b"ours"), ("text/cloud-boothook", b"theirs"), ("text/plain", USERS),
    ]  # fmt: skip


@pytest.mark.parametrize("users", [b"", b"\n \n"])
def test_no_user_data_is_no_part(users: bytes) -> None:
    assert len(parts(multipart(b"ours", users))) == 1


def test_user_data_of_any_length_is_not_taken() -> None:
    assert parts(multipart(b"ours", b"x" * (1 << 20)))[1][1] == b"x" * (1 << 20)
    with pytest.raises(BadOption, match="at most"):
        multipart(b"ours", bytes(17 << 20))


# -- what runs in the guest ----------------------------------------------------------------------------------------------


def run_boothook(root: Path, script: bytes) -> subprocess.CompletedProcess[str]:
    """The script, with a folder for a root, the disc's files where it would be mounted, and programs that write down how they are
    called."""
    (root / "bin").mkdir(exist_ok=True)
    for name, file in (("systemctl", "asked"), ("mount", "mounts"), ("umount", "mounts")):
        (root / "bin" / name).write_text(f'#!/bin/sh\necho "$@" >> {root}/{file}\n')
        (root / "bin" / name).chmod(0o755)
    if not (root / "run/belljar-disc").exists():
        (root / "run/belljar-disc").mkdir(parents=True)
        (root / "run/belljar-disc/agent.tar").write_bytes(archive_of([("agent.pyc", b"the agent", 0o644)]))
    text = script.decode().replace("/usr/lib/belljar", f"{root}/lib").replace("/run/", f"{root}/run/")
    env = {"PATH": f"{root}/bin:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", text], env=env, capture_output=True, text=True, check=False, timeout=10)


def test_the_boothook_installs_agent_and_unit_and_starts_them_once(tmp_path: Path) -> None:
    script = boothook(agent_unit())
    done = run_boothook(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "lib/agent.pyc").read_bytes() == b"the agent"
    assert (tmp_path / "mounts").read_text().startswith("-t iso9660 -o ro LABEL=cidata ")
    unit = (tmp_path / "run/systemd/system/belljar-agent.service").read_text()
    assert unit.replace(f"{tmp_path}", "") == waiting_for_cloud_init(agent_unit()).replace("/usr/lib/belljar", "/lib")
    assert run_boothook(tmp_path, script).returncode == 0  # cloud-init runs it at every boot
    assert (tmp_path / "asked").read_text() == "--no-block start belljar-agent.service\n"


def test_a_systemd_that_does_not_see_the_unit_yet_is_told_to_look(tmp_path: Path) -> None:
    script = boothook("[Unit]\n[Service]\n").replace(b"systemctl --no-block start", b"false", 1)
    assert run_boothook(tmp_path, script).returncode == 0
    assert (tmp_path / "asked").read_text() == "daemon-reload\n--no-block start belljar-agent.service\n"


def test_the_agent_waits_for_cloud_inits_end_and_ends_the_machine_when_that_failed() -> None:
    unit = waiting_for_cloud_init(agent_unit())
    head, service = unit.split("[Service]\n")
    assert "After=cloud-final.service\n" in head and "FailureAction=poweroff-force\n" in head
    assert service.startswith("ExecStartPre=/usr/lib/belljar/loader ")
    assert "Restart=always" not in unit


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ('{"v1": {"datasource": "x", "errors": []}}', ""),
        ('{"v1": {"datasource": null, "errors": ["(\'scripts_user\', 1)", "b"]}}', "('scripts_user', 1); b"),
        ("{", "it left no result"),
        ('{"v1": {}}', "it left no result"),
        (None, "it left no result"),
    ],
)
def test_a_cloud_init_that_failed_is_told_on_the_console(tmp_path: Path, result: str | None, told: str) -> None:
    console, log = tmp_path / "console", tmp_path / "log"
    if result is not None:
        (tmp_path / "result.json").write_text(result)
    log.write_text("the end of its log\n")
    code = (
        CHECK.replace("/dev/console", str(console))
        .replace("/run/cloud-init/result.json", str(tmp_path / "result.json"))
        .replace("/var/log/cloud-init-output.log", str(log))
    )
    done = subprocess.run(["python3", "-I", "-S", "-c", code], check=False, timeout=10)
    assert done.returncode == (1 if told else 0)
    if told:
        lines = console.read_text().strip().splitlines()
        assert lines[0] == "the end of its log"
        assert lines[-1].startswith("belljar: cloud-init failed: ") and told in lines[-1]


def test_the_disc_brings_the_agent_and_the_interpreter_that_runs_it(tmp_path: Path) -> None:
    carried = interpreter(tmp_path, b"key", lambda: b"import json\nprint(json.dumps(1))\n")
    seed = cloud_init_seed(carried, agent_unit())
    seed.write(tmp_path / "seed")
    disc = read_disc(tmp_path / "seed")
    (tmp_path / "run/belljar-disc").mkdir(parents=True)
    (tmp_path / "run/belljar-disc/agent.tar").write_bytes(disc["agent.tar"])
    done = run_boothook(tmp_path, parts(disc["user-data"])[0][1])
    assert (done.returncode, done.stderr) == (0, "")
    unit = (tmp_path / "run/systemd/system/belljar-agent.service").read_text()
    (start,) = (line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart="))
    done = subprocess.run(start.split(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_door_makes_the_same(tmp_path: Path) -> None:
    seed = cloud_init_seed(SEED.agent, "[Unit]\n[Service]\n", USERS, grows=True)
    seed.write(tmp_path / "seed")
    found = parts(read_disc(tmp_path / "seed")["user-data"])
    assert found[1] == ("text/plain", USERS)
    assert b"belljar-agent.service" in found[0][1]
