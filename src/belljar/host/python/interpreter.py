"""A script that travels with its interpreter: this host's own Python.

The script, the program, its loader, the libraries the loader names, and of the standard library only what the script imports,
found by importing it here. Modules are bytecode, so that an emulated guest compiles nothing. One tar archive, made once:

    FOLDER/SHA256.tar       the archive; the digest is that of a key, which stands for this Python and this script
    FOLDER/lock             held by the process that makes one

In the guest it is started by its own loader (`command`), so nothing of the guest's is needed but its kernel: no C
library, and not this one's either.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType

from belljar.errors import HostError
from belljar.host.commands import run
from belljar.host.files import write_whole
from belljar.host.locks import locked
from belljar.host.python.elf import loader_of
from belljar.host.quick_imports import sha256
from belljar.records import dataclass

LIBRARY = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
PATIENCE = 120.0  # seconds: another process copies some 12 MiB
AGENT = "agent.pyc"  # the script, in the archive
# `os`: by it the interpreter knows its library, which else would be one of the guest's.
ALWAYS = ("encodings.ascii", "encodings.latin_1", "encodings.utf_8", "json", "os")
# The library does without these where they are missing, and so does the agent, which packs nothing.
NEVER = ("_bz2", "_lzma", "bz2", "lzma")

LISTING = """\
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
for name in sys.argv[2].split(","):
    __import__(name)
for name, module in sorted(sys.modules.items()):
    path = getattr(module, "__file__", None)
    if path and name != "__main__":
        print(name, path, hasattr(module, "__path__"), sep="\\t")
"""


@dataclass(frozen=True)
class Interpreter:
    """An archive with an interpreter."""

    digest: str  # for its script and its Python, hexadecimal
    path: Path

    def files(self) -> Iterator[tuple[str, bytes, int]]:
        """(path below its folder, content, mode) of each file."""
        import tarfile

        with tarfile.open(self.path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None:
                    yield member.name, content.read(), member.mode


def command(folder: str) -> str:
    """How a guest starts an unpacked interpreter. By the loader's options: payloads would inherit a variable."""
    return f"{folder}/loader --library-path {folder} {folder}/python -I -S"


def interpreter(folder: Path, key: bytes, script: Callable[[], bytes]) -> Interpreter:
    """The one with *script*, made now where it is missing; *folder* is ours, and *key* stands for script and Python. Raises
    HostError, CommandFailed, LockTimeout, NoSpace."""
    digest = sha256(key).hexdigest()
    path = folder / f"{digest}.tar"
    if not path.exists():
        with locked(folder / "lock", timeout=PATIENCE, what="copy this host's Python for guests"):
            if not path.exists():
                write_whole(path, archive_of(sorted(_parts(script()))))
    return Interpreter(digest, path)


def out_of_use(folder: Path, key: bytes) -> Iterator[Path]:
    """Archives of other keys."""
    kept = ("lock", f"{sha256(key).hexdigest()}.tar")
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in kept and not path.name.startswith("."):
            yield path


def _program() -> str:
    """The Python that runs this, not one that leads to it from a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def archive_of(files: Iterable[tuple[str, bytes, int]]) -> bytes:
    """A tar archive of these: path, content, mode."""
    import tarfile

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data, mode in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def _parts(script: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Every file of the archive: its path, its content, its mode."""
    program = _program()
    binary = Path(program).read_bytes()
    loader = loader_of(binary)
    if not loader:
        hint = "Install belljar for a Python that is linked dynamically, as distributions have it."
        raise HostError(f"{program}: has no loader, so it cannot be taken along into guests", hint=hint)
    yield AGENT, _bytecode(script, AGENT), 0o644
    yield "python", binary, 0o755
    yield "loader", Path(loader).read_bytes(), 0o755
    extensions = []
    for name, path, is_package in _modules(script):
        inner = name.replace(".", "/")
        if path.endswith(".py"):
            leaf = f"{inner}/__init__" if is_package else inner
            yield f"{LIBRARY}/{leaf}.pyc", _bytecode(Path(path).read_bytes(), f"{leaf}.py"), 0o644
        else:
            extensions.append(path)
            yield f"{LIBRARY}/lib-dynload/{os.path.basename(path)}", Path(path).read_bytes(), 0o755
    for name, path in sorted(_libraries(loader, [program, *extensions]).items()):
        yield name, Path(path).read_bytes(), 0o755
    if not extensions:
        yield f"{LIBRARY}/lib-dynload/none", b"", 0o644  # Python looks for the folder


def _modules(script: bytes) -> list[tuple[str, str, bool]]:
    """(name, file, is it a package) of each module that importing all that the script ever imports loads."""
    import ast

    names = set(ALWAYS)
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    argv = [_program(), "-I", "-S", "-c", LISTING, ",".join(NEVER), ",".join(sorted(names))]
    rows = (line.split("\t") for line in run(argv, timeout=PATIENCE, env={}).out.decode().splitlines())
    return [(name, path, is_package == "True") for name, path, is_package in rows if name != "os.path"]


def _bytecode(source: bytes, shown: str) -> bytes:
    import importlib.util

    code: CodeType = compile(source, shown, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def _libraries(loader: str, programs: list[str]) -> dict[str, str]:
    """What the loader would load for these, by the name it is looked for. Raises HostError for what it does not find."""
    paths = {}
    for program in programs:
        for line in run([loader, "--list", program], timeout=PATIENCE, env={}).out.decode().splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            path = rest.partition(" (")[0]
            if arrow and not os.path.isfile(path):
                raise HostError(f"{program}: needs the library {name}, which this host does not have")
            if arrow and os.path.realpath(path) != os.path.realpath(loader):
                paths[os.path.basename(name)] = path
    return paths
