"""What goes wrong is told once, however often it is noticed."""

from typing import Any

from belljar.errors import ImageUnknown
from belljar.service.telling import Troubles


def test_a_trouble_is_told_when_it_begins_changes_and_ends() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    troubles = Troubles(lambda event, **facts: told.append((event, facts)))
    troubles.note("disk")
    for _ in range(1000):
        troubles.note("disk", OSError(28, "No space left on device"))
        troubles.note("atlas", ImageUnknown("a:\nnone"))
    troubles.note("disk", "read-only")
    assert troubles.now == {"disk": "read-only", "atlas": "ImageUnknown: a: none"}
    troubles.note("disk")
    troubles.note("disk")
    assert troubles.now.keys() == {"atlas"}
    assert told == [
        ("failed", {"about": "disk", "why": "[Errno 28] No space left on device"}),
        ("failed", {"about": "atlas", "why": "ImageUnknown: a: none"}),
        ("failed", {"about": "disk", "why": "read-only"}),
        ("works again", {"about": "disk"}),
    ]


def test_an_error_without_words_has_the_name_of_its_kind() -> None:
    told: list[object] = []
    Troubles(lambda event, **facts: told.append((event, facts["why"]))).note("host b", TimeoutError())
    assert told == [("failed", "TimeoutError")]
