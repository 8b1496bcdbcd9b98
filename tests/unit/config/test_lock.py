"""What the site keeps for itself: which settings, in which places, and what a user is told."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.config import Loaded, inspect
from belljar.errors import BadSetting
from belljar.host.files import only_root_writes

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has files that are root's")
USER = 1000
LOCKED = {
    "network.egress": "'open'",
    "qemu.binary": "'/home/me/qemu'",
    "machine.hypervisor": "'libvirt:qemu+tcp://elsewhere/system'",
    "machine.network": "'user'",
    "machine.cpus": "64",
    "image.sources": "['/home/me/images']",
    "paths.site_store": "'/home/me/store'",
    "paths.run": "'/home/me/run'",
    "libvirt.log_folder": "'/home/me/x'",
    "batch.allow": "['* *']",
    "site.lock": "[]",
}
OPEN = {"machine.start": "'cold'", "machine.grace": "'1m'", "guest.lost_after": "'1h'", "context.site": "'mine'"}


class Host:
    """A host with its own /etc and a user's home."""

    def __init__(self, folder: Path) -> None:
        self.etc, self.home = folder / "etc", folder / "home"
        (self.home / ".config/belljar").mkdir(parents=True)
        self.etc.mkdir()
        self.environ = {"HOME": str(self.home)}
        self.own = self.home / ".config/belljar/belljar.toml"

    def site(self, text: str) -> None:
        (self.etc / "belljar.toml").write_text(text)

    def look(self, config: Path | None = None, *, in_job: bool = True, uid: int = USER) -> Loaded:
        return inspect(config, environ=self.environ, uid=uid, etc=self.etc, in_job=in_job)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def section_with(name: str, value: str) -> str:
    section, _, key = name.partition(".")
    return f"[{section}]\n{key} = {value}\n"


@pytest.mark.parametrize("name", LOCKED)
@pytest.mark.parametrize("place", ["own file", "variable", "named file"])
def test_in_a_batch_job_a_user_changes_nothing_of_the_sites(host: Host, tmp_path: Path, place: str, name: str) -> None:
    named = None
    if place == "variable":
        host.environ[f"BELLJAR_{name.replace('.', '_').upper()}"] = LOCKED[name].strip("'[]").replace("'", "")
        origin = f"environment BELLJAR_{name.replace('.', '_').upper()}"
    else:
        path = host.own if place == "own file" else tmp_path / "mine.toml"
        path.write_text(section_with(name, LOCKED[name]))
        path.chmod(0o666)  # whoever it belongs to, others can write it
        named, origin = (path if place == "named file" else None), f"{path}:2"
    loaded = host.look(named)
    (mistake,) = loaded.mistakes
    assert (mistake.origin, mistake.key, mistake.is_users) == (origin, name, True)
    assert mistake.what.startswith("is for the site to set") and "/etc/belljar" in mistake.what and mistake.hint
    host.environ.pop(f"BELLJAR_{name.replace('.', '_').upper()}", None)
    host.own.unlink(missing_ok=True)
    assert loaded.settings == host.look().settings


@pytest.mark.parametrize("name", OPEN)
def test_what_the_site_leaves_open_is_the_users(host: Host, name: str) -> None:
    host.own.write_text(section_with(name, OPEN[name]))
    loaded = host.look()
    assert loaded.mistakes == () and loaded.origins == {name: f"{host.own}:2"}


def test_outside_of_batch_jobs_only_the_batch_and_the_lock_are_the_sites_unless_it_says_more(host: Host) -> None:
    host.own.write_text("".join(section_with(*one) for one in LOCKED.items() if one[0] == "network.egress"))
    assert host.look(in_job=False).mistakes == ()
    host.site("[site]\nlock = ['network.e*']\n")
    for in_job in (True, False):
        (mistake,) = host.look(in_job=in_job).mistakes
        assert mistake.what == "is for the site to set, in /etc/belljar" and mistake.hint == "take it away"
    for name in ("batch.allow", "site.lock"):
        host.own.write_text(section_with(name, LOCKED[name]))
        assert [one.key for one in host.look(in_job=False).mistakes] == [name]


def test_a_list_of_the_sites_takes_the_place_of_the_default(host: Host) -> None:
    host.site("[site]\nlock = []\n")
    host.own.write_text(section_with("network.egress", "'open'"))
    assert host.look().mistakes == ()


def test_what_is_free_outside_of_jobs_is_said(host: Host) -> None:
    host.own.write_text(section_with("paths.store", "'/home/me/store'"))
    host.environ["BELLJAR_QEMU_CPU"] = "max"
    file, variable = host.look().mistakes
    assert str(file).endswith("is for the site to set in a batch job, in /etc/belljar (take it away)")
    assert variable.hint == "unset it in the job"


@pytest.mark.parametrize("word", ["netwrok.*", "network", "egress"])
def test_a_pattern_that_fits_nothing_is_a_mistake_and_opens_nothing(host: Host, word: str) -> None:
    host.site(f"[site]\nlock = ['{word}']\n")
    host.own.write_text(section_with("qemu.binary", "'/home/me/qemu'"))
    of_site, of_user = host.look().mistakes
    assert of_site.origin == f"{host.etc}/belljar.toml:2" and repr(word) in of_site.what and not of_site.is_users
    assert of_user.key == "qemu.binary"


