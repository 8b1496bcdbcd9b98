"""A factory's surroundings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.vacuum.factory.site import Site


@pytest.fixture(autouse=True)
def api_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests by the settings as they come, not by this host's."""
    from belljar import api
    from belljar.config import Paths, Settings
    from belljar.jobs.starting import make_request

    settings = Settings(Paths(*(Path("/nowhere"),) * 3, scratch=Path("/nowhere"), logs=Path("/nowhere")))
    monkeypatch.setattr(api, "request_of", lambda work, **asked: make_request(settings, work, **asked))
    yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
