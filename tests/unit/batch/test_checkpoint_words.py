"""When a job asks to be checkpointed: judged alike by the node, by Slurm's plugin, by Grid Engine's verifier and HTCondor's schedd."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.batch import test_gridengine_jsv as jsv
from tests.unit.batch import test_htcondor as condor
from tests.unit.batch.test_slurm import LINE, OPTIONS, surroundings
from tests.unit.batch.test_slurm_lua import LIBRARY, Submission, line

from belljar.batch import Settings
from belljar.batch.gridengine.dialect import DIALECT as GRID_ENGINE
from belljar.batch.htcondor.dialect import DIALECT as HTCONDOR
from belljar.batch.htcondor.rules import prepare, requirements
from belljar.batch.job.policy import checkpoint_of
from belljar.batch.job.terms import Ending, Job, Standing
from belljar.batch.slurm.dialect import Slurm
from belljar.errors import BadSetting, BelljarError

SITE = Settings(checkpoint="on-request", checkpoint_folder="/scratch/checkpoints")
NOT_WORDS, NOT_HERE = "not when a job can be checkpointed", "jobs are not checkpointed here"
GOOD = ("on-preempt", "on-limit", "every=1h", "every=90", "every=1d+on-preempt+on-limit")
BAD = ("x", "on-preempt+", "+on-limit", "on-preempt++on-limit", "every=", "every=0", "every=1w", "every=-1", "every=1h5", "ever",
       "On-Preempt", "on-preempt on-limit", "every=123456789", "never+on-limit", "on-preempt\n", "$(id)", "on-request")  # fmt: skip
CASES = [
    *(("on-request", words, "") for words in (*GOOD, "", "never")),
    *(("every=1h", words, "") for words in ("on-limit", "never", "")),
    *(("on-request", words, NOT_WORDS) for words in BAD),
    *(("never", words, NOT_HERE) for words in GOOD),
    *(("never", words, "") for words in ("", "never")),
]
every_case = pytest.mark.parametrize(("site", "words", "refusal"), CASES)


def settings(site: str) -> Settings:
    return replace(SITE, checkpoint=site)


@every_case
def test_on_the_node(site: str, words: str, refusal: str) -> None:
    message = ""
    try:
        default = "" if site in ("never", "on-request") else site
        assert checkpoint_of(words, settings(site)) == ("" if words == "never" else words or default)
    except BelljarError as exc:
        message = exc.message
    assert refusal in message if refusal else not message


@pytest.mark.skipif(LIBRARY is None, reason="no liblua5.1 on this host")
@every_case
def test_in_slurmctld(site: str, words: str, refusal: str, tmp_path: Path) -> None:
    if re.search(r"[\s,;]", words):
        pytest.skip("two words of a comment")
    result, script, message = Submission(tmp_path, settings(site)).submit(f"vm=debian12 vm-checkpoint={words}")
    assert result == (-1 if refusal else 0) and refusal in message
    if not refusal:
        asked = f" --checkpoint={words}" if words not in ("", "never") else ""
        assert line(script) == f"#!/opt/belljar/libexec/wrap-slurm --array=no --image=debian12{asked}\n"


@every_case
def test_in_grid_engines_verifier(site: str, words: str, refusal: str) -> None:
    if "\n" in words:
        pytest.skip("a line break is refused by itself")
    answer = jsv.answer("l_hard vm_image=debian12", env=(f"VM_CHECKPOINT {words}",), one=jsv.verifier(settings(site)))
    assert answer[-1].startswith("RESULT STATE REJECT" if refusal else "RESULT STATE CORRECT") and refusal in answer[-1]


@every_case
def test_in_htcondor(site: str, words: str, refusal: str) -> None:
    """As an expression of the schedd, whose pattern is tried here; and in the hook before the job starts."""
    expression, _ = requirements(settings(site))["BelljarCheckpoint"]
    pattern = re.search(r'regexp\("(.*)", VmCheckpoint\)', expression)
    if words:
        fits = re.search(pattern[1], words) if pattern else words == "never"
        assert bool(fits) is not bool(refusal) or "\n" in words  # PCRE's $, too, forgives one at the end
    printed = prepare(f'VmImage = "debian12"\nVmCheckpoint = "{words.strip()}"\n'.encode(), "bob", (), settings(site))
    assert refusal.encode() in printed if words == words.strip() else True


def test_a_change_after_submission_is_refused(tmp_path: Path) -> None:
    site, record = Submission(tmp_path, SITE), {"comment": "vm=debian12 vm-checkpoint=on-limit"}
    result, _, message = site.modify({"comment": "vm=debian12 vm-checkpoint=every=1h"}, record)
    assert result == -1 and "image and checkpoint of a job cannot be changed" in message
    assert site.modify({"comment": "vm=debian12 vm-checkpoint=x"}, record)[0] == -1
    for comment in ("vm=debian12 vm-checkpoint=on-limit belljar=1 try 1 of 3", "mine"):
        assert site.modify({"comment": comment}, record)[0] == 0


def test_settings_that_make_no_sense_are_named() -> None:
    for changes, message in (
        ({"checkpoint": "always"}, r"batch\.checkpoint: 'always'"),
        ({"checkpoint_folder": "x"}, r"batch\.checkpoint_folder: 'x'"),
    ):
        with pytest.raises(BadSetting, match=message):
            checkpoint_of("on-limit", replace(SITE, **changes))
    assert checkpoint_of(None, replace(SITE, checkpoint="every=1h")) == "", "a system whose jobs cannot be"


# -- each system's words -------------------------------------------------------------------------------------------------


def test_each_system_reads_what_a_job_asks_for() -> None:
    assert Slurm().read(surroundings(options={**OPTIONS, "checkpoint": "every=1h"})).checkpoint == "every=1h"
    whole = surroundings(
        options={**OPTIONS, "checkpoint": "ev"}, script=LINE.replace(b"\n", b" --checkpoint=every=1h\n")
    )
    assert Slurm().read(whole).checkpoint == "every=1h", "the kernel may have cut the line"
    assert condor.job().checkpoint == ""
    ad = condor.recorded("job.ad").rstrip() + b'\nVmCheckpoint = "on-preempt"\n'
    assert HTCONDOR.read(condor.surroundings(ad)).checkpoint == "on-preempt"


SHOWN = b"""JobId=7 JobName=x
   JobState=%s Reason=None Dependency=(null)
   Requeue=%d Restarts=%d BatchFlag=1 Reboot=0 ExitCode=0:0
   Comment=x Requeue=1 Restarts=9 JobState=RUNNING
