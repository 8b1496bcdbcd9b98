"""qstat's JSON as OpenPBS 20 and later write it, read strictly: nothing that a user chose can end a job there, or begin another one.
https://github.com/openpbs/openpbs (doc/man1/qstat.1B, src/lib/Libcmds/pbs_json.c)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from belljar.pool.terms import LARGEST_ANSWER, JobState

# doc/man7/pbs_job_attributes.7B: job_state
STATES = {
    **dict.fromkeys("QWT", JobState.WAITING), "H": JobState.HELD, **dict.fromkeys("RSU", JobState.RUNNING),
    "E": JobState.ENDING, **dict.fromkeys("FXM", JobState.ENDED),
}  # fmt: skip
LINE = re.compile(r'((?: {4})+|\t+)"(.*?)":\t?(\{|".*"|[^"{].*?),?')


def jobs_of(printed: bytes) -> dict[str, Mapping[str, Any]]:
    """Each job's attributes by its id, without jobs that are not told whole. Raises ValueError.

    A value on each line, as deep as that is indented. Releases up to 23.06 do not write users' words as JSON has them (`.5`,
    backslashes), and users may nest what they like: here no words end a job, or begin another one."""
    text = printed[: LARGEST_ANSWER + 1].decode("utf-8", "replace")
    if len(printed) > LARGEST_ANSWER or not (text.startswith("{\n") and text.rstrip().endswith("\n}")):
        raise ValueError(f"qstat printed {text[:60]!r} where its document begins, or not all of it")
    path: list[dict[str, Any]] = [{}]
    for line in text.split("\n"):
        match = LINE.fullmatch(line)
        depth = 0 if match is None else len(match[1].replace(" " * 4, "\t"))
        # A line break in a variable's name can begin such a line, too: nothing but jobs comes after the first of them.
        if match is None or depth > len(path) or (depth == 1 and len(path) > 1):
            continue
        name, is_object = match[2], match[3] == "{"
        if depth == 2 and not is_object:
            continue
        del path[depth:]
        is_twice, value = depth == 2 and name in path[-1], {} if is_object else _plain(match[3])
        path[-1][name] = {} if is_twice else value  # which of two is the job is not known, nor is its state
        if isinstance(value, dict):
            path.append(value)
    jobs = path[0].get("Jobs", {})
    if "pbs_server" not in path[0]:
        raise ValueError(f"qstat printed {text[:60]!r} where its document begins")
    return {id: job for id, job in jobs.items() if isinstance(job, dict)} if isinstance(jobs, dict) else {}


def _plain(value: str) -> str:
    if "\\" in value:
        with suppress(ValueError, RecursionError):
            return str(json.loads(value, strict=False))
    return value[1:-1] if value.startswith('"') else value
