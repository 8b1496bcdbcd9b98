"""What stands for `typing` on the path of every job."""

from __future__ import annotations

import typing

from belljar import hints
from belljar.hints import Any, Generic, Protocol, TypeVar, cast
from belljar.records import dataclass

T = TypeVar("T")


class Named(Protocol):
    def name(self) -> str: ...


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


@dataclass(frozen=True)
class Facts:
    box: Box[int]
    more: dict[str, Any]


def test_each_name_is_one_of_typing() -> None:
    assert all(hasattr(typing, name) and hasattr(hints, name) for name in hints.__all__)


def test_classes_that_use_it_can_be_made_and_their_annotations_read() -> None:
    class Own(Named):
        def name(self) -> str:
            return cast("str", "own")

    assert Own().name() == "own" and Box(5).value == 5 and isinstance(Box("x"), Box)
    assert typing.get_type_hints(Facts)["box"] is Box  # a parameter is lost, a class is not
    assert typing.get_origin(typing.get_type_hints(Facts)["more"]) is dict
