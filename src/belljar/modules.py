"""The code of all modules in one file, which `make install` writes, with that of the standard library's that a job imports. To find,
open and read each by itself costs some 0.06 ms, and a job imports 150. Where there is no such file, as in a checkout, or another
source, modules are found as ever. What this imports itself is there when Python has begun."""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    ModuleSpec = type(__spec__)

FOLDER = os.path.dirname(__file__) + "/"
FILE = f"{FOLDER}modules.{sys.implementation.cache_tag}"  # bytecode is of one version of Python
WIDTH = 8  # bytes that say how long the index is


class Modules:
    """Finds and loads modules. No descriptor stays open, for 0, 1 and 2 may be free when this begins."""

    def __init__(self) -> None:
        file = os.open(FILE, os.O_RDONLY)
        try:
            self._stat = os.fstat(file)
            self._begin = WIDTH + int.from_bytes(os.read(file, WIDTH), "big")
            # Module -> path of its source, that file's time and size, and where its code is.
            self._index: dict[str, tuple[str, int, int, int, int]] = marshal.loads(os.read(file, self._begin - WIDTH))
        finally:
            os.close(file)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """None, so that it is found as ever, where it has another source by now, or belljar was installed anew meanwhile."""
        if name not in self._index:
            return None
        place, time, size, at, length = self._index[name]
        source = os.path.join(FOLDER, place)
        try:
            stat, file = os.stat(source), os.open(FILE, os.O_RDONLY)
        except OSError:
            return None
        try:
            if (stat.st_mtime_ns, stat.st_size) != (time, size) or not os.path.samestat(os.fstat(file), self._stat):
                return None
            code = os.pread(file, length, self._begin + at)
        except OSError:
            return None
        finally:
            os.close(file)
        is_package = source.endswith("/__init__.py")
        # (It is a loader without importlib.abc's Loader, which would cost an import.)
        spec = ModuleSpec(name, self, origin=source, loader_state=code, is_package=is_package)  # type: ignore[arg-type]
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(os.path.dirname(source))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__file__ = spec.origin  # a spec that `has_location` would work out where a cache were, too
        code, spec.loader_state = marshal.loads(spec.loader_state), None
        exec(code, module.__dict__)


def write() -> None:
    """Write that file, for who installs belljar. For the standard library it holds what is imported by now."""
    index, codes, at = {}, [], 0
    for name, path in (*ours(), *standard()):
        with open(path, "rb") as source:
            stat, text = os.fstat(source.fileno()), source.read()
        code = marshal.dumps(compile(text, path, "exec", dont_inherit=True))
        index[name] = path.removeprefix(FOLDER), stat.st_mtime_ns, stat.st_size, at, len(code)
        codes.append(code)
        at += len(code)
    known = marshal.dumps(index)
    with open(f"{FILE}.new", "wb") as whole:
        whole.write(len(known).to_bytes(WIDTH, "big") + known + b"".join(codes))
    os.replace(f"{FILE}.new", FILE)


def ours() -> Iterator[tuple[str, str]]:
    """Each module of belljar, and its source."""
    for folder, _, files in os.walk(FOLDER):
        for path in (os.path.join(folder, file) for file in files if file.endswith(".py")):
            place = os.path.relpath(path, FOLDER)
            yield f"belljar/{place}".removesuffix(".py").removesuffix("/__init__").replace("/", "."), path


def standard() -> Iterator[tuple[str, str]]:
    """The same of the standard library, but for what is part of the interpreter."""
    folder = os.path.dirname(os.__file__) + "/"
    for name, module in sys.modules.items():
        spec = getattr(module, "__spec__", None)
        if spec and spec.name == name and str(spec.origin).startswith(folder) and spec.origin.endswith(".py"):
            yield name, spec.origin


def use() -> None:
    """From now on import from that file, where there is one."""
    try:  # noqa: SIM105 - contextlib is not there yet
        sys.meta_path.insert(0, Modules())
    except FileNotFoundError:
        pass
