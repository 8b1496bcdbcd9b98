"""vacuum.toml: what it becomes, and every way in which it can be wrong."""

import re
from pathlib import Path

import pytest

from belljar.errors import BadSetting, ImageUnknown
from belljar.model import GIB, Context
from belljar.records import replace
from belljar.vacuum import Mode, Pipe, Space
from belljar.vacuum.settings.settings import inspect, keys, load, wrong_here

GOOD = """\
[space]
name = "vac01.example.org"
factories = [".", "b.example.org"]
mode = "compatible"
allow = ["10.1.0.0/16", "fd00::/8"]

[factory]
name = "a.example.org"
processors = 16
memory = "3G"
shutdown_time = 2027-01-15T08:00:00Z

[factory.options]
cvmfs_proxy = "http://squid.example.org:3128"
queue = "short"

[machinetype.lhcb-prod]
share = 1
image = "debian12"
max_processors = 8
max_wallclock = "24h"
min_wallclock = "9000s"
fqan = "/lhcb/Role=pilot"
user_data = "https://lhcb.example.org/user_data"
context = "none"
options = {queue = "long"}
option_files = {cert = "/etc/lhcb/cert.pem"}

[pipe.gds]
url = "https://gds.example.org/pipe.json"
share = 6
backoff = "10m"

[machinetype.gds-prod]
share = 4

[machinetype.gds-own]
image = "sl6"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "vacuum.toml"


def read(file: Path, text: str) -> Space:
    file.write_text(text)
    return load(file)


def mistakes(file: Path, text: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(BadSetting) as caught:
        load(file)
    assert "check-config" in caught.value.hint
    return [line.removeprefix(str(file)) for line in caught.value.message.splitlines()]


# -- what it becomes ---------------------------------------------------------------------------------------------------


def test_a_space_has_what_its_file_says(file: Path) -> None:
    space = read(file, GOOD)
    assert (space.name, space.factory, space.site) == ("vac01.example.org", "a.example.org", "example.org")
    assert space.factories == ("a.example.org", "b.example.org")
    assert (space.mode, space.processors, space.memory) == (Mode.COMPATIBLE, 16, 3 * GIB)
    assert space.shutdown_time == 1_800_000_000.0
    one = next(one for one in space.types if one.name == "lhcb-prod")
    assert (one.share, one.image, one.max_wallclock, one.least_wallclock) == (1.0, "debian12", 86400.0, 9000.0)
    assert (one.fqan, one.context, one.backoff, one.fizzle) == ("/lhcb/Role=pilot", Context.NONE, 600.0, 600.0)


def test_options_of_the_factory_are_for_all_types_that_do_not_say_otherwise(file: Path) -> None:
    by_name = {one.name: one for one in read(file, GOOD).types}
    assert by_name["lhcb-prod"].options == (("cvmfs_proxy", "http://squid.example.org:3128"), ("queue", "long"))
    assert by_name["lhcb-prod"].option_files == (("cert", Path("/etc/lhcb/cert.pem")),)
    assert dict(by_name["gds-own"].options)["queue"] == "short"


def test_a_type_of_a_pipe_is_none_by_itself_unless_it_has_an_image(file: Path) -> None:
    space = read(file, GOOD)
    (pipe,) = space.pipes
    assert [one.name for one in space.types] == ["lhcb-prod", "gds-own"]
    assert (pipe.url, pipe.share, pipe.given) == ("https://gds.example.org/pipe.json", 6.0, (("backoff", 600.0),))
    assert pipe.own == (("gds-prod", (("share", 4.0),)), ("gds-own", (("image", "sl6"),)))


def test_files_beside_it_come_later_key_by_key(file: Path) -> None:
    folder = file.with_suffix(".d")
    folder.mkdir()
    (folder / "10-a.toml").write_text("[factory]\ndraining = true\nprocessors = 8\n[machinetype.lhcb-prod]\nshare = 2")
    (folder / "20-b.toml").write_text("[factory]\nprocessors = 4\n[factory.options]\nqueue = 'night'")
    (folder / "30-c.conf").write_text("not TOML")
    space = read(file, GOOD)
    assert (space.draining, space.processors, space.memory) == (True, 4, 3 * GIB)
    assert space.types[0].share == 2.0 and space.types[0].image == "debian12"
    assert space.options == (("cvmfs_proxy", "http://squid.example.org:3128"), ("queue", "night"))
    assert inspect(file).origins["factory.processors"] == f"{folder}/20-b.toml:2"


def test_what_nobody_says_is_the_host_s_own(file: Path) -> None:
    import os

    space = read(file, "[space]\nname = 'vac01.example.org'")
    assert (space.factory, space.processors) == (os.uname().nodename, os.cpu_count())
    assert space.factories == (space.factory,)


# -- what can be wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ", space.name: is missing (as in vac01"),
        ("[space]\nname = 'a b'", ":2, space.name: 'a b' cannot be a name"),
        ("[spaces]\nname = 'a'", ":1, spaces: no such table (did you mean space?)"),
        ("space = 3", ":1, space: is a table (write [space] on a line of its own)"),
        ("machinetype = 3", ":1, machinetype: is a table (write [machinetype.NAME] on a line of its own)"),
        ("[machinetype.Atlas_x]\nimage = 'a'", ":1, machinetype.Atlas_x: cannot be a name (small letters"),
        ("[space]\nname = 'v'\nshare = 1", ":3, space.share: no such key (there are name, factories"),
        ("[machinetype.a]\nimage = 'a'\nshares = 1", ":3, machinetype.a.shares: no such key (did you mean share?)"),
        ("[machinetype.a]\nimage = 'a'\npipe = 'x'", ":3, machinetype.a.pipe: no such key"),
        ("[machinetype.a]\nimage = 'a'\nshare = -1", ":3, machinetype.a.share: must be at least 0, not -1 (of the space"),
        ("[machinetype.a]\nimage = 'a'\nshare = 'x'", ":3, machinetype.a.share: wants a number, not 'x'"),
        ("[machinetype.a]\nimage = 'a'\nshare = nan", ":3, machinetype.a.share: must be a finite number"),
        ("[machinetype.a]\nshare = 1", ", machinetype.a.image: is missing (an image's name"),
        ("[machinetype.a]\nimage = 'a'\nmin_processors = 8", ":3, machinetype.a.min_processors: min_processors 8 is more"),
        ("[machinetype.a]\nimage = 'a'\nmax_processors = 0", ":3, machinetype.a.max_processors: must be at least 1, not 0"),
        ("[machinetype.a]\nimage = 'a'\nmin_wallclock = '2d'", ":3, machinetype.a.min_wallclock: is more than max_wallclock"),
        ("[machinetype.a]\nimage = 'a'\nnetwork = 'lan'", ":3, machinetype.a.network: 'lan' is not a network (user, bridge"),
        ("[machinetype.a]\nimage = 'a'\ncontext = 'x'", ":3, machinetype.a.context: wants one of auto, ramdisk"),
        ("[machinetype.a]\nimage = 'a'\nuser_data = 'ud'", ":3, machinetype.a.user_data: 'ud' is neither"),
        ("[machinetype.a]\nimage = 'a'\nuser_data = 'http://'", ":3, machinetype.a.user_data: 'http://' is neither"),
        ("[machinetype.a]\nimage = 'a'\nheartbeat = 60", ":3, machinetype.a.heartbeat: without heartbeat_file"),
        ("[machinetype.a]\nimage = 'a'\nheartbeat_file = '../x'", ":3, machinetype.a.heartbeat_file: '../x' is not a file's"),
        ("[machinetype.a]\nimage = 'a'\nfqan = 'atlas'", ":3, machinetype.a.fqan: 'atlas' does not begin with /"),
        ("[machinetype.a]\nimage = 'a'\nproxy = ['/a', '/b', '/c']", ":3, machinetype.a.proxy: has more than two paths"),
        ("[machinetype.a]\nimage = 'a'\nproxy = ['a']", ":3, machinetype.a.proxy: wants a path from the root"),
        ("[machinetype.a]\nimage = 'a'\noptions = 'x'", ":3, machinetype.a.options: is a table of names and values"),
        ("[machinetype.a]\nimage = 'a'\n[machinetype.a.options]\nA-b = 'x'", ":3, machinetype.a.options: 'A-b' cannot be"),
        ("[machinetype.a]\nimage = 'a'\noptions = {x = \"a\\nb\"}", ":3, machinetype.a.options: must be one line"),
        ("[machinetype.a]\nimage='a'\noptions={x='1'}\noption_files={x='/x'}", ":3, machinetype.a.options: x is in option_files"),
        ("[pipe.a]\nshare = 1", ", pipe.a.url: is missing (an http(s) address)"),
        ("[pipe.a]\nurl = 'ftp://x/y'", ":2, pipe.a.url: 'ftp://x/y' is not an address"),
        ("[factory]\nname = 'a/b'", ":2, factory.name: 'a/b' cannot be a host's name"),
        ("[factory]\nmemory = 2.5", ":2, factory.memory: wants a size such as 2G, not 2.5"),
        ("[factory]\nshutdown_time = 'soon'", ":2, factory.shutdown_time: wants a date and time such as"),
        ("[space]\nname = 'v'\nfactories = ['a', 'a']", ":3, space.factories: a is there twice"),
        ("[space]\nname = 'v'\nfactories = ['a b']", ":3, space.factories: 'a b' cannot be a host's name"),
        ("[space]\nname = 'v'\nallow = ['10.0.0.1/8']", ":3, space.allow: 10.0.0.1/8 has host bits set (as in 10.1"),
        ("[space]\nname = 'v'\nvacmon = ['mon']", ":3, space.vacmon: 'mon' is not HOST:PORT"),
        ("[space]\nname = 'v'\nsigned_only = true", ":3, space.signed_only: without key_file"),
        ("[space]\nname = 'v'\npoll_limit = 1", ":3, space.poll_limit: is less than poll_silence"),
        ("[space]\nname = 'v'\nport = 70000", ":3, space.port: must be at most 65535, not 70000"),
        ("[space\n", ": not TOML: "),
    ],
)  # fmt: skip
def test_a_mistake_names_file_key_and_what_to_do(file: Path, text: str, told: str) -> None:
    assert any(told in line for line in mistakes(file, text)), mistakes(file, text)


HEADS = {"space": "space", "factory": "factory", "machinetype": "machinetype.a", "pipe": "pipe.a"}


@pytest.mark.parametrize(("table", "key"), [(table, key) for table in HEADS for key in keys(table)])
@pytest.mark.parametrize("value", ["[[1]]", "1979-05-27T07:32:00Z"])
def test_each_key_refuses_what_is_not_of_its_kind(file: Path, table: str, key: str, value: str) -> None:
    if (table, key, value[0]) == ("factory", "shutdown_time", "1"):
        value = "true"
    found = mistakes(file, f"[{HEADS[table]}]\n{key} = {value}")
    (told,) = [line for line in found if f", {HEADS[table]}.{key}: " in line]
    assert told.startswith(":2, ") and told.endswith(")") and len(told.rpartition(" (")[2]) > 5


def test_all_mistakes_are_told_at_once_and_each_once(file: Path) -> None:
    text = (
        "[space]\nname = 3\nmod = 'x'\n[factory]\ncycle = 0\n[machinetype.a]\nimage = 7\nfqan = 'x'\n[pipe.p]\nurl = 1"
    )
    told = mistakes(file, text)
    assert sorted(line.partition(",")[0] for line in told) == [":10", ":2", ":3", ":5", ":7", ":8"]


def test_mistakes_in_a_file_beside_it_have_that_file_s_name(file: Path) -> None:
    file.with_suffix(".d").mkdir()
    (file.with_suffix(".d") / "x.toml").write_text("[factory]\ndrain = true")
    (told,) = mistakes(file, GOOD)
    assert told.startswith(f"{file.with_suffix('.d')}/x.toml:2, factory.drain: no such key (did you mean draining?)")


def test_without_the_file_that_is_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="no such file"):
        load(tmp_path / "vacuum.toml")


def test_what_does_not_fit_this_host_is_found_apart(file: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("x")
    space = read(
        file,
        f"""[space]\nname = 'v.example'\nfactories = ['b.example']\n[factory]\nname = 'a'\n[machinetype.m]\nimage = 'x'\nshare = 1
        user_data = '{there}'\nproxy = ['{there}', '/nowhere/key']\ntoken_file = '/nowhere/token'
        option_files = {{x = '/nowhere/x', y = '{there}'}}""",
    )
    found = {(key, what) for key, what, _ in wrong_here(space)}
    assert found == {
        ("space.factories", "this host, a, is not among them"),
        ("factory.name", "a has no domain, which factories of Vac insist on"),
        ("machinetype.m.proxy", "/nowhere/key is not there"),
        ("machinetype.m.token_file", "/nowhere/token is not there"),
        ("machinetype.m.option_files", "/nowhere/x is not there"),
    }


def test_what_could_never_start_here_is_found(file: Path) -> None:
    space = read(
        file,
        """[space]\nname = 'v.example'\n[factory]\nname = 'wn.example'\nmemory = '8000T'\nshutdown_time = 1000000000
        [machinetype.m]\nimage = 'sl5'\nnetwork = 'bridge:br77'\n[machinetype.n]\nimage = 'sl6'\nmemory = '1G'
        [machinetype.o]\nimage = 'https://images.example.org/x'\nmemory = '1G'\nshare = 0""",
    )

    def find(name: str) -> None:
        if name == "sl5":
            raise ImageUnknown(f"no image is called {name!r}")

    found = [(key, what) for key, what, _ in wrong_here(space, find)]
    assert [key for key, _ in found] == [
        "factory.shutdown_time", "space", "machinetype.m.memory", "machinetype.m.network", "machinetype.m.image",
    ]  # fmt: skip
    assert found[3:] == [
        ("machinetype.m.network", "br77 is not a bridge of this host"),
        ("machinetype.m.image", "no image is called 'sl5'"),
    ]
    assert not list(wrong_here(replace(space, shutdown_time=None, types=(), pipes=(Pipe("p", share=1.0),))))


def test_every_key_has_a_help_text() -> None:
    for table in ("space", "factory", "machinetype", "pipe"):
        assert all(key.field.metadata["help"] for key in keys(table).values())
    assert keys("pipe")["share"].field is not keys("machinetype")["share"].field
    assert keys("factory")["name"].field.name == "factory"


def test_the_page_for_sites_that_had_vac_names_keys_that_there_are() -> None:
    page = (Path(__file__).parents[4] / "docs/operate/vacuum/from-vac.md").read_text()
    _, settings, machinetypes, pipes = (part.split("|\n") for part in page.split("\n## "))
    for kind, rows in (("machinetype", machinetypes), ("pipe", pipes)):
        rights = [row.rpartition(" | ")[2] for row in rows[2:] if row.startswith("|")]
        named = [word for right in rights for word in re.findall(r"^`([a-z_]+)`", right)]
        assert named and set(named) <= keys(kind).keys()
    named = re.findall(r"`(space|factory)\.([a-z0-9_]+)", "".join(settings))
    assert len(named) > 10 and all(key in keys(kind) for kind, key in named)
