"""What OpenPBS and Torque sites get, against stand-ins for qmgr."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.batch import Settings
from belljar.batch.install.engine import Installation
from belljar.batch.install.pieces import Advice, Change, Clash, OurFile, OurLines, Place, Status
from belljar.batch.job.policy import smallest_limit
from belljar.batch.pbs.openpbs import site as openpbs_site
from belljar.batch.pbs.torque import site as torque_site
from belljar.errors import BadOption, CommandFailed


def nobody(argv: tuple[str, ...]) -> bytes:
    raise CommandFailed(f"{argv[0]}: exit 1: cannot connect")


def place(folder: Path, *parts: str, run: object = nobody, settings: Settings | None = None, **options: str) -> Place:
    for part in parts:
        (folder / part).mkdir()
    return Place(
        settings=settings or Settings(), wrapper=folder / "libexec/wrap-x", belljar=folder / "libexec/belljar",
        store=folder / "store", folder=folder, options=options, run=run,  # type: ignore[arg-type]
    )  # fmt: skip


# -- OpenPBS -----------------------------------------------------------------------------------------------------------

HOOK = """Hook belljar_node
    type = site
    enabled = true
    event = execjob_begin,execjob_epilogue,execjob_end,execjob_launch,
\texechost_periodic,
\texechost_startup
    user = pbsadmin
    alarm = 60
    freq = 300
