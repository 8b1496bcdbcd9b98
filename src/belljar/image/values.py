"""What is wrong with the values of `[image]` beyond their types: each is read here as it is when it is used. No source is
asked, and no file looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from belljar.errors import BadSetting
from belljar.image import Settings
from belljar.image.site.master import place_of
from belljar.image.site.trust import read_rules


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each."""
    looks: list[tuple[str, Callable[[], object]]] = [
        *(("trust", lambda line=line: read_rules((line,))) for line in settings.trust),
        *(("sources", lambda source=source: place_of(source)) for source in settings.sources),
        *(("formats", lambda form=form: _check_format(form)) for form in settings.formats),
    ]
    for key, look in looks:
        try:
            look()
        except BadSetting as exc:
            yield key, exc
    if settings.sources and not settings.trust:
        yield (
            "sources",
            BadSetting(
                "without lines in `image.trust` nothing is taken from a source",
                hint="say there who may publish which names: docs/image-life.md",
            ),
        )


def _check_format(form: str) -> None:
    known = Settings().formats
    if form not in known:
        raise BadSetting(
            f"image.formats: {form!r} is no form of a disk or of packing", hint=f"there are {', '.join(known)}"
        )
