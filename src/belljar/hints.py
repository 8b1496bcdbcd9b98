"""What `typing` offers, for the modules that every job imports: to import it takes 2 ms of processor time, with the abstract classes
that its protocols are (docs/develop/decisions/0003-a-quick-start.md). Type checkers see the real one. Here nothing is checked: a protocol is a class
like others, and a generic one has no parameters."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Generic, NoReturn, Protocol, TypeGuard, TypeVar, Unpack, cast

__all__ = ["TYPE_CHECKING", "Any", "Generic", "NoReturn", "Protocol", "TypeGuard", "TypeVar", "Unpack", "cast"]

if not TYPE_CHECKING:

    class Hint:
        """What is only ever part of an annotation, or a base that changes nothing."""

        def __class_getitem__(cls, of):
            return cls

    class TypeVar:
        """A parameter of a generic type."""

        def __init__(self, name, *bounds, **options) -> None:
            self.__name__ = name

    class Protocol:
        """What others are to offer."""

    Any = Generic = NoReturn = TypeGuard = Unpack = Hint

    def cast(kind, value):
        return value