"""


def changes(site: object, where: Place) -> dict[str, Change]:
    return {piece.purpose: piece for piece in site.pieces(where) if isinstance(piece, Change)}  # type: ignore[attr-defined]


def test_a_hook_is_known_by_its_events_however_qmgr_folds_them(tmp_path: Path) -> None:
    pieces = changes(openpbs_site.SITE, place(tmp_path, "server_priv"))
    known, made = pieces["hook belljar_node is known"], pieces["hook belljar_node: its events"]
    assert known.is_done(HOOK) and known.is_done(HOOK.replace("alarm = 60", "alarm = 30")), "made by hand: kept"
    assert not known.is_done("") and not made.undo
    assert made.is_done(HOOK)
    assert not made.is_done(HOOK.replace("alarm = 60", "alarm = 30"))
    assert not made.is_done(HOOK.replace("execjob_launch,", ""))
    assert not made.is_done("")


def test_a_hook_gets_its_settings_before_its_script(tmp_path: Path) -> None:
    pieces = [piece.purpose for piece in openpbs_site.SITE.pieces(place(tmp_path, "server_priv"))]
    assert pieces.index("hook belljar_node: its settings") < pieces.index("hook belljar_node: its script")
    script = changes(openpbs_site.SITE, place(tmp_path))["hook belljar_node: its script"]
    assert script.is_done(openpbs_site.text_of("belljar_node").decode()) and not script.is_done("import pbs\n")


def test_what_a_job_may_still_ask_by_is_the_first_to_go(tmp_path: Path) -> None:
    """PBS refuses to delete a resource that a job has; with the hooks gone before, such a job ran natively."""
    made = list(changes(openpbs_site.SITE, place(tmp_path, "server_priv")))
    assert made[-2:] == ["resource vm_disk", "resource vm_image"]


def test_resources_need_their_flags(tmp_path: Path) -> None:
    resource = changes(openpbs_site.SITE, place(tmp_path, "server_priv"))["resource vm_image"]
    assert resource.is_done("Resource vm_image\n    type = string_array\n    flag = hm\n")
    assert not resource.is_done("Resource vm_image\n    type = string_array\n    flag = h\n")


def test_the_hooks_know_the_sites_settings(tmp_path: Path) -> None:
    settings = Settings(queue_images=("night=el9",), allow=("group:hep el*",), retries=5, max_cpus=4)
    values = json.loads(openpbs_site.config_of(place(tmp_path, "server_priv", settings=settings)))
    assert values["queue_images"] == {"night": "el9"} and values["allow"] == [["group", "hep", "el*"]]
    assert (values["retries"], values["max_cpus"], values["notes"]) == (5, 4, "/run/belljar-openpbs")
    assert values["least_memory"] == smallest_limit(settings)


def test_no_line_of_pbs_mom_is_touched(tmp_path: Path) -> None:
    """`$suspendsig 20 18` took native jobs: the kernel ignores TSTP for groups without a parent, as all of PBS are."""
    node = openpbs_site.SITE.pieces(place(tmp_path, "mom_priv"))
    assert all(isinstance(one, OurFile) and one.path.parent == tmp_path / "libexec" for one in node)
    server = openpbs_site.SITE.pieces(place(tmp_path, "server_priv"))
    assert not any(isinstance(one, OurLines) for one in server)


@pytest.mark.parametrize(
    ("site", "options"), [(openpbs_site.SITE, {}), (torque_site.SITE, {}), (torque_site.SITE, {"hooks": "own"})]
)
def test_our_folder_is_the_same_on_server_and_nodes(tmp_path: Path, site: Any, options: dict[str, str]) -> None:
    """They may share it: what one of them installs is there for the other."""
    made = []
    for part in ("server_priv", "mom_priv"):
        pieces = site.pieces(replace(place(tmp_path, part, **options), folder=tmp_path))
        made.append([one for one in pieces if getattr(one, "path", tmp_path).parent == tmp_path / "libexec"])
        (tmp_path / part).rmdir()
    assert made[0] == made[1]


@pytest.mark.parametrize("site", [openpbs_site.SITE, torque_site.SITE])
def test_a_folder_that_is_neither_is_refused(site: object, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="neither server_priv nor mom_priv"):
        list(site.pieces(place(tmp_path)))  # type: ignore[attr-defined]
    with pytest.raises(BadOption, match="no option"):
        list(site.pieces(place(tmp_path, "mom_priv", colour="red")))  # type: ignore[attr-defined]


@pytest.fixture
def mom(tmp_path: Path) -> Iterator[int]:
    """A process of that name."""
    (tmp_path / "pbs_mom").symlink_to("/bin/cat")
    with subprocess.Popen([tmp_path / "pbs_mom"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # it is no longer the one that starts it
        yield process.pid
        process.kill()


def test_pbs_mom_is_told_to_read_again(tmp_path: Path, mom: int) -> None:
    where = place(tmp_path, "mom_priv")
    lock = tmp_path / "mom_priv/mom.lock"
    assert torque_site.SITE.after(where) == ()
    lock.write_bytes(b"%d\n\0" % mom)  # as Torque 6.1.3 writes it
    assert torque_site.SITE.after(where) == (("kill", "-HUP", str(mom)),)
    for text in (b"%d\n\0" % os.getpid(), b"-1\n\0", b"", b"\xff"):
        lock.write_bytes(text)
        assert torque_site.SITE.after(where) == (), "nobody else gets a HUP"


def test_an_epilogue_script_that_no_longer_runs_is_found(tmp_path: Path) -> None:
    where = place(tmp_path, "mom_priv")
    assert [one.is_good for one in openpbs_site.SITE.findings(where)] == [True]
    (tmp_path / "mom_priv/epilogue").touch()
    assert [one.is_good for one in openpbs_site.SITE.findings(where)] == [False]


def test_a_hook_that_was_switched_off_is_switched_on(tmp_path: Path) -> None:
    made = changes(openpbs_site.SITE, place(tmp_path, "server_priv"))["hook belljar_node: its events"]
    assert not made.is_done(HOOK.replace("enabled = true", "enabled = false"))
    assert ("qmgr", "-c", "set hook belljar_node enabled = true") in made.do


def test_openpbs_is_told_of_its_hooks_and_of_their_end(tmp_path: Path) -> None:
    """What qmgr is told, over a server of paper that knows what it was told."""
    server = Qmgr()
    (tmp_path / "server_priv").mkdir()
    ours = tmp_path / "opt/libexec/openpbs"

    here = Place(Settings(), ours / "wrap-openpbs", ours / "belljar-openpbs", tmp_path, tmp_path, run=server.run)
    engine = Installation("openpbs", openpbs_site.SITE, here, {"wrap-openpbs": b"#!\n"}, "belljar")
    engine.install()
    assert set(server.hooks) == {"belljar_submit", "belljar_node"}
    assert {one.name for one in ours.iterdir()} == {
        "wrap-openpbs", "belljar.json", "belljar_node.py", "belljar_submit.py"
    }  # fmt: skip
    assert {step.status for step in engine.plan()} == {Status.THERE}
    engine.uninstall()
    assert server.hooks == {} and server.resources == {} and not ours.parent.exists()


class Qmgr:
    """As much of qmgr as the site speaks: resources and hooks that were created are there, with what was set and imported."""

    def __init__(self) -> None:
        self.hooks: dict[str, dict[str, bytes]] = {}
        self.resources: dict[str, str] = {}

    def run(self, argv: tuple[str, ...]) -> bytes:
        if argv[-1] == "list server":
            return b"Server here\n"
        verb, kind, name, *rest = argv[-1].split(None, 3)
        known: dict[str, object] = {"hook": self.hooks, "resource": self.resources}[kind]  # type: ignore[assignment]
        if verb == "create":
            known[name] = {} if kind == "hook" else rest[0]
        elif name not in known:
            raise CommandFailed(f"qmgr: exit 1: no {kind} {name}")
        elif verb == "delete":
            del known[name]
        elif verb == "list" and kind == "resource":
            return f"Resource {name}\n    {self.resources[name].replace('=', ' = ').replace(',flag', chr(10) + '    flag')}\n".encode()
        elif verb == "list":
            lines = [f"    {key} = {value.decode()}" for key, value in self.hooks[name].items() if "/" not in key]
            return "\n".join([f"Hook {name}", *lines, ""]).encode()
        elif verb == "set":
            key, _, value = rest[0].partition(" = ")
            self.hooks[name][key] = value.strip('"').encode()
        elif verb == "import":
            self.hooks[name][rest[0].split()[0]] = Path(rest[0].split()[2]).read_bytes()
        else:
            return self.hooks[name].get(rest[0].split()[0], b"")
        return b""


# -- Torque ------------------------------------------------------------------------------------------------------------


def test_torque_starts_every_job_through_the_wrapper(tmp_path: Path) -> None:
    pieces = torque_site.SITE.pieces(place(tmp_path, "mom_priv"))
    (lines,) = [piece for piece in pieces if isinstance(piece, OurLines)]
    assert lines.lines == (f"$job_starter {tmp_path}/libexec/wrap-x",)
    files = {piece.path.name: piece for piece in pieces if isinstance(piece, OurFile)}
    assert {piece.path.parent for piece in files.values()} == {tmp_path / "mom_priv"}
    assert all(piece.content.startswith(b"#!") for piece in files.values())


def test_a_site_with_its_own_prologue_calls_ours(tmp_path: Path) -> None:
    pieces = torque_site.SITE.pieces(place(tmp_path, "mom_priv", hooks="own"))
    assert {piece.path.parent for piece in pieces if isinstance(piece, OurFile)} == {tmp_path / "libexec"}
    assert any(isinstance(piece, Advice) for piece in pieces)


def test_the_prologue_writes_what_was_asked_beside_the_node_file(tmp_path: Path) -> None:
    (prologue,) = [
        piece for piece in torque_site.SITE.pieces(place(tmp_path, "mom_priv"))
        if isinstance(piece, OurFile) and piece.path.name == "prologue"
    ]  # fmt: skip
    script, nodes = tmp_path / "prologue", tmp_path / "7.srv"
    script.write_bytes(prologue.content)
    asked = "vm_image=$(touch x)`id`,mem=1gb"
    words = ["7.srv", "bjalice", "g", "name", asked, "night", "", "/x.SC"]
    done = subprocess.run(["sh", script, *words], env={"PBS_NODEFILE": str(nodes)}, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert Path(f"{nodes}.belljar").read_text() == f"{asked}\nnight\n" and not (tmp_path / "x").exists()


SERVER = "set server scheduling = True\nset server extra_resc = my_own\nset server extra_resc += vm_image\n"


def test_of_torques_server_one_attribute_is_changed(tmp_path: Path) -> None:
    """`extra_resc` cannot be set on 6.1.3, and crashed a patched one on the way back."""
    (requeue,) = changes(torque_site.SITE, place(tmp_path, "server_priv")).values()
    assert requeue.is_done("set server automatic_requeue_exit_code = 319\n") and not requeue.is_done(SERVER)


def test_a_site_that_uses_the_requeue_code_keeps_it(tmp_path: Path) -> None:
    taken = place(tmp_path, "server_priv", run=lambda argv: b"set server automatic_requeue_exit_code = 99\n")
    (clash,) = torque_site.SITE.pieces(taken)
    assert isinstance(clash, Clash) and clash.purpose == "automatic_requeue_exit_code" and clash.text.startswith("99: ")


@pytest.mark.parametrize(("printed", "good"), [(b"", False), (b"set server kill_delay = 15\n", True)])
def test_too_short_a_kill_delay_is_found(tmp_path: Path, printed: bytes, good: bool) -> None:
    (found,) = torque_site.SITE.findings(place(tmp_path, "server_priv", run=lambda argv: printed))
    assert found.is_good is good
