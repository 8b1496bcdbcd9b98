"""Settings from files and variables: what wins, and what a mistake looks like."""

from pathlib import Path

import pytest

from belljar.config import SECTIONS, Settings, every_setting, inspect
from belljar.config.merge import ALWAYS_LOCKED, is_locked
from belljar.errors import BadSetting
from belljar.hypervisor import Accelerator
from belljar.model import GIB, MIB


class Host:
    """A host with its own /etc, home and environment."""

    def __init__(self, folder: Path) -> None:
        self.etc, self.home = folder / "etc", folder / "home"
        (self.etc / "conf.d").mkdir(parents=True)
        (self.home / ".config/belljar").mkdir(parents=True)
        self.environ = {"HOME": str(self.home)}
        self.extra: Path | None = None

    def site(self, text: str) -> None:
        (self.etc / "belljar.toml").write_text(text)

    def user(self, text: str) -> None:
        (self.home / ".config/belljar/belljar.toml").write_text(text)

    def load(self) -> Settings:
        return inspect(self.extra, environ=self.environ, uid=1000, etc=self.etc).checked()

    def mistakes(self) -> list[str]:
        with pytest.raises(BadSetting) as caught:
            self.load()
        assert caught.value.exit_code == 125
        return caught.value.message.splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# -- what wins ---------------------------------------------------------------------------------------------------------


def test_without_any_file_the_defaults_hold(host: Host) -> None:
    assert host.load().machine == SECTIONS["machine"]()


def test_each_layer_stands_before_the_one_below_key_by_key(host: Host, tmp_path: Path) -> None:
    host.site("[machine]\ncpus = 2\nmemory = '1G'\ngrace = 1\nkeep_days = 1")
    (host.etc / "conf.d/10-a.toml").write_text("[machine]\nmemory = '2G'\ngrace = 2\nkeep_days = 2")
    (host.etc / "conf.d/20-b.toml").write_text("[machine]\ngrace = 3\nkeep_days = 3")
    (host.etc / "conf.d/README").write_text("not a settings file")
    host.user("[machine]\nkeep_days = 4\nkeep_count = 4\nclone_timeout = 4")
    host.extra = tmp_path / "extra.toml"
    host.extra.write_text("[machine]\nkeep_count = 5\nclone_timeout = 5")
    host.environ["BELLJAR_MACHINE_CLONE_TIMEOUT"] = "6s"
    machine = host.load().machine
    assert (machine.cpus, machine.memory, machine.grace) == (2, 2 * GIB, 3.0)
    assert (machine.keep_days, machine.keep_count, machine.clone_timeout) == (4, 5, 6.0)


def test_every_value_tells_where_it_comes_from(host: Host) -> None:
    host.site("# the site\n[machine]\n\ncpus = 2\n")
    host.environ["BELLJAR_QEMU_ACCELERATOR"] = "tcg"
    loaded = inspect(environ=host.environ, uid=1000, etc=host.etc)
    assert loaded.origins == {
        "machine.cpus": f"{host.etc}/belljar.toml:4",
        "qemu.accelerator": "environment BELLJAR_QEMU_ACCELERATOR",
    }
    assert loaded.settings.qemu.accelerator is Accelerator.TCG


def test_sizes_durations_and_paths_are_written_as_people_write_them(host: Host) -> None:
    host.user("[machine]\nmemory = '512MiB'\ngrace = '5m'\n[paths]\nscratch = '~/scratch'\nsite_store = ''")
    host.environ["HOME"] = str(host.home)
    settings = host.load()
    assert (settings.machine.memory, settings.machine.grace) == (512 * MIB, 300.0)
    assert settings.paths.scratch.is_absolute() and settings.paths.scratch.name == "scratch"
    assert settings.paths.site_store is None


def test_variables_of_others_that_begin_like_ours_are_left_alone(host: Host) -> None:
    host.environ |= {"BELLJAR_ID": "x", "BELLJAR": "y", "BELLJAR_JOB_NAME": "z", "BELLJAR_MACHINE": "w"}
    assert host.load().machine == SECTIONS["machine"]()


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_at_once_each_with_its_place(host: Host) -> None:
    host.site("[machine]\ncpus = 'two'\n\n[quemu]\nbinary = 'x'\n")
    host.user("[image]\nmax_size = '2 elephants'\ndefualt = 'x'\n")
    host.environ["BELLJAR_MACHINE_START"] = "warm"
    first, second, third, fourth, fifth = host.mistakes()
    assert first.startswith(f"{host.etc}/belljar.toml:4, quemu: no such table (did you mean qemu?)")
    assert second.startswith(
        f"{host.home}/.config/belljar/belljar.toml:3, image.defualt: no such key (did you mean default?)"
    )
    assert third.startswith(f"{host.etc}/belljar.toml:2, machine.cpus: wants a whole number, not 'two'")
    assert "image.max_size: '2 elephants' is not a size" in fourth
    assert fifth.startswith(
        "environment BELLJAR_MACHINE_START, machine.start: wants one of auto, clone, cold; not 'warm'"
    )


