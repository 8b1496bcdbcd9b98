"""APEL's messages: individual jobs (v0.3, v0.4), machines of a cloud (v0.4) and counts of a month (sync v0.1), and their names in a
directory queue; and lines as PBS and BLAH write them, for APEL's parsers of these logs, one for each machine in each.

Keys and rules: https://wiki.egi.eu/wiki/APEL/MessageFormat and the loader of https://github.com/apel/apel (2.5.0). Version 0.4 has
type and value of the benchmark in one field. Clouds: https://docs.egi.eu/internal/accounting/record-types/cloud/.
Names: a folder of 8 and a file of 14 hexadecimal digits, as SSM reads them.
PBS: a file for each day of local time, `YYYYMMDD`. BLAH: one for each day of UTC, `blahp.log-YYYYMMDD`.
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
    fields = {
        "Site": record.site_name, "SubmitHost": record.submit_host, "LocalJobId": record.id,
        "LocalUserId": record.factory, "Queue": record.machinetype, "GlobalUserName": record.user, "FQAN": record.fqan,
        "WallDuration": record.wall, "CpuDuration": record.cpu, "Processors": record.processors, "NodeCount": 1,
        "InfrastructureDescription": INFRASTRUCTURE, "InfrastructureType": "grid",
        "StartTime": record.start, "EndTime": record.end, "MemoryReal": used, "MemoryVirtual": kib,
    }  # fmt: skip
    power = f"{record.power:g}"
    if record.is_reportable and version is Version.V03:
        fields |= {"ServiceLevelType": record.benchmark, "ServiceLevel": power}
    elif record.is_reportable:
        fields["ServiceLevel"] = f"{{{record.benchmark}: {power}}}"
    return _text(HEAD.format(version.value), fields)


def cloud(record: CloudRecord, site: str) -> str:
    """One machine that ended, as one message: memory in MB, disk in GB. What is not known, such as its processor time, has no line."""
    fields = {
        "VMUUID": record.id, "SiteName": site, "CloudComputeService": record.service, "MachineName": record.id,
        "LocalUserId": record.user, "LocalGroupId": record.group, "Status": "completed", "StartTime": record.start,
        "EndTime": record.end, "WallDuration": record.wall, "CpuCount": record.processors,
        "Memory": -(-record.memory // MIB), "Disk": -(-record.disk // GIB) or "", "ImageId": record.image,
        "CloudType": CLOUD_TYPE,
    }  # fmt: skip
    return _text(CLOUD_HEAD, {key: word(str(value)) for key, value in fields.items()})


def sync(site: str, submit_host: str, jobs: int, year: int, month: int) -> str:
    """How many records of a month were made."""
    fields = {"Site": site, "SubmitHost": submit_host, "NumberOfJobs": jobs, "Month": month, "Year": year}
    return _text(SYNC_HEAD, fields)


def name_of(record: UsageRecord | CloudRecord) -> str:
    """FOLDER/FILE in the queue. The same machine has the same name whenever this is asked."""
    return time.strftime("%Y%m%d/%H%M%S", time.gmtime(record.end)) + record.id.removeprefix("i-")[:8]


def sync_name(now: float) -> str:
    """FOLDER/FILE of a message that counts."""
    return time.strftime("%Y%m%d/%H%M%S", time.gmtime(now)) + f"{int(now % 1 * (1 << 32)):08x}"


def _text(head: str, fields: dict[str, object]) -> str:
    lines = [f"{key}: {value}" for key, value in fields.items() if value not in ("", None)]
    return "\n".join([head, *lines, "%%"]) + "\n"


# -- logs --------------------------------------------------------------------------------------------------------------


def pbs_line(record: UsageRecord) -> str:
    """An `E` record. Its processors are cores 0, 1, ... of the factory, for that is where parsers count them."""
    who, kib = _one_word(record.machinetype), record.memory // 1024
    used = (record.memory_used or record.memory) // 1024
    cores = "+".join(f"{record.factory}/{core}" for core in range(record.processors))
    limit = _clock(record.wall_limit or record.wall)
    fields = {
        "user": who, "group": who, "jobname": record.id, "queue": who,
        "ctime": record.start, "qtime": record.start, "etime": record.start, "start": record.start,
        "owner": f"{who}@{record.space}", "exec_host": cores,
        "Resource_List.cput": limit, "Resource_List.ncpus": record.processors, "Resource_List.neednodes": 1,
        "Resource_List.nodect": 1, "Resource_List.nodes": 1, "Resource_List.walltime": limit,
        "session": 0, "end": record.end, "Exit_status": 0, "resources_used.cput": _clock(record.cpu),
        "resources_used.mem": f"{used}kb", "resources_used.ncpus": record.processors,
        "resources_used.vmem": f"{kib}kb", "resources_used.walltime": _clock(record.wall),
    }  # fmt: skip
    moment = time.strftime("%m/%d/%Y %H:%M:%S", time.localtime(record.end))
    return f"{moment};E;{record.id};{' '.join(f'{key}={value}' for key, value in fields.items())}"


def pbs_file(record: UsageRecord) -> str:
    return time.strftime("%Y%m%d", time.localtime(record.end))


def blah_line(record: UsageRecord) -> str:
    """The user the machine was for, by the same ids."""
    fields = {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.end)),
        "userDN": record.user, "userFQAN": record.fqan, "ceID": record.submit_host,
        "jobID": record.id, "lrmsID": record.id, "clientID": record.id, "localUser": "99",
    }  # fmt: skip
    return " ".join('"{}={}"'.format(key, value.replace('"', "'")) for key, value in fields.items())


def blah_file(record: UsageRecord) -> str:
    return time.strftime("blahp.log-%Y%m%d", time.gmtime(record.end))


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _one_word(text: str) -> str:
    return "_".join(text.replace(";", "_").split())
