"""What a site needs for LSF: an application profile with our job starter, an esub that asks for it, and two hooks.

Jobs without `-a vm` never see it. A queue whose jobs all get machines needs the same lines: that is advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Advice, OurFile, OurLines, Piece, Place
from belljar.batch.job.policy import queue_images
from belljar.batch.lsf.hooks import PROFILE
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, expect, fail, ok

SUDOERS = """PRE_EXEC and POST_EXEC must run as root on the execution hosts, so that they can end what a dead job left. In
/etc/lsf.sudoers (root's, mode 600) of each host:
    LSB_PRE_POST_EXEC_USER=root
then `badmin hrestart all`. Without it they run as the job's user, and end that user's machines only."""

SERVERDIR = """Link or copy {path} to $LSF_SERVERDIR/esub.{profile} on every host from which jobs are submitted
(or tell where that is with --set serverdir=DIR). With LSB_ESUB_METHOD="{profile}" in lsf.conf every submission is looked at."""


class LsfSite:
    """The pieces, and what is to be looked at besides."""

    default_folder = Path("/usr/share/lsf/conf/lsbatch")  # the cluster's own configdir lies below: --folder names it
    needs = Needs(
        ("badmin", "bjobs", "bhosts", "bpost", "bread", "brequeue", "bapp"),
        ("LSF_ENVDIR", "LSF_BINDIR", "LSF_SERVERDIR", "LSF_LIBDIR"),
        bins=lambda variables: (variables["LSF_BINDIR"],) if "LSF_BINDIR" in variables else (),
    )  # fmt: skip

    def pieces(self, place: Place) -> Iterator[Piece]:
        """Options: `serverdir`, $LSF_SERVERDIR; `unit`, the site's LSF_UNIT_FOR_LIMITS (default MB)."""
        settings = place.settings
        if re.search(r"[\s;\"'$`\\]", str(place.wrapper)):
            raise BadOption(f"{place.wrapper}: LSF's shell would split this path", hint="Choose another --prefix.")
        for verb in ("prolog", "epilog"):
            path = place.wrapper.with_name(f"lsf-{verb}")
            yield OurFile(f"{verb} of jobs with machines", path, place.hook("lsf", verb))
        server, name = place.options.get("serverdir", ""), f"esub.{PROFILE}"
        esub = Path(server, name) if server else place.wrapper.with_name(name)
        yield OurFile("asks for a machine at submit", esub, place.filled(Path(__file__).with_name("esub.sh")))
        about = ("Begin Application", f"NAME = {PROFILE}", "DESCRIPTION = jobs in machines of their own (belljar)")
        yield OurLines(
            "application profile with our job starter", place.folder / "lsb.applications",
            (*about, *self._lines(place), "End Application"), clashes=(rf"NAME\s*=\s*{PROFILE}\s*$",),
        )  # fmt: skip
        if not server:
            yield Advice("bsub finds esub.vm", SERVERDIR.format(path=esub, profile=PROFILE))
        yield Advice("hooks run as root", SUDOERS)
        if queues := ", ".join(queue_images(settings)) or ("every queue" if settings.default_image else ""):
            lines = "\n".join(f"    {line}" for line in self._lines(place))
            yield Advice("queues whose jobs all get machines", f"In lsb.queues, for {queues}:\n{lines}")

    def _lines(self, place: Place) -> tuple[str, ...]:
        unit = place.options.get("unit", "")
        if unit and unit not in ("KB", "MB", "GB", "TB", "PB"):
            raise BadOption(f"unit={unit}: LSF_UNIT_FOR_LIMITS is KB, MB, GB, TB or PB")
        starter = f"exec {place.wrapper}{f' --unit={unit}' if unit else ''}; %USRCMD"
        libexec = place.wrapper.parent
        hooks = (f"PRE_EXEC = {libexec / 'lsf-prolog'}", f"POST_EXEC = {libexec / 'lsf-epilog'}")
        return (f"JOB_STARTER = {starter}", "JOB_CONTROLS = SUSPEND[SIGTSTP] RESUME[SIGCONT]", *hooks)

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("badmin", "reconfig", "-f"),)  # without it any warning is a question

    def findings(self, place: Place) -> Iterator[Finding]:
        what = f"application profile {PROFILE}"
        try:
            printed = " ".join(place.output("bapp", "-l", PROFILE).split())
        except BelljarError as exc:
            remedy = "Run `badmin reconfig`, where LSF is installed and its environment is set (profile.lsf)."
            yield fail(what, exc.message, remedy)
            return
        yield ok(what, "known to LSF")
        is_ours = str(place.wrapper) in printed
        yield expect("its job starter is belljar's", is_ours, "" if is_ours else "it is not", "badmin reconfig")


SITE = LsfSite()
