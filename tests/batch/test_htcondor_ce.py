"""The page about HTCondor-CE, followed with Debian's HTCondor: its own job router takes jobs of a schedd to the same schedd, on a node
with belljar. In the place of `condor-ce` and `condor_ce` stand `condor`'s own names."""

from __future__ import annotations

import re

import pytest
from tests.batch.lab.condor import Condor
from tests.batch.lab.page import steps
from tests.batch.test_htcondor import as_the_page_says, images_of
from tests.live.conftest import ROOT

PAGE = ROOT / "docs/batch/htcondor-ce.md"
# A compute element's schedd has no slots: here they keep away from jobs that are to be routed. The router looks often.
MORE = """\
DAEMON_LIST = $(DAEMON_LIST) JOB_ROUTER
JOB_ROUTER_POLLING_PERIOD = 2
STARTD_CRON_BELLJAR_PERIOD = 2s
START = $(START) && TARGET.WantMachine =!= true
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_grid_job_is_routed_into_a_machine_of_an_image_that_the_site_lists() -> None:
    condor = Condor("trixie")
    try:
        condor.up()
        for section in ("1. Settings", "2. Install"):
            as_the_page_says(condor, section)
        condor.write("/etc/condor/config.d/99-test.conf", MORE)
        page = PAGE.read_text().replace("condor-ce/config.d/90", "condor/config.d/91").replace("condor_ce_", "condor_")
        route, job = steps(page)
        condor.run("sh", "-ec", route.commands)
        condor.run("condor_restart", "-fast")
        condor.until(lambda: b"debian12" in images_of(condor), "the schedd knows the pool's images", 120)
        commands = job.commands.replace("condor_wait", "timeout 600 condor_wait")
        for image in ("debian12", "somebody-elses"):
            printed = condor.text(
                "sh", "-ec", commands.replace('"debian12"', f'"{image}"'), user="bjalice", timeout=700
            )
            assert re.search(r"^hello from belljar-[0-9a-f]{12}$", printed, re.MULTILINE), printed
        words = ("-constraint", "RoutedFromJobId isnt undefined", "-af", "VmImage", "GridImage", "ExitCode")
        done = {"debian12 debian12 0", "debian12 somebody-elses 0"}
        condor.until(
            lambda: set(condor.text("condor_history", *words).splitlines()) == done, "both jobs were routed", 60
        )
    finally:
        condor.close()
