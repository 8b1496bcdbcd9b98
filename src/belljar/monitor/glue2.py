"""The machines of a host as GLUE 2 describes what jobs may have: an ExecutionEnvironment for each image, as LDIF and as JSON.

https://www.ogf.org/documents/GFD.147.pdf (the model), GFD.218 (LDAP), GFD.219 (JSON)
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from typing import Any

from belljar.machine import Settings
from belljar.model import MIB, NetworkMode

VALIDITY = 3600  # seconds
KEY = "GLUE2ResourceID"
ENTITY = ("Name", "CreationTime", "Validity")  # attributes of every entity, as LDAP has them


def environment(
    image: str, system: str, machine: Settings, used: int, free: int, *, service: str, manager: str, time: str
) -> dict[str, Any]:
    """An image, and the machine that a job gets with it, as GLUE 2 names its attributes. *system*: as its /etc/os-release has it;
    *used*: machines that run; *free*: more of them that there is room for; *time*: ISO 8601, in UTC."""
    version, memory = re.search(r"\d[\w.]*", system), machine.memory // MIB
    return {
        "ID": f"urn:glue2:ExecutionEnvironment:{image}.{service}", "Name": image, "CreationTime": time,
        "Validity": VALIDITY, "Platform": os.uname().machine, "VirtualMachine": True, "TotalInstances": used + free,
        "UsedInstances": used, "LogicalCPUs": machine.cpus, "CPUTimeScalingFactor": 1, "WallTimeScalingFactor": 1,
        "MainMemorySize": memory, "VirtualMemorySize": memory, "OSFamily": "linux",
        "OSName": system.partition(" ")[0] or "linux", "OSVersion": version[0] if version else "", "ConnectivityIn": False,
        "ConnectivityOut": machine.network is not NetworkMode.NONE, "Associations": {"ManagerID": manager},
    }  # fmt: skip


def ldif(environment: Mapping[str, Any], service: str) -> str:
    """One entry, below that of its service."""
    id, manager = environment["ID"], environment["Associations"]["ManagerID"]
    own = {name: value for name, value in environment.items() if name not in ("ID", *ENTITY, "Associations")}
    lines = [
        _line("dn", f"{KEY}={_escaped(id)},GLUE2ServiceID={_escaped(service)},GLUE2GroupID=resource,o=glue"),
        "objectClass: GLUE2Resource",
        "objectClass: GLUE2ExecutionEnvironment",
        _line(KEY, id),
        *(_line(f"GLUE2Entity{name}", environment[name]) for name in ENTITY),
        *(_line(f"GLUE2ExecutionEnvironment{name}", value) for name, value in own.items() if value != ""),
        _line("GLUE2ResourceManagerForeignKey", manager),
        _line("GLUE2ExecutionEnvironmentComputingManagerForeignKey", manager),
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    """RFC 2849: what is not plain is written in base64."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if re.fullmatch(r"[!-9;=-~]([ -~]*[!-~])?", text):
        return f"{name}: {text}"
    return f"{name}:: {base64.b64encode(text.encode()).decode()}"


def _escaped(text: str) -> str:
    """As a value in a distinguished name: RFC 4514."""
    return re.sub(r'([,+"\\<>;=#]|^ | $)', r"\\\1", text)
