"""The dashboard, read by Grafana's own models, which are generated from its schema and leave out what that does not have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARD = Path(__file__).parents[3] / "docs/operate/monitor/grafana.json"


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def read_by_grafana(values: Any) -> Any:
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(values)))


def lost(values: Any, back: Any, where: str = "") -> Iterator[str]:
    """The places of *values* that are not in *back*, or another there."""
    if isinstance(values, dict) and isinstance(back, dict):
        for key, value in values.items():
            yield from lost(value, back.get(key), f"{where}.{key}")
    elif isinstance(values, list) and isinstance(back, list) and len(values) == len(back):
        for number, (value, other) in enumerate(zip(values, back, strict=True)):
            yield from lost(value, other, f"{where}[{number}]")
    elif values != back:
        yield where


def test_grafana_knows_every_word_of_the_dashboard() -> None:
    assert list(lost(dashboard(), read_by_grafana(dashboard()))) == []


def test_a_word_that_grafana_does_not_know_is_seen() -> None:
    values = dashboard()
    values["refreshes"] = "1m"
    values["panels"][0]["options"]["colour"] = "value"
    values["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert sorted(lost(values, read_by_grafana(values))) == [
        ".panels[0].options.colour", ".panels[1].fieldConfig.defaults.units", ".refreshes",
    ]  # fmt: skip
