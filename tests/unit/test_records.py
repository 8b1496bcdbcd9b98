"""Records are dataclasses to everyone who looks, without the compiler."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from belljar import records


@records.dataclass(frozen=True)
class Point:
    """A place."""

    x: int
    y: int = 2
    tags: dict[str, int] = records.field(default_factory=dict, metadata={"help": "what it is called"})
    secret: str = records.field(default="s", repr=False, compare=False)


@records.dataclass(frozen=True)
class Solid(Point):
    z: int = 0


@records.dataclass
class Count:
    number: int = 0


def test_fields_defaults_and_factories() -> None:
    one, two = Point(1), Point(x=1, y=2)
    assert (one.x, one.y, one.tags, one.secret) == (1, 2, {}, "s")
    assert one == two and one is not two and one.tags is not two.tags
    assert Solid(1, z=3).z == 3 and Solid(1) != Point(1) and Solid(1, 5).y == 5
    assert repr(one) == "Point(x=1, y=2, tags={})"
    assert Point(1, secret="other") == one


@pytest.mark.parametrize(
    ("given", "named"),
    [((), {}), ((1, 2, {}, "s", 5), {}), ((1,), {"x": 1}), ((1,), {"w": 1}), ((), {"w": 1}), ((), {"y": 1, "w": 2})],
)
def test_what_does_not_fit_is_refused(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Point"):
        Point(*given, **named)


def test_frozen_ones_cannot_be_changed_and_have_a_hash() -> None:
    one = Point(1)
    with pytest.raises(AttributeError):
        one.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del one.x
    frozen = records.dataclass(frozen=True)(type("Pair", (), {"__annotations__": {"a": "int"}}))
    assert hash(frozen(1)) == hash(frozen(1)) and {frozen(1), frozen(1)} == {frozen(1)}


def test_others_can_be_changed_and_have_none() -> None:
    count = Count()
    count.number += 1
    assert count == Count(1)
    with pytest.raises(TypeError):
        hash(count)


def test_the_standard_library_takes_them_for_its_own() -> None:
    one = Point(1)
    assert dataclasses.is_dataclass(one)
    assert [field.name for field in dataclasses.fields(Point)] == ["x", "y", "tags", "secret"]
    assert dataclasses.replace(one, y=7) == records.replace(one, y=7) == Point(1, 7)
    assert dataclasses.asdict(one) == {"x": 1, "y": 2, "tags": {}, "secret": "s"}
    assert records.fields(one)[2].metadata["help"] == "what it is called"
    assert pickle.loads(pickle.dumps(one)) == one
    match one:
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_inspect_is_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; import belljar.model; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {"inspect", "dataclasses"} & set(done.stdout.split())
