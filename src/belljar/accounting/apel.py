"""APEL's messages: individual jobs (v0.3, v0.4), machines of a cloud (v0.4) and counts of a month (sync v0.1), and their names in a
directory queue.

Keys and rules: https://wiki.egi.eu/wiki/APEL/MessageFormat and the loader of https://github.com/apel/apel (2.5.0). Version 0.4 has
type and value of the benchmark in one field. Clouds: https://docs.egi.eu/internal/accounting/record-types/cloud/. Names: a folder of 8 and a file of 14 hexadecimal digits, as SSM reads them.
"""

from __future__ import annotations

import time

from belljar.accounting import CloudRecord, UsageRecord, Version, word
from belljar.model import GIB, MIB

HEAD = "APEL-individual-job-message: v{}"
CLOUD_HEAD, CLOUD_TYPE = "APEL-cloud-message: v0.4", "belljar"
SYNC_HEAD = "APEL-sync-message: v0.1"
INFRASTRUCTURE = "BELLJAR-VACUUM"


def message(record: UsageRecord, version: Version) -> str:
    """One machine, as one message. What is not known has no line; the benchmark has none where the record is not to be sent."""
    kib, used = record.memory // 1024, (record.memory_used or record.memory) // 1024
    facts = {
        "Site": record.site_name, "SubmitHost": record.submit_host, "LocalJobId": record.id,
        "LocalUserId": record.factory, "Queue": record.machinetype, "GlobalUserName": record.user, "FQAN": record.fqan,
        "WallDuration": record.wall, "CpuDuration": record.cpu, "Processors": record.processors, "NodeCount": 1,
        "InfrastructureDescription": INFRASTRUCTURE, "InfrastructureType": "grid",
        "StartTime": record.start, "EndTime": record.end, "MemoryReal": used, "MemoryVirtual": kib,
    }  # fmt: skip
    power = f"{record.power:g}"
    if record.is_reportable and version is Version.V03:
        facts |= {"ServiceLevelType": record.benchmark, "ServiceLevel": power}
    elif record.is_reportable:
        facts["ServiceLevel"] = f"{{{record.benchmark}: {power}}}"
    return _text(HEAD.format(version.value), facts)


def cloud(record: CloudRecord, site: str) -> str:
    """One machine that ended, as one message: memory in MB, disk in GB. What is not known, such as its processor time, has no line."""
    facts = {
        "VMUUID": record.id, "SiteName": site, "CloudComputeService": record.service, "MachineName": record.id,
        "LocalUserId": record.user, "LocalGroupId": record.group, "Status": "completed", "StartTime": record.start,
        "EndTime": record.end, "WallDuration": record.wall, "CpuCount": record.processors,
        "Memory": -(-record.memory // MIB), "Disk": -(-record.disk // GIB) or "", "ImageId": record.image,
        "CloudType": CLOUD_TYPE,
    }  # fmt: skip
    return _text(CLOUD_HEAD, {key: word(str(value)) for key, value in facts.items()})


def sync(site: str, submit_host: str, jobs: int, year: int, month: int) -> str:
    """How many records of a month were made."""
    facts = {"Site": site, "SubmitHost": submit_host, "NumberOfJobs": jobs, "Month": month, "Year": year}
    return _text(SYNC_HEAD, facts)


def name_of(record: UsageRecord | CloudRecord) -> str:
    """FOLDER/FILE in the queue. The same machine has the same name whenever this is asked."""
    return time.strftime("%Y%m%d/%H%M%S", time.gmtime(record.end)) + record.id.removeprefix("i-")[:8]


def sync_name(now: float) -> str:
    """FOLDER/FILE of a message that counts."""
    return time.strftime("%Y%m%d/%H%M%S", time.gmtime(now)) + f"{int(now % 1 * (1 << 32)):08x}"


def _text(head: str, facts: dict[str, object]) -> str:
    lines = [f"{key}: {value}" for key, value in facts.items() if value not in ("", None)]
    return "\n".join([head, *lines, "%%"]) + "\n"
