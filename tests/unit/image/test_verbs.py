"""`belljar image ...` as typed, against a store of small images."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.image import FakeOverlays, FakeStore
from tests.unit.image.image_parts import ext4, runtime, system

from belljar.cli.image import image as verb
from belljar.cli.parser import Parser
from belljar.errors import BadOption, ImageInUse, ImageUnknown, UsageError
from belljar.host.python.interpreter import command
from belljar.image import AGENT_PATH, Image
from belljar.image.store.store import Store
from belljar.jobs.disks import told_of

Publish = Callable[..., Image]
Typed = Callable[..., int]


@pytest.fixture
def typed(store: Store) -> Typed:
    """Carry out one command line and return its exit code."""

    def typed(*words: str, root: Path | None = None) -> int:
        parser = Parser(prog="belljar image")
        parser.take(verb.VERBS["image"])
        args = parser.parse_args(words)
        return int(args.carry_out(args, runtime(store, root)))

    return typed


def test_the_list_shows_names_and_where_an_image_comes_from(
    typed: Typed, publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    image = publish("base")
    assert typed("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NAME", "DIGEST", "STATE"] and row.split()[:5] == [
        "base",
        image.digest[:12],
        "ready",
        "Debian",
        "kernel",
    ]


def test_an_image_that_cannot_do_what_it_is_imported_for_is_not_stored(
    typed: Typed, publish: Publish, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, root, base = str(ext4(tmp_path / "disk")), system(tmp_path / "root"), publish("base")
    for context, missing in (("inject", "no systemd"), ("cloud-init", "no cloud-init and no systemd")):
        with pytest.raises(UsageError, match=rf"image mine: --context {context} is not possible.*{missing}"):
            typed("import", disk, "--name", "mine", "--context", context, root=root)
        assert store.images() == [base] and list((store.folder / "drafts").iterdir()) == []
    assert typed("import", disk, "--name", "mine", "--context", "ramdisk", root=root) == 0
    assert store.resolve("mine").facts["context"] == "ramdisk"
    assert typed("import", disk, "--name", "mine", root=root) == 0  # the same disk, to be started in another way
    assert "context" not in store.resolve("mine").facts and store.verify(store.resolve("mine")) == []
    store.drop("base")
    unknown = str(ext4(tmp_path / "unknown"))  # what nobody has looked for may be there all the same
    assert typed("import", unknown, "--name", "other", "--context", "inject") == 0
    capsys.readouterr()


SYSTEMD = {"init": "/sbin/init", "init_system": "systemd", "cloud_init": False}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (SYSTEMD, "boots by firmware; its guests get the agent by inject"),
        ({**SYSTEMD, "cloud_init": True}, "its guests get the agent by cloud-init"),
        ({**SYSTEMD, "agent": True}, "it starts the agent itself"),
        ({**SYSTEMD, "init_system": "other"}, "it boots by firmware; nothing in it is known to start the agent"),
        ({}, "it boots by firmware; its file systems were not looked into, which takes"),
    ],
)
def test_an_import_tells_how_its_image_starts_and_gets_the_agent(
    publish: Publish, facts: dict[str, object], told: str
) -> None:
    words = told_of(replace(publish("mine", direct=False), facts=facts))
    assert words.startswith("image mine: ") and told in words


def test_of_a_usual_image_nothing_is_told(publish: Publish) -> None:
    image = publish("mine")
    assert told_of(image) == ""
    assert told_of(replace(image, kernel=None, facts={"boots_by": "disc"})) == ""


@pytest.mark.parametrize("name", ["folder.tar", "no such/file.tar.gz"])
def test_an_archive_that_cannot_be_written_is_refused_before_any_work(typed: Typed, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(BadOption, match=r"Is a directory|No such file"):
        typed("extract", "base", "/var/log", "-o", str(tmp_path / name))
    assert list(tmp_path.glob("*.tar*")) == [tmp_path / "folder.tar"]


def test_an_empty_store_lists_nothing(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("list", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_programs_get_every_fact(typed: Typed, publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    image = publish("base")
    typed("list", "--format", "json")
    (one,) = json.loads(capsys.readouterr().out)
    typed("show", "base", "--format", "json")
    assert json.loads(capsys.readouterr().out) == one
    assert (one["digest"], one["names"], one["disk"], one["created"]) == (image.digest, ["base"], str(image.disk), 1.0)


def test_people_get_a_table(typed: Typed, publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    publish("base")
    assert typed("show", "base") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["virtual_size"].endswith("MiB") and rows["stored"].endswith(" KiB")


def test_a_corrupt_image_fails_the_verification_and_can_be_shown_and_removed(
    typed: Typed, publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = publish("good", b"1"), publish("bad", b"2")
    bad.disk.chmod(0o600)
    bad.disk.write_bytes(b"broken")
    assert typed("verify", "good") == 0 and typed("verify", "bad") == 1 and typed("verify") == 1
    capsys.readouterr()
    assert typed("verify", "--format", "json") == 1
    wrong = {one["names"][0]: one["wrong"] for one in json.loads(capsys.readouterr().out)}
    assert wrong["good"] == [] and wrong["bad"][0].startswith("disk.qcow2: sha256 is")
    assert typed("show", "bad") == 0 and typed("remove", "bad") == 0
    assert good.disk.exists() and not bad.disk.exists()


def test_names_come_and_go(typed: Typed, publish: Publish, store: Store) -> None:
    publish("base")
    assert typed("tag", "base", "other") == 0
    assert typed("remove", "base") == 0
    assert store.resolve("other").names == ("other",)
    with pytest.raises(ImageUnknown):
        typed("tag", "base", "x")


def test_an_image_in_use_stays(typed: Typed, publish: Publish, store: Store) -> None:
    with store.hold(publish("base"), "m1"):
        for force in ([], ["--force"]):
            with pytest.raises(ImageInUse):
                typed("remove", "base", *force)
    assert typed("verify", "base") == 0


def test_gc_says_what_it_does(typed: Typed, publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    folder = publish(None).disk.parent
    assert typed("gc", "--dry-run", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == [str(folder)] and folder.exists()
    assert typed("gc") == 0 and not folder.exists()


def test_an_import_prints_its_digest_and_warns_of_what_it_will_need(
    typed: Typed, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("import", str(ext4(tmp_path / "disk")), "--name", "mine") == 0
    said = capsys.readouterr()
    assert said.out == store.resolve("mine").digest + "\n"
    assert "boots by firmware" in said.err and "agent" in said.err


def test_the_agent_and_its_unit_are_printed(typed: Typed, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert typed("agent", "--tar") == 0
    with tarfile.open(fileobj=io.BytesIO(capfdbinary.readouterr().out)) as archive:
        assert {"loader", "python", "agent.pyc"} <= set(archive.getnames())
    assert typed("agent", "--unit") == 0
    assert f"ExecStart={command(AGENT_PATH)} {AGENT_PATH}/agent.pyc\n".encode() in capfdbinary.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("build",),
        ("build", "fedora"),
        ("build", "debian", "--suite", "sid"),
        ("import", "x"),
        ("agent",),
        ("agent", "--print", "--unit"),
        ("list", "--format", "xml"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(typed: Typed, words: tuple[str, ...]) -> None:
    with pytest.raises(BadOption):
        typed(*words)


def test_the_shipped_fake_behaves_like_a_store(tmp_path: Path) -> None:
    fake, overlays = FakeStore(), FakeOverlays()
    image = fake.resolve("debian12")
    assert fake.resolve(image.digest[:8]) == image
    assert overlays.create(tmp_path / "disk", image, None) == image.virtual_size
    overlays.discard(tmp_path / "disk")
    overlays.discard(tmp_path / "disk")
    del fake.known["debian12"]
    for refused in (lambda: fake.resolve("debian12"), lambda: fake.hold(image, "m1").__enter__()):
        with pytest.raises(ImageUnknown):
            refused()
