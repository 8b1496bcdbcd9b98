"""What a site's files look like before, between and after: nothing of the site's is lost, nothing of ours stays."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from belljar.batch import Settings
from belljar.batch.install import engine as install_engine
from belljar.batch.install import files as install_files
from belljar.batch.install.engine import Engine
from belljar.batch.install.pieces import Advice, Change, Finding, OurFile, OurLines, Piece, Place, Status
from belljar.errors import BadOption, CommandFailed, CommandHung, CommandMissing, NotOurs, SystemSilent

CONF = b"# the site's own\nClusterName=c\nSelectType=x\n"


@dataclass
class PaperSystem:
    """A batch system whose settings are a dictionary, changed by `conf set K V` and `conf del K`, shown by `conf get K`."""

    values: dict[str, str] = field(default_factory=dict)
    ran: list[tuple[str, ...]] = field(default_factory=list)
    fails: set[tuple[str, ...]] = field(default_factory=set)
    missing: bool = False
    deaf: bool = False  # takes every change and keeps none
    silent: bool = False  # does not answer
    slow: bool = False  # answers too late what it is asked about one key

    def run(self, argv: tuple[str, ...], stdin: bytes = b"") -> bytes:
        if self.missing:
            raise CommandMissing("conf: no such program on this host")
        self.ran.append(argv)
        if self.silent:
            raise CommandFailed("conf: exit 1: cannot connect to server")
        if self.slow and argv[1] == "get":
            raise CommandHung("conf: not finished after 20 s, killed")
        if argv in self.fails:
            raise CommandFailed("conf: exit 1: no")
        match argv:
            case ("conf", "set", key, value):
                if not self.deaf:
                    self.values[key] = value
            case ("conf", "stdin", key):
                self.values[key] = stdin.decode()
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

    def pieces(self, place: Place) -> list[Piece]:
        return list(self.made)

    def findings(self, place: Place) -> list[Finding]:
        return self.seen

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return (("conf", "reread"),)


@dataclass
class Bench:
    """A folder /etc/paper with a site's conf in it, and the engine over it."""

    folder: Path
    system: PaperSystem = field(default_factory=PaperSystem)

    def __post_init__(self) -> None:
        self.etc = self.folder / "etc"
        self.etc.mkdir()
        self.conf = self.etc / "paper.conf"
        self.conf.write_bytes(CONF)
        self.site = PaperSite(self.etc)
        self.wrapper = self.folder / "opt/libexec/wrap-paper"
        self.options: dict[str, str] = {}

    def engine(self) -> Engine:
        place = Place(
            Settings(), self.wrapper, self.folder / "opt/libexec/belljar", self.folder, self.etc, self.options,
            run=lambda argv: self.system.run(argv),
        )  # fmt: skip
        return Engine("paper", self.site, place, self.launchers, self.system.run)

    def launchers(self, place: Place) -> list[Piece]:
        return [OurFile("launcher", place.wrapper, b"#!launcher\n", 0o755)]

    def lines(self, *lines: str, **facts: object) -> OurLines:
        return OurLines("lines", self.conf, lines or ("Wrap=yes",), **facts)  # type: ignore[arg-type]

    def file(self, content: bytes = b"hook\n", name: str = "hook.sh") -> OurFile:
        return OurFile("a hook", self.etc / name, content, 0o755)

    def change(self, key: str = "starter", value: str = "/w") -> Change:
        return Change(
            f"set {key}", ("conf", "get", key), lambda out: out == value.encode(), (("conf", "set", key, value),),
            (("conf", "del", key),), answers=("conf", "list"),
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
    for force in (False, True):
        with pytest.raises(SystemSilent, match=r"set other: .*conf") as caught:
            bench.engine().uninstall(force=force)
        assert "nothing was taken out" in caught.value.hint
    assert bench.files() == before and bench.system.values == values
    assert bench.states()[-2:] == ["unknown", "unknown"]
    setattr(bench.system, how, False)
    bench.engine().uninstall()
    assert bench.system.values == {} and bench.files() == {"etc/paper.conf": CONF}


# -- failing paths ------------------------------------------------------------------------------------------------------


def test_a_file_of_somebody_elses_is_never_overwritten_not_even_by_force(bench: Bench) -> None:
    (bench.etc / "hook.sh").write_bytes(b"theirs\n")
    bench.site.made = [bench.lines(), bench.file(), bench.change()]
    before = bench.files()
    for force in (False, True):
        with pytest.raises(NotOurs, match=r"hook.sh: in the way: a file of somebody else's"):
            bench.engine().install(force=force)
    assert bench.files() == before
    assert bench.system.values == {}


def test_a_setting_of_the_sites_that_clashes_with_ours_is_named_with_its_line(bench: Bench) -> None:
    bench.conf.write_bytes(CONF + b"  wrap = other\n")
    bench.site.made = [bench.lines("Wrap=yes", clashes=(r"wrap\s*=",))]
    with pytest.raises(NotOurs, match="line 4: wrap = other"):
        bench.engine().install()


def test_a_comment_and_our_own_lines_are_no_clash(bench: Bench) -> None:
    bench.conf.write_bytes(CONF + b"# Wrap=old\n")
    bench.site.made = [bench.lines("Wrap=yes", clashes=(r"Wrap\s*=",))]
    bench.engine().install()
    assert bench.states() == ["there", "there"]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_installation_that_fails_at_any_step_leaves_everything_as_it_was(bench: Bench, after: int) -> None:
    good: list[Piece] = [bench.file(), bench.lines(), bench.change(), bench.change("second", "2")]
    bad = Change(
        "bad",
        ("conf", "get", "bad"),
        lambda out: False,
        (("conf", "set", "bad", "1"), ("conf", "fail")),
        (("conf", "del", "bad"),),
        answers=("conf", "list"),
    )
    bench.system.fails = {("conf", "fail")}
    bench.site.made = [*good[:after], bad, *good[after:]]
    before = bench.files()
    with pytest.raises(CommandFailed):
        bench.engine().install()
    assert bench.files() == before
    assert bench.system.values == {}, "half a change is taken back too"
    assert not bench.wrapper.parent.parent.exists()


def test_a_change_that_succeeds_and_changes_nothing_is_a_failure(bench: Bench) -> None:
    bench.system.deaf = True
    bench.site.made = [bench.change()]
    with pytest.raises(CommandFailed, match="succeeded and changed nothing"):
        bench.engine().install()
    assert not bench.wrapper.exists()


def test_a_system_without_its_commands_is_said_before_anything_is_written(bench: Bench) -> None:
    bench.system.missing = True
    bench.site.made = [bench.file(), bench.change()]
    with pytest.raises(NotOurs, match="no such program"):
        bench.engine().install()
    assert not bench.wrapper.exists()


def test_a_folder_that_is_not_there_is_an_option_to_correct(bench: Bench) -> None:
    bench.etc.rename(bench.folder / "away")
    with pytest.raises(BadOption, match="no such folder"):
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
    with pytest.raises(NotOurs, match="do not pair"):
        bench.engine().install()
    assert bench.conf.read_bytes() == text


def test_a_file_of_ours_that_was_changed_by_hand_is_neither_replaced_nor_removed_unless_asked(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.lines()]
    bench.engine().install()
    (bench.etc / "hook.sh").write_bytes(b"mended\n")
    bench.site.made = [bench.file(b"newer\n"), bench.lines()]
    with pytest.raises(NotOurs, match="changed by hand"):
        bench.engine().install()
    before = bench.files()
    with pytest.raises(NotOurs, match="changed since belljar wrote it"):
        bench.engine().uninstall()
    assert bench.files() == before, "nothing is touched before all is known"
    bench.engine().install(force=True)
    assert (bench.etc / "hook.sh").read_bytes() == b"newer\n"
    assert (bench.etc / "hook.sh.before-belljar").read_bytes() == b"mended\n"


def test_a_record_that_is_none_stops_us(bench: Bench) -> None:
    install_files.path_of(bench.etc, "paper").write_text('{"files": 3}')
    with pytest.raises(NotOurs, match="not a record of an installation"):
        bench.engine().plan()


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
    assert (bench.etc / "paper.conf.before-belljar").read_bytes() == CONF
    assert os.access(bench.wrapper, os.X_OK)
    assert bench.system.values == {"starter": "/w"}
    bench.engine().uninstall()
    assert bench.files() == before
    assert stat.S_IMODE(os.stat(bench.conf).st_mode) == 0o640
    assert bench.system.values == {}
    assert not bench.wrapper.parent.exists()


@pytest.mark.parametrize("text", [b"", b"no newline at the end", b"\xff\xfe latin\r\nlines\r\n"])
def test_any_bytes_of_a_sites_file_come_back(bench: Bench, text: bytes) -> None:
    bench.conf.write_bytes(text)
    bench.site.made = [bench.lines()]
    bench.engine().install()
    assert b"Wrap=yes\n" in bench.conf.read_bytes()
    bench.engine().uninstall()
    assert bench.conf.read_bytes() == text


def test_a_file_that_was_not_there_is_made_and_goes_again(bench: Bench) -> None:
    bench.conf.unlink()
    bench.site.made = [bench.lines()]
    bench.engine().install()
    bench.engine().uninstall()
    assert not bench.conf.exists()


@pytest.mark.parametrize("at", range(1, 12))
def test_an_installation_that_was_killed_at_any_write_can_be_repeated_and_taken_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed: nothing is taken back, for nobody lives to do it."""

    class Killed(BaseException):
        pass

    writes = 0
    real = install_files.write_whole

    def dying(*words: Any, **facts: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == at:
            raise Killed
        real(*words, **facts)

    bench.site.made = [bench.lines(), bench.file(), bench.change()]
    before = bench.files()
    with monkeypatch.context() as patch:
        for module in (install_files,):
            patch.setattr(module, "write_whole", dying)
        patch.setattr(install_engine, "_all_or_nothing", lambda: nullcontext([]))
        with suppress(Killed):
            bench.engine().install()
    bench.engine().install()
    assert set(bench.states()) == {"there"}
    bench.engine().uninstall()
    assert bench.files() == before
    assert bench.system.values == {}


def test_twice_is_as_once(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.lines(), bench.change()]
    bench.engine().install()
    before, ran = bench.files(), len(bench.system.ran)
    assert bench.engine().install() == []
    assert bench.files() == before
    assert [argv for argv in bench.system.ran[ran:] if argv[1] != "get"] == []


def test_another_version_replaces_its_own_lines_and_files_where_they_stand(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.lines("Wrap=1")]
    bench.engine().install()
    bench.conf.write_bytes(bench.conf.read_bytes() + b"Later=site\n")
    bench.site.made = [bench.file(b"newer\n"), bench.lines("Wrap=2", "More=3")]
    assert bench.states() == ["there", "different", "different"]
    bench.engine().install()
    assert bench.conf.read_bytes() == CONF + b"# belljar begin\nWrap=2\nMore=3\n# belljar end\nLater=site\n"
    bench.engine().uninstall()
    assert bench.conf.read_bytes() == CONF + b"Later=site\n"
    assert (bench.etc / "paper.conf.before-belljar").exists(), "the site changed it since: the copy is still of use"


def test_lines_for_one_file_from_two_pieces_stand_between_one_pair_of_marks(bench: Bench) -> None:
    bench.site.made = [bench.lines("A=1"), bench.file(), bench.lines("B=2")]
    bench.engine().install()
    assert bench.conf.read_bytes() == CONF + install_files.block(("A=1", "B=2"), "#")


def test_a_link_to_the_sites_file_stays_a_link(bench: Bench) -> None:
    real = bench.folder / "real.conf"
    bench.conf.rename(real)
    bench.conf.symlink_to(real)
    bench.site.made = [bench.lines()]
    bench.engine().install()
    assert bench.conf.is_symlink() and b"Wrap=yes" in real.read_bytes()
    bench.engine().uninstall()
    assert bench.conf.is_symlink() and real.read_bytes() == CONF


def test_a_setting_the_site_had_before_is_not_taken_back(bench: Bench) -> None:
    bench.system.values["starter"] = "/w"
    bench.site.made = [bench.change()]
    bench.engine().install()
    bench.engine().uninstall()
    assert bench.system.values == {"starter": "/w"}


def test_changes_are_undone_in_reverse_and_before_the_files_they_need(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.change("a", "1"), bench.change("b", "2")]
    bench.engine().install()
    assert bench.engine().uninstall()[:2] == ["undid: set b", "undid: set a"]


def test_standard_input_of_a_change_reaches_its_command(bench: Bench) -> None:
    bench.site.made = [
        Change(
            "s",
            ("conf", "get", "k"),
            lambda out: out == b"text\n",
            (("conf", "stdin", "k"),),
            (),
            stdin=b"text\n",
            answers=("conf", "list"),
        )
    ]
    bench.engine().install()
    assert bench.system.values == {"k": "text\n"}


def test_the_options_are_remembered_for_check_and_uninstall(bench: Bench) -> None:
    bench.options = {"queue": "vm.q"}
    bench.site.made = [bench.file()]
    bench.engine().install(prefix="/p")
    record = install_files.load(install_files.path_of(bench.etc, "paper"))
    assert (record.options, record.prefix) == ({"queue": "vm.q"}, "/p")


def test_what_a_file_of_the_sites_still_calls_is_not_taken_from_under_it(bench: Bench) -> None:
    caller = bench.etc / "own.sh"
    caller.write_text(f"{bench.etc}/hook.sh\n")
    bench.site.made = [bench.lines(), replace(bench.file(), caller=caller)]
    bench.engine().install()
    before = bench.files()
    with pytest.raises(NotOurs, match=r"own.sh: calls .*/hook.sh"):
        bench.engine().uninstall()
    assert bench.files() == before
    caller.write_text("true\n")
    bench.engine().uninstall()
    assert not (bench.etc / "hook.sh").exists()


@pytest.mark.parametrize("calls", [True, False])
def test_a_caller_is_in_the_way_of_what_is_ours_only(bench: Bench, calls: bool) -> None:
    """Nor does a caller that is not there, or is no file; and --force goes all the same."""
    caller = bench.etc / "own.sh"
    bench.site.made = [replace(bench.file(), caller=caller)]
    if calls:
        caller.write_text(f"{bench.etc}/hook.sh\n")
        bench.engine().uninstall()
        bench.engine().install()
        bench.engine().uninstall(force=True)
    else:
        bench.engine().install()
        caller.mkdir()
        bench.engine().uninstall()
    assert not (bench.etc / "hook.sh").exists()


def test_what_a_later_version_does_not_know_any_more_is_removed_all_the_same(bench: Bench) -> None:
    bench.site.made = [bench.file()]
    bench.engine().install()
    bench.site.made = []
    bench.engine().uninstall()
    assert not (bench.etc / "hook.sh").exists()


def test_rereading_that_fails_is_told_and_undoes_nothing(bench: Bench) -> None:
    bench.system.fails = {("conf", "reread")}
    bench.site.made = [bench.file()]
    bench.engine().install()
    assert bench.engine().reread() == ["conf reread: conf: exit 1: no"]
    assert (bench.etc / "hook.sh").exists()


def test_check_tells_what_is_wrong_and_what_to_do(bench: Bench) -> None:
    bench.site.made = [bench.file(), bench.change()]
    bench.site.seen = [Finding("version", False, "too old", "Take a newer one.")]
    found = list(bench.engine().check())
    assert [one.is_good for one in found] == [False, False, False, False]
    assert found[0].remedy == "belljar batch install paper"
    bench.engine().install()
    assert [one.is_good for one in bench.engine().check()] == [True, True, True, False]


def test_a_mode_that_was_changed_is_found_and_mended(bench: Bench) -> None:
    bench.site.made = [bench.file()]
    bench.engine().install()
    (bench.etc / "hook.sh").chmod(0o600)
    assert bench.states() == ["there", Status.DIFFERENT.value]
    bench.engine().install()
    assert os.access(bench.etc / "hook.sh", os.X_OK)


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
