"""What a site's files look like before, between and after: nothing of the site's is lost, nothing of ours stays."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from belljar.batch import Settings
from belljar.batch.install import pieces as install_pieces
from belljar.batch.install.commands import Needs
from belljar.batch.install.engine import Installation
from belljar.batch.install.pieces import Advice, Change, OurFile, OurLines, Piece, Place
from belljar.errors import BadOption, BelljarError, CommandFailed, CommandMissing, UsageError
from belljar.findings import Finding, fail

CONF = b"# the site's own\nClusterName=c\nSelectType=x\n"
MADE = b"#!/bin/sh\n# Made by `belljar batch install paper`.\n"


@dataclass
class PaperSystem:
    """A batch system whose settings are a dictionary, changed by `conf set K V` and `conf del K`, shown by `conf get K`."""

    values: dict[str, str] = field(default_factory=dict)
    ran: list[tuple[str, ...]] = field(default_factory=list)
    fails: set[tuple[str, ...]] = field(default_factory=set)
    missing: bool = False
    deaf: bool = False  # takes every change and keeps none
    silent: bool = False  # does not answer
    slow: bool = False  # answers too late

    def run(self, argv: tuple[str, ...]) -> bytes:
        if self.missing:
            raise CommandMissing("conf: no such program on this host")
        self.ran.append(argv)
        if self.silent:
            raise CommandFailed("conf: exit 1: cannot connect to server")
        if self.slow:
            raise CommandFailed("conf: not finished after 20 s, killed")
        if argv in self.fails:
            raise CommandFailed("conf: exit 1: no")
        match argv:
            case ("conf", "set", key, value):
                if not self.deaf:
                    self.values[key] = value
            case ("conf", "del", key):
                self.values.pop(key, None)
            case ("conf", "get", key):
                if key not in self.values:
                    raise CommandFailed(f"conf: exit 1: no {key}")
                return self.values[key].encode()
        return b""


@dataclass
class PaperSite:
    default_folder: Path
    made: list[Piece] = field(default_factory=list)
    seen: list[Finding] = field(default_factory=list)
    needs: Needs = field(default_factory=lambda: Needs(("conf",), answers=("conf", "list")))

    def pieces(self, place: Place) -> list[Piece]:
        wanted = place.options.get("extra") == "yes"
        return [piece for piece in self.made if wanted or "extra" not in piece.purpose]

    def findings(self, place: Place) -> list[Finding]:
        return self.seen

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("conf", "reread"),)


@dataclass
class Bench:
    """A folder /etc/paper with a site's conf in it, and the installation over it."""

    folder: Path
    system: PaperSystem = field(default_factory=PaperSystem)

    def __post_init__(self) -> None:
        self.etc = self.folder / "etc"
        self.etc.mkdir()
        self.conf = self.etc / "paper.conf"
        self.conf.write_bytes(CONF)
        self.site = PaperSite(self.etc)
        self.ours = self.folder / "opt/libexec/paper"
        self.wrapper = self.ours / "wrap-paper"
        self.options: dict[str, str] = {}
        self.before: dict[str, str] | None = None
        self.launchers = {"wrap-paper": b"#!launcher\n", "site.json": b"{}\n"}

    def engine(self) -> Installation:
        place = Place(
            Settings(), self.wrapper, self.ours / "belljar-paper", self.folder, self.etc, self.options,
            run=lambda argv: self.system.run(argv),
        )  # fmt: skip
        before = None if self.before is None else replace(place, options=self.before)
        command = "belljar batch install paper"
        return Installation("paper", self.site, place, self.launchers, command, before)

    def lines(self, *lines: str, **facts: object) -> OurLines:
        return OurLines("lines", self.conf, lines or ("Wrap=yes",), **facts)  # type: ignore[arg-type]

    def file(self, content: bytes = b"true\n", name: str = "hook.sh") -> OurFile:
        return OurFile("a hook", self.etc / name, MADE + content)

    def change(self, key: str = "starter", value: str = "/w") -> Change:
        return Change(
            f"set {key}", ("conf", "get", key), lambda shown: shown == value, (("conf", "set", key, value),),
            (("conf", "del", key),),
        )  # fmt: skip

    def files(self) -> dict[str, bytes]:
        return {str(one.relative_to(self.folder)): one.read_bytes() for one in self.folder.rglob("*") if one.is_file()}

    def states(self) -> list[str]:
        return [step.status.value for step in self.engine().plan()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- a system that does not answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["silent", "slow", "missing"])
