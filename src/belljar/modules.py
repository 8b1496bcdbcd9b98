"""The code of all modules in one file, which `make install` writes. To find, open and read each by itself costs some 0.06 ms, and a
job imports ninety. Where there is no such file, as in a checkout, or another source, modules are found as ever."""

from __future__ import annotations

import marshal
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

FOLDER = os.path.dirname(__file__) + "/"
FILE = f"{FOLDER}modules.{sys.implementation.cache_tag}"  # bytecode is of one version of Python
WIDTH = 8  # bytes that say how long the index is


class Modules:
    """Finds and loads modules of ours. No descriptor stays open, for 0, 1 and 2 may be free when this begins."""

    def __init__(self) -> None:
        file = os.open(FILE, os.O_RDONLY)
        try:
            self._facts = os.fstat(file)
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
        source = FOLDER + place
        with suppress(OSError):
            facts, file = os.stat(source), os.open(FILE, os.O_RDONLY)
            try:
                if (facts.st_mtime_ns, facts.st_size) == (time, size) and os.path.samestat(os.fstat(file), self._facts):
                    code = os.pread(file, length, self._begin + at)
                    is_package = source.endswith("/__init__.py")
                    # (It is a loader without importlib.abc's Loader, which would cost an import.)
                    spec = ModuleSpec(name, self, origin=source, loader_state=code, is_package=is_package)  # type: ignore[arg-type]
                    spec.has_location = True
                    if spec.submodule_search_locations is not None:
                        spec.submodule_search_locations.append(os.path.dirname(source))
                    return spec
            finally:
                os.close(file)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        code, spec.loader_state = marshal.loads(spec.loader_state), None
        exec(code, module.__dict__)


def write() -> None:
    """Write that file, for who installs belljar."""
    index, codes, at = {}, [], 0
    for folder, _, files in os.walk(FOLDER):
        for path in (os.path.join(folder, file) for file in files if file.endswith(".py")):
            with open(path, "rb") as source:
                facts, text = os.fstat(source.fileno()), source.read()
            code = marshal.dumps(compile(text, path, "exec", dont_inherit=True))
            place = os.path.relpath(path, FOLDER)
            name = f"belljar/{place}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            index[name] = place, facts.st_mtime_ns, facts.st_size, at, len(code)
            codes.append(code)
            at += len(code)
    known = marshal.dumps(index)
    with open(f"{FILE}.new", "wb") as whole:
        whole.write(len(known).to_bytes(WIDTH, "big") + known + b"".join(codes))
    os.replace(f"{FILE}.new", FILE)


def use() -> None:
    """From now on import from that file, where there is one."""
    with suppress(FileNotFoundError):
        sys.meta_path.insert(0, Modules())
