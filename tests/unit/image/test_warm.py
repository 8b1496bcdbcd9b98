"""Warm images in the store: a base's disk under another name, with a recipe; and `belljar image warm` as typed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.image.image_parts import runtime
from tests.unit.image.site import Site

from belljar.cli.image import image as verb
from belljar.cli.parser import Parser
from belljar.errors import BadOption, BelljarError, ImageCorrupt, InputMissing, PrepareFailed, TemplateError
from belljar.hypervisor.libvirt.driver import LibvirtHypervisor
from belljar.image import Image, Recipe, Settings, unpacked
from belljar.image.images import Images
from belljar.image.store.store import Store
from belljar.image.warm import store_nameless
from belljar.machine import Settings as MachineSettings
from belljar.model import GIB, MIB, Account, NetworkMode, Payload, Transfer
from belljar.records import replace

Publish = Callable[..., Image]
ROOT = Account("root", 0, 0, "root")


def recipe(base: Image, *inputs: Transfer, argv: tuple[bytes, ...] = (b"load",)) -> Recipe:
    return Recipe(base.digest, base.called, Payload(argv, ROOT, inputs=inputs), 1, 256 * MIB, 60.0, "alice")


def test_a_warm_image_has_its_bases_disk_without_taking_room(store: Store, publish: Publish) -> None:
    base = publish("base", b"1")
    warm = store.tag(store_nameless(store, base, recipe(base)), "warm")
    assert warm.digest != base.digest
    assert os.path.samefile(warm.disk, base.disk) and warm.recipe == recipe(base)
    assert store.verify(warm) == [] and store.verify(base) == [] and store.resolve("base") == base
    store.drop("base")
    assert store.resolve("warm").disk.read_bytes().endswith(b"1")


def test_the_same_recipe_on_the_same_base_is_the_same_image(store: Store, publish: Publish, tmp_path: Path) -> None:
    base, other = publish("base", b"1"), publish("other", b"2")
    (tmp_path / "given").write_text("a")
    given = Transfer(str(tmp_path / "given"), "given")
    first = [store_nameless(store, base, recipe(base)), store_nameless(store, base, recipe(base, given))]
    again = [store_nameless(store, base, recipe(base)), store_nameless(store, base, recipe(base, given))]
    (tmp_path / "given").write_text("b")
    others = [
        store_nameless(store, base, recipe(base, given)), store_nameless(store, other, recipe(other)),
        store_nameless(store, base, recipe(base, argv=(b"more",))),
    ]  # fmt: skip
    assert [image.digest for image in first] == [image.digest for image in again]
    assert len({image.digest for image in (*first, *others)}) == 5


def test_its_inputs_are_kept_with_it_and_come_out_again(store: Store, publish: Publish, tmp_path: Path) -> None:
    base = publish("base", b"1")
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    given = Transfer(str(folder), "/opt/lib"), Transfer(str(folder / "a.py"), "/opt/a.py")
    image = store_nameless(store, base, recipe(base, *given))
    (folder / "a.py").unlink()
    kept = image.recipe
    assert kept is not None
    with unpacked(image) as place:
        assert [(place / item.outside).is_dir() for item in kept.payload.inputs] == [True, False]
        assert (place / kept.payload.inputs[1].outside).read_text() == "a = 1\n"
    with pytest.raises(InputMissing, match=r"--in .*lib/a.py: No such file"):
        store_nameless(store, base, recipe(base, given[1]))
    assert list((store.folder / "drafts").iterdir()) == []


def test_a_users_warm_image_of_the_sites_base_is_the_users_own(
    store: Store, publish: Publish, settings: Settings, tmp_path: Path
) -> None:
    base = publish("base", b"1")
    own = Images(tmp_path / "own", store.folder.parent, settings)
    warm = own.tag(store_nameless(own, own.resolve("base"), recipe(base)), "warm")
    assert warm.store == own.folder and warm.disk.read_bytes() == base.disk.read_bytes()
    assert not os.path.samefile(warm.disk, base.disk) and own.verify(warm) == []


def test_a_warm_image_is_not_prepared_twice(store: Store, publish: Publish) -> None:
    base = publish("base", b"1")
    warm = store.tag(store_nameless(store, base, recipe(base)), "warm")
    with pytest.raises(BadOption, match="image warm is warm already"):
        store_nameless(store, warm, recipe(warm))


def test_recipe_disk_and_inputs_come_from_the_sites_repository(site: Site, tmp_path: Path) -> None:
    from belljar.image.progress import Progress

    (tmp_path / "given").write_text("a")
    base = site.make("base", b"1", to=site.publisher)
    image = store_nameless(site.publisher, base, recipe(base, Transfer(str(tmp_path / "given"), "given")))
    site.change(lambda repository: repository.put(site.publisher, "warm", image, Progress()))
    node = site.trusting(site.line)
    node.ensure("warm")
    here = node.resolve("warm")
    assert (here.digest, here.recipe) == (image.digest, image.recipe) and node.verify(here) == []
    with unpacked(here) as place:
        assert (place / "0/given").read_text() == "a"


# -- as typed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hypervisor() -> Any:
    return SimpleNamespace(cloning=None)


@pytest.fixture
def typed(store: Store, monkeypatch: pytest.MonkeyPatch, hypervisor: Any) -> Callable[..., list[Any]]:
    """Carry out one command line; the requests for memory that it made."""
    asked: list[Any] = []

    def build(runtime: object, request: Any, **how: object) -> None:
        asked.append(request)
        if b"fail" in store.resolve(request.machine.image).recipe.payload.argv:  # type: ignore[union-attr]
            raise PrepareFailed("the command that prepares it ended with exit code 3")

    monkeypatch.setattr(verb, "build_template", build)

    def typed(*words: str) -> list[Any]:
        parser = Parser(prog="belljar image")
        parser.take(verb.VERBS["image"])
        args = parser.parse_args(words)
        room = runtime(store)
        room.settings = SimpleNamespace(image=room.settings.image, machine=MachineSettings())
        room.hypervisor = hypervisor
        args.carry_out(args, room)
        return asked

    return typed


@pytest.mark.parametrize("words", ["warm NAME --from base -m 1G --", "warm --from base -m 1G NAME --"])
def test_options_stand_on_either_side_of_the_name(
    typed: Callable[..., list[Any]], publish: Publish, store: Store, words: str
) -> None:
    publish("base")
    (request,) = typed(*words.split(), "python3", "-c", "import x", "--help")
    image = store.resolve("NAME")
    assert image.recipe is not None and image.recipe.payload.argv == (b"python3", b"-c", b"import x", b"--help")
    assert (image.recipe.memory, image.recipe.cpus, image.recipe.base_name) == (GIB, 1, "base")
    assert (request.machine.memory, request.machine.image) == (GIB, f"sha256:{image.digest}")


def test_an_image_that_cannot_be_prepared_is_not_kept(
    typed: Callable[..., list[Any]], publish: Publish, store: Store
) -> None:
    base = publish("base")
    with pytest.raises(PrepareFailed, match="exit code 3"):
        typed("warm", "mine", "--from", "base", "--", "fail")
    assert store.images() == [base] and list((store.folder / "drafts").iterdir()) == []


@pytest.mark.parametrize("hypervisor", [LibvirtHypervisor.__new__(LibvirtHypervisor)])
def test_where_machines_are_always_booted_cold_nothing_is_made(
    typed: Callable[..., list[Any]], publish: Publish, store: Store
) -> None:
    base = publish("base")
    with pytest.raises(TemplateError, match="machines by libvirt are always booted cold"):
        typed("warm", "mine", "--from", "base", "--", "load")
    assert store.images() == [base]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("mine -- load", "required: --from"),
        ("mine --from base", "nothing prepares it"),
        ("mine --from base --", "nothing prepares it"),
        ("mine --from nothing -- load", "no image is called 'nothing'"),
        ("mine --from base --network bridge -- load", "--network 'bridge': no such word"),
        (
            "mine --from base --network none --allow a.org -- load",
            "--allow with --network none: it is for a user network",
        ),
        ("mine --from base --allow 10.0.0.0/33 -- load", "'10.0.0.0/33': not ADDRESS"),
        ("mine --from base --network user --secret A=env:A,host=a.org -- load", "unrecognized arguments: --secret"),
        ("mine --from base --memory 0 -- load", "--memory 0: must be more than nothing"),
        ("mine --from base --time 0s -- load", "--time 0: must be more than nothing"),
        ("mine --from base --in /nowhere -- load", "--in /nowhere: does not exist"),
        ("mine --from base --bad -- load", "unrecognized arguments: --bad"),
        ("a/b --from base -- load", "cannot be the name of an image"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_made(
    typed: Callable[..., list[Any]], publish: Publish, store: Store, words: str, says: str
) -> None:
    base = publish("base")
    with pytest.raises(BelljarError, match=says):
        typed("warm", *words.split())
    assert store.images() == [base]


def test_the_list_and_the_recipe_are_shown(
    typed: Callable[..., list[Any]], publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("base")
    typed("warm", "mine", "--from", "base", "--env", "LEVEL=3", "--", "load", "it all")
    typed("list")
    assert "warm (512 MiB)" in capsys.readouterr().out
    typed("show", "mine")
    shown = capsys.readouterr().out
    for text in ("load 'it all'", "LEVEL=3", "512 MiB", "base"):
        assert text in shown


@pytest.mark.parametrize(
    ("words", "network", "allow"),
    [
        ("", NetworkMode.NONE, ()),
        ("--network none", NetworkMode.NONE, ()),
        ("--network user", NetworkMode.USER, ()),
        ("--allow pypi.org:443 --allow none", NetworkMode.USER, ("pypi.org:443", "none")),
    ],
)
def test_a_recipe_has_the_network_that_was_asked_for(
    typed: Callable[..., list[Any]], publish: Publish, store: Store, capsys: pytest.CaptureFixture[str], words: str,
    network: NetworkMode, allow: tuple[str, ...],
) -> None:  # fmt: skip
    publish("base")
    typed("warm", "mine", "--from", "base", *words.split(), "--", "load")
    kept = store.resolve("mine").recipe
    assert kept is not None and (kept.network, kept.allow) == (network, allow)
    typed("show", "mine")
    shown = capsys.readouterr().out
    assert f"network {network.value}" in " ".join(shown.split()) and all(host in shown for host in allow)


def test_a_recipe_with_a_network_of_the_host_is_a_damaged_image(store: Store, publish: Publish) -> None:
    base = publish("base")
    kept = store_nameless(store, base, replace(recipe(base), network=NetworkMode.USER))
    facts = {"warm": kept.facts["warm"].replace('"network":"user"', '"network":"bridge"')}
    with pytest.raises(ImageCorrupt, match="its recipe cannot be read: network: 'bridge': not none or user"):
        _ = replace(kept, facts=facts).recipe


def test_the_memory_goes_with_the_last_name(store: Store, publish: Publish) -> None:
    base = publish("base")
    image = store.tag(store_nameless(store, base, recipe(base)), "mine")
    store.tag(image, "second")
    removed: list[str] = []
    templates = [
        SimpleNamespace(key=key, facts={"image_digest": each.digest}) for key, each in (("a", image), ("b", base))
    ]
    room = runtime(store)
    room.hypervisor = SimpleNamespace(templates=lambda: templates, remove_template=removed.append)
    for name, gone in (("second", []), ("mine", ["a"])):
        verb.remove(SimpleNamespace(image=name, force=False), room)  # type: ignore[arg-type]
        assert removed == gone
    assert store.images() == [base]


def test_a_text_that_is_no_recipe_is_a_damaged_image(store: Store, publish: Publish) -> None:
    image = publish("base", warm='{"base": 1}')
    with pytest.raises(ImageCorrupt, match="image base: its recipe cannot be read: base: 1: not text"):
        _ = image.recipe
    assert replace(image, facts={}).recipe is None


def test_one_whose_recipe_cannot_be_read_is_listed_as_corrupt_and_can_be_removed(
    typed: Callable[..., list[Any]], publish: Publish, store: Store, hypervisor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    good = publish("base")
    bad = store.tag(publish("other", b"2", warm='{"base": 1}'), "bad")
    typed("list")
    states = {line.split()[0]: "corrupt" in line for line in capsys.readouterr().out.splitlines()[1:]}
    assert states == {"base": False, "bad,": True}
    assert "its recipe cannot be read" in store.complaint(bad)
    hypervisor.templates = list
    typed("remove", "bad")
    typed("remove", "other")
    assert store.images() == [good]
