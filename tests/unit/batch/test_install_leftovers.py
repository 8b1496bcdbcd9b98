"""What other options had put there: it goes with the installation that no longer wants it, whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.batch.test_install import CONF, Bench, PaperSite

from belljar.batch import Settings
from belljar.batch.install import files as install_files
from belljar.batch.install import record as install_record
from belljar.batch.install.engine import Engine
from belljar.batch.install.pieces import OurLines, Piece, Place, Status
from belljar.batch.pbs.openpbs import site as openpbs_site
from belljar.batch.slurm import site as slurm_site
from belljar.errors import BadOption, BelljarError, CommandFailed, NotOurs, SystemSilent

THEIRS = b"theirs\n"


class Optional(PaperSite):
    """With `extra=yes` a file, lines in another file and a setting more."""

    bench: Bench
    caller: Path | None = None

    def pieces(self, place: Place) -> list[Piece]:
        found: list[Piece] = [self.bench.file(), self.bench.lines(), self.bench.change()]
        if place.options.get("extra") == "gone":
            raise BadOption("no such extra any more")
        if place.options.get("extra") == "yes":
            extra = replace(self.bench.file(b"more\n", "extra/more.sh"), purpose="more", folders=1, caller=self.caller)
            found += [extra, OurLines("two", self.other, ("Two=2",)), self.bench.change("second", "2")]
        return found

    @property
    def other(self) -> Path:
        return self.bench.etc / "other.conf"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.site = site = Optional(made.etc)
    site.bench = made
    site.other.write_bytes(b"A=1")
    made.options = {"extra": "no"}
    made.engine().install()
    made.without = everything(made)  # type: ignore[attr-defined]
    made.options = {"extra": "yes"}
    made.engine().install()
    made.options = {"extra": "no"}
    return made


def everything(bench: Bench) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    folders = sorted(str(one) for one in bench.folder.rglob("*") if one.is_dir())
    return bench.files(), dict(bench.system.values), folders


def test_a_script_of_the_sites_that_still_calls_it_is_named_before_anything_is_touched(bench: Bench) -> None:
    caller = bench.etc / "own.sh"
    caller.write_text("sh extra/more.sh\n")
    assert isinstance(bench.site, Optional)
    bench.site.caller = caller
    before = everything(bench)
    with pytest.raises(NotOurs, match=r"own.sh: calls .*/more.sh"):
        bench.engine().install()
    assert everything(bench) == before
    bench.engine().install(force=True)
    assert not (bench.etc / "extra").exists()


@pytest.mark.parametrize("failing", [("conf", "del", "second"), ("unlink",)])
def test_an_installation_that_fails_while_it_takes_things_out_puts_them_back(
    bench: Bench, failing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(bench)
    if failing == ("unlink",):

        def refuse(path: Path, undo: install_files.Undo) -> None:
            raise PermissionError(f"{path}: it is immutable")

        monkeypatch.setattr("belljar.batch.install.files.remove", refuse)
    else:
        bench.system.fails = {failing}
    with pytest.raises((CommandFailed, PermissionError)):
        bench.engine().install()
    assert everything(bench) == before
    monkeypatch.undo()
    bench.system.fails = set()
    bench.engine().install()
    assert everything(bench) == bench.without  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("then", ["no", "yes"])
def test_an_installation_that_was_killed_while_it_took_things_out_can_be_repeated_either_way(
    bench: Bench, after: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves no time to put anything back: the names of the writes and commands are counted, then nothing works."""
    whole = everything(bench)
    left = [after]

    def counted(function: object) -> object:
        def call(*words: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise SystemExit("killed")
            return function(*words, **named)  # type: ignore[operator]

        return call

    for name in ("write_whole",):
        monkeypatch.setattr(install_files, name, counted(install_files.write_whole))
        monkeypatch.setattr(install_record, name, counted(install_record.write_whole))
    monkeypatch.setattr("pathlib.Path.unlink", counted(Path.unlink))
    monkeypatch.setattr(bench.system, "run", counted(bench.system.run))
    with pytest.raises(SystemExit):
        bench.engine().install()
    monkeypatch.undo()
    bench.options = {"extra": then}
    bench.engine().install()
    assert everything(bench) == (whole if then == "yes" else bench.without)  # type: ignore[attr-defined]
    bench.engine().uninstall()
    assert bench.files() == {"etc/paper.conf": CONF, "etc/other.conf": b"A=1"}
    assert bench.system.values == {}


def test_what_was_changed_by_hand_is_the_sites_from_then_on(bench: Bench) -> None:
    path = bench.etc / "extra/more.sh"
    path.write_bytes(THEIRS)
    (step,) = [step for step in bench.engine().plan() if step.path == path]
    assert (step.status, step.detail) == (Status.LEFTOVER, "changed since belljar wrote it: it stays, and is yours")
    bench.engine().install()
    assert path.read_bytes() == THEIRS
    assert bench.states() == ["there"] * 4
    bench.engine().uninstall()
    assert path.read_bytes() == THEIRS and bench.system.values == {}


def test_options_that_mean_nothing_any_more_do_not_stop_others(bench: Bench) -> None:
    record = install_record.load(install_record.path_of(bench.etc, "paper"))
    record.choices = (replace(record.choices[0], options={"extra": "gone"}),)
    install_record.save(install_record.path_of(bench.etc, "paper"), record)
    bench.engine().install()
    assert bench.states() == ["there"] * 4
    bench.engine().uninstall()
    assert not (bench.etc / "extra/more.sh").exists(), "a file is known by the record alone"


def test_what_is_no_longer_wanted_is_planned_and_found_then_taken_out(bench: Bench) -> None:
    before = everything(bench)
    plan = {step.piece.purpose: step for step in bench.engine().plan() if step.status is Status.LEFTOVER}
    assert set(plan) == {"more", "two", "set second"}
    assert (plan["more"].before, plan["more"].after) == (b"more\n", b"")
    assert plan["two"].after == b"A=1\n", "the newline that it lacked goes too when it is done"
    assert everything(bench) == before
    bad = {one.what: one.remedy for one in bench.engine().check() if not one.is_good}
    assert bad[f"more ({bench.etc}/extra/more.sh)"] == "belljar batch install paper"
    done = bench.engine().install()
    assert {step.piece.purpose for step in done} == set(plan)
    assert everything(bench) == bench.without  # type: ignore[attr-defined]
    assert [one for one in bench.engine().check() if not one.is_good] == []


def test_what_the_site_had_set_itself_stays(bench: Bench) -> None:
    bench.options = {"extra": "yes"}
    bench.engine().uninstall()
    bench.system.values["second"] = "2"
    bench.engine().install()
    bench.options = {"extra": "no"}
    bench.engine().install()
    assert bench.system.values == {"starter": "/w", "second": "2"}


def test_uninstall_takes_out_what_any_options_put_there(bench: Bench) -> None:
    bench.engine().uninstall()
    assert bench.files() == {"etc/paper.conf": CONF, "etc/other.conf": b"A=1"}
    assert bench.system.values == {} and not (bench.etc / "extra").exists()


def test_another_prefix_takes_its_launchers_with_it(bench: Bench) -> None:
    old = bench.wrapper
    bench.wrapper = bench.folder / "usr/libexec/wrap-paper"
    bench.engine().install()
    assert bench.wrapper.exists() and not old.exists()
    bench.engine().uninstall()
    assert not bench.wrapper.parent.exists()


def test_a_setting_that_cannot_be_asked_about_is_not_forgotten_by_other_options(bench: Bench) -> None:
    before = everything(bench)
    bench.system.fails = {("conf", "get", "second"), ("conf", "list")}
    with pytest.raises(SystemSilent, match="set second"):
        bench.engine().install()
    assert everything(bench) == before
    bench.system.fails.clear()
    bench.engine().install()
    assert everything(bench) == bench.without  # type: ignore[attr-defined]


# -- real sites --------------------------------------------------------------------------------------------------------


def test_the_hook_at_submission_of_openpbs_goes_when_it_is_not_wanted(tmp_path: Path) -> None:
    """What qmgr is told, over a server of paper that knows what it was told."""
    server = Qmgr()
    (tmp_path / "server_priv").mkdir()

    def engine(submit: str) -> Engine:
        place = Place(
            Settings(), tmp_path / "libexec/wrap-x", tmp_path / "libexec/belljar", tmp_path, tmp_path,
            {"submit": submit}, run=lambda argv: server.run(argv),
        )  # fmt: skip
        return Engine("openpbs", openpbs_site.SITE, place, lambda place: [], server.run)

    engine("yes").install()
    assert set(server.hooks) == {"belljar_submit", "belljar_node"}
    done = engine("no").install()
    assert set(server.hooks) == {"belljar_node"}
    assert not (tmp_path / "libexec/openpbs/belljar_submit.py").exists()
    assert "hook belljar_submit is known" in {step.piece.purpose for step in done}
    assert {step.status for step in engine("no").plan()} == {Status.THERE, Status.ADVICE}
    engine("no").uninstall()
    assert server.hooks == {} and server.resources == {} and not (tmp_path / "libexec").exists()


class Qmgr:
    """As much of qmgr as the site speaks: resources and hooks that were created are there, with what was set and imported."""

    def __init__(self) -> None:
        self.hooks: dict[str, dict[str, bytes]] = {}
        self.resources: dict[str, str] = {}

    def run(self, argv: tuple[str, ...], stdin: bytes = b"") -> bytes:
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


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a path short enough for a `#!` line."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_slurm_can_go_from_one_way_to_the_other_and_back(short_path: Path) -> None:
    etc, opt = short_path / "etc", short_path / "opt"
    etc.mkdir()
    (etc / "slurm.conf").write_bytes(CONF)

    def engine(submit: str) -> Engine:
        place = Place(
            Settings(default_image="el9"), opt / "libexec/wrap-slurm", opt / "libexec/belljar-slurm", short_path / "store", etc,
            {"submit": submit}, run=nothing,
        )  # fmt: skip
        return Engine("slurm", slurm_site.SITE, place, lambda place: [], lambda argv, stdin: b"")

    def there() -> set[str]:
        return {str(one.relative_to(short_path)) for one in short_path.rglob("*") if one.is_file()}

    seen = {}
    for submit in ("lua", "hand"):
        engine(submit).install()
        seen[submit] = there(), (etc / "slurm.conf").read_bytes()
        engine(submit).uninstall()
        assert there() == {"etc/slurm.conf"} and (etc / "slurm.conf").read_bytes() == CONF
    for submit in ("lua", "hand", "lua"):
        engine(submit).install()
        assert (there(), (etc / "slurm.conf").read_bytes()) == seen[submit]
        assert {step.status for step in engine(submit).plan()} == {Status.THERE}
    engine("hand").uninstall()
    assert there() == {"etc/slurm.conf"} and (etc / "slurm.conf").read_bytes() == CONF


def nothing(argv: tuple[str, ...]) -> bytes:
    raise BelljarError("slurmctld does not answer")
