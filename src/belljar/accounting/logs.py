"""Lines as PBS and BLAH write them, for APEL's parsers of these logs. One line for each machine in each.

PBS: a file for each day of local time, `YYYYMMDD`. BLAH: one for each day of UTC, `blahp.log-YYYYMMDD`."""

from __future__ import annotations

import time

from belljar.accounting import UsageRecord


def pbs_line(record: UsageRecord) -> str:
    """An `E` record. Its processors are cores 0, 1, ... of the factory, for that is where parsers count them."""
    who, kib = _one_word(record.machinetype), record.memory // 1024
    used = (record.memory_used or record.memory) // 1024
    cores = "+".join(f"{record.factory}/{core}" for core in range(record.processors))
    limit = _clock(record.wall_limit or record.wall)
    facts = {
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
    return f"{moment};E;{record.id};{' '.join(f'{key}={value}' for key, value in facts.items())}"


def pbs_file(record: UsageRecord) -> str:
    return time.strftime("%Y%m%d", time.localtime(record.end))


def blah_line(record: UsageRecord) -> str:
    """Who the machine was for, by the same ids."""
    facts = {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.end)),
        "userDN": record.user, "userFQAN": record.fqan, "ceID": record.submit_host,
        "jobID": record.id, "lrmsID": record.id, "clientID": record.id, "localUser": "99",
    }  # fmt: skip
    return " ".join('"{}={}"'.format(key, value.replace('"', "'")) for key, value in facts.items())


def blah_file(record: UsageRecord) -> str:
    return time.strftime("blahp.log-%Y%m%d", time.gmtime(record.end))


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _one_word(text: str) -> str:
    return "_".join(text.replace(";", "_").split())
