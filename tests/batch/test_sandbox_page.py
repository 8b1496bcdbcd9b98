"""The page for sandboxes, followed: its batch job under a real Slurm, its sandboxes real machines."""

from __future__ import annotations

import os
import re

from tests.batch.lab.libraries import libraries
from tests.batch.lab.page import fits, steps
from tests.batch.slurm_fixtures import Cluster
from tests.live.conftest import ROOT

PAGE = (ROOT / "docs/operate/sandboxes.md").read_text()
MOST_WORDS = 650
PREFIX = "/opt/belljar/lib"
PYTHON = "/usr/bin/python3"  # the tests' own has belljar already


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= MOST_WORDS


def test_the_job_of_the_page_does_what_it_says(cluster: Cluster) -> None:
    script, _, submit, *_ = re.findall(r"^```(?:sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    script = script.replace(PREFIX, f"{cluster.site.lib}:{libraries()}").replace("python3 ", f"{PYTHON} ")
    home = cluster.site.home("bjalice")
    for name, text in (("rollouts.sh", script), ("rollouts.py", program)):
        (home / name).write_text(text)
    folders = {f"BELLJAR_PATHS_{name}": str(value) for name, value in paths(cluster).items()}
    env = {**cluster.lab.env, **folders}
    done = cluster.site.run("sh", "-c", submit, user="bjalice", env=env)
    expected = next(step.expected for step in steps(PAGE) if step.commands == submit)
    assert expected and fits(f"...\n{expected}", done.stdout.decode()), done.stdout.decode()
    cluster.clean()


def paths(cluster: Cluster) -> dict[str, object]:
    """Of the site, whose settings file is not where belljar looks by itself."""
    return {"NODE": cluster.site.node, "SITE_STORE": os.environ.get("BELLJAR_TEST_STORE", ROOT / ".state/store")}