WRONG = {
    "bytes": ("'2X'", "[]", "true", "-1", "1.5", "'-1G'"),
    "seconds": ("'soon'", "[]", "true", "-1", "nan", "inf", "'-1s'"),
    "days": ("'7'", "[]", "true", "-1", "1.5"),
    "int": ("'7'", "[]", "true", "-1", "1.5"),
    "Path": ("7", "true", "'relative/path'", "'/var/../etc'", "'~nobody-here/x'", '"/a\\u0000b"'),
    "str": ("7", "true", "[]", "{a=1}", "'''two\nlines'''", "1979-05-27"),
    "enum": ("7", "'neither'", "''", "[]"),
    "tuple": ("7", "'alone'", "true", "[7]", "[true]", '["a\\nb"]'),
    "float": ("'7'", "[]", "true", "-1", "nan"),
    "bool": ("7", "'maybe'", "[]", "1.5"),
    "percent": ("'7'", "[]", "true", "-1", "inf"),
}
EVERY_KEY = [
    (section, name, str(facts.get("unit") or _kind))
    for section, name, value, facts in every_setting(
        Settings(paths=inspect(environ={}, uid=1000, etc=Path("/nowhere")).checked().paths)
    )
    for _kind in [
        "enum"
        if hasattr(value, "value")
        else "Path"
        if value is None or isinstance(value, Path)
        else type(value).__name__
    ]
]


def test_each_key_refuses_each_wrong_value_and_says_which(host: Host) -> None:
    for section, key, kind in EVERY_KEY:
        for wrong in WRONG[kind]:
            host.site(f"[{section}]\n{key} = {wrong}\n")
            (mistake,) = host.mistakes()
            assert mistake.startswith(f"{host.etc}/belljar.toml:2, {section}.{key}: "), wrong
            assert len(mistake.removeprefix(str(host.etc))) < 250


def test_each_key_can_be_set_by_a_variable_to_what_is_shown(host: Host) -> None:
    from belljar.cli.render import setting

    values = {f"{s}.{k}": setting(value, facts) for s, k, value, facts in every_setting(host.load())}
    for section, key, _ in EVERY_KEY:
        variable = f"BELLJAR_{section}_{key}".upper()
        host.environ[variable] = values[f"{section}.{key}"]
        if is_locked(f"{section}.{key}", ALWAYS_LOCKED):  # only root's variables can
            assert "is for the site to set" in host.mistakes()[0], key
        else:
            assert host.load() == inspect(environ={"HOME": str(host.home)}, uid=1000, etc=host.etc).checked(), key
        del host.environ[variable]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("machine = 3", "machine: is a table (write [machine] on a line of its own)"),
        ("[[machine]]", "machine: is a table"),
        ("[machine.cpus]", "machine.cpus: wants a whole number, not {}"),
        ("cpus = 2", "cpus: no such table"),
        ("[machine", "not TOML: Expected ']' at the end of a table declaration "),
        ("[machine]\ncpus = 1\ncpus = 2", "not TOML: Cannot overwrite a value"),
        ("a = " + "[" * 5000, "not TOML"),
        ("#" * (1 << 20) + "#", "larger than 1048576 bytes"),
    ],
)
def test_a_malformed_file_is_one_mistake(host: Host, text: str, what: str) -> None:
    host.site(text)
    (mistake,) = host.mistakes()
    assert what in mistake


def test_a_file_in_another_encoding_says_where(host: Host) -> None:
    (host.etc / "belljar.toml").write_bytes(b"[machine]\n# \xe4")
    assert host.mistakes() == [f"{host.etc}/belljar.toml: not UTF-8 at byte 12 (save it as UTF-8)"]


def test_a_named_file_that_is_missing_is_a_mistake(host: Host, tmp_path: Path) -> None:
    host.extra = tmp_path / "missing.toml"
    assert host.mistakes() == [
        f"{tmp_path}/missing.toml: no such file (correct the path that was given, or take the link away)"
    ]


def test_a_dangling_link_or_a_folder_in_place_of_a_file_is_a_mistake(host: Host) -> None:
    (host.etc / "belljar.toml").symlink_to("/nowhere")
    (host.home / ".config/belljar/belljar.toml").mkdir()
    first, second = host.mistakes()
    assert "a link that leads nowhere" in first and "Is a directory" in second


def test_a_wrong_value_leaves_the_one_below_standing(host: Host) -> None:
    host.site("[machine]\ncpus = 3")
    host.user("[machine]\ncpus = 'x'")
    loaded = inspect(environ=host.environ, uid=1000, etc=host.etc)
    assert loaded.settings.machine.cpus == 3
    assert len(loaded.mistakes) == 1


@pytest.mark.parametrize("how", ["file", "variable"])
def test_a_user_cannot_change_what_is_the_sites_and_root_can(tmp_path: Path, how: str) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "own")}
    if how == "variable":
        environ["BELLJAR_BATCH_ALLOW"] = "* secret"
    else:
        (tmp_path / "own/belljar").mkdir(parents=True)
        (tmp_path / "own/belljar/belljar.toml").write_text('[batch]\nallow = ["* secret"]\n')
    site = tmp_path / "site.toml"
    site.write_text('[batch]\nallow = ["* debian*"]\n')
    loaded = inspect(site, environ=environ, uid=1234, etc=tmp_path / "etc")
    (mistake,) = loaded.mistakes
    assert mistake.key == "batch.allow" and "is for the site to set" in mistake.what
    assert loaded.settings.batch.allow == ("* debian*",)
    assert inspect(None, environ=environ, uid=0, etc=tmp_path / "etc").settings.batch.allow == ("* secret",)
