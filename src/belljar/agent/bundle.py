"""Makes the one file that guests get, of the modules that the agent is written in. The host's own, it stays outside.

The sources are joined in their order; what they import of each other is in the same file then, so those lines go, and what
they import of the standard library is said once, above. No name may mean two things in two modules, and none is renamed by
an import; a test sees to both. A start asks for the digest alone, for which nothing is parsed.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__)) + "/"
STAMP = "sources.sha256"  # an installed tree has it: its sources never change
PARTS = (
    "wire.py", "guest/system.py", "transfer/tar.py", "transfer/untar.py", "guest/accounts.py", "guest/network.py", "guest/mounts.py",
    "guest/growth.py", "guest/devices.py", "loop/channel.py", "guest/cgroups.py", "guest/guest.py", "loop/payload.py", "loop/streams.py",
    "loop/connection.py", "loop/process.py", "loop/hold.py", "loop/loop.py",
)  # fmt: skip
INSIDE = ("belljar_hold.py", "belljar_hold.h")  # what the agent puts into its guest: a text "@NAME" stands for each
HEAD = '''\
"""belljar's guest agent: gives the guest its identity, runs payloads, carries their streams and files.

One file, standard library only, made of the modules of belljar.agent, each below its name. It runs by the Python it came with.
What is asked, and when, is decided outside (belljar.guest).
"""
'''


def source() -> bytes:
    """The whole agent, the same bytes for the same sources."""
    imports: set[str] = set()
    bodies = [f"\n\n# -- {name}\n{_without_imports(_read(name).decode(), imports)}" for name in PARTS]
    whole = "\n".join([HEAD, *sorted(imports), *bodies])
    for name in INSIDE:
        whole = whole.replace(f'"@{name}"', repr(_read(f"inside/{name}").decode()))
    return whole.encode()


def key() -> bytes:
    """Stands for the agent and the Python it travels with, and is cheaper than `source`."""
    try:
        return _read(STAMP) + sys.version.encode()
    except FileNotFoundError:
        return _digest() + sys.version.encode()


def stamp() -> None:
    """Keep the digest of sources that do not change from now on."""
    with open(FOLDER + STAMP, "wb") as file:
        file.write(_digest())


def _digest() -> bytes:
    from hashlib import sha256

    digest = sha256()
    for name in ("bundle.py", *PARTS, *(f"inside/{name}" for name in INSIDE)):
        text = _read(name)
        digest.update(b"%d\n" % len(text))
        digest.update(text)
    return digest.digest()


def _read(name: str) -> bytes:
    with open(os.path.join(FOLDER, name), "rb", buffering=0) as file:
        return file.read()


def _without_imports(text: str, imports: set[str]) -> str:
    """A module's text below its imports, those of functions left in; adds to *imports* what it takes of the standard library."""
    import ast

    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            lines[first:last] = [""] * (last - first)
            if not ast.unparse(node).startswith("from belljar."):
                imports.add(ast.unparse(node))
    return "".join(lines)
