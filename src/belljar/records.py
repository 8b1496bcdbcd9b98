"""What `dataclasses` offers, for the classes that every job builds; docs/develop/decisions/0003-a-quick-start.md has the figures.

The standard library compiles six methods for each class, 0.3 ms of processor time. Here all classes share the same
methods. Type checkers and the standard library's `fields`, `replace` and `asdict` take them for dataclasses. There is
no `__post_init__`, `ClassVar`, order, slots or keyword-only field."""

from __future__ import annotations

from belljar.hints import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import MISSING, Field, dataclass, field, fields, replace

__all__ = ["MISSING", "RESERVED", "Field", "dataclass", "field", "fields", "replace"]
RESERVED = {"klass": "class"}  # a field and its name in JSON: Python keeps the word to itself


class FrozenInstanceError(AttributeError):
    """A frozen value was to be changed."""


def _init(self: Any, /, *given: Any, **named: Any) -> None:
    known = self.__dataclass_fields__
    values = self._defaults | dict(zip(known, given, strict=False)) | named
    for name, make in self._factories:
        if name not in values:
            values[name] = make()
    twice = given and [name for name, _ in zip(known, given, strict=False) if name in named]
    if len(given) > len(known) or twice or values.keys() != known.keys():
        wrong = twice or sorted(known.keys() ^ values.keys()) or f"{len(given)} values"
        raise TypeError(f"{type(self).__name__}: missing, unknown or given twice: {wrong}")
    self.__dict__.update(values)


def _repr(self: Any) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name, known in self.__dataclass_fields__.items() if known.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return all(getattr(self, name) == getattr(other, name) for name in self._compared)


def _hash(self: Any) -> int:
    return hash(tuple([getattr(self, name) for name in self._compared]))


def _refuse(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed")


MUTABLE = {"__init__": _init, "__repr__": _repr, "__eq__": _eq, "__hash__": None}
FROZEN = MUTABLE | {"__hash__": _hash, "__setattr__": _refuse, "__delattr__": _refuse}

if not TYPE_CHECKING:

    class MISSING:
        """The default of a field that has none."""

    class Field:
        """One field, as the standard library's functions look at it."""

        init, kw_only, type = True, False, None

        def __init__(self, default, default_factory, metadata, repr, compare) -> None:
            self.name, self.default, self.default_factory = "", default, default_factory
            self.metadata, self.repr, self.compare = metadata or {}, repr, compare

        @property
        def _field_type(self) -> object:
            import dataclasses

            return dataclasses._FIELD

    def field(*, default=MISSING, default_factory=MISSING, metadata=None, repr=True, compare=True) -> Field:
        """A field with more to it than a default."""
        return Field(default, default_factory, metadata, repr, compare)

    def dataclass(kind=None, /, *, frozen=False):
        """Give a class the fields that it names, and the methods that go by them."""
        if kind is None:
            return lambda kind: dataclass(kind, frozen=frozen)
        known = {}
        for base in reversed(kind.__mro__[1:]):
            known |= base.__dict__.get("__dataclass_fields__", {})
        for name in kind.__annotations__:
            given = kind.__dict__.get(name, MISSING)
            known[name] = made = given if isinstance(given, Field) else field(default=given)
            made.name = name
            if made is given and made.default is MISSING:
                delattr(kind, name)
            elif made is given:
                setattr(kind, name, made.default)
        kind.__dataclass_fields__, kind.__match_args__ = known, tuple(known)
        kind._defaults = {made.name: made.default for made in known.values() if made.default is not MISSING}
        factories = ((made.name, made.default_factory) for made in known.values())
        kind._factories = [(name, make) for name, make in factories if make is not MISSING]
        kind._compared = [made.name for made in known.values() if made.compare]
        for name, method in (FROZEN if frozen else MUTABLE).items():
            if kind.__dict__.get(name) is None:  # Python itself sets __hash__ to None beside an __eq__
                setattr(kind, name, method)
        return kind

    def fields(of) -> tuple[Field, ...]:
        """The fields of a class, or of a value of it, in their order."""
        return tuple(of.__dataclass_fields__.values())

    def replace(value, /, **changes):
        """The value anew, with changes."""
        return type(value)(**{name: getattr(value, name) for name in value.__dataclass_fields__} | changes)
