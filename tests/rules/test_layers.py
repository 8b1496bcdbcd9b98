"""Who may import whom: arrows point down, neighbours never meet, another room is entered by its door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/belljar"
FLOORS = {
    "errors": 0, "model": 0,
    "host": 1, "journal": 2,
    "hypervisor": 3, "image": 3, "network": 3, "guest": 3, "batch": 3, "context": 3,
    "machine": 4,
    "jobs": 5, "config": 6, "assembly": 7, "api": 8, "cli": 8, "__main__": 9,
    "agent": 0,  # imports nothing else of ours, for it travels into the guest; the host shares its wire codec
}  # fmt: skip
DOWN_WITHIN_A_FLOOR = {("errors", "model")}
KEEPERS = ("jobs",)  # what a job is on this host: it works with the insides of the keeper and of batch/
PROGRAMS = ("config", "assembly", "api", "cli", "__main__")  # these know every concrete class
OPEN_ROOMS = ("host", "agent")  # shelves of small modules, each a door of its own
HANDS_ON_THE_ENVIRONMENT = {
    "belljar.image.build.debian": "to the program that builds",
    "belljar.image.build.mirrors": "the proxies that all downloads of this host go through",
}
FOREIGN = {
    "httpx": "image",
    "rich": "image",
    "pycdlib": "context",
    "libvirt": "hypervisor",
    "h11": "context",
    "asyncssh": "guest",
    "cryptography": "image",
}  # a foreign library has one owner

MODULES = sorted(path for path in SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import, lazy ones too; those for type checkers alone are left out."""
    tree = ast.parse(path.read_bytes())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            for one in node.names:
                yield node.lineno, one.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for one in node.names:
                is_module = (SOURCE.parent / Path(*f"{node.module}.{one.name}".split("."))).with_suffix(".py").exists()
                is_room = (SOURCE.parent / Path(*f"{node.module}.{one.name}".split("."))).is_dir()
                yield node.lineno, f"{node.module}.{one.name}" if is_module or is_room else str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows_point_down_and_neighbours_never_meet(path: Path) -> None:
    own = room_of(name_of(path))
    for line, module in imports(path):
        other = room_of(module) if module.startswith("belljar.") else ""
        if not other or not own or other == own or (own, other) in DOWN_WITHIN_A_FLOOR:
            continue
        assert FLOORS[other] < FLOORS[own], f"{path}:{line}: {own} must not import {other}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_another_room_is_entered_by_its_door(path: Path) -> None:
    own = room_of(name_of(path))
    for line, module in imports(path):
        other = room_of(module) if module.startswith("belljar.") else ""
        if other and other != own and own not in (*PROGRAMS, *KEEPERS) and other not in OPEN_ROOMS:
            assert module.count(".") == 1, f"{path}:{line}: {own} must import belljar.{other}, not {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_programs_know_the_settings_files_and_the_environment(path: Path) -> None:
    own = room_of(name_of(path))
    if own in (*PROGRAMS, *KEEPERS, "host", "agent"):  # host: PATH, to find a program; agent: it lives in the guest
        return
    if name_of(path) in HANDS_ON_THE_ENVIRONMENT:
        return
    text = path.read_text()
    assert "os.environ" not in text and "os.getenv" not in text, f"{path}: a room is handed its settings"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_foreign_library_has_one_owner(path: Path) -> None:
    for line, module in imports(path):
        owner = FOREIGN.get(module.split(".")[0])
        own = room_of(name_of(path))
        # rich also draws the progress of image verbs
        assert owner in (None, own) or own == "cli", f"{path}:{line}: {module} belongs to {owner}"


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} <= set(FLOORS)
