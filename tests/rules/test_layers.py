"""Who may import whom: arrows point down, neighbours never meet, another room is entered by its door."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.rules.offenders import assert_none

SOURCE = Path(__file__).parents[2] / "src/belljar"
FLOORS = {
    "hints": -4, "modules": -3, "records": -2, "reading": -1, "errors": 0, "model": 0, "findings": 1,
    "host": 1, "journal": 2,
    "hypervisor": 3, "image": 3, "network": 3, "guest": 3, "batch": 3, "context": 3,
    "machine": 4, "pool": 4,
    "jobs": 5, "accounting": 5, "service": 5, "config": 6, "assembly": 7, "api": 8, "vacuum": 9, "bait": 9, "lease": 9, "monitor": 9, "soak": 9, "adapters": 9, "cli": 10, "__main__": 11,
    "agent": 0,  # imports nothing else of ours, for it travels into the guest; the host shares its wire codec
}  # fmt: skip
DOWN_WITHIN_A_FLOOR = {("errors", "model")}
KEEPERS = (
    "jobs",
    "pool",
)  # what a job is on this host, and what a system shows of its jobs: they work with the insides of the rooms below
PROGRAMS = ("config", "assembly", "api", "cli", "__main__")  # these know every concrete class
OPEN_ROOMS = ("host", "service", "agent")  # shelves of small modules, each a door of its own
OPEN_SHELF = (
    "belljar.hypervisor.devices"  # a file for each kind of thing on a machine's bus: rooms above read what it says
)
HANDS_ON_THE_ENVIRONMENT = {
    "belljar.image.build.debian": "to the program that builds, with the proxies that all downloads of this host go through",
    "belljar.image.container.sources": "to skopeo, which finds the user's logins, certificates and proxies by it",
    "belljar.adapters.mini_swe_agent": "to the sandbox, the variables that its configuration names",
    "belljar.hypervisor.libvirt.connection": "to the process that holds a connection: libvirt finds a user's own daemon by it",
}
FOREIGN = {
    "rich": "image",
    "pycdlib": "context",
    "libvirt": "hypervisor",
    "h11": "host",
    "botocore": "lease",
    "prometheus_client": "service monitor",
    "argcomplete": "cli",
    "psycopg": "lease",
    "matplotlib": "soak monitor",
    "cloudpickle": "api",
    "distributed": "adapters",
    "parsl": "adapters",
    "submitit": "adapters",
    "tuf": "image",
    "securesystemslib": "image",
    # The image room reads keys and checks the chains within CernVM's images; service makes certificates for machines, host
    # those that a machine's proxy shows its guest.
    "cryptography": "image service host",
    "nemo_gym": "adapters",
    "harbor": "adapters",
    "minisweagent": "adapters",
}  # a foreign library has one owner

MODULES = sorted(path for path in SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports(path: Path, *, types: bool = False) -> list[tuple[int, str]]:
    """(line, module) of each import, lazy ones too; those for type checkers alone with *types*."""
    return list(found_imports(path, types))


def found_imports(path: Path, types: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_bytes())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types and not types:
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


def crossings() -> Iterator[tuple[str, str, str, str]]:
    """(where, own room, other room, module) of each import of another room of ours."""
    for path in MODULES:
        own = room_of(name_of(path))
        for line, module in imports(path):
            other = room_of(module) if module.startswith("belljar.") else ""
            if other and other != own:
                yield f"{path}:{line}", own, other, module


def test_arrows_point_down_and_neighbours_never_meet() -> None:
    assert_none(
        f"{where}: {own} must not import {other}"
        for where, own, other, _ in crossings()
        if own and (own, other) not in DOWN_WITHIN_A_FLOOR and FLOORS[other] >= FLOORS[own]
    )


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazily and for types neither. A room's door may load what is behind it: that is what it is for."""
    below = {name_of(path): path for path in MODULES}
    asked = {
        name: {other for _, other in imports(path, types=True) if other in below and other != name}
        for name, path in below.items()
        if path.name != "__init__.py"
    }
    try:
        TopologicalSorter(asked).prepare()
    except CycleError as exc:
        raise AssertionError(" <- ".join(exc.args[1])) from None


def test_another_room_is_entered_by_its_door() -> None:
    assert_none(
        f"{where}: {own} must import belljar.{other}, not {module}"
        for where, own, other, module in crossings()
        if own not in (*PROGRAMS, *KEEPERS) and other not in OPEN_ROOMS and module.count(".") != 1
        if not module.startswith(OPEN_SHELF)
    )


def test_adapters_stand_over_the_python_api_and_nothing_of_ours_imports_them() -> None:
    assert_none(
        f"{where}: {own} must not import {module}"
        for where, own, other, module in crossings()
        if other == "adapters" or (own == "adapters" and other not in ("api", "errors", "model"))
    )


def test_only_programs_know_the_settings_files_and_the_environment() -> None:
    """host: PATH, to find a program; service: what systemd says; agent: it lives in the guest. Any other room is handed its settings."""
    allowed = (*PROGRAMS, *KEEPERS, "host", "service", "agent")
    rooms = [path for path in MODULES if room_of(name_of(path)) not in allowed]
    texts = {name_of(path): path.read_text() for path in rooms if name_of(path) not in HANDS_ON_THE_ENVIRONMENT}
    assert_none(name for name, text in texts.items() if "os.environ" in text or "os.getenv" in text)


def test_a_foreign_library_has_one_owner() -> None:
    """rich also draws the progress of image verbs."""
    used = [(name_of(path), line, module.split(".")[0]) for path in MODULES for line, module in imports(path)]
    assert_none(
        f"{name}:{line}: {library} belongs to {FOREIGN[library]}"
        for name, line, library in used
        if library in FOREIGN and room_of(name) not in (*FOREIGN[library].split(), "cli")
    )


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} <= set(FLOORS)
