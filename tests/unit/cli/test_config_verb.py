"""`belljar config show` and `belljar config check`."""

import json
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.jobs.paper_node import make_node

from belljar.cli import main
from belljar.config import inspect
from belljar.errors import BadSetting
from belljar.findings import Grade
from belljar.jobs.site import doctor as checks


@pytest.fixture(autouse=True)
def _nothing_else_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("belljar.config.ETC", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


@pytest.fixture
def file(runtime: Any, tmp_path: Path) -> Path:
    runtime.config_file = tmp_path / "my.toml"
    return tmp_path / "my.toml"


def test_show_gives_each_setting_and_where_it_comes_from(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = '2G'\n")
    assert call("config", "show", "--origin") == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["machine.memory"] == ["2G", f"{file}:2", "in", "batch", "jobs"]
    assert lines["machine.grace"] == ["10s", "default"]
    assert lines["batch.retries"] == ["3", "default", "always"]


def test_show_as_json_has_plain_values(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[qemu]\naccelerator = 'tcg'\n")
    call("config", "show", "--format", "json")
    settings = json.loads(capsys.readouterr().out)
    assert settings["qemu"]["accelerator"] == "tcg"
    assert settings["machine"]["grace"] == 10.0
    call("config", "show", "--format", "json", "--origin")
    settings = json.loads(capsys.readouterr().out)
    assert settings["qemu"]["accelerator"] == {"value": "tcg", "origin": f"{file}:2", "locked": "in batch jobs"}


def test_show_tells_what_the_site_itself_locked(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[site]\nlock = ['guest.*']\n")
    call("config", "show", "--format", "json", "--origin")
    settings = json.loads(capsys.readouterr().out)
    locked = {(section, key): one["locked"] for section, keys in settings.items() for key, one in keys.items()}
    assert locked["guest", "heartbeat"] == locked["batch", "allow"] == locked["site", "lock"] == "always"
    assert locked["network", "egress"] == ""


def test_check_names_what_a_batch_job_would_be_refused_for(
    call: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("BELLJAR_NETWORK_EGRESS", "open")
    assert call("config", "check") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(
        "note: a batch job is refused for it: environment BELLJAR_NETWORK_EGRESS, network.egress: is for the site to set"
    )
    assert call("config", "check", "--format", "json") == 0
    assert [f"note: {one}" for one in json.loads(capsys.readouterr().out)["notes"]] == said[1:]


@pytest.mark.parametrize(
    ("value", "uid", "is_told"),
    [("auto", 1000, True), ("off", 1000, False), ("required", 1000, False), ("auto", 0, False)],
)
def test_check_and_doctor_say_what_anti_spoofing_does_not_do(
    call: Any, file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, value: str, uid: int, is_told: bool
) -> None:
    file.write_text(f"[network]\nbridges = ['br7']\nanti_spoofing = '{value}'\n")
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("belljar.network.bridge.which", lambda name: "/usr/sbin/nft")
    monkeypatch.setattr("belljar.hypervisor.qemu.guard.prove", lambda confine: "")
    call("config", "check")
    notes = [
        line for line in capsys.readouterr().out.splitlines() if '"auto" does nothing here' in line and "br7" in line
    ]
    found = checks.network(SimpleNamespace(settings=inspect(file).checked()))  # type: ignore[arg-type]
    assert (len(notes), found.grade) == ((1, Grade.WARN) if is_told else (0, Grade.OK))
    assert not is_told or f"note: {found.text}" == notes[0]


def test_show_still_shows_what_holds_when_there_are_mistakes_and_fails(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = 'x'\ncpus = 4")
    with pytest.raises(BadSetting, match=r"machine\.memory"):
        call("config", "show")
    assert "machine.cpus" in capsys.readouterr().out


def test_check_exits_1_and_lists_every_mistake(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\nmemory = 'x'\ncpus = 'y'")
    assert call("config", "check") == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert call("config", "check", "--format", "json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and {one["key"] for one in said["mistakes"]} == {"machine.memory", "machine.cpus"}


@pytest.mark.skipif(os.geteuid() != 0, reason="folders of root")
def test_check_says_that_the_nodes_folder_is_missing_or_keeps_users_out(call: Any, file: Path, capsys: Any) -> None:
    with closing(make_node()) as made:
        file.write_text(f"[paths]\nnode = '{made.node}'")
        assert call("config", "check") == 0
        made.node.chmod(0o700)
        capsys.readouterr()
        assert call("config", "check") == 1
        why = f"{made.node}: users cannot pass {made.node} (chmod o+x {made.node})"
        assert capsys.readouterr().out == f"{file}:2, paths.node: {why}\n"
        made.node.chmod(0o711)
        file.write_text(f"[paths]\nnode = '{made.node}-not'\n[machine]\ncpus = 'y'")
        assert call("config", "check", "--format", "json") == 1
        cpus, node = json.loads(capsys.readouterr().out)["mistakes"]
        assert cpus["key"] == "machine.cpus" and node["key"] == "paths.node"
        assert (node["what"], node["hint"].split()[0]) == (f"{made.node}-not: No such file or directory", "mkdir")


def test_check_of_good_settings_names_the_files(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[machine]\ncpus = 2")
    assert call("config", "check") == 0
    assert capsys.readouterr().out == f"The settings are good ({file}).\n"


WRONG = [
    ("machine", "hypervisor", "'libvirt:qemu+ssh://host/system'", "no such driver"),
    ("machine", "hypervisor", "'kvm'", "no such driver"),
    ("machine", "hypervisor", "'libvirt:xen:///system'", "guests under Xen are not supported"),
    ("network", "allow", "['10.0.0.0/8', '10.0.0.0/33']", "'10.0.0.0/33': not ADDRESS[/PREFIX]"),
    ("network", "deny", "['10.0.0.1:99999']", "'10.0.0.1:99999': not ADDRESS[/PREFIX]"),
    ("network", "bridges", "['br0', 'a bridge']", "cannot be the name of a bridge"),
    ("network", "bridge_addresses", "['192.0.2.10-192.0.3.10/24']", "192.0.2.10-192.0.3.10/24"),
    ("network", "bridge_gateway", "'gateway.example.org'", "no IPv4 address"),
    ("network", "bridge_dns", "'::1'", "no IPv4 address"),
    ("network", "mac_pool", "['01:00:00:00:00:01']", "unicast MAC address"),
    ("network", "isolated_net", "'10.98.0.0/25'", "10.98.0.0/25"),
    ("image", "sources", f"['images#sha256={64 * 'a'}']", "is not of the form /PATH#sha256=DIGEST"),
    ("image", "sources", f"['ftp://example.org/images#sha256={64 * 'a'}']", "or https://HOST/PATH#sha256=DIGEST"),
    ("image", "sources", "['/shared/images']", "is not of the form"),
    ("machine", "cpus", "0", "must be at least 1, not 0"),
    ("machine", "memory", "'32M'", "must be at least 64M, not 32M"),
    ("machine", "cpus", "100_000_000_000_000_000_000_000", "must be at most 4096, not 1e+23"),
    ("image", "default", "'../../etc/passwd'", "'../../etc/passwd': an image cannot have this name"),
    ("image", "default", "''", "'': an image cannot have this name"),
    ("qemu", "boot_timeout", "0", "must be at least 0.01, not 0"),
    ("qemu", "cpu", "'nonesuch'", "unable to find CPU model 'nonesuch'"),
    ("qemu", "cpu", "'max,foo=1 -device x'", "Property 'max-x86_64-cpu.foo' not found"),
    ("qemu", "binary", "'/no/such/qemu'", "/no/such/qemu: no such program"),
    ("qemu", "binary", "'/bin/ls'", "is not QEMU: it calls itself 'ls"),
    ("qemu", "user", "'nobody-of-this-name'", "no such user on this host"),
    ("qemu", "uefi", "'/no/such/file'", "no readable file"),
    ("qemu", "virtiofsd", "'/no/such/file'", "no such program"),
    ("batch", "queue_images", "['night']", "not of the form QUEUE=IMAGE"),
    ("batch", "allow", "['everybody']", "not of the form"),
    ("batch", "registries", "['hub']", "not of the form HOST"),
    ("batch", "pull", "'always'", "site-registries"),
]


@pytest.mark.parametrize(("section", "key", "value", "named"), WRONG)
def test_check_finds_what_would_be_refused_only_when_it_is_used(
    call: Any, file: Path, capsys: Any, section: str, key: str, value: str, named: str
) -> None:
    file.write_text(f"[{section}]\n{key} = {value}\n")
    assert call("config", "check") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{file}:2, {section}.{key}: ") and named in line and line.endswith(")"), line
    assert line.count(f"{section}.{key}") == 1, line


def test_check_takes_what_the_pages_show_as_examples(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("""
[machine]
hypervisor = "libvirt:qemu+unix:///system?socket=/run/sock"
[network]
allow = ["10.20.0.0/16:3128/tcp", "10.20.1.5"]
deny = ["203.0.113.0/24"]
bridges = ["br0"]
bridge_addresses = ["192.0.2.10-192.0.2.40/24"]
bridge_gateway = "192.0.2.1"
bridge_dns = "192.0.2.1"
mac_pool = ["52:54:00:00:00:01-52:54:00:00:00:20"]
[qemu]
cpu = "max,-avx512f"
[image]
default = "sha256:a68fbddc316f2fc2d8671ab62f85f96e7ca7d69477a8e6fbcf1512d76e6185cf"
sources = [
    "/shared/images#sha256=9cc9d0a4faa8e7c6f06ec9b79591cb0988a621efa3f8cef5d93d8c6e98c581ab",
    "https://images.example.org/cms#sha256=57b1faa8e7c6f06ec9b79591cb0988a621efa3f8cef5d93d8c6e98c581ab9cc9",
]
""")
    assert call("config", "check") == 0, capsys.readouterr().out


def test_doctor_finds_it_too(call: Any, file: Path, capsys: Any) -> None:
    file.write_text("[network]\nbridge_dns = '::1'\n")
    assert call("doctor", "--only", "settings") == 1
    assert f"{file}:2, network.bridge_dns: '::1': no IPv4 address" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="a user's file is the user's to open")
def test_a_file_that_others_may_write_is_refused_by_all_but_doctor(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "site.toml"
    file.write_text("")
    file.chmod(0o666)
    for words in (("ps",), ("run", "true"), ("image", "list")):
        assert main(["--config", str(file), *words]) == 125
        assert f"belljar: {file}: others may write to it (mode 0666)" in capsys.readouterr().err
    assert main(["--config", str(file), "doctor", "--only", "settings", "--only", "limits"]) == 1
    printed = capsys.readouterr().out
    assert f"{file}: others may write to it (mode 0666)" in printed and printed.count("fail") == 1


def test_a_value_from_a_variable_is_found_with_its_name(
    call: Any, file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("")
    monkeypatch.setenv("BELLJAR_NETWORK_ISOLATED_NET", "here")
    assert call("config", "check", "--format", "json") == 1
    (found,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert (found["origin"], found["key"]) == ("environment BELLJAR_NETWORK_ISOLATED_NET", "network.isolated_net")
    assert found["hint"]


def test_a_kvm_that_ends_qemu_says_nothing_of_the_processor_model(call: Any, file: Path, capsys: Any) -> None:
    """Seen: `kvm_buf_set_msrs: Assertion failed` for a model that the same QEMU takes without KVM."""
    qemu = file.with_name("qemu-system-x86_64")
    qemu.write_text("""#!/bin/sh
case "$*" in
    *--version*) echo "QEMU emulator version 7.2.0" ;;
    *kvm*) echo "qemu-system-x86_64: Assertion failed" >&2; kill -ABRT $$ ;;
    *" max "*) cat ;;
    *) echo "qemu-system-x86_64: unable to find CPU model" >&2; exit 1 ;;
esac
""")
    qemu.chmod(0o755)
    file.write_text(f'[qemu]\nbinary = "{qemu}"\ncpu = "max"\n')
    assert call("config", "check") == 0, capsys.readouterr().out
    file.write_text(f'[qemu]\nbinary = "{qemu}"\ncpu = "best"\n')
    assert call("config", "check") == 1
    assert "unable to find CPU model" in capsys.readouterr().out
