"""Makes the one file that guests get, of the modules that the agent is written in. The host's own, it stays outside.

The sources are joined in their order; what they import of each other is in the same file then, so those lines go, and what
they import of the standard library is said once, above. No name may mean two things in two modules, and none is renamed by
an import; a test sees to both. Nothing is compiled or parsed here, lines are all it looks at: a start asks for the digest.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__)) + "/"
STAMP = "sources.sha256"  # an installed tree has it: its sources never change
PARTS = (
    "wire.py", "guest/system.py", "transfer/tar.py", "transfer/untar.py", "guest/accounts.py", "guest/network.py", "guest/mounts.py",
    "guest/growth.py", "guest/cgroups.py", "guest/guest.py", "loop/payload.py", "loop/streams.py",
    "loop/process.py", "loop/channel.py", "loop/loop.py", "main.py",
)  # fmt: skip
HEAD = '''\
"""belljar's guest agent: gives the guest its identity, runs payloads, carries their streams and files.

One file, standard library only, made of the modules of belljar.agent, each below its name. It runs by the Python it came with.
What is asked, and when, is decided outside (belljar.guest).
"""
'''


def source() -> bytes:
    """The whole agent, the same bytes for the same sources."""
    imports, bodies = set(), []
    for name in PARTS:
        about, imported, body = _taken_apart(_read(name).decode("utf-8"))
        imports.update(imported)
        bodies.append("\n\n# -- %s %s\n%s\n\n%s" % (name, "-" * (116 - len(name)), about, body))
    return "".join([HEAD, "\n", *(line + "\n" for line in sorted(imports)), *bodies]).encode("utf-8")


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

    found = sha256()
    for name in ("bundle.py", *PARTS):
        text = _read(name)
        found.update(b"%d\n" % len(text))
        found.update(text)
    return found.digest()


def _read(name: str) -> bytes:
    fd = os.open(FOLDER + name if name[0] != "/" else name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = part = os.read(fd, 1 << 16)
        while part:
            part = os.read(fd, 1 << 16)
            text += part
        return text
    finally:
        os.close(fd)


def _taken_apart(text: str) -> tuple[str, list[str], str]:
    """A module's docstring as a comment, what it imports of the standard library, and all that comes below its imports."""
    about = ""
    if text.startswith('"""'):
        about, _, text = text[3:].partition('"""')
    imports, lines, at, for_types = [], text.rstrip("\n").split("\n"), 0, False
    while at < len(lines) and _is_head(lines[at]):
        line = lines[at].strip()
        if line and not lines[at].startswith(" "):
            for_types = line.startswith("if ")
        if line.startswith(("import ", "from ")) and not line.startswith("from belljar.") and not for_types:
            imports.append(line)
        at += 1
    comment = "\n".join(("# " + line).rstrip() for line in about.strip().split("\n"))
    return comment, imports, "\n".join(lines[at:]) + "\n"


def _is_head(line: str) -> bool:
    """For the imports: `else` says what there is instead of them when the program runs."""
    return not line or line.startswith(("import ", "from ", " ", ")", "TYPE_CHECKING = ", "if TYPE_CHECKING:", "else:"))