def test_what_cannot_be_asked_is_not_absent(bench: Bench, how: str) -> None:
    """The settings stand in the system until it was heard to have none: nothing is forgotten, nothing taken out."""
    bench.site.made = [bench.lines(), bench.file(), bench.change(), bench.change("other")]
    bench.engine().install()
    before, values = bench.files(), dict(bench.system.values)
    setattr(bench.system, how, True)
    with pytest.raises(BelljarError, match=r"paper does not answer: conf") as caught:
        bench.engine().uninstall()
    assert "Nothing was changed." in caught.value.hint
    with pytest.raises(BelljarError, match="does not answer"):
        bench.engine().install()
    assert bench.files() == before and bench.system.values == values
    setattr(bench.system, how, False)
    bench.engine().uninstall()
    assert bench.system.values == {} and bench.files() == {"etc/paper.conf": CONF}


# -- what is the site's own ------------------------------------------------------------------------------------------------


def test_a_file_of_the_sites_is_never_overwritten(bench: Bench) -> None:
    (bench.etc / "hook.sh").write_bytes(b"theirs\n")
    bench.site.made = [bench.lines(), bench.file(), bench.change()]
    before = bench.files()
    with pytest.raises(UsageError, match=r"hook.sh: the site's own: move it away"):
        bench.engine().install()
    assert bench.files() == before and bench.system.values == {}
    bench.engine().uninstall()
    assert bench.files() == before, "nor removed"


def test_a_folder_of_somebody_elses_is_never_replaced(bench: Bench) -> None:
    """Slurm itself may have been installed to PREFIX/libexec/slurm."""
    bench.ours.mkdir(parents=True)
    (bench.ours / "cr_start.sh").write_bytes(b"theirs\n")
    with pytest.raises(UsageError, match="choose another --prefix"):
        bench.engine().install()
    bench.engine().uninstall()
    assert (bench.ours / "cr_start.sh").read_bytes() == b"theirs\n"


def test_a_setting_of_the_sites_that_clashes_with_ours_is_named_with_its_line(bench: Bench) -> None:
    bench.conf.write_bytes(CONF + b"  wrap = other\n")
    bench.site.made = [bench.lines("Wrap=yes", clashes=(r"wrap\s*=",))]
    with pytest.raises(UsageError, match=r"paper\.conf: line 4: wrap = other: take it out"):
        bench.engine().install()
    assert bench.conf.read_bytes() == CONF + b"  wrap = other\n" and not bench.ours.exists()


def test_a_clash_below_our_own_lines_is_found_and_our_own_lines_are_none(bench: Bench) -> None:
    bench.conf.write_bytes(CONF + b"# Wrap=old\n")
    bench.site.made = [bench.lines("Wrap=yes", clashes=(r"Wrap\s*=",))]
    bench.engine().install()
    assert bench.states() == ["there", "there"]
    with bench.conf.open("ab") as file:
        file.write(b"Wrap=later\n")
    with pytest.raises(UsageError, match=r"line 8: Wrap=later"):
        bench.engine().install()


@pytest.mark.parametrize(
    "text",
    [
        b"# belljar begin\nx\n",
        b"# belljar end\n# belljar begin\n",
        b"# belljar begin\n# belljar begin\n# belljar end\n",
    ],
)
def test_marks_that_do_not_pair_are_for_a_person(bench: Bench, text: bytes) -> None:
    bench.conf.write_bytes(text)
    bench.site.made = [bench.lines()]
    with pytest.raises(UsageError, match="do not pair"):
        bench.engine().install()
    assert bench.conf.read_bytes() == text


# -- failing paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_installation_that_fails_at_any_step_is_made_whole_by_the_next_one(bench: Bench, after: int) -> None:
    good: list[Piece] = [bench.file(), bench.lines(), bench.change(), bench.change("second", "2")]
    bench.system.fails = {("conf", "set", "bad", "1")}
    bench.site.made = [*good[:after], bench.change("bad", "1"), *good[after:]]
    before = bench.files()
    with pytest.raises(CommandFailed):
        bench.engine().install()
    bench.system.fails = set()
    bench.engine().install()
    assert set(bench.states()) == {"there"}
    bench.engine().uninstall()
    assert bench.files() == before and bench.system.values == {}


def test_a_change_that_succeeds_and_changes_nothing_is_a_failure(bench: Bench) -> None:
    bench.system.deaf = True
    bench.site.made = [bench.change()]
    with pytest.raises(CommandFailed, match="succeeded and changed nothing"):
        bench.engine().install()


def test_a_folder_that_is_not_there_is_an_option_to_correct(bench: Bench) -> None:
    bench.etc.rename(bench.folder / "away")
    with pytest.raises(BadOption, match="no such folder"):
        bench.engine().install()


