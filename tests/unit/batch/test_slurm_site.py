"""What a site is given for Slurm, and what is seen to be wrong there."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings
from belljar.batch.install.engine import Installation
from belljar.batch.install.pieces import Advice, Clash, OurFile, OurLines, Place
from belljar.batch.slurm import site as slurm_site
from belljar.batch.slurm.site import SITE
from belljar.errors import BadOption, CommandFailed

# `scontrol show config`, 22.05.8, in part
CONFIG = """Configuration data as of 2026-11-20T12:07:05
Epilog                  = {folder}/belljar-epilog
JobRequeue              = 1
JobSubmitPlugins        = lua
KillWait                = 30 sec
ProctrackType           = proctrack/cgroup
Prolog                  = {folder}/belljar-prolog
RequeueExit             = (null)
RequeueExitHold         = (null)
"""


def place(
    folder: Path, config: str = CONFIG, settings: Settings | None = None, version: str = "slurm-wlm 22.05.8"
) -> Place:
    def run(argv: tuple[str, ...]) -> bytes:
        return (version if argv[1] == "--version" else config.format(folder=folder)).encode()

    paths = (Path("/opt/belljar/libexec/wrap-slurm"), Path("/opt/with blank/belljar"), folder / "store", folder)
    return Place(settings or Settings(), *paths, run=run)


def installed(here: Place) -> Place:
    (here.store / "images/names").mkdir(parents=True)
    for piece in SITE.pieces(here):
        if isinstance(piece, OurFile):
            piece.path.parent.mkdir(parents=True, exist_ok=True)
            piece.path.write_bytes(piece.content)
    return here


def lines(here: Place) -> tuple[str, ...]:
    return next((piece.lines for piece in SITE.pieces(here) if isinstance(piece, OurLines)), ())


def files(here: Place) -> dict[str, OurFile]:
    return {piece.path.name: piece for piece in SITE.pieces(here) if isinstance(piece, OurFile)}


def advice(here: Place) -> str:
    return "\n".join(piece.text for piece in SITE.pieces(here) if isinstance(piece, Advice))


def bad(here: Place) -> list[str]:
    return [f"{one.name}: {one.text}: {one.remedy}" for one in SITE.findings(here) if not one.is_good]


def test_a_site_without_anything_of_its_own(tmp_path: Path) -> None:
    here = place(tmp_path)
    assert sorted(files(here)) == ["belljar-epilog", "belljar-prolog", "belljar.lua", "job_submit.lua"]
    assert lines(here) == (
        f"Epilog={tmp_path}/belljar-epilog", "JobSubmitPlugins=lua", f"Prolog={tmp_path}/belljar-prolog",
    )  # fmt: skip
    assert advice(here) == ""
    assert SITE.after(here) == (("scontrol", "reconfigure"),)


@pytest.mark.parametrize(("verb", "does"), [("prolog", "exit 1"), ("epilog", "kill -9 $$"), ("prolog", "exit 0")])
def test_hooks_end_well_whatever_happens(tmp_path: Path, verb: str, does: str) -> None:
    hook = tmp_path / "hook"
    command = tmp_path / "it's belljar"
    command.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\n{does}\n')
    command.chmod(0o755)
    here = place(tmp_path)
    with_command = Place(here.settings, here.wrapper, command, here.store, here.folder, run=here.run)
    hook.write_bytes(files(with_command)[f"belljar-{verb}"].content)
    hook.chmod(0o755)
    assert subprocess.run([hook], env={}, check=False, timeout=20).returncode == 0
    assert (tmp_path / "called").read_text() == f"internal {verb} slurm\n"


def test_our_own_lines_are_not_taken_for_the_sites(tmp_path: Path) -> None:
    ours = next(one for one in SITE.pieces(place(tmp_path)) if isinstance(one, OurLines))
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    ours.put(place(tmp_path))
    assert lines(place(tmp_path)) == ours.lines and len(ours.lines) == 3


def test_a_site_with_hooks_of_its_own_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("prolog=/site/prolog.sh # ours\nInclude more.conf\n")
    (tmp_path / "more.conf").write_text("Epilog = /site/epilog.d/*\nJobSubmitPlugins=throttle\n")
    here = place(tmp_path)
    assert lines(here) == ()
    assert files(here)["50-belljar-epilog"].path == Path("/site/epilog.d/50-belljar-epilog")
    assert f"Prolog=/site/prolog.sh already: let that script call {tmp_path}/belljar-prolog" in advice(here)
    assert "JobSubmitPlugins=throttle,lua" in advice(here)


def test_a_site_with_a_plugin_of_its_own_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("JobSubmitPlugins=lua\n")
    (tmp_path / "job_submit.lua").write_text("function slurm_job_submit() end\n")
    here = place(tmp_path)
    assert "job_submit.lua" not in files(here) and "belljar.lua" in files(here)
    assert f"call {tmp_path}/belljar.lua" in advice(here) and "JobSubmitPlugins=lua" not in lines(here)
    assert any("is the site's own" in one for one in bad(installed(here)))
    (tmp_path / "job_submit.lua").write_text(MERGED.format(folder=tmp_path))
    assert not any("site's own" in one for one in bad(here))


MERGED = 'local belljar = dofile("{folder}/belljar.lua")\n'


def test_a_plugin_that_asks_ours_is_read_again_with_it(tmp_path: Path) -> None:
    """slurmctld looks at the time of job_submit.lua alone; nobody is told again what was done already."""
    (tmp_path / "slurm.conf").write_text("JobSubmitPlugins=lua\n")
    plugin = tmp_path / "job_submit.lua"
    plugin.write_text("function slurm_job_submit() end\n")
    here = place(tmp_path)
    assert SITE.after(here) == (("scontrol", "reconfigure"),)
    plugin.write_text(MERGED.format(folder=tmp_path))
    assert advice(here) == ""
    assert SITE.after(here) == (("touch", "--", str(plugin)), ("scontrol", "reconfigure"))
    assert SITE.after(replace(here, options={"submit": "hand"})) == (("scontrol", "reconfigure"),)


def test_a_prolog_of_the_sites_is_to_call_ours_until_it_does(tmp_path: Path) -> None:
    for name in ("prolog", "epilog"):
        (tmp_path / f"{name}.sh").write_text("true\n")
    (tmp_path / "slurm.conf").write_text(f"Prolog={tmp_path}/prolog.sh\nEpilog={tmp_path}/epilog.sh\n")
    here = place(tmp_path)
    assert f"call {tmp_path}/belljar-prolog" in advice(here)
    (tmp_path / "prolog.sh").write_text(f"{tmp_path}/belljar-prolog\n")
    assert f"call {tmp_path}/belljar-prolog" not in advice(here) and "belljar-epilog" in advice(here)


def test_our_plugin_is_reread_when_the_rules_change(tmp_path: Path) -> None:
    """slurmctld looks at job_submit.lua's time alone."""
    one = files(place(tmp_path))["job_submit.lua"].content
    other = files(place(tmp_path, settings=Settings(default_image="debian12")))["job_submit.lua"].content
    assert one != other