"""


@pytest.mark.parametrize(
    ("state", "requeue", "restarts", "standing"),
    [
        (b"RUNNING", 1, 2, Standing.RUNS),
        (b"COMPLETING", 1, 3, Standing.QUEUED),  # preempted
        (b"PENDING", 1, 3, Standing.QUEUED),
        (b"COMPLETING", 1, 2, Standing.OVER),  # cancelled, or its limit
        (b"RUNNING", 0, 2, Standing.OVER),  # --no-requeue
    ],
)
def test_slurm_tells_a_preemption_from_a_cancel(state: bytes, requeue: int, restarts: int, standing: Standing) -> None:
    job = Job("slurm", "7", started_before=2)
    assert Slurm().standing(job, SHOWN % (state, requeue, restarts)) is standing
    assert Slurm().ask_standing(job) == ("scontrol", "show", "job", "7")


def test_a_checkpointed_job_is_given_back_at_once_and_not_counted() -> None:
    job = Job("slurm", "7", started_before=9)
    ending = Slurm().give_back(job, is_queued=False)
    assert ending.commands == (("scontrol", "requeue", "7"), ("scontrol", "update", "JobId=7", "StartTime=now+5"))
    assert Slurm().give_back(job, is_queued=True) == Ending()
    assert GRID_ENGINE.give_back(job, is_queued=True) == GRID_ENGINE.give_back(job, is_queued=False) == Ending(99)
    assert HTCONDOR.give_back(condor.job(), is_queued=True) == Ending()
    ending = HTCONDOR.give_back(condor.job(), is_queued=False)
    assert (ending.exit_code, ending.delay) == (1, 0.0) and ending.files and ending.opens
