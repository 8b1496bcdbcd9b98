"""What other options had put there: more of the same can be added; all else goes by `uninstall`, and is refused before."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.batch.test_install import CONF, Bench, PaperSite

from belljar.batch import Settings
from belljar.batch.install import files as install_files
from belljar.batch.install.engine import Engine
from belljar.batch.install.pieces import OurLines, Piece, Place, Status
from belljar.batch.pbs.openpbs import site as openpbs_site
from belljar.batch.slurm import site as slurm_site
from belljar.errors import BadOption, BelljarError, CommandFailed, NotOurs

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
    made.options = {"extra": "yes"}
    made.engine().install()
    return made


def test_a_script_of_the_sites_that_still_calls_it_is_named_before_anything_is_touched(bench: Bench) -> None:
    assert isinstance(bench.site, Optional)
    bench.site.caller = bench.etc / "own.sh"
    bench.site.caller.write_text(f"{bench.etc}/extra/more.sh\n")
    before = bench.files()
    with pytest.raises(NotOurs, match=r"own.sh: calls .*extra/more.sh"):
        bench.engine().uninstall()
    assert bench.files() == before


def test_more_is_added_and_what_is_not_wanted_any_more_is_refused(bench: Bench) -> None:
    before, values = bench.files(), dict(bench.system.values)
    assert "more.sh" in str(before) and values == {"starter": "/w", "second": "2"}
    bench.options = {"extra": "no"}
    with pytest.raises(NotOurs, match=r"extra/more.sh: installed with other options") as refused:
        bench.engine().install()
    assert {"other.conf", "set second"} <= {
        line.partition(":")[0].rpartition("/")[2] for line in refused.value.message.splitlines()
    }
    assert "belljar batch uninstall paper" in refused.value.hint
    assert (bench.files(), bench.system.values) == (before, values)
    bench.options = {"extra": "yes"}
    bench.engine().uninstall()
    bench.options = {"extra": "no"}
    bench.engine().install()
    assert bench.system.values == {"starter": "/w"} and not (bench.etc / "extra").exists()


def test_another_prefix_is_refused_before_anything_is_touched(bench: Bench) -> None:
    before = bench.files()
    bench.wrapper = bench.folder / "new/libexec/wrap-paper"
    with pytest.raises(NotOurs, match=r"opt/libexec/wrap-paper: installed with other options"):
        bench.engine().install()
    assert bench.files() == before


def test_options_that_mean_nothing_any_more_do_not_keep_a_site_from_uninstalling(bench: Bench) -> None:
    bench.options = {"extra": "gone"}
    with pytest.raises(BadOption):
        bench.engine().uninstall(force=True)
    bench.options = {"extra": "no"}
    bench.engine().uninstall(force=True)
    assert bench.system.values == {"second": "2"}, "what is no more cannot be undone, and is forgotten"
    assert not install_files.path_of(bench.etc, "paper").exists()


# -- real sites --------------------------------------------------------------------------------------------------------


def test_openpbs_is_told_of_its_hooks_and_of_their_end(tmp_path: Path) -> None:
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
    with pytest.raises(NotOurs, match="belljar_submit"):
        engine("no").install()
    engine("yes").uninstall()
    assert server.hooks == {} and server.resources == {} and not (tmp_path / "libexec").exists()
    engine("no").install()
    assert set(server.hooks) == {"belljar_node"}
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


def test_slurm_can_go_from_the_lines_of_users_to_its_plugin(short_path: Path) -> None:
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
    engine("hand").install()
    engine("lua").install()
    assert (there(), (etc / "slurm.conf").read_bytes()) == seen["lua"], "more is added in place"
    with pytest.raises(NotOurs, match=r"belljar.lua: installed with other options"):
        engine("hand").install()


def nothing(argv: tuple[str, ...]) -> bytes:
    raise BelljarError("slurmctld does not answer")
