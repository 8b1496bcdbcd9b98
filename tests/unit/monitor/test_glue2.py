"""Execution environments of GLUE 2, as LDAP and people's programs read them."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import main
from belljar.machine import Settings
from belljar.model import GIB, NetworkMode
from belljar.monitor.glue2 import environment, ldif

SCHEMA = Path("/etc/ldap/schema")
SERVICE, MANAGER = "urn:glue2:ComputingService:ce01", "urn:glue2:ComputingManager:ce01"
DEBIAN = "debian12", "Debian GNU/Linux 12 (bookworm)", Settings(cpus=4, memory=8 * GIB), 2, 5
ODD = 'a,b+c="d" ', "Übuntu, but not quite", Settings(memory=GIB, network=NetworkMode.USER), 0, 0
CONFIGURATION = """\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/GLUE20.schema
modulepath /usr/lib/ldap
moduleload back_mdb
database mdb
suffix o=glue
directory {folder}
"""
PARENTS = f"""\
dn: o=glue
objectClass: organization
o: glue

dn: GLUE2GroupID=resource,o=glue
objectClass: GLUE2Group
GLUE2GroupID: resource

dn: GLUE2ServiceID={SERVICE},GLUE2GroupID=resource,o=glue
objectClass: GLUE2ComputingService
GLUE2ServiceID: {SERVICE}
GLUE2ServiceType: org.example.ce
GLUE2ServiceQualityLevel: production
GLUE2ServiceAdminDomainForeignKey: EXAMPLE

"""


def described(*offers: tuple[str, str, Settings, int, int]) -> list[dict[str, Any]]:
    return [environment(*offer, service="ce01", manager=MANAGER, time="2026-01-01T12:00:00Z") for offer in offers]


def test_an_image_is_an_environment_of_virtual_machines() -> None:
    (made,) = described(DEBIAN)
    assert made["VirtualMachine"] is True and made["ID"] == "urn:glue2:ExecutionEnvironment:debian12.ce01"
    assert (made["OSName"], made["OSVersion"], made["MainMemorySize"]) == ("Debian", "12", 8192)
    assert (made["TotalInstances"], made["UsedInstances"], made["ConnectivityOut"]) == (7, 2, False)
    assert made["Associations"] == {"ManagerID": MANAGER}


def test_an_entry_is_escaped_where_it_must_be() -> None:
    text = ldif(described(ODD)[0], SERVICE)
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert lines["dn"].startswith(r"GLUE2ResourceID=urn:glue2:ExecutionEnvironment:a\,b\+c\=\"d\" .ce01,")
    assert base64.b64decode(lines["GLUE2ExecutionEnvironmentOSName:"]).decode() == "Übuntu,"
    assert base64.b64decode(lines["GLUE2EntityName:"]) == b'a,b+c="d" '
    assert not any("OSVersion" in name for name in lines)


@pytest.mark.skipif(
    not shutil.which("slapadd", path="/usr/sbin:/sbin") or not (SCHEMA / "GLUE20.schema").exists(),
    reason="Debian's packages slapd and glue-schema are not installed",
)
def test_openldap_takes_the_entries_by_the_schema(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "slapd.conf").write_text(CONFIGURATION.format(folder=tmp_path / "db"))
    entries = "\n".join(ldif(described_one, SERVICE) for described_one in described(DEBIAN, ODD))
    for text, code in (
        (entries, 0),
        (entries.replace("ExecutionEnvironmentOSFamily: linux\n", "EntityOtherInfo: x\n"), 1),
    ):
        (tmp_path / "all.ldif").write_text(PARENTS * (code == 0) + text.replace("ce01,GLUE2S", f"ce0{code + 1},GLUE2S"))
        command = ["/usr/sbin/slapadd", "-f", str(tmp_path / "slapd.conf"), "-l", str(tmp_path / "all.ldif")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr


def test_a_host_describes_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "store", "logs", "scratch"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name.upper()}", str(tmp_path / name))
    assert main(["monitor", "glue2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ExecutionEnvironment": []}
    assert main(["monitor", "glue2"]) == 0
    assert capsys.readouterr().out == ""