def test_all_is_well(tmp_path: Path) -> None:
    assert bad(installed(place(tmp_path))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("JobSubmitPlugins        = lua", "JobSubmitPlugins = (null)"), "slurmctld asks belljar"),
        (("Prolog                  = {folder}/belljar-prolog", "Prolog = (null)"), "Prolog calls belljar"),
        (("Epilog                  = {folder}/belljar-epilog", "Epilog = /bin/true"), "Epilog calls belljar"),
    ],
)
def test_settings_of_slurm_that_hurt(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    here = installed(place(tmp_path, CONFIG.replace(*change)))
    assert any(said in one for one in bad(here)), bad(here)


# `scontrol show config`, 24.11.5, in part, with two lines Prolog= in slurm.conf
NUMBERED = """Epilog[0]               = {folder}/belljar-epilog
Prolog[0]               = /site/prolog.sh
Prolog[1]               = {folder}/belljar-prolog
"""


def test_numbered_hooks_are_looked_at_all(tmp_path: Path) -> None:
    config = "\n".join(one for one in CONFIG.splitlines() if not one.startswith(("Prolog", "Epilog"))) + f"\n{NUMBERED}"
    assert not any("calls belljar" in one for one in bad(installed(place(tmp_path, config))))
    assert any("Prolog calls belljar: Prolog=/site/prolog.sh" in one for one in bad(
        place(tmp_path, config.replace("Prolog[1]               = {folder}/belljar-prolog\n", ""))))  # fmt: skip


def test_a_site_with_several_hooks_is_asked_to_call_ours_from_one(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    (tmp_path / "two.sh").write_text(f"{tmp_path}/belljar-prolog\n")
    conf.write_text(f"Prolog=/site/one.sh\nProlog={tmp_path}/two.sh\nEpilog=/site/one.sh\nEpilog=/site/d/*\n")
    here = place(tmp_path)
    assert files(here)["50-belljar-epilog"].path == Path("/site/d/50-belljar-epilog") and advice(here) == ""
    conf.write_text(f"Prolog=/site/one.sh\nProlog={tmp_path}/belljar-prolog\nEpilog=/site/d/*\n")
    assert "belljar-prolog" in files(here) and advice(here) == ""


@pytest.mark.parametrize("has", [True, False])
def test_a_slurm_without_lua_gets_no_plugin(tmp_path: Path, has: bool) -> None:
    """A slurmctld that is to use a plugin it does not have does not start again."""
    (tmp_path / "lib").mkdir()
    if has:
        (tmp_path / "lib/job_submit_lua.so").touch()
    here = place(tmp_path, CONFIG + "PluginDir = {folder}/lib\n")
    clashes = [piece.text for piece in SITE.pieces(here) if isinstance(piece, Clash)]
    assert (clashes == []) is has and all("--set submit=hand" in text for text in clashes)
    by_hand = replace(here, options={"submit": "hand"})
    assert advice(by_hand) == "" and "belljar.lua" not in files(by_hand)
    assert not any("submission" in text for text in bad(by_hand))
    with pytest.raises(BadOption, match="lua or hand"):
        SITE.pieces(replace(here, options={"submit": "x"}))


def test_a_node_that_fetches_its_settings_gets_the_hooks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slurm.conf made there would stand before the one that slurmctld gives."""
    fetched = tmp_path / "run/slurm.conf"
    fetched.parent.mkdir()
    fetched.write_text(f"Prolog={tmp_path}/belljar-prolog\nEpilog={tmp_path}/epilog.d/*\nJobSubmitPlugins=lua\n")
    monkeypatch.setattr(slurm_site, "FETCHED", fetched)
    here = place(tmp_path)
    assert set(files(here)) == {"belljar-prolog", "50-belljar-epilog"} and lines(here) == () and advice(here) == ""
    assert bad(installed(here)) == []
    (tmp_path / "slurm.conf").touch()
    assert "belljar.lua" in files(here)


def test_a_slurmctld_that_does_not_answer(tmp_path: Path) -> None:
    def run(argv: tuple[str, ...]) -> bytes:
        raise CommandFailed("scontrol: exit 1: Unable to contact slurm controller")

    silent: Callable[[tuple[str, ...]], bytes] = run
    here = Place(Settings(), Path("/w"), Path("/b"), tmp_path, tmp_path, run=silent)
    assert bad(here)[0].startswith("slurmctld answers: scontrol: exit 1")


def test_slurm_can_go_from_its_plugin_to_the_lines_of_users_and_back() -> None:
    with tempfile.TemporaryDirectory() as name:  # a path short enough for a `#!` line
        etc, ours = Path(name, "etc"), Path(name, "opt/libexec/slurm")
        etc.mkdir()
        (etc / "slurm.conf").write_bytes(b"ClusterName=c\n")

        def engine(submit: str, before: str = "") -> Installation:
            settings = Settings(default_image="el9")
            here = Place(
                settings,
                ours / "wrap-slurm",
                ours / "belljar-slurm",
                Path(name, "store"),
                etc,
                {"submit": submit},
                silent,
            )
            last = replace(here, options={"submit": before}) if before else None
            return Installation("slurm", SITE, here, {"wrap-slurm": b"#!\n"}, "belljar", last)

        def there() -> tuple[set[str], bytes]:
            names = {str(one.relative_to(name)) for one in Path(name).rglob("*") if not one.is_dir()}
            return {one for one in names if "/.slurm-" not in one}, (etc / "slurm.conf").read_bytes()

        seen = {}
        for submit in ("lua", "hand"):
            engine(submit).install()
            seen[submit] = there()
            engine(submit).uninstall()
            assert there() == ({"etc/slurm.conf"}, b"ClusterName=c\n")
        engine("hand").install()
        engine("lua", before="hand").install()
        assert there() == seen["lua"]
        engine("hand", before="lua").install()
        assert there() == seen["hand"]


def silent(argv: tuple[str, ...]) -> bytes:
    raise CommandFailed("scontrol: exit 1: Unable to contact slurm controller")