class Killed(BaseException):
    """Nobody lives to take anything back."""


@pytest.mark.parametrize("doing", ["install", "again", "uninstall"])
@pytest.mark.parametrize("at", range(1, 24))
def test_what_was_killed_at_any_step_can_be_repeated_and_taken_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: int, doing: str
) -> None:
    steps = 0

    def dying(real: Any) -> Any:
        def step(*words: Any, **facts: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == at:
                raise Killed
            return real(*words, **facts)

        return step

    bench.site.made = [bench.lines(), bench.file(), bench.change(), replace(bench.change("two"), purpose="extra")]
    before = bench.files()
    bench.options = {"extra": "yes"}
    if doing != "install":
        bench.engine().install()
    if doing == "again":
        bench.options, bench.before = {}, {"extra": "yes"}
        bench.launchers["wrap-paper"] = b"#!newer\n"
    with monkeypatch.context() as patch:
        for place, name in (
            (install_pieces, "write_whole"), (Path, "unlink"), (Path, "rmdir"),
            (bench.system, "run"),
        ):  # fmt: skip
            patch.setattr(place, name, dying(getattr(place, name)))
        with suppress(Killed):
            bench.engine().uninstall() if doing == "uninstall" else bench.engine().install()
    bench.engine().install()
    assert set(bench.states()) == {"there"}
    assert bench.wrapper.read_bytes() == bench.launchers["wrap-paper"]
    assert {path.name for path in bench.ours.iterdir()} == {*bench.launchers}
    bench.engine().uninstall()
    assert bench.files() == before
    assert bench.system.values == {}


# -- what it does -------------------------------------------------------------------------------------------------------


def test_install_and_uninstall_leave_every_byte_and_mode_as_before(bench: Bench) -> None:
    bench.conf.chmod(0o640)
    bench.site.made = [bench.file(), bench.lines(), bench.change(), Advice("restart", "Restart it.")]
    before = bench.files()
    assert bench.states() == ["missing", "missing", "missing", "missing", "by hand"]
    bench.engine().install()
    assert bench.states() == ["there"] * 4 + ["by hand"]
    assert bench.conf.read_bytes() == CONF + b"# belljar begin\nWrap=yes\n# belljar end\n"
    assert stat.S_IMODE(os.stat(bench.conf).st_mode) == 0o640
    assert os.access(bench.wrapper, os.X_OK) and not os.access(bench.ours / "site.json", os.X_OK)
    assert bench.system.values == {"starter": "/w"}
    bench.engine().uninstall()
    assert bench.files() == before
    assert stat.S_IMODE(os.stat(bench.conf).st_mode) == 0o640
    assert bench.system.values == {}
    assert not bench.ours.parent.exists()


@pytest.mark.parametrize("text", [b"", b"a newline at the end\n", b"\xff\xfe latin\r\nlines\r\n"])
def test_any_bytes_of_a_sites_file_come_back(bench: Bench, text: bytes) -> None:
    bench.conf.write_bytes(text)
    bench.site.made = [bench.lines()]
    bench.engine().install()
    assert b"Wrap=yes\n" in bench.conf.read_bytes()
    bench.engine().uninstall()
    assert (bench.conf.read_bytes() if bench.conf.exists() else b"") == text


def test_a_file_that_ends_without_a_newline_gets_one(bench: Bench) -> None:
    bench.conf.write_bytes(b"A=1")
    bench.site.made = [bench.lines()]
    bench.engine().install()
    assert bench.conf.read_bytes() == b"A=1\n# belljar begin\nWrap=yes\n# belljar end\n"
    bench.engine().uninstall()
    assert bench.conf.read_bytes() == b"A=1\n"


def test_a_file_that_was_not_there_is_made_and_goes_again(bench: Bench) -> None:
    bench.conf.unlink()
    bench.site.made = [bench.lines()]
    bench.engine().install()
    bench.engine().uninstall()
    assert not bench.conf.exists()


def test_twice_is_as_once(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.lines(), bench.change()]
    bench.engine().install()
    before, ran = bench.files(), len(bench.system.ran)
    assert bench.engine().install() == []
    assert bench.files() == before
    assert [argv for argv in bench.system.ran[ran:] if argv[1] not in ("get", "list")] == []


def test_another_version_replaces_its_own_lines_and_files_where_they_stand(bench: Bench) -> None:
    beside = OurFile("of the folder", bench.ours / "prolog", b"#!/bin/sh\n")
    bench.site.made = [bench.file(), bench.lines("Wrap=1"), beside]
    bench.engine().install()
    bench.conf.write_bytes(bench.conf.read_bytes() + b"Later=site\n")
    bench.site.made = [bench.file(b"newer\n"), bench.lines("Wrap=2", "More=3")]
    assert bench.states() == ["different", "different", "different"]
    assert "-Wrap=1\n+Wrap=2\n+More=3\n" in bench.engine().plan()[2].diff
    bench.engine().install()
    assert bench.conf.read_bytes() == CONF + b"# belljar begin\nWrap=2\nMore=3\n# belljar end\nLater=site\n"
    assert {one.name for one in bench.ours.iterdir()} == set(bench.launchers)
    bench.engine().uninstall()
    assert bench.files() == {"etc/paper.conf": CONF + b"Later=site\n"}


def test_a_link_to_the_sites_file_stays_a_link(bench: Bench) -> None:
    real = bench.folder / "real.conf"
    bench.conf.rename(real)
    bench.conf.symlink_to(real)
    bench.site.made = [bench.lines()]
    bench.engine().install()
    assert bench.conf.is_symlink() and b"Wrap=yes" in real.read_bytes()
    bench.engine().uninstall()
    assert bench.conf.is_symlink() and real.read_bytes() == CONF


def test_changes_are_undone_in_reverse_and_before_the_files_they_need(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.change("a", "1"), bench.change("b", "2"), bench.lines()]
    bench.engine().install()
    done = bench.engine().uninstall()
    assert done[:2] == ["undid: set b", "undid: set a"] and done[-1] == f"removed {bench.ours}"


def test_what_other_options_had_put_there_goes(bench: Bench) -> None:
    extra = replace(bench.file(b"more\n", "extra.sh"), purpose="extra"), replace(bench.change("two"), purpose="extra")
    bench.site.made = [bench.file(), bench.change(), *extra]
    bench.options = {"extra": "yes"}
    bench.engine().install()
    assert bench.system.values == {"starter": "/w", "two": "/w"} and (bench.etc / "extra.sh").exists()
    bench.options, bench.before = {}, {"extra": "yes"}
    assert [piece.name for piece in bench.engine().stale()] == [str(bench.etc / "extra.sh"), "extra"]
    bench.engine().install()
    assert bench.system.values == {"starter": "/w"} and not (bench.etc / "extra.sh").exists()


def test_rereading_that_fails_is_told_and_undoes_nothing(bench: Bench) -> None:
    bench.system.fails = {("conf", "reread")}
    bench.site.made = [bench.file()]
    bench.engine().install()
    assert bench.engine().reread() == ["conf reread: conf: exit 1: no"]
    assert (bench.etc / "hook.sh").exists()


def test_check_tells_what_is_wrong_and_what_to_do(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.change()]
    bench.site.seen = [fail("version", "too old", "Take a newer one.")]
    found = list(bench.engine().check())
    assert [one.is_good for one in found] == [False, False, False, False]
    assert found[0].remedy == "belljar batch install paper"
    bench.engine().install()
    assert [one.is_good for one in bench.engine().check()] == [True, True, True, False]


@pytest.mark.parametrize("where", ["etc/hook.sh", "opt/libexec/paper/wrap-paper"])
@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: path.chmod(0o600), lambda path: path.write_bytes(path.read_bytes() + b"x\n")]
)
def test_what_was_changed_by_hand_is_found_and_mended(bench: Bench, where: str, harm: Any) -> None:
    bench.site.made = [bench.file()]
    bench.engine().install()
    before = bench.files()
    harm(bench.folder / where)
    assert sorted(bench.states())[0] != "there"
    bench.engine().install()
    mode = stat.S_IMODE((bench.folder / where).stat().st_mode)
    assert (mode == 0o755 and bench.files().keys() == before.keys()) or where.startswith("opt")
    assert bench.states() == ["there", "there"]


def test_a_change_that_the_system_refuses_to_undo_is_told_with_its_own_hint(bench: Bench) -> None:
    """What was undone before it stays undone; `uninstall` again goes on there."""
    kept, gone = replace(bench.change("kept"), purpose="kept", undo_hint="Ask again."), bench.change("gone")
    bench.site.made = [kept, gone]
    bench.engine().install()
    bench.system.fails = {kept.undo[0]}
    with pytest.raises(CommandFailed, match="kept: conf: exit 1: no") as caught:
        bench.engine().uninstall()
    assert caught.value.hint == "Ask again."
    assert set(bench.system.values) == {"kept"}
    bench.system.fails = set()
    bench.engine().uninstall()
    assert bench.system.values == {} and not bench.wrapper.exists()
