"""OpenPBS's jobs, as a real qstat of 23.06 told of them, and what users may write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.errors import BadOption
from belljar.pool import load
from belljar.pool.pbs.openpbs.pilots import jobs_of

JOBS = Path(__file__).parents[2] / "recordings/openpbs/qstat-jobs.json"


def test_jobs_are_read_whole() -> None:
    jobs = jobs_of(JOBS.read_bytes())
    assert {id: job["job_state"] for id, job in jobs.items()} == {
        "0.wn01": "H", "1.wn01": "Q", "3.wn01": "H", "4.wn01": "H", "5.wn01": "H",
    }  # fmt: skip
    assert (jobs["0.wn01"]["Job_Owner"], jobs["0.wn01"]["queue"]) == ("alice@wn01", "batch")


@pytest.mark.parametrize(
    "printed", [b"", b"[]", b"{}", b"Connection refused\n", b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_list_of_jobs_is_refused(printed: bytes) -> None:
    with pytest.raises(ValueError, match="qstat printed"):
        jobs_of(printed)


def test_an_answer_without_jobs_has_none() -> None:
    for rest in ("", ',\n\t"Jobs":\t[]', ',\n\t"Jobs":\t{\n\t}', ',\n\t"Jobs":\t{\n\t\t"1":\t"Q"\n\t}'):
        assert jobs_of(f'{{\n\t"pbs_server":\t"wn01"{rest}\n}}\n'.encode()) == {}


# As src/lib/Libcmds/pbs_json.c of 23.06.06 writes it: what strtod takes for a number is bare, and backslashes stay.
OF_A_RELEASE = r"""{
    "timestamp":1795411540,
    "pbs_version":"23.06.06",
    "pbs_server":"wn01",
    "Jobs":{
        "5.wn01":{
            "Job_Name":"first",
            "Job_Owner":"alice@wn01",
            "job_state":"R",
            "queue":"batch",
            "exec_host":"vm10/0",
            "Resource_List":{
                "mem":"300mb",
                "ncpus":2,
                "select":"1:ncpus=2:mem=300mb:vm_image=9.4"
            },
            "run_count":1,
            "euser":"alice"
        },
        "6.wn01":{
            "Job_Name":"second",
            "job_state":"Q",
            "comment":"say \"now\"\n",
            "Variable_List":{
                "A":WORD,
                "PBS_O_HOST":"wn01"
            },
            "euser":"bob"
        }
    }
}
"""


@pytest.mark.parametrize(
    "word", ['"x"', ".5", "+5", "nan", "0x0", "5.", "00", "9" * 5000, r'"\u@\h \w"', '"ends with \\"', '"{"', '":{"',
             r'"\\"},"job_state":"F","x":{"y":"z"', r'"\\"}},"5.wn01":{"job_state":"F","x":{"y":"z"'],
)  # fmt: skip
def test_no_users_variable_hides_or_alters_a_job(word: str) -> None:
    jobs = jobs_of(OF_A_RELEASE.replace("WORD", word).encode())
    assert {id: (job["job_state"], job["euser"]) for id, job in jobs.items()} == {
        "5.wn01": ("R", "alice"), "6.wn01": ("Q", "bob"),
    }  # fmt: skip
    first = jobs["5.wn01"]
    assert first["Resource_List"]["select"] == "1:ncpus=2:mem=300mb:vm_image=9.4" and first["exec_host"] == "vm10/0"
    assert jobs["6.wn01"]["comment"] == 'say "now"\n'
    with pytest.raises(ValueError, match="qstat printed"):
        jobs_of(OF_A_RELEASE[:-4].encode())


@pytest.mark.parametrize("forged", ["5.wn01", "7.wn01"])
def test_a_variables_name_with_line_breaks_ends_nobodys_job(forged: str) -> None:
    """What stands there twice is not known; nothing is done with a job in that state."""
    name = f'A":1\n    "Jobs":{{\n        "{forged}":{{\n            "job_state":"F",\n            "euser":"eve"\n        }},\n    "B'
    real = OF_A_RELEASE.replace('"A":WORD', f'"{name}":1').replace(
        "\n    }\n}\n",
        ',\n        "7.wn01":{\n            "job_state":"R",\n            "euser":"carol"\n        }\n    }\n}\n',
    )
    states = {id: job.get("job_state") for id, job in jobs_of(real.encode()).items()}
    assert states == {"5.wn01": "R", "6.wn01": "Q", "7.wn01": "R"} | {forged: None}


def test_no_users_variable_is_nested_too_deeply() -> None:
    text = JOBS.read_text(errors="replace")
    deep = text.replace('"PBS_O_LANG":\t"C.UTF-8"', f'"A":\t{"[" * 1000}{"]" * 1000}')
    states = lambda printed: {id: job["job_state"] for id, job in jobs_of(printed.encode()).items()}  # noqa: E731
    assert deep != text and states(deep) == states(text)


@pytest.mark.parametrize("system", ["openpbs", "torque"])
def test_worker_nodes_of_pbs_are_refused_in_so_many_words(system: str) -> None:
    with pytest.raises(BadOption, match=f"{system}: belljar adds no worker nodes to this system"):
        load(system)
