"""`belljar batch install|check|uninstall` as an administrator sees them, over a system of paper."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.jobs.paper_node import make_node

from belljar import batch
from belljar.assembly import Runtime
from belljar.batch.install.commands import Needs
from belljar.batch.install.pieces import Advice, Change, OurFile, OurLines, Piece, Place
from belljar.batch.slurm import site as site_of_slurm
from belljar.cli import main
from belljar.errors import BadSetting
from belljar.findings import Finding, ok
from belljar.jobs.batch.hooks import go_by_the_site
from belljar.jobs.node import own_prefix
from belljar.jobs.site import check as batch_look
from belljar.jobs.site import doctor
from belljar.jobs.site.install import _libraries
from belljar.network import AntiSpoofing
from belljar.network import Settings as Network
from belljar.records import replace


@dataclass
class PaperSite:
    default_folder: Path
    reread: tuple[tuple[str, ...], ...] = (("true",),)
    places: list[Place] = field(default_factory=list)
    needs: Needs = field(default_factory=lambda: Needs(("true", "false", "test")))

    def pieces(self, place: Place) -> list[Piece]:
        self.places.append(place)
        flag = place.folder / "flag"
        return [
            OurFile(
                "a hook",
                place.folder / "hook.sh",
                f"#!/bin/sh\n# Made by `belljar batch install slurm`.\nexec {place.belljar} internal epilog slurm\n".encode(),
            ),
            OurLines(
                "settings",
                place.folder / "paper.conf",
                (f"Wrap={place.wrapper}", f"Queue={place.options.get('queue', '')}"),
            ),
            Change(
                "a flag",
                ("test", "-e", str(flag)),
                lambda out: True,
                (("touch", str(flag)),),
                (("rm", str(flag)),),
            ),
            Advice("restart", "Restart the paper daemon.\n    by hand"),
        ]

    def findings(self, place: Place) -> list[Finding]:
        return [ok("version", "1.0")]

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        return self.reread


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperSite]:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/paper.conf").write_text("Name=c\n")
    made = PaperSite(tmp_path / "etc")
    monkeypatch.setattr(site_of_slurm, "SITE", made)
    yield made


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., int]:
    return lambda act, *words: main(["batch", act, "slurm", "--prefix", str(tmp_path / "opt"), *words])


def files(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_showing_writes_nothing(
    site: PaperSite, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(tmp_path)
    assert call("install", "--dry-run") == 0
    assert files(tmp_path) == before
    said = capsys.readouterr().out
    for words in ("libexec/slurm", "+# belljar begin\n+Wrap=", "$ touch", "missing", "by hand"):
        assert words in said


def test_all_is_printed_whole_for_a_sites_own_means(
    site: PaperSite, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(tmp_path)
    assert call("install", "--print") == 0
    assert files(tmp_path) == before
    rows = json.loads(capsys.readouterr().out)
    made = {Path(row["path"]).name: row for row in rows if "content" in row}
    assert set(made) == {"site.json", "belljar-slurm", "wrap-slurm", "hook.sh"}
    assert made["wrap-slurm"]["mode"] == "0755" and "internal', 'wrap'" in made["wrap-slurm"]["content"]
    (lines,) = (row for row in rows if "lines" in row)
    assert lines["lines"].startswith("# belljar begin\nWrap=") and lines["path"] == str(tmp_path / "etc/paper.conf")
    assert [row["command"] for row in rows if "command" in row] == [["touch", str(tmp_path / "etc/flag")], ["true"]]
    assert [row["by_hand"] for row in rows if "by_hand" in row] == ["Restart the paper daemon.\n    by hand"]


@pytest.mark.parametrize(("answer", "is_done"), [("y", True), ("", False), ("no", False)])
def test_at_a_terminal_it_asks_first(
    site: PaperSite,
    call: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    is_done: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: f"{answer}\n")
    monkeypatch.setattr("sys.stdin", terminal)
    assert call("install") == (0 if is_done else 1)
    assert (tmp_path / "etc/hook.sh").exists() is is_done
    assert "Do this? [y/N] " in capsys.readouterr().out
    del terminal.readline
    assert call("install", "--yes") == 0
    assert call("install") == 0, "nothing is left to ask about"


def test_install_check_and_uninstall_with_the_options_remembered(
    site: PaperSite, tmp_path: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(tmp_path)
    assert call("install", "--queue", "a", "--queue", "b", "--set", "host=h") == 0
    assert "by hand: restart: Restart the paper daemon.\n    by hand\n" in capsys.readouterr().out
    assert "Queue=a,b" in (tmp_path / "etc/paper.conf").read_text()
    call("check", "--format", "json")
    said = json.loads(capsys.readouterr().out)
    assert all(one["grade"] == "ok" for one in said["findings"][2:7]), said
    assert dict(site.places[-1].options) == {"queue": "a,b", "host": "h"}
    assert site.places[-1].wrapper == tmp_path / "opt/libexec/slurm/wrap-slurm"
    assert call("install") == 0
    assert "All is in place." in capsys.readouterr().out
    assert call("uninstall") == 0
    assert files(tmp_path) == before
    assert call("uninstall") == 0
    assert "Nothing of belljar's" in capsys.readouterr().out


def test_fewer_options_take_out_what_they_do_not_want(
    site: PaperSite, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = site.pieces
    extra = OurFile("more", tmp_path / "etc/more.sh", b"#!/bin/sh\n# Made by `belljar batch install slurm`.\n")
    site.pieces = lambda place: [*made(place), *([extra] if place.options.get("more") else [])]  # type: ignore[method-assign]
    assert call("install", "--set", "more=yes") == 0 and extra.path.exists()
    capsys.readouterr()
    assert call("install", "--set", "more=", "--dry-run") == 0 and extra.path.exists()
    assert "not wanted any more" in capsys.readouterr().out
    assert call("install", "--set", "more=") == 0 and not extra.path.exists()
    assert call("install") == 0
    assert "All is in place." in capsys.readouterr().out


def test_check_is_1_with_remedies_where_something_is_missing(
    site: PaperSite, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("check") == 1
    said = capsys.readouterr().out
    assert "fail  a hook" in said and "-> belljar batch install slurm" in said


@pytest.mark.parametrize(
    "break_it",
    [Path.unlink, lambda hook: hook.write_text(hook.read_text() + "by hand"), lambda hook: hook.chmod(0o600)],
)
def test_the_remedy_that_check_names_mends_a_hook_as_it_stands(
    site: PaperSite, tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Callable[[Path], object]
) -> None:
    """Word for word, with the folder, the options and the settings that this installation has."""
    etc, options = site.default_folder.rename(tmp_path / "my etc"), ("--queue", "a,b", "--set", "host=h")
    (tmp_path / "site.toml").touch()
    words = ["--config", str(tmp_path / "site.toml"), "batch", "install", "slurm", "--folder", str(etc)]
    assert main([*words, "--prefix", str(tmp_path / "opt"), *options]) == 0
    before = files(tmp_path)
    break_it(etc / "hook.sh")
    check = [*words[:3], "check", *words[4:], "--prefix", str(tmp_path / "opt"), "--format", "json"]
    capsys.readouterr()
    assert main(check) == 1
    (bad,) = (one for one in json.loads(capsys.readouterr().out)["findings"] if "a hook" in one["name"])
    program, *remedy = shlex.split(bad["remedy"])
    assert program == "belljar" and main(remedy) == 0
    capsys.readouterr()
    main(check)
    (good,) = (one for one in json.loads(capsys.readouterr().out)["findings"] if "a hook" in one["name"])
    assert good["grade"] == "ok"
    assert before.items() <= files(tmp_path).items()


def test_a_system_that_does_not_reread_is_told_and_the_files_stay(
    site: PaperSite, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.reread = (("false",),)
    assert call("install") == 1
    assert "not done, repeat it by hand: false" in capsys.readouterr().out
    assert (tmp_path / "etc/hook.sh").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--set", "x"), "not of the form KEY=VALUE"),
        (("--set", "=x"), "not of the form KEY=VALUE"),
        (("--folder", "/nonexistent"), "no such folder"),
    ],
)
def test_wrong_options_are_said(
    site: PaperSite, call: Callable[..., int], words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("install", *words) == 125
    assert what in capsys.readouterr().err


def test_a_list_of_commands_that_is_not_one_is_said(
    site: PaperSite, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "opt/libexec/slurm/site.json"
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    assert call("check") == 125
    assert "not a" in capsys.readouterr().err


def test_the_launchers_run_this_belljar_whatever_their_environment_says(
    site: PaperSite, call: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "site.toml").write_text("[batch]\nretries = 7\n")
    assert (
        main(["--config", str(tmp_path / "site.toml"), "batch", "install", "slurm", "--prefix", str(tmp_path / "opt")])
        == 0
    )
    (tmp_path / "belljar.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "json.py").write_text("raise SystemExit('nor this one')")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nonexistent", "PYTHONSTARTUP": str(tmp_path / "json.py")}
    done = subprocess.run(
        [str(tmp_path / "opt/libexec/slurm/belljar-slurm"), "config", "show"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ["batch.retries", "7"] in [line.split() for line in done.stdout.splitlines()]
    done = subprocess.run(
        [str(tmp_path / "opt/libexec/slurm/wrap-slurm"), "a\nb", "--help"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 125, "outside of a job"
    assert "not this one" not in done.stderr


def test_a_launcher_of_a_checkout_has_what_belljar_needs(
    site: PaperSite, call: Callable[..., int], tmp_path: Path
) -> None:
    assert main(["batch", "install", "slurm", "--prefix", str(tmp_path / "opt")]) == 0
    before, _, _ = (tmp_path / "opt/libexec/slurm/belljar-slurm").read_text().partition("sys.argv")
    needs = "import cryptography, h11, pycdlib, rich; print('all there')"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", f"{before}\n{needs}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "all there\n", done.stderr


def test_the_prefix_is_where_belljar_is_installed() -> None:
    assert own_prefix().is_absolute()
    assert own_prefix() != Path("/usr")


def test_an_installed_belljar_has_its_launchers_beside_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("lib", "lib-20260101-120000-77"):
        monkeypatch.setattr("belljar.jobs.node.__file__", f"/opt/belljar/{folder}/belljar/jobs/node.py")
        assert own_prefix() == Path("/opt/belljar")


def test_launchers_name_the_link_that_an_upgrade_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib-1/belljar/jobs").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("lib-1")
    monkeypatch.setattr("belljar.jobs.site.install.__file__", str(tmp_path / "lib-1/belljar/jobs/site/install.py"))
    assert _libraries()[0] == str(tmp_path / "lib")


def test_a_folder_users_cannot_pass_is_found_by_check(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "wrap").touch()
    (found,) = batch_look._entered_by_all("the launcher", closed / "wrap")
    assert not found.is_good and str(closed) in found.text


@pytest.mark.skipif(os.geteuid() != 0, reason="folders of other users")
def test_a_nodes_folder_that_is_not_roots_is_found_by_check() -> None:
    def good(path: Path | None) -> bool:
        settings = SimpleNamespace(paths=SimpleNamespace(node=path))
        found = doctor.node(SimpleNamespace(settings=settings))  # type: ignore[arg-type]
        return found.is_good

    made = make_node()
    node = made.node
    assert good(node)
    node.chmod(0o777)
    assert not good(node)
    node.chmod(0o1777)
    assert good(node)
    os.chown(node, 65534, 65534)
    assert not good(node)
    assert good(None)
    made.close()


def test_a_share_that_is_not_there_is_found_by_check(tmp_path: Path) -> None:
    shares, paths = (f"{tmp_path}:ro", f"{tmp_path}/gone:/data"), SimpleNamespace(node=tmp_path)
    settings = SimpleNamespace(batch=batch.Settings(shares=shares), paths=paths)
    (found,) = batch_look._shares(SimpleNamespace(settings=settings), "the settings")  # type: ignore[arg-type]
    assert not found.is_good and f"no such folder on this host: {tmp_path}/gone;" in found.text


@pytest.mark.skipif(os.geteuid() != 0, reason="root's templates")
def test_a_template_that_users_first_jobs_would_boot_is_told_by_check(tmp_path: Path) -> None:
    shares = (f"{tmp_path}:rw",)
    settings = replace(
        Runtime().settings, batch=batch.Settings(shares=shares, queue_images=("night=el9", "day=debian12"))
    )
    digests = {"el9": "a" * 64, "debian12": "b" * 64}
    made = [
        SimpleNamespace(facts={"image_digest": digests["el9"], "shares": ["9p"]}, grows={"memory"}),
        SimpleNamespace(facts={"image_digest": digests["debian12"]}, grows={"memory"}),
        SimpleNamespace(facts={"image_digest": digests["debian12"], "shares": ["9p"]}, grows=frozenset()),
    ]
    runtime = SimpleNamespace(
        settings=settings, hypervisor=SimpleNamespace(templates=lambda: made),
        images=SimpleNamespace(resolve=lambda name: SimpleNamespace(digest=digests[name])),
    )  # fmt: skip
    place = Place(settings.batch, tmp_path / "wrap-slurm", tmp_path, tmp_path, tmp_path)
    (told,) = (one for one in batch_look._images(runtime, place) if "template" in one.name)  # type: ignore[arg-type]
    assert (told.name, told.is_good) == ("template of debian12", True)
    assert "each user's first job boots; `belljar batch node slurm test` makes one" in told.text


@pytest.mark.parametrize(
    ("system", "printed"),
    [
        ("slurm", b"PartitionName=night AllowGroups=ALL\nPartitionName=main AllowGroups=ALL\n"),
        ("gridengine", b"main\nnight\n"),
        ("openpbs", b"#\ncreate queue night\nset queue night enabled = True\ncreate queue main\n"),
        ("torque", b"#\ncreate queue night\nset queue night enabled = True\ncreate queue main\n"),
        ("lsf", b""),
        ("htcondor", b""),
    ],
)
def test_a_queue_with_an_image_that_the_system_does_not_have_is_found_by_check(
    tmp_path: Path, system: str, printed: bytes
) -> None:
    settings = batch.Settings(queue_images=("night=debian12", "nihgt=debian12"))
    place = Place(settings, tmp_path, tmp_path, tmp_path, tmp_path, run=lambda argv: printed)
    found = list(batch_look._queues(system, place))
    assert [one.text for one in found] == ([f"{system} has no queue nihgt"] if printed else [])
    assert all("main" in one.remedy and "night" in one.remedy for one in found)


def test_a_system_without_such_a_hook_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["internal", "hook", "lsf", "jsv"]) == 125
    assert "lsf: has no hook 'jsv'" in capsys.readouterr().err
    assert main(["internal", "hook", "slurm", "suspend"]) == 125
    assert main(["internal", "hook", "nosystem", "x"]) == 125


def test_other_acts_are_not_imported_by_one() -> None:
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from belljar.cli import main
main(["internal", "prolog", "slurm"])
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "belljar.jobs.batch.hooks" in loaded
    for heavy in (
        "belljar.cli.batch.batch",
        "belljar.batch.install.engine",
        "asyncio",
        "difflib",
        "subprocess",
        "belljar.machine.supervisor",
    ):
        assert heavy not in loaded, heavy


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's and of others")
def test_a_settings_file_that_a_user_could_change_is_found_by_check(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.touch()
    assert list(batch_look._is_the_sites(file)) == []
    os.chown(file, 65534, 65534)
    (found,) = batch_look._is_the_sites(file)
    assert not found.is_good and str(file) in found.text and found.remedy.startswith(f"chown root {file}")


@pytest.mark.parametrize(("value", "is_said"), [("auto", True), ("off", False), ("required", False)])
def test_a_bridge_without_rules_for_users_machines_is_found_by_check(value: str, is_said: bool) -> None:
    network = Network(bridges=("br7",), anti_spoofing=AntiSpoofing(value))
    runtime = SimpleNamespace(settings=SimpleNamespace(network=network))
    found = list(batch_look._bridges(runtime, "the settings"))  # type: ignore[arg-type]
    assert [(one.is_good, "br7" in one.text) for one in found] == [(False, True)] * is_said


@pytest.mark.parametrize(
    ("node", "shares", "is_said"),
    [
        ("home/nodes", ("home:rw",), True),
        ("home", ("home:rw",), True),
        ("home/nodes", ("home:ro",), False),
        ("local/nodes", ("home:rw",), False),
        (None, ("home:rw",), True),
        (None, ("local:rw",), False),
    ],
)
def test_folders_that_machines_could_write_are_found_by_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str | None, shares: tuple[str, ...], is_said: bool
) -> None:
    for name in ("home", "local"):
        (tmp_path / name).mkdir()
    somebody = SimpleNamespace(pw_uid=1000, pw_dir=str(tmp_path / "home/somebody"))
    monkeypatch.setattr(batch_look.pwd, "getpwall", lambda: [somebody])
    texts = tuple(str(tmp_path / share) for share in shares)
    settings = SimpleNamespace(
        paths=SimpleNamespace(node=tmp_path / node if node else None), batch=batch.Settings(shares=texts)
    )
    _, *found = batch_look._shares(SimpleNamespace(settings=settings), "the settings")  # type: ignore[arg-type]
    assert [(one.is_good, str(tmp_path / "home") in one.text) for one in found] == [(False, True)] * is_said


@pytest.mark.parametrize(("variable", "passes"), [("BELLJAR_BATCH_GRACE", True), ("BELLJAR_MACHINE_CPUS", False)])
def test_a_hook_goes_by_the_site_whatever_its_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, passes: bool
) -> None:
    """The first is the user's alone; the second stands beside a mistake of the site's."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/belljar.toml").write_text("[batch]\ngrace = 7\n" if passes else "[batch]\ngrace = 'x'\n")
    monkeypatch.setattr("belljar.config.ETC", tmp_path / "etc")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv(variable, "nonsense")
    runtime = Runtime()
    if passes:
        assert go_by_the_site(runtime).grace == 7.0
    else:
        with pytest.raises(BadSetting):
            go_by_the_site(runtime)