def test_a_lock_that_cannot_be_read_opens_nothing(host: Host) -> None:
    host.site("[site]\nlock = 7\n")
    host.own.write_text(section_with("qemu.binary", "'/home/me/qemu'"))
    for in_job in (True, False):
        assert [one.key for one in host.look(in_job=in_job).mistakes] == ["site.lock", "qemu.binary"]


def test_a_folder_named_by_a_variable_is_the_users_wherever_it_is(host: Host) -> None:
    host.site(section_with("batch.retries", "7"))
    (host.etc / "belljar").mkdir()
    (host.etc / "belljar/belljar.toml").write_text(section_with("network.egress", "'open'"))
    host.environ["XDG_CONFIG_HOME"] = str(host.etc)
    assert [one.key for one in host.look().mistakes] == ["network.egress"]


def test_root_is_the_site(host: Host) -> None:
    host.own.write_text(
        "".join(section_with(name, LOCKED[name]) for name in ("network.egress", "site.lock", "paths.run"))
    )
    host.environ["BELLJAR_BATCH_ALLOW"] = "* debian*"
    assert host.look(uid=0).mistakes == ()


# -- a file that is named ----------------------------------------------------------------------------------------------


@as_root
def test_a_named_file_that_only_root_can_change_is_the_sites(host: Host, tmp_path: Path) -> None:
    named = tmp_path / "site.toml"
    named.write_text("[batch]\nallow = ['* debian*']\n[network]\negress = 'open'\n[site]\nlock = ['guest.*']\n")
    host.own.write_text("[guest]\nheartbeat = 1\n")
    loaded = host.look(named)
    assert loaded.settings.batch.allow == ("* debian*",)
    assert [one.key for one in loaded.mistakes] == ["guest.heartbeat"]


@as_root
@pytest.mark.parametrize("how", ["theirs", "others write", "their folder", "folder others write", "beside a link"])
def test_a_named_file_that_a_user_can_change_is_no_site(host: Host, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    named = folder / "site.toml"
    named.write_text(section_with("batch.allow", "['* *']"))
    match how:
        case "theirs":
            os.chown(named, USER, USER)
        case "others write":
            named.chmod(0o664)
        case "their folder":
            os.chown(folder, USER, USER)
        case "folder others write":
            folder.chmod(0o777)
        case "beside a link":
            os.chown(named, USER, USER)
            (tmp_path / "link.toml").symlink_to(named)
            named = tmp_path / "link.toml"
    assert [(one.key, one.is_users) for one in host.look(named).mistakes] == [("batch.allow", True)]


@as_root
def test_a_link_of_a_user_to_a_file_of_roots_is_read_where_it_leads(host: Host, tmp_path: Path) -> None:
    """It could lead elsewhere at the next look."""
    named, theirs = tmp_path / "site.toml", tmp_path / "theirs"
    named.write_text(section_with("batch.retries", "7"))
    theirs.mkdir()
    (theirs / "link.toml").symlink_to(named)
    os.chown(theirs, USER, USER)
    loaded = host.look(theirs / "link.toml")
    assert loaded.origins == {"batch.retries": f"{named}:2"}


@as_root
def test_a_folder_of_everybodys_with_the_sticky_bit_lets_nobody_change_what_is_roots(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "file").touch()
    assert only_root_writes(folder / "file")
    (folder / "file").chmod(0o1666)
    assert not only_root_writes(folder / "file")


# -- a file that others may write is nobody's --------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize(
    "loosen",
    [
        lambda etc: (etc / "belljar.toml").chmod(0o666),
        lambda etc: (etc / "belljar.toml").chmod(0o664),
        lambda etc: os.chown(etc / "belljar.toml", 1000, 1000),
        lambda etc: etc.chmod(0o777),
        lambda etc: (etc / "conf.d/more.toml").chmod(0o602),
        lambda etc: (etc / "conf.d").chmod(0o777),
    ],
    ids=["file", "file of a group", "file of a user", "folder", "further file", "folder of further files"],
)
@pytest.mark.parametrize("uid", [0, USER])
def test_a_site_file_that_others_may_write_is_refused(host: Host, loosen: Callable[[Path], None], uid: int) -> None:
    (host.etc / "conf.d").mkdir()
    for path in (host.etc / "belljar.toml", host.etc / "conf.d/more.toml"):
        path.write_text(section_with("machine.cpus", "3"))
    assert host.look(uid=uid).checked().machine.cpus == 3
    loosen(host.etc)
    with pytest.raises(BadSetting, match=f"^{host.etc}.*(others|everybody) may write|belongs to uid 1000") as caught:
        host.look(uid=uid).checked()
    assert "(settings are a small file that others cannot write)" in caught.value.message


@as_root
def test_a_link_of_roots_to_a_site_file_is_followed(host: Host, tmp_path: Path) -> None:
    (tmp_path / "cfg").mkdir()
    (tmp_path / "cfg/belljar.toml").write_text(section_with("machine.cpus", "3"))
    (host.etc / "belljar.toml").symlink_to(tmp_path / "cfg/belljar.toml")
    assert host.look().checked().machine.cpus == 3
    (tmp_path / "cfg/belljar.toml").chmod(0o646)
    assert host.look().mistakes


@as_root
def test_roots_own_file_is_the_sites_too_and_a_users_own_is_theirs_to_open(host: Host) -> None:
    host.own.write_text(section_with("machine.start", "'cold'"))
    host.own.chmod(0o666)
    assert host.look(uid=0).mistakes and not host.look(uid=USER).mistakes
