"""One node each of OpenPBS and Torque: stand-ins for pbs_mom, belljar installed by its own `batch install`, real machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.batch.lab.mom import Asked, Mom, Running
from tests.batch.lab.site import Site

VM = {"ncpus": "1", "mem": "700mb", "vm_image": "debian12", "walltime": "600"}


class Pbs:
    """A site with one stand-in node. `run` takes one job to its end."""

    def __init__(self, site: Site, mom: Mom) -> None:
        self.site, self.mom = site, mom

    def start(self, asked: Asked, user: str = "bjalice", ident: str = "") -> Running:
        if self.mom.system == "torque":
            asked = by_variables(asked)
        return self.mom.start(user, asked, home=self.site.home(user), ident=ident)

    def run(self, asked: Asked, user: str = "bjalice", ident: str = "") -> tuple[int, str, str]:
        job = self.start(asked, user, ident)
        status = job.wait()
        return status, job.out, job.err

    def leftovers(self) -> list[str]:
        return self.site.leftovers()


def by_variables(asked: Asked) -> Asked:
    """The same as a user of Torque asks for it."""
    wanted = {name: value for name, value in asked.resources.items() if name.startswith("vm_")}
    rest = {name: value for name, value in asked.resources.items() if name not in wanted}
    return replace(asked, resources=rest, env={**{name.upper(): value for name, value in wanted.items()}, **asked.env})


def _installed(site: Site, system: str, home: Path) -> None:
    """The node's part, by the command itself: there is no server here."""
    done = site.command("batch", "install", system, "--folder", str(home), "--prefix", str(site.top), check=True)
    assert b"Done." in done.stdout


@pytest.fixture(scope="module")
def openpbs() -> Iterator[Pbs]:
    site = Site("openpbs", "retry_delay = 5")
    try:
        mom = Mom(site.top / "pbs", "openpbs")
        _installed(site, "openpbs", mom.home)
        from belljar.batch.pbs.openpbs.site import text_of

        launchers = site.top / "libexec/openpbs"
        mom.hook, mom.config = site.top / "belljar_node.py", site.top / "hook.json"
        mom.hook.write_bytes(text_of("belljar_node"))
        names = sorted(path.name for path in launchers.iterdir())
        belljar = next(name for name in names if name.startswith("belljar"))
        settings = {
            "wrapper": f"{launchers}/wrap-openpbs",
            "belljar": f"{launchers}/{belljar}",
            "notes": f"{site.top}/notes",
        }
        mom.config.write_text(json.dumps({**settings, "retries": 3}))
        yield Pbs(site, mom)
    finally:
        site.close()


@pytest.fixture(scope="module")
def torque() -> Iterator[Pbs]:
    site = Site("torque", "retry_delay = 5")
    try:
        mom = Mom(site.top / "torque", "torque", kill_delay=4.0, host="torque")
        _installed(site, "torque", mom.home)
        mom.starter = site.top / "libexec/torque/wrap-torque"
        assert f"$job_starter {mom.starter}\n" in (mom.home / "mom_priv/config").read_text()
        mom.prologue, mom.epilogue = mom.home / "mom_priv/prologue", mom.home / "mom_priv/epilogue"
        yield Pbs(site, mom)
    finally:
        site.close()


# What a job can see of how it was started, in a form that does not change from run to run.
LOOK = r"""
tr '\0' '\n' </proc/$$/environ | LC_ALL=C sort | grep -v '^PBS_JOBID=\|^PBS_NODEFILE=\|^TMPDIR='
tr '\0' '|' </proc/$$/cmdline | sed "s|/$PBS_JOBID[.]SC|/ID.SC|"; echo
tr '\0' '|' </proc/$PPID/cmdline; echo
readlink /proc/$$/exe /proc/$PPID/exe
/usr/bin/python3 -c 'print(*[x for x in open("/proc/self/status") if x[:6] in ("SigBlk", "SigIgn", "Cpus_a")])'
umask; pwd; ulimit -a
[ "$(ps -o sid= -p $$)" = "$(ps -o sid= -p $PPID)" ] && echo same session
/usr/bin/python3 -c 'import os; print(sorted(os.listdir("/proc/self/fd")))'
"""
