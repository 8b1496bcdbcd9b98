"""Imports of the standard library without what they take along for cases that a job never meets.

While `quickly` imports a module, others have stand-ins: an absent one, which the importing module itself allows for, or one that
gives way to the real module as soon as anything of it is used; and its regular expressions are compiled when they are first used
(docs/develop/decisions/0003-a-quick-start.md has the figures).
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

from belljar.hints import TYPE_CHECKING, Any
from belljar.records import dataclass

if TYPE_CHECKING:
    from hashlib import sha256 as sha256

NEWEST = 3, 14  # whose imports were looked at: a newer Python imports as ever, until tests have passed with it
CO_COROUTINE = 0x80
compile_now = re.compile
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"


class Later(ModuleType):
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the machinery of imports asks for some
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class Logger:
    """A logger of `logging`, which is imported for the first thing that is logged."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, *words: object) -> None:
        """asyncio says by it which selector a loop has; who wants to hear that has imported logging."""
        if isinstance(logging := sys.modules.get("logging"), ModuleType):
            logging.getLogger(self._name).debug(*words)

    def __getattr__(self, act: str) -> Any:
        import logging

        return getattr(logging.getLogger(self._name), act)


def is_coroutine_function(function: Any) -> bool:
    """What asyncio asks of each handler of a signal."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and bool(code.co_flags & CO_COROUTINE)


class Name:
    """A name of a module that is imported when what has the name is first used."""

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module

    def _real(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._real()(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


class Pattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern: Any, flags: Any = 0) -> None:
        self._given = pattern, flags

    def __getattr__(self, act: str) -> Any:
        return getattr(compile_now(*self._given), act)

    def match(self, *where: Any) -> Any:
        """It is the default of parameters, which wants nothing compiled."""
        return compile_now(*self._given).match(*where)

    def sub(self, *what: Any) -> Any:
        """fnmatch takes it at once, since 3.14."""
        return compile_now(*self._given).sub(*what)


class Fields:
    """What `typing.NamedTuple` is to tomllib."""

    def __init__(self, *values: object) -> None:
        self.__dict__.update(zip(type(self).__annotations__, values, strict=True))


STAND_INS: dict[str, dict[str, dict[str, object] | None]] = {
    "argparse": {
        "gettext": {"gettext": str, "ngettext": lambda singular, plural, count: singular if count == 1 else plural}
    },  # there are no translations
    "json": {},
    "pathlib": {"urllib.parse": {"quote_from_bytes": Name("quote_from_bytes", "urllib.parse")}, "ntpath": {}},
    "tomllib": {
        "datetime": {
            name: Name(name, "datetime") for name in ("date", "datetime", "time", "timedelta", "timezone", "tzinfo")
        },
        "string": {"ascii_letters": LETTERS + LETTERS.upper(), "digits": DIGITS, "hexdigits": DIGITS + "abcdefABCDEF"},
        "typing": {
            **dict.fromkeys(("Any", "BinaryIO", "Callable", "IO", "Tuple"), Any),
            "NamedTuple": Fields,
            "TYPE_CHECKING": False,
        },
    },
    "asyncio": {
        "ssl": None,
        "asyncio.sslproto": {},
        "asyncio.staggered": {},
        "concurrent.futures": {name: name for name in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION")},
        "dataclasses": {
            "dataclass": lambda *, frozen, slots: dataclass(frozen=frozen)
        },  # two of asyncio.graph's, since 3.14
        "inspect": {"iscoroutinefunction": is_coroutine_function},
        "linecache": {},
        "locale": {},
        "logging": {"getLogger": Logger, "DEBUG": 10},
        "subprocess": {"PIPE": -1, "STDOUT": -2, "DEVNULL": -3},
        "traceback": {"extract_stack": Name("extract_stack", "traceback")},
        "typing": {"final": lambda kind: kind, "Optional": Any, "Type": Any, "TYPE_CHECKING": False},
    },
}


def quickly(name: str) -> None:
    """Import this module, so that a later `import` finds it."""
    if name in sys.modules:
        return
    if sys.version_info[:2] > NEWEST:
        import_module(name)
        return
    made = {
        absent: None if known is None else Later(absent, **known)
        for absent, known in STAND_INS[name].items()
        if absent not in sys.modules
    }
    sys.modules.update(made)  # type: ignore[arg-type]
    compiled, re.compile = re.compile, Pattern  # type: ignore[assignment]
    try:
        for absent, stand_in in made.items():  # `import a.b` takes b from a
            if "." in absent and not absent.startswith(f"{name}."):
                setattr(import_module(absent.rpartition(".")[0]), absent.rpartition(".")[2], stand_in)
        import_module(name)
    finally:
        re.compile = compiled
        for absent, stand_in in made.items():
            if sys.modules.get(absent) is stand_in:
                del sys.modules[absent]


def first_of(*names: str) -> Any:
    """The first of these modules that there is."""
    for name in names[:-1]:
        with suppress(ImportError):
            return import_module(name)
    return import_module(names[-1])


# For what is small. Python's own, until 3.11 and since; `hashlib` takes OpenSSL along, which pays from some MiB on.
if not TYPE_CHECKING:
    sha256 = first_of("_sha256", "_sha2", "hashlib").sha256

quickly("pathlib")  # everybody needs these two
quickly("json")
